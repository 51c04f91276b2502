"""`rudra watch`."""

import argparse
from pathlib import Path

SUMMARY = "show a running job's curves in the terminal, from another shell"

MORE = """\
Reads while the run writes, redraws every second, and ends with the run or Ctrl-C; the run does not notice."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5")
    parser.add_argument("--once", action="store_true", help="print what is there now, and end")
    parser.add_argument("--wait", action="store_true", help="wait for a file that does not exist yet")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report.watch import watch

    watch(arguments.file, once=arguments.once, wait=arguments.wait)
    return 0
