"""`rudra run`."""

import argparse
from functools import partial

from rudra.cli.finish import report
from rudra.cli.options import job_options, verbose_option

SUMMARY = "train a job on MPI ranks"

MORE = """\
`rudra run` starts mpirun itself, with one rank for each learner and each server. Under mpirun or srun it uses
the ranks it finds: every rank that no server needs becomes a learner. If the job names another number of
learners, the run is refused, and the error says how many ranks to start.

Ctrl-C stops the run and leaves a checkpoint, from which `rudra resume` continues."""

EXAMPLES = {
    "rudra run digits --output soft.h5": "train a shipped job: four learners and two servers on this machine",
    "rudra run digits --set protocol.name=hardsync --output hard.h5": "train it under another protocol",
    "mpirun -n 10 rudra run my-job.toml": "train on ten ranks that mpirun starts; srun works alike",
    "rudra run my-job.toml --output my-job.h5 --resume": "continue if there is a checkpoint, else begin",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=True)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE.h5|FILE.ckpt",
        help="continue from the checkpoint of this run; without a file, from that of --output, if there is one",
    )
    verbose_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    return report(arguments, partial(rudra.run, resume=arguments.resume, verbose=arguments.verbose))
