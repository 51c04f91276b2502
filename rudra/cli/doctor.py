"""`rudra doctor`."""

import argparse

SUMMARY = "check this machine, and say what to do about what is wrong"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object, for scripts")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.cli import examination

    return examination.main(as_json=arguments.json)
