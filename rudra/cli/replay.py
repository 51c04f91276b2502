"""`rudra replay`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option, set_option, trust_option

SUMMARY = "repeat a recorded run in one process, and compare bit for bit"

MORE = """\
The replay feeds the recorded gradients to the same roles in the recorded order. Exit code 0: every update and
the final weights are bitwise identical. Exit code 1: they differ, and the output names the first update that does.
If you signed FILE.h5, Rudra finds your own modules where the run found them, and in the working directory.
Otherwise it imports no code that the file names without --trust."""

EXAMPLES = {
    "rudra replay soft.h5": "check that the run can be reproduced",
    "rudra replay soft.h5 --until 100 -o at-100.pt": "write the weights after update 100, for torch.load",
    "rudra replay soft.h5 --norms 1": "add the norm of every gradient and update to the record",
    "rudra replay my-job.h5 --set data.path=/scratch/cifar10": "replay with the data in another directory",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file of a run")
    parser.add_argument(
        "--until", type=int, metavar="UPDATE", help="stop after this update and write the weights, as a state dict"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="W.pt", help="file for these weights. Default: FILE-UPDATE.pt"
    )
    force_option(parser, "W.pt")
    parser.add_argument(
        "--norms",
        type=int,
        metavar="N",
        help="add the norms of the gradients of every Nth update to FILE.h5, as results.gradient_norms records them",
    )
    set_option(parser, "change data.path or training.warm_start; repeatable")
    trust_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    replayed = rudra.replay(
        arguments.file,
        until=arguments.until,
        output=arguments.output,
        overrides=arguments.overrides,
        quiet=arguments.quiet,
        force=arguments.force,
        trust=arguments.trust,
        norms=arguments.norms,
    )
    print(f"{arguments.file}: {replayed}")
    if replayed.norms:
        print(f"{arguments.file}: {replayed.norms} norms of gradients and updates added")
    return 0 if replayed.identical else 1
