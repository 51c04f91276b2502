"""`rudra tune`."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rudra import interrupts
from rudra.cli.options import job_argument, numbers, overrides_of, set_option, start_plainly, trust_option
from rudra.errors import EXIT_STOPPED, ConfigError

SUMMARY = "find the synchronisation that reaches a target soonest"

MORE = """\
Predicts the time of every protocol, topology, mini-batch size and period that the job allows. Then trains short runs,
called probes, with real gradients in virtual time, and measures what their samples are worth against a reference run.
The best ones are trained until they reach the target. The answer names the soonest, the next one, and what it saves
against the job as given. DIR receives best.toml, a job with the winner's settings. A page, report.html, has reasons and
pictures. The table tried.csv has all probes. The same command continues from the journal after a stop.

The target is measured on a validation split: the job's, or else a tenth of the training set. Weights are averaged over
time for every measurement.

With --mpi probes train on real ranks: each starts its ranks, or all train in the launch of mpirun or srun."""

EXAMPLES = {
    "rudra tune digits --target 'accuracy >= 0.97' --plan": "predict all points and train nothing",
    "rudra tune digits --target 'accuracy >= 0.97' --set model.name=mlp": "search, and write digits-tune/best.toml",
    "rudra tune my-job.toml --learners 2,4,8 --space protocol.name=hardsync,async": "choose λ too, of two protocols",
    "rudra tune my-job.toml --mpi --budget 15m": "train probes on real ranks of this machine, for 15 minutes",
    "rudra tune my-job.toml --cluster lab.toml p775": "search for two clusters; synchronous probes train once",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    parser.add_argument("--target", metavar="'METRIC >= X'", help="what to reach. Default: the job's training.target")
    parser.add_argument(
        "--budget",
        default="8x",
        metavar="Nx|Nm|Nh",
        help="samples to train, in reference runs (8x) or as minutes or hours (15m, 2h). Default: 8x",
    )
    parser.add_argument(
        "--learners", dest="counts", metavar="N,N,…", help="numbers of learners to choose from. Default: the job's"
    )
    parser.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="TABLE.KEY=V1,V2",
        help="values of a key, in place of those that the search would try; repeatable",
    )
    set_option(parser)
    parser.add_argument(
        "--cluster",
        action="extend",
        nargs="+",
        default=[],
        metavar="COSTS",
        help="search for each of these clusters: files of `rudra calibrate`, presets or result files. Weights that do "
        "not depend on time are trained once for all of them",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="directory of what probes measured, for other searches of the job too. Default: probes, in the answer's",
    )
    parser.add_argument("--mpi", action="store_true", help="train probes on real ranks, in place of virtual time")
    parser.add_argument("--strategy", metavar="NAME", help="how to choose probes. Default: guided")
    parser.add_argument("--plan", action="store_true", help="predict the points and train nothing")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="directory of the answer. Default: NAME-tune")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    trust_option(parser)
    parser.set_defaults(learners=None)


def execute(arguments: argparse.Namespace) -> int:
    import sys

    from rudra.job.job import Job
    from rudra.job.jobfiles import parsed
    from rudra.mpi.launch import world_rank, world_size
    from rudra.studies.sweep import parse_grid
    from rudra.tuning import space, tune
    from rudra.tuning.store import ProbeStore

    if not arguments.mpi or arguments.plan:
        start_plainly("tune")
    elif arguments.cluster:
        raise ConfigError("--cluster: real ranks are one cluster; leave out --cluster or --mpi")
    overrides = overrides_of(arguments)
    job = Job.load(arguments.job, overrides)
    fixed = {change.key: [change.value] for change in map(parsed, overrides)}
    varied = {key for dimension in space.DIMENSIONS for key in dimension.keys}
    given = {key: values for key, values in fixed.items() if key in varied}
    for key, values in parse_grid(arguments.space).items():
        if key in fixed:
            raise ConfigError(f"--space {key}: --set fixes it; give one of them")
        given[key] = values
    about = {
        "target": arguments.target,
        "learners": numbers("--learners", arguments.counts) or (),
        "given": given,
        "quiet": arguments.quiet or not sys.stderr.isatty(),
    }
    clusters = _clusters(arguments.cluster)
    jobs = {name: job.with_(simulation={"costs": costs}) for name, costs in clusters.items()} or {"": job}
    directory = arguments.output or Path(f"{job.name}-tune")
    if not arguments.plan:
        about |= {"mpi": arguments.mpi, "budget": arguments.budget, "strategy": arguments.strategy or tune.DEFAULT}
        about |= {"store": arguments.store or (directory / "probes" if clusters else None)}
    reached, leads, launched = True, world_rank() == 0, world_size() is not None
    for name, its in jobs.items():
        if name:
            print(f"cluster {name}:", flush=True)
        if arguments.plan:
            print("\n".join(tune.plan(its, **about).lines()), flush=True)
            continue
        output = directory / name
        try:
            with nullcontext() if launched else interrupts.terminations():  # the ranks of a launcher handle it
                answer = tune.tune(its, output=output, **about)
        except KeyboardInterrupt:
            if leads:
                print(f"rudra: {job.name}: stopped; the same command continues from {directory}", file=sys.stderr)
            return EXIT_STOPPED
        reached &= answer.winner is not None
        if leads:
            print("\n".join(answer.lines()), flush=True)
            made = (tune.BEST, "tried.csv", "report.html")
            wrote = f"wrote {', '.join(f'{output}/{file}' for file in made if (output / file).is_file())}"
            trains = f"; rudra run {output}/{tune.BEST} trains it" if answer.winner is not None else ""
            print(f"{wrote}{trains}", flush=True)
    if clusters and not arguments.plan and arguments.store is None:
        ProbeStore(directory / "probes").clear()
    return 0 if reached else 1


def _clusters(costs: Sequence[str]) -> dict[str, str]:
    """Returns name -> file or preset of every cluster."""
    found: dict[str, str] = {}
    for each in costs:
        name = Path(each).stem
        if name in found:
            raise ConfigError(f"--cluster {each}: another one is also called '{name}'; use files with other names")
        found[name] = each
    return found
