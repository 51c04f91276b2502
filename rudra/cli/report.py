"""`rudra report`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option, log_option

SUMMARY = "write one page about any number of runs"

MORE = """\
The page is one HTML file that needs nothing else: tables, test error or loss and other metrics, training, staleness,
tradeoff curves, speed-up and time per role, each with its numbers as CSV. Runs that failed or are missing are
shown as such."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result file, or directory of a sweep")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="also write each figure as PDF and SVG, and its numbers as CSV"
    )
    log_option(parser)
    force_option(parser, "the page, and files in DIR,")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report import report

    page, *files = report(
        arguments.files, arguments.output, arguments.figures, log=arguments.log, force=arguments.force
    )
    print(f"wrote {page}" + (f" and {len(files)} files in {arguments.figures}" if files else ""))
    return 0
