"""`rudra run`."""

import argparse
from functools import partial

from rudra.cli.finish import report
from rudra.cli.options import job_options, verbose_option

SUMMARY = "train a job on MPI ranks"

MORE = """\
Started plainly, it starts mpirun itself, with one rank for each learner and server. Started by
mpirun or srun, it uses the ranks it was given: as many learners as the servers leave, unless the
job names another number, which is refused."""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=True)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="go on from the checkpoint of --output, if it has one, or of that result file or checkpoint",
    )
    verbose_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    return report(arguments, partial(rudra.run, resume=arguments.resume, verbose=arguments.verbose))
