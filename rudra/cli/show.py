"""`rudra show`."""

import argparse
import json
from pathlib import Path

from rudra.cli.options import at_least

SUMMARY = "print the results of a run"

MORE = """\
Prints time, throughput, learning rate, staleness, losses, errors and metrics of a run, also while it runs."""

EXAMPLES = {
    "rudra show soft.h5": "print the results",
    "rudra show soft.h5 --target 'accuracy >= 0.95'": "also print when test accuracy reached 0.95",
    "rudra show soft.h5 --json": "print them as JSON, for a script",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--target", metavar="TEXT", help="print when this target was reached, such as 'accuracy >= 0.98'"
    )
    about = "evaluations whose median must reach the target. Default: the job's training.target_window"
    parser.add_argument("--target-window", type=at_least(1), metavar="N", help=about)


def execute(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.progress import summary_table

    with rudra.open_results(arguments.file) as results:
        summary = results.summary(arguments.target, arguments.target_window)
    print(json.dumps(summary, indent=2) if arguments.json else summary_table(summary))
    return 0
