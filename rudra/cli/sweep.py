"""`rudra sweep`."""

import argparse
import sys
from pathlib import Path

from rudra import interrupts
from rudra.cli.options import job_options, overrides_of, start_plainly
from rudra.errors import EXIT_STOPPED

SUMMARY = "run all combinations of values, or the study of a job"

MORE = """\
Each combination is a point. Points are simulated, several at a time, or run on real ranks with --mpi. A second call
runs only the points that are missing. DIR receives one result file for each point and an index, sweep.json;
`rudra report DIR` makes a page of them."""

EXAMPLES = {
    "rudra sweep digits --grid protocol.n=1,2,4": "simulate three variants of a job",
    "rudra sweep digits --grid protocol.n=1,2 --grid training.minibatch_size=4,16": "simulate four combinations",
    "rudra sweep rudra/figure5 --quick": "run the study of a shipped job, in its short variant",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=False)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="TABLE.KEY=V1,V2",
        help="values of a key (an empty value: its default); repeatable; without --grid: the job's [study]",
    )
    parser.add_argument("--quick", action="store_true", help="the short variant of the study")
    parser.add_argument("--mpi", action="store_true", help="run on real ranks, one point at a time")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="points to simulate at a time. Default: one for each core"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="directory of the results. Default: NAME-sweep or NAME-quick-sweep",
    )
    parser.add_argument("--force", action="store_true", help="replace the results of another job or grid in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress; print only the name of the directory")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.files import locked
    from rudra.studies import pool, sweep

    start_plainly("sweep")
    study = sweep.plan(
        arguments.job,
        grid=sweep.parse_grid(arguments.grid) or None,
        quick=arguments.quick,
        overrides=overrides_of(arguments),
        driver="mpi" if arguments.mpi else "simulation",
    )
    workers = sweep.workers_for(study, arguments.workers)
    directory = arguments.output or Path(f"{study.name}{'-quick' if study.quick else ''}-sweep")
    with locked(directory, "sweep"):
        done = study.finished(directory, force=arguments.force)
        study.write_index(directory)
        mode: pool.Mode = "quiet" if arguments.quiet else "bar" if sys.stderr.isatty() else "lines"
        try:
            with interrupts.terminations():
                failures = pool.run(study, directory, done, workers=workers, mode=mode)
        except KeyboardInterrupt:
            print(f"rudra: {study.name}: stopped; the same command continues from {directory}", file=sys.stderr)
            return EXIT_STOPPED
    if arguments.quiet:
        print(directory)
    else:
        print(pool.summary(study, directory, failures))
        print(f"wrote {directory}: {len(study.points) - len(done)} of {len(study.points)} points run now")
    return 1 if failures else 0
