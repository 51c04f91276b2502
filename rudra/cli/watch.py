"""`rudra watch`."""

import argparse
from pathlib import Path

SUMMARY = "show the curves of a running job in the terminal"

MORE = """\
Start it in another shell. It reads the result file while the run writes it, redraws every second, and ends with
the run or with Ctrl-C. It does not slow the run down."""

EXAMPLES = {
    "rudra watch soft.h5": "follow a run",
    "rudra watch my-job.h5 --wait": "start before the run does",
    "rudra watch soft.h5 --once": "print the curves as they are now",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file")
    parser.add_argument("--once", action="store_true", help="print the curves once, and end")
    parser.add_argument("--wait", action="store_true", help="wait until FILE.h5 exists")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report.watch import watch

    watch(arguments.file, once=arguments.once, wait=arguments.wait)
    return 0
