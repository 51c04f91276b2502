"""`rudra doctor`."""

import argparse

SUMMARY = "check that this machine can run jobs"

MORE = """\
Looks at Python, torch, GPUs, MPI and its launcher, memory that ranks share, SLURM, cores and HDF5, and says how to fix
what is wrong. Exit code 1: something would stop every run."""

EXAMPLES = {
    "rudra doctor": "check this machine",
    "rudra doctor --json": "print the findings as JSON, for a script",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.cli import examination

    return examination.main(as_json=arguments.json)
