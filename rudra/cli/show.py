"""`rudra show`."""

import argparse
import json
from pathlib import Path

from rudra.cli.options import at_least

SUMMARY = "print the figures of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5")
    parser.add_argument("--json", action="store_true", help="as one JSON object, for scripts")
    parser.add_argument("--target", metavar="TEXT", help="when was it reached? such as 'accuracy >= 0.98'")
    about = "by the median of so many tests; default: the job's training.target_window"
    parser.add_argument("--target-window", type=at_least(1), metavar="N", help=about)


def execute(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.progress import summary_table

    with rudra.open_results(arguments.file) as results:
        summary = results.summary(arguments.target, arguments.target_window)
    print(json.dumps(summary, indent=2) if arguments.json else summary_table(summary))
    return 0
