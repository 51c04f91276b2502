"""`rudra run`."""

import argparse
from functools import partial

from rudra.cli.finish import report
from rudra.cli.options import from_options, job_options, origin_of, verbose_option

SUMMARY = "train a job on MPI ranks"

MORE = """\
`rudra run` starts mpirun itself, with one rank for each learner and each server. Under mpirun or srun it uses
the ranks it finds: every rank that no server needs becomes a learner. If the job names another number of
learners, the run is refused, and the error says how many ranks to start.

Ctrl-C stops the run and saves a checkpoint; `rudra resume` continues from it."""

EXAMPLES = {
    "rudra run digits --output soft.h5": "train a shipped job: four learners and two servers on this machine",
    "rudra run digits --set protocol.name=hardsync --output hard.h5": "train it under another protocol",
    "mpirun -n 10 rudra run my-job.toml": "train on ten ranks that mpirun starts; srun works alike",
    "rudra run my-job.toml --output my-job.h5 --resume": "continue if there is a checkpoint, otherwise start",
    "rudra run other.toml --from soft-3.ckpt --carry all": "start another job from the end of epoch 3 of this run",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=True)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE.h5|FILE.ckpt",
        help="continue from the checkpoint of this run; without a file, from the checkpoint of --output, if it exists",
    )
    from_options(parser)
    verbose_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    begin = {"resume": arguments.resume, **origin_of(arguments)}
    return report(arguments, partial(rudra.run, **begin, verbose=arguments.verbose))
