"""`rudra simulate`."""

import argparse

from rudra.cli.finish import report
from rudra.cli.options import job_options

SUMMARY = "run a job in one process and virtual time"

MORE = """\
The same roles and real gradients as in `rudra run`, but any number of learners in one process.
Time is virtual and comes from the job's table [simulation]; the same job gives the same bits."""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=True)


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    return report(arguments, rudra.simulate)
