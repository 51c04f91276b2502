"""`rudra sweep`."""

import argparse
import sys
from pathlib import Path

from rudra.cli.options import job_options, overrides_of, start_plainly

SUMMARY = "run a grid of jobs, or the study that a job describes"

MORE = """\
Each point is simulated (or, with --mpi, run on real ranks), several at a time. Called again, it does what is missing.
The directory has one result file for each point and sweep.json; `rudra report DIR` makes a page of it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=False)
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


def execute(arguments: argparse.Namespace) -> int:
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
