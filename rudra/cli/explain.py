"""`rudra explain`."""

import argparse
from pathlib import Path

from rudra.cli.options import trust_option

SUMMARY = "say where the time of a run went, and what would make it faster"

MORE = """\
Prints about ten lines: where the time went, for whom learners wait, staleness and learning rate, evaluations and
checkpoints. A table then lists changes of the job that would make it faster by more than 5 %, with the gain that
`rudra predict FILE.h5` predicts from the rows of the run, the staleness, the samples of an update, and the options."""

EXAMPLES = {
    "rudra explain soft.h5": "explain a run",
    "rudra explain soft.h5 --json": "print lines and all changes as JSON, for a script",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    trust_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    from rudra.explain import explain

    found = explain(arguments.file, trust=arguments.trust)
    print(found.as_json() if arguments.json else found.as_text())
    return 0
