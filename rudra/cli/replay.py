"""`rudra replay`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option, search_beside, set_option

SUMMARY = "repeat a recorded run in one process, and compare bit for bit"

MORE = """\
The same roles are fed the recorded gradients in the recorded order. Ends with exit code 0 if every
update and the final weights are the same bits, else with 1 and the first update that differs.
--until leaves the weights of one moment as a state dict for torch.load. Modules of your own are
found beside FILE.h5, at the root of its project and in the current directory."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5")
    parser.add_argument("--until", type=int, metavar="UPDATE", help="stop there and write the weights of that moment")
    parser.add_argument("-o", "--output", type=Path, metavar="W.pt", help="for these weights; default: FILE-UPDATE.pt")
    force_option(parser, "W.pt")
    set_option(parser, "where something is: data.path or training.warm_start")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    search_beside(arguments.file)
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
