"""`rudra plot`."""

import argparse
from pathlib import Path

from rudra.cli.options import beside, force_option, log_option

SUMMARY = "draw errors, losses, learning rate and staleness of one or more runs"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.h5")
    parser.add_argument(
        "-o", "--output", type=Path, help=".png, .svg or .pdf; default: the first file's name with .png"
    )
    log_option(parser)
    force_option(parser, "the picture")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report.analysis import plot

    output = arguments.output or beside(arguments.files[0], ".png")
    plot(arguments.files, output, log=arguments.log, force=arguments.force)
    print(f"wrote {output}")
    return 0
