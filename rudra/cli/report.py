"""`rudra report`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option, log_option

SUMMARY = "write one HTML page about runs"

MORE = """\
The page needs no other file. It begins with the answer: the best runs, and what `rudra explain` says of one of them.
Its tables and figures show test error or loss, metrics, training, staleness, tradeoff curves, speed-up and time per
role; each offers its numbers as CSV. Runs that failed or are missing are listed."""

EXAMPLES = {
    "rudra report soft.h5 hard.h5 -o compare.html": "compare two runs",
    "rudra report digits-sweep --figures figures": "report a sweep, and write each figure as PDF, SVG and CSV",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE.h5|DIR", help="result files, or directories of sweeps"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="PAGE.html", help="default: report.html"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="also write each figure as PDF and SVG, and its numbers as CSV, into DIR",
    )
    log_option(parser)
    force_option(parser, "PAGE.html, and files in DIR,")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report import report

    page, *files = report(
        arguments.files, arguments.output, arguments.figures, log=arguments.log, force=arguments.force
    )
    print(f"wrote {page}" + (f" and {len(files)} files in {arguments.figures}" if files else ""))
    return 0
