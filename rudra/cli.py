"""The command line: a thin skin of the Python API. Parses, calls, prints, and turns errors into one line."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rudra.config import Job, cores, shipped_jobs
from rudra.errors import ConfigError, RudraError
from rudra.launch import world_rank, world_size

if TYPE_CHECKING:
    from rudra.results import Results

DESCRIPTION = """\
Rudra trains a PyTorch model over MPI under any synchronisation protocol, from fully
synchronous to fully asynchronous, and measures what each choice costs: time per epoch,
staleness, test error.

A job file says what to train and how; `rudra jobs` lists those that come with Rudra.
The result of a run is one HDF5 file."""

EPILOG = """\
first steps:
  rudra doctor                        is everything here that a run needs?
  rudra run digits                    train on real MPI ranks; under a minute
  rudra show digits-*.h5              the run's figures
  rudra plot digits-*.h5              test error and staleness as a picture

comparing protocols:
  rudra run digits --set protocol.name=hardsync --output hard.h5
  rudra run digits --set protocol.name=softsync --set protocol.n=2 --output soft.h5
  rudra simulate digits --learners 30 --output many.h5     30 learners in one process
  rudra plot hard.h5 soft.h5 many.h5 --output compare.png

on a cluster (as many learners as the ranks leave, beside the servers):
  mpirun -n 10 rudra run my-job.toml
  srun --mpi=pmix rudra run my-job.toml

exit codes: 0 all went well; 1 it ran and failed, or was interrupted; 2 a mistake in what was asked for."""


def main(argv: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        argv: arguments after the program's name.

    Returns:
        Exit code: 0, 1 (it ran and failed, or was interrupted), 2 (the user's mistake).
    """
    parser = _parser()
    try:
        if not argv:
            parser.print_help()
            return 0
        if argv[0] == "bench":  # its options are its own
            return _bench(argv[1:])
        arguments = parser.parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        code = command(arguments)
        sys.stdout.flush()
        return code
    except RudraError as error:
        if not error.said and world_rank() == 0:
            print(f"rudra: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if world_rank() == 0:
            print("rudra: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `rudra show … | head`: whoever read has seen enough
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("rudra", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"rudra {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], summary: str, more: str = ""
    ) -> argparse.ArgumentParser:
        text = summary[0].upper() + summary[1:] + "."
        sub = commands.add_parser(name, help=summary, description=f"{text}\n\n{more}".strip(), formatter_class=raw)
        sub.set_defaults(command=command)
        return sub

    _job_options(add("run", _run, "train a job on MPI ranks", RUN_MORE), runs=True)
    _job_options(add("simulate", _simulate, "run a job in one process and virtual time", SIMULATE_MORE), runs=True)
    show = add("show", _show, "print the figures of a run")
    show.add_argument("file", type=Path, metavar="FILE.h5")
    show.add_argument("--json", action="store_true", help="as one JSON object, for scripts")
    plot = add("plot", _plot, "draw test error and staleness of one or more runs")
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE.h5")
    plot.add_argument("--output", type=Path, help=".png, .svg or .pdf; default: the first file's name with .png")
    jobs = add("jobs", _jobs, "list the jobs that come with Rudra")
    jobs.add_argument("--paths", action="store_true", help="where their files are, as templates for your own")
    _job_options(add("validate", _validate, "check a job and say what it would run"), runs=False)
    doctor = add("doctor", _doctor, "check this machine, and say what to do about what is wrong")
    doctor.add_argument("--json", action="store_true", help="as one JSON object, for scripts")
    commands.add_parser("bench", help="measure Rudra itself against the bounds; bench --help lists them")
    return parser


RUN_MORE = """\
Started plainly, it starts mpirun itself, with one rank for each learner and server. Started by
mpirun or srun, it uses the ranks it was given, and the learners are what the servers leave."""

SIMULATE_MORE = """\
The same roles and real gradients as in `rudra run`, but any number of learners in one process.
Time is virtual and comes from the job's table [simulation]; the same job gives the same bits."""


def _job_options(parser: argparse.ArgumentParser, *, runs: bool) -> None:
    parser.add_argument("job", metavar="JOB", help="a TOML file, or a name that `rudra jobs` lists")
    parser.add_argument("--learners", type=int, metavar="N", help="number of learners, as --set cluster.learners=N")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        dest="overrides",
        help="override any key of the job; may be given several times",
    )
    if runs:
        parser.add_argument(
            "--output", type=Path, metavar="FILE.h5", help="default: made from the job's name and the time"
        )
        parser.add_argument("--force", action="store_true", help="replace FILE.h5 if it exists")
        parser.add_argument("--quiet", action="store_true", help="no progress; print only the result file's name")


def _load(arguments: argparse.Namespace) -> Job:
    """The job of the command line; a job file's own directory is where its `package.module:callable` may lie."""
    path = Path(arguments.job)
    if path.is_file():
        sys.path.insert(0, str(path.resolve().parent))
    overrides = list(arguments.overrides)
    if arguments.learners is not None:
        overrides.append(f"cluster.learners={arguments.learners}")
    return Job.load(arguments.job, overrides)


def _run(arguments: argparse.Namespace) -> int:
    import rudra

    return _report(arguments, rudra.run)


def _simulate(arguments: argparse.Namespace) -> int:
    import rudra

    return _report(arguments, rudra.simulate)


def _report(arguments: argparse.Namespace, execute: Callable[..., "Results"]) -> int:
    """Runs or simulates, then prints the summary and draws the picture, on one rank only."""
    from rudra.progress import summary_table

    progress = "quiet" if arguments.quiet else None
    results = execute(_load(arguments), output=arguments.output, force=arguments.force, progress=progress)
    if world_size() is not None and world_rank() != 0:
        return 0
    with results:
        if arguments.quiet:
            print(results.path)
            return 0
        print(summary_table(results.summary()))
        written = [results.path]
    if _has("matplotlib"):
        from rudra.analysis import plot

        picture = written[0].with_suffix(".png")
        if not picture.exists() or arguments.force:
            plot(written, picture)
            written.append(picture)
    print("wrote " + ", ".join(map(str, written)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.progress import summary_table

    with rudra.open_results(arguments.file) as results:
        summary = results.summary()
    print(json.dumps(summary, indent=2) if arguments.json else summary_table(summary))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    from rudra.analysis import plot

    output = arguments.output or arguments.files[0].with_suffix(".png")
    plot(arguments.files, output)
    print(f"wrote {output}")
    return 0


def _jobs(arguments: argparse.Namespace) -> int:
    for name, path in shipped_jobs().items():
        if arguments.paths:
            print(path)
            continue
        job = Job.load(path)
        learners = job.cluster.learners or "default"
        print(f"{name:24} {_protocol_text(job)}, learners: {learners}\n    {_first_comment(path)}")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    job = _load(arguments).resolved(cores=cores())
    protocol, topology = job.make_protocol(), job.make_topology()
    plan = topology.plan(job.learners)
    rates = [job.optimizer.scheduled(epoch) for epoch in (0, *job.optimizer.milestones)]
    factor = protocol.modulation.rate_factor(0.0)
    modulation = protocol.default_modulation if job.protocol.modulation == "auto" else job.protocol.modulation
    lines = {
        "ranks": f"{plan.ranks}, topology {topology.name}, {job.learners} learners (λ)",
        "protocol": f"{_protocol_text(job)}, {_count(protocol.gradients_per_update, 'gradient')} per update (c)",
        "minibatch": f"{_count(job.training.minibatch_size, 'sample')} per gradient (μ)",
        "learning rate": f"{' then '.join(f'{rate * factor:.4g}' for rate in rates)}"
        + f" = α0 x {factor:.4g} (modulation {modulation})",
        "epochs": f"{job.training.epochs}, seed {job.training.seed}",
        "threads": f"{job.cluster.threads_per_rank} per learner, {cores()} cores here",
    }
    print(f"{arguments.job}: valid")
    print("\n".join(f"  {key:15}{text}" for key, text in lines.items()))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from rudra import doctor

    return doctor.main(as_json=arguments.json)


def _bench(argv: Sequence[str]) -> int:
    if not _has("rudra.bench"):
        raise ConfigError("this installation has no benchmarks")
    from rudra import bench

    return int(bench.main(argv))


def _version() -> str:
    try:
        return importlib.metadata.version("rudra")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _protocol_text(job: Job) -> str:
    name = job.protocol.name if isinstance(job.protocol.name, str) else job.protocol.name.__name__
    return f"{job.protocol.n or 1}-softsync" if name == "softsync" else name


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _first_comment(path: Path) -> str:
    """What a job file says of itself in its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
