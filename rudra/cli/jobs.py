"""`rudra jobs`."""

import argparse
from pathlib import Path

from rudra.cli.options import protocol_text

SUMMARY = "list the jobs that come with Rudra"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", action="store_true", help="where their files are, as templates for your own")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.job.job import Job
    from rudra.job.jobfiles import shipped_jobs

    for name, path in shipped_jobs().items():
        if arguments.paths:
            print(path)
            continue
        job = Job.load(path)
        learners = job.cluster.learners or "default"
        print(f"{name:24} {protocol_text(job)}, learners: {learners}\n    {_first_comment(path)}")
    return 0


def _first_comment(path: Path) -> str:
    """What a job file says of itself in its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
