"""`rudra plot`."""

import argparse
from pathlib import Path

from rudra.cli.options import beside, force_option, log_option

SUMMARY = "draw error, loss, learning rate and staleness of runs"

MORE = """\
Runs that differ only in the seed become one line, their median, in a band from the lowest to the highest."""

EXAMPLES = {
    "rudra plot soft.h5": "draw one run, as soft.png",
    "rudra plot soft.h5 hard.h5 --output compare.pdf": "compare two runs in one picture",
    "rudra plot soft.h5 hard.h5 --log --output log.svg": "compare them on logarithmic axes",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.h5", help="result files")
    about = "picture: .png, .svg or .pdf. Default: the name of the first file with .png"
    parser.add_argument("-o", "--output", type=Path, metavar="PICTURE.png", help=about)
    log_option(parser)
    force_option(parser, "PICTURE.png")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report.plot import plot

    output = arguments.output or beside(arguments.files[0], ".png")
    plot(arguments.files, output, log=arguments.log, force=arguments.force)
    print(f"wrote {output}")
    return 0
