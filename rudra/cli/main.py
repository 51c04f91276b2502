"""The command line: a thin skin of the Python API. Parses, calls, prints, and turns errors into one line."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rudra.errors import EXIT_STOPPED, ConfigError, RudraError, meant, printable
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.job.tables import UNMEASURED
from rudra.machine import cores
from rudra.mpi.launch import leave_the_word, world_rank, world_size
from rudra.studies import submit

if TYPE_CHECKING:
    from protocols import Protocol
    from rudra.api import ProgressMode
    from rudra.results.reader import Results
    from topologies import Plan

ROOTS = ("pyproject.toml", "setup.cfg", "setup.py", ".git")
"""One of these is at the root of a project."""

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
  rudra plot digits-*.h5              errors, losses, learning rate and staleness as a picture
  rudra resume digits-*.h5            go on with a run that was stopped

comparing protocols (each changes the learning rate in its own way; modulation=none keeps α0 in all):
  rudra run digits --set protocol.name=hardsync --set protocol.modulation=none --output hard.h5
  rudra run digits --set protocol.n=2 --set protocol.modulation=none --output soft.h5
  rudra simulate digits --learners 30 --output many.h5     30 learners in one process
  rudra plot hard.h5 soft.h5 many.h5 --output compare.png

on a cluster (as many learners as the ranks leave, beside the servers):
  mpirun -n 10 rudra run my-job.toml
  srun --mpi=pmix rudra run my-job.toml
  rudra slurm my-job.toml --ntasks 10 --time 4:00:00 --submit     as a batch job that goes on after its time limit

exit codes: 0 all went well; 1 it ran and failed; 2 a mistake in what was asked for; 3 it was stopped, and
`rudra resume` goes on."""


def main(argv: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        argv: arguments after the program's name.

    Returns:
        Exit code: 0, 1 (it ran and failed), 2 (the user's mistake), 3 (it was stopped, and can be resumed).
    """
    parser = _parser()
    try:
        if not argv:
            parser.print_help()
            return 0
        if argv[0] == "bench":  # its options are its own
            return _bench(argv[1:])
        arguments = parser.parse_args(argv, argparse.Namespace(argv=argv))
        command: Callable[[argparse.Namespace], int] = arguments.command
        code = command(arguments)
        sys.stdout.flush()
        return code
    except RudraError as error:
        if not error.said:
            if world_rank() == 0:
                print(error.report, file=sys.stderr)
            leave_the_word(error.exit_code)
        return error.exit_code
    except MemoryError as error:
        print(f"rudra: too little memory: {printable(str(error)) or 'none is left'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if world_rank() == 0:
            print("rudra: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `rudra show … | head`: whoever read has seen enough
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Says what a misspelt command may mean."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += meant(found[1], re.findall(r"[\w-]+", found[2]))
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("rudra", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"rudra {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], summary: str, more: str = ""
    ) -> argparse.ArgumentParser:
        text = summary[0].upper() + summary[1:] + "."
        sub = commands.add_parser(name, help=summary, description=f"{text}\n\n{more}".strip(), formatter_class=raw)
        sub.set_defaults(command=command)
        return sub

    run = add("run", _run, "train a job on MPI ranks", RUN_MORE)
    _job_options(run, runs=True)
    run.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="go on from the checkpoint of --output, if it has one, or of that result file or checkpoint",
    )
    _verbose_option(run)
    resume = add("resume", _resume, "go on with a run that was stopped or failed", RESUME_MORE)
    resume.add_argument("file", type=Path, metavar="FILE", help="its result file (.h5) or a checkpoint of it (.ckpt)")
    _set_option(resume, "where something is, or how the run is reported: data.path, and the tables faults and results")
    resume.add_argument("--quiet", action="store_true", help="no progress; print only the result file's name")
    _verbose_option(resume)
    _job_options(add("simulate", _simulate, "run a job in one process and virtual time", SIMULATE_MORE), runs=True)
    _sweep_options(add("sweep", _sweep, "run a grid of jobs, or the study that a job describes", SWEEP_MORE))
    batch = add("slurm", _slurm, "write or submit the batch script of a job", submit.MORE)
    _job_options(batch, runs=False)
    submit.add_options(batch)
    _predict_options(add("predict", _predict, "say what a job would take, without training", PREDICT_MORE))
    _calibrate_options(add("calibrate", _calibrate, "measure what a job's model costs here", CALIBRATE_MORE))
    show = add("show", _show, "print the figures of a run")
    show.add_argument("file", type=Path, metavar="FILE.h5")
    show.add_argument("--json", action="store_true", help="as one JSON object, for scripts")
    show.add_argument("--target", metavar="TEXT", help="when was it reached? such as 'accuracy >= 0.98'")
    about = "by the median of so many tests; default: the job's training.target_window"
    show.add_argument("--target-window", type=_at_least(1), metavar="N", help=about)
    plot = add("plot", _plot, "draw errors, losses, learning rate and staleness of one or more runs")
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE.h5")
    plot.add_argument("-o", "--output", type=Path, help=".png, .svg or .pdf; default: the first file's name with .png")
    _log_option(plot)
    _force_option(plot, "the picture")
    replay = add("replay", _replay, "repeat a recorded run in one process, and compare bit for bit", REPLAY_MORE)
    replay.add_argument("file", type=Path, metavar="FILE.h5")
    replay.add_argument("--until", type=int, metavar="UPDATE", help="stop there and write the weights of that moment")
    replay.add_argument("-o", "--output", type=Path, metavar="W.pt", help="for these weights; default: FILE-UPDATE.pt")
    _force_option(replay, "W.pt")
    _set_option(replay, "where something is: data.path or training.warm_start")
    replay.add_argument("--quiet", action="store_true", help="no progress bar")
    export = add("export", _export, "write a run's weights for torch or safetensors", EXPORT_MORE)
    export.add_argument("file", type=Path, metavar="FILE.h5")
    export.add_argument("-o", "--output", type=Path, metavar="W.pt", required=True, help=".pt or .safetensors")
    export.add_argument(
        "--epoch", type=_epoch, metavar="N", help="as they were at its end, or `best`; default: the final weights"
    )
    _force_option(export, "W.pt")
    timeline = add("timeline", _timeline, "write a run as a trace for Perfetto or Chrome", TIMELINE_MORE)
    timeline.add_argument("file", type=Path, metavar="FILE.h5")
    timeline.add_argument(
        "-o", "--output", type=Path, metavar="TRACE.json", help=".json or .json.gz; default: FILE.trace.json"
    )
    _force_option(timeline, "TRACE.json")
    report = add("report", _page, "write one page about any number of runs", REPORT_MORE)
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result file, or directory of a sweep")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    report.add_argument(
        "--figures", type=Path, metavar="DIR", help="also write each figure as PDF and SVG, and its numbers as CSV"
    )
    _log_option(report)
    _force_option(report, "the page, and files in DIR,")
    watch = add("watch", _watch, "show a running job's curves in the terminal, from another shell", WATCH_MORE)
    watch.add_argument("file", type=Path, metavar="FILE.h5")
    watch.add_argument("--once", action="store_true", help="print what is there now, and end")
    watch.add_argument("--wait", action="store_true", help="wait for a file that does not exist yet")
    jobs = add("jobs", _jobs, "list the jobs that come with Rudra")
    jobs.add_argument("--paths", action="store_true", help="where their files are, as templates for your own")
    _topology_options(
        add("topology", _topology, "show who is who in a job or a run, and who talks to whom", TOPOLOGY_MORE)
    )
    check = add("validate", _validate, "check a job and say what it would run", VALIDATE_MORE)
    _job_options(check, runs=False)
    check.add_argument("--syntax", action="store_true", help="only the job's keys; read no data, build nothing")
    doctor = add("doctor", _doctor, "check this machine, and say what to do about what is wrong")
    doctor.add_argument("--json", action="store_true", help="as one JSON object, for scripts")
    commands.add_parser("bench", help="measure Rudra itself against the bounds; bench --help lists them")
    return parser


RUN_MORE = """\
Started plainly, it starts mpirun itself, with one rank for each learner and server. Started by
mpirun or srun, it uses the ranks it was given: as many learners as the servers leave, unless the
job names another number, which is refused."""

RESUME_MORE = """\
The job is that of the run, with as many learners and threads; it goes on under the same name, and the file keeps what
was recorded up to the checkpoint. With hardsync the weights become what they would have become, to the last bit.
Under mpirun or srun give as many ranks as the run had. To resume in a batch script, whether there is a checkpoint yet
or not: rudra run JOB --output FILE.h5 --resume"""

REPORT_MORE = """\
The page is one HTML file that needs nothing else: tables, test error or loss and other metrics, training, staleness,
tradeoff curves, speed-up and time per role, each with its numbers as CSV. Runs that failed or are missing are
shown as such."""

WATCH_MORE = """\
Reads while the run writes, redraws every second, and ends with the run or Ctrl-C; the run does not notice."""

SIMULATE_MORE = """\
The same roles and real gradients as in `rudra run`, but any number of learners in one process.
Time is virtual and comes from the job's table [simulation]; the same job gives the same bits."""


SWEEP_MORE = """\
Each point is simulated (or, with --mpi, run on real ranks), several at a time. Called again, it does what is missing.
The directory has one result file for each point and sweep.json; `rudra report DIR` makes a page of it."""


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    _job_options(parser, runs=False)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="TABLE.KEY=V1,V2",
        help="values of a key, nothing for its default; several make all combinations; default: the job's [study]",
    )
    parser.add_argument("--quick", action="store_true", help="the study's quick variant: minutes on two cores")
    parser.add_argument("--mpi", action="store_true", help="run on real ranks, one point after the other")
    parser.add_argument("--workers", type=int, metavar="N", help="points at a time; default: as many as cores")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: NAME-sweep, or NAME-quick-sweep")
    parser.add_argument("--force", action="store_true", help="replace an index and finished points of another job")
    parser.add_argument("--quiet", action="store_true", help="no progress; print only the directory's name")


PREDICT_MORE = """\
Simulates the job's roles without tensors and data, for as long as a steady rate needs, with the costs in
its table [simulation]: `costs = "p775"` (the paper's cluster), a file of `rudra calibrate`, or your own keys."""

CALIBRATE_MORE = """\
Short runs on real ranks, with one learner and with several, at several μ: about a minute, in which the
machine should have nothing else to do. `predict` and `simulate` then find what was measured, for this model
on this machine; a job uses a file that was written elsewhere with [simulation] costs = "FILE.toml"."""


def _predict_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a TOML file, or a name that `rudra jobs` lists")
    parser.add_argument(
        "--learners", dest="counts", metavar="N,N,…", help="one row for each number; default: the job's"
    )
    _set_option(parser, "override any key of the job; may be given several times")
    parser.add_argument("--samples", type=_at_least(1), metavar="N", help="of an epoch; default: the training set's")
    parser.add_argument("--updates", type=_at_least(4), metavar="N", help="to simulate; default: what a rate needs")
    parser.add_argument("--json", action="store_true", help="as one JSON object for each row, for scripts")
    parser.set_defaults(learners=None)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a TOML file, or a name that `rudra jobs` lists")
    about = "default: where `predict` and `simulate` find it for this model on this machine; replaced if it is there"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help=about)
    parser.add_argument("--learners", type=_at_least(1), default=2, metavar="N", help="how many compute at once; 2")
    parser.add_argument("--sizes", metavar="N,N,…", help="μ to measure at; default: the job's, a quarter, 4 times")
    parser.add_argument("--seconds", type=float, metavar="S", help="that each run computes; 2")
    _set_option(parser, "override any key of the job; may be given several times")
    _force_option(parser, "FILE.toml")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


TOPOLOGY_MORE = """\
Trees of who pushes to whom and how weights come down, the roles of each node, compute groups, and what
comes of it. A job is shown as it would be placed on its own ranks on one node (or on the nodes that its
table [simulation] gives), on the ranks that you say, or, for a result file, as it was.

  rudra topology my-job.toml
  rudra topology my-job.toml --set topology.name=adv --set topology.options.fan_out=2
  rudra topology my-job.toml -n 18                what `mpirun -n 18` on one node would make of it
  rudra topology my-job.toml --nodes 6,6,4        three nodes that have so many ranks each
  rudra topology my-job.h5                        of a run"""


def _topology_options(parser: argparse.ArgumentParser) -> None:
    _job_options(parser, runs=False)
    parser.add_argument("-n", dest="ranks", type=_at_least(1), metavar="RANKS", help="fit the job to so many ranks")
    parser.add_argument("--nodes", metavar="R,R,…", help="ranks of each node; default: all on one")
    parser.add_argument("--all", action="store_true", help="print every role, also of thousands that are alike")


REPLAY_MORE = """\
The same roles are fed the recorded gradients in the recorded order. Ends with exit code 0 if every
update and the final weights are the same bits, else with 1 and the first update that differs.
--until leaves the weights of one moment as a state dict for torch.load. Modules of your own are
found beside FILE.h5, at the root of its project and in the current directory."""

EXPORT_MORE = """\
All that `load_state_dict` of the model takes, whether it is trained or not, under the names that it has there.
Weights of epochs before the last are in a file where the job says [results] keep_every or keep_best."""

TIMELINE_MORE = """\
Open it at https://ui.perfetto.dev: when each learner computed, pushed, waited and pulled, and when
the servers updated and tested, on one clock."""


VALIDATE_MORE = """\
Loads the data, builds model, loss, metrics, optimiser and hooks, and tries one mini-batch and one batch of
the test in this process, so that what a run would stumble over is found here. Predicts memory from that."""


def _job_options(parser: argparse.ArgumentParser, *, runs: bool) -> None:
    parser.add_argument("job", metavar="JOB", help="a TOML file, or a name that `rudra jobs` lists")
    parser.add_argument("--learners", type=int, metavar="N", help="number of learners, as --set cluster.learners=N")
    _set_option(parser, "override any key of the job; may be given several times")
    if runs:
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE.h5", help="default: made from the job's name and the time"
        )
        _force_option(parser, "FILE.h5")
        parser.add_argument("--quiet", action="store_true", help="no progress; print only the result file's name")


def _force_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--force", action="store_true", help=f"replace {what} if it exists")


def _log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", action="store_true", help="logarithmic axes for errors, losses and learning rates")


def _verbose_option(parser: argparse.ArgumentParser) -> None:
    text = "where a run does not end well, also show what MPI and mpirun said"
    parser.add_argument("--verbose", action="store_true", help=text)


def _set_option(parser: argparse.ArgumentParser, about: str) -> None:
    more = "; without a value: its default again"
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides", help=about + more
    )


def _load(arguments: argparse.Namespace) -> Job:
    """The job of the command line."""
    return Job.load(arguments.job, _overrides(arguments))


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """What the command line changes."""
    _search_beside(arguments.job)
    learners = [] if arguments.learners is None else [f"cluster.learners={arguments.learners}"]
    return [*arguments.overrides, *learners]


def _search_beside(file: str | Path) -> None:
    """Where the `package.module:callable` of a job or result file may lie: beside it, at its project's root, or here.

    These places come last, so that what is there stands in for nobody else's modules.
    """
    places = [Path.cwd()]
    if os.path.isfile(file):
        directory = Path(file).resolve().parent
        roots = (place for place in (directory, *directory.parents) if any((place / mark).exists() for mark in ROOTS))
        places = [directory, next(roots, directory), *places]
    sys.path += [place for place in dict.fromkeys(map(str, places)) if place not in sys.path]


def _run(arguments: argparse.Namespace) -> int:
    import rudra

    return _report(arguments, partial(rudra.run, resume=arguments.resume, verbose=arguments.verbose))


def _resume(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.resume import resumable

    _search_beside(arguments.file)
    job, path, output = resumable(arguments.file, arguments.overrides)
    results = rudra.run(job, output=output, resume=path, progress=_mode(arguments), verbose=arguments.verbose)
    return _finished(arguments, results)


def _simulate(arguments: argparse.Namespace) -> int:
    import rudra

    return _report(arguments, rudra.simulate)


def _slurm(arguments: argparse.Namespace) -> int:
    return submit.main(arguments, _overrides(arguments))


def _predict(arguments: argparse.Namespace) -> int:
    from rudra.simulation import predict

    counts: Sequence[int | None] = _numbers("--learners", arguments.counts) or [None]
    overrides = _overrides(arguments)
    made = [[*overrides, *([] if n is None else [f"cluster.learners={n}"])] for n in counts]
    jobs = [Job.load(arguments.job, each) for each in made]
    found = [predict.predict(job, samples=arguments.samples, updates=arguments.updates) for job in jobs]
    if arguments.json:
        print("\n".join(json.dumps(p.as_dict()) for p in found))
        return 0
    job = found[0].job
    source = found[0].costs or f"defaults ({UNMEASURED} {arguments.job})"
    print(f"{job.name}: {_protocol_text(job)}, μ = {job.training.minibatch_size}, costs: {source}")
    print(predict.as_text(found))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from rudra import files
    from rudra.simulation import costs
    from rudra.studies import calibrate

    if world_size() is not None:
        raise ConfigError("rudra calibrate starts mpirun itself: start it plainly")
    _search_beside(arguments.job)
    job = Job.load(arguments.job, arguments.overrides)
    output: Path = arguments.output or costs.measured_path(job)
    if arguments.output is None:
        output.parent.mkdir(parents=True, exist_ok=True)
    else:
        files.check_output(output, arguments.force)
    text = calibrate.calibrate(
        job,
        learners=arguments.learners,
        sizes=_numbers("--sizes", arguments.sizes),
        seconds=arguments.seconds,
        show=not arguments.quiet and sys.stderr.isatty(),
    )
    with files.written(output) as file:
        file.write(text.encode())
    print(f"wrote {output}" + ("" if arguments.output else "; predict and simulate find it there"))
    return 0


def _numbers(option: str, text: str | None) -> list[int]:
    """Whole numbers between commas; none where the option was not given."""
    if text is None:
        return []
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) != len(text.split(",")) or 0 in numbers:
        raise ConfigError(f"{option} {text}: must be whole numbers >= 1 between commas, such as 1,2,4")
    return numbers


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, not '{text}'")
        return int(text)

    return number


def _sweep(arguments: argparse.Namespace) -> int:
    from rudra.studies import pool, sweep

    if world_size() is not None:
        raise ConfigError("rudra sweep starts mpirun itself: start it plainly")
    study = sweep.plan(
        arguments.job,
        grid=sweep.parse_grid(arguments.grid) or None,
        quick=arguments.quick,
        overrides=_overrides(arguments),
        driver="mpi" if arguments.mpi else "simulation",
    )
    workers = sweep.workers_for(study, arguments.workers)
    directory = arguments.output or Path(f"{study.name}{'-quick' if study.quick else ''}-sweep")
    with sweep.locked(directory):
        done = study.finished(directory, force=arguments.force)
        study.write_index(directory)
        mode: pool.Mode = "quiet" if arguments.quiet else "bar" if sys.stderr.isatty() else "lines"
        failures = pool.run(study, directory, done, workers=workers, mode=mode)
    if arguments.quiet:
        print(directory)
    else:
        print(pool.summary(study, directory, failures))
        print(f"wrote {directory}: {len(study.points) - len(done)} of {len(study.points)} points run now")
    return 1 if failures else 0


def _report(arguments: argparse.Namespace, execute: Callable[..., "Results"]) -> int:
    """Runs or simulates, then says what came of it."""
    job = _load(arguments)
    results = execute(job, output=arguments.output, force=arguments.force, progress=_mode(arguments))
    return _finished(arguments, results, force=arguments.force)


def _mode(arguments: argparse.Namespace) -> "ProgressMode | None":
    return "quiet" if arguments.quiet else None


def _finished(arguments: argparse.Namespace, results: "Results", *, force: bool = True) -> int:
    """Prints the summary and draws the picture, on one rank only."""
    from rudra.results.progress import summary_table

    if world_size() is not None and world_rank() != 0:
        return 0
    with results:
        code = EXIT_STOPPED if results.status == "interrupted" else 0  # a simulation that a loss stopped
        if arguments.quiet:
            print(results.path)
            return code
        print(summary_table(results.summary()))
        written = [results.path]
    if _has("matplotlib"):
        from rudra.report.analysis import plot

        picture = written[0].with_suffix(".png")
        if force or not os.path.lexists(picture):
            plot(written, picture, force=force)
            written.append(picture)
    print("wrote " + ", ".join(map(str, written)))
    return code


def _show(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.progress import summary_table

    with rudra.open_results(arguments.file) as results:
        summary = results.summary(arguments.target, arguments.target_window)
    print(json.dumps(summary, indent=2) if arguments.json else summary_table(summary))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    from rudra.report.analysis import plot

    output = arguments.output or _beside(arguments.files[0], ".png")
    plot(arguments.files, output, log=arguments.log, force=arguments.force)
    print(f"wrote {output}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    import rudra

    _search_beside(arguments.file)
    replayed = rudra.replay(
        arguments.file,
        until=arguments.until,
        output=arguments.output,
        overrides=arguments.overrides,
        quiet=arguments.quiet,
        force=arguments.force,
    )
    print(f"{arguments.file}: {replayed}")
    return 0 if replayed.identical else 1


def _epoch(text: str) -> int | str:
    """What `--epoch` may be; argparse names it in the error's text."""
    return text if text == "best" else int(text)


def _export(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.export import export

    output = arguments.output
    with rudra.open_results(arguments.file) as results:
        names = export(results, output, arguments.epoch, force=arguments.force)
        epoch = results.best_epoch if arguments.epoch == "best" else arguments.epoch
        epoch = epoch or max(results.kept_epochs, default=0)
    print(f"wrote {output}: {names} tensors of epoch {epoch}")
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    import rudra
    from rudra.results.timeline import write_timeline

    output = arguments.output or _beside(arguments.file, ".trace.json")
    with rudra.open_results(arguments.file) as results:
        if not results.job.get("results", {}).get("minibatches", True):
            print(
                f"rudra: {arguments.file}: holds no times of learners: [results] minibatches = false", file=sys.stderr
            )
        with tqdm(unit=" rows", desc=output.name, leave=False, disable=None) as bar:
            events = write_timeline(results, output, bar.update, force=arguments.force)
    print(f"wrote {output}: {events:,} events")
    return 0


def _beside(file: Path, suffix: str) -> Path:
    """The file's name with another suffix."""
    if not file.name:
        raise ConfigError(f"{file}: is a directory; give a result file")
    return file.with_suffix(suffix)


def _page(arguments: argparse.Namespace) -> int:
    from rudra.report import report

    page, *files = report(
        arguments.files, arguments.output, arguments.figures, log=arguments.log, force=arguments.force
    )
    print(f"wrote {page}" + (f" and {len(files)} files in {arguments.figures}" if files else ""))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from rudra.report.watch import watch

    watch(arguments.file, once=arguments.once, wait=arguments.wait)
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


def _topology(arguments: argparse.Namespace) -> int:
    from rudra.report import topology

    sizes = _numbers("--nodes", arguments.nodes)
    if arguments.job.endswith(".h5"):
        if arguments.ranks or sizes or arguments.overrides or arguments.learners:
            raise ConfigError(
                f"{arguments.job}: shows the run as it was; -n, --nodes, --learners and --set are for jobs"
            )
        cast = topology.of_file(Path(arguments.job))
    else:
        cast = topology.of_job(_load(arguments), arguments.ranks, sizes)
    print(f"{arguments.job}: {topology.as_text(cast, everything=arguments.all)}")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from rudra.compute.schedule import planned
    from rudra.report.topology import message, roles

    job = _load(arguments).resolved(cores=cores())
    plan, topology = job.plan(), job.make_topology()
    protocol = job.make_protocol(plan)
    factor = protocol.modulation.rate_factor(0.0)
    by_update = job.optimizer.schedule_every == "update"  # how many there are depends on the data
    known = (job.optimizer.learning_rate,) if by_update else planned(job.optimizer, job.training.epochs).rates
    rates = [f"{rate * factor:.4g}" for rate in known]
    rates[3:-1] = ["…"] if len(rates) > 5 else rates[3:-1]
    modulation = protocol.modulation.name
    lines = {
        "ranks": f"{plan.ranks}, topology {topology.name}, {job.learners} learners (λ)",
        "roles": roles(plan),
        "messages": message(plan, protocol.gradients_per_update),
        "protocol": f"{_protocol_text(job)}, {_count(protocol.gradients_per_update, 'gradient')} per update (c)",
        "staleness": _staleness_text(protocol, plan, modulation),
        "minibatch": f"{_count(job.training.minibatch_size, 'sample')} per gradient (μ)",
        "learning rate": f"{' then '.join(rates)} = α0 x {factor:.4g} (modulation {modulation})",
        "epochs": f"{job.training.epochs}, seed {job.training.seed}",
        "threads": f"{job.cluster.threads_per_rank} per learner, {cores()} cores here",
    }
    for place, hook in enumerate(job.hooks):
        role = plan.roles[hook.roles(plan)[0]].name if hook.role is None else hook.role
        often = f"each {hook.at}" if hook.every == 1 else f"every {hook.every} {hook.at}s"
        lines[f"hook {place}"] = f"{hook.call} at {'the end' if hook.at == 'end' else often}, {role}"
    if job.training.target is not None:
        window = job.training.target_window
        few = "" if window <= job.training.epochs else f": never reached, there are {job.training.epochs} epochs"
        lines["target"] = f"{job.training.target}, by the median of {_count(window, 'test')}{few}"
    if job.optimizer.plateau is not None:
        lines["schedule"] = f"times {job.optimizer.factor:g} after {job.optimizer.plateau} tests that are no better"
    elif job.optimizer.schedule != "step":
        lines["schedule"] = f"{job.optimizer.schedule}, a rate for each {job.optimizer.schedule_every}"
    if job.optimizer.warm_up:
        lines["warm-up"] = f"the rate grows from 0 in the first {job.optimizer.warm_up:g} epochs"
    if job.optimizer.momentum:
        lines["momentum"] = _momentum_text(job, plan, protocol)
        if not job.explicit_momentum(plan):
            text = "so much asynchrony leaves no explicit momentum, and may act like more than was asked for"
            print(f"rudra: {arguments.job}: [optimizer] momentum_correction: {text}", file=sys.stderr)
    if not arguments.syntax:
        lines |= _rehearsed(job, plan)
    print(f"{arguments.job}: valid")
    print("\n".join(f"  {key:15}{text}" for key, text in lines.items()))
    return 0


def _rehearsed(job: Job, plan: "Plan") -> dict[str, str]:
    """What came of one mini-batch, tried in this process."""
    from rudra.results.progress import too_few
    from rudra.simulation.rehearsal import rehearse

    found = rehearse(job, plan)
    if text := too_few(job, found.samples.training):
        print(f"rudra: {job.name}: {text}", file=sys.stderr)
    tested = ", ".join(found.metrics)
    kinds = ", ".join(f"{kind} {_megabytes(size)}" for kind, size in found.memory.items())
    return {
        "data": f"{found.samples.training:,} training and {found.samples.test:,} test samples",
        "model": f"{found.parameters:,} parameters; a gradient of {_count(job.training.minibatch_size, 'sample')} "
        f"takes {found.gradient_s * 1e3:.3g} ms here, loss {found.loss:.4g} at the initial weights",
        **({"metrics": tested} if tested else {}),
        "memory": f"about, for each rank: {kinds}; data, once on each node: {_megabytes(found.data_bytes)}",
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


def _staleness_text(protocol: "Protocol", plan: "Plan", modulation: str) -> str:
    """What gradients will be like on average, and whether a rate that is divided by n allows for it."""
    sigma = protocol.expected_staleness
    if not sigma:
        return "0"
    text = f"{'more than' if plan.overlapped else 'about'} {sigma:.3g} on average (⟨σ⟩)"
    if modulation == "n" and sigma > protocol.n:
        text += f", not n = {protocol.n}: α0/n is {sigma / protocol.n:.3g} times α0/⟨σ⟩"
    return text


def _momentum_text(job: Job, plan: "Plan", protocol: "Protocol") -> str:
    table, sigma = job.optimizer, protocol.expected_staleness
    if table.momentum_correction == "none":
        return f"{table.momentum:g}, {table.momentum_form}'s form" if table.name == "sgd" else f"{table.momentum:g}"
    if not sigma:
        return f"{table.momentum:g}, all of it explicit: nothing is stale"
    acts = f"⟨σ⟩ of about {sigma:.3g} acts like {sigma / (1 + sigma):.3g}"
    return f"{job.explicit_momentum(plan):.4g} explicit, of {table.momentum:g}: {acts}"


def _doctor(arguments: argparse.Namespace) -> int:
    from rudra.cli import doctor

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
