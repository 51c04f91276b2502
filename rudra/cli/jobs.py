"""`rudra jobs`."""

import argparse
from pathlib import Path

from rudra.cli.options import protocol_text

SUMMARY = "list the shipped jobs, or print one"

MORE = """\
Without NAME, lists each shipped job with its protocol, its number of learners and its purpose. With NAME, prints
the file of that job; `rudra init --from NAME` writes it with a comment on every key."""

EXAMPLES = {
    "rudra jobs": "list the shipped jobs",
    "rudra jobs rudra/figure5": "print the file of one",
    "rudra jobs --paths": "list where their files are",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="shipped job whose file to print")
    parser.add_argument("--paths", action="store_true", help="print the paths of the files only")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.errors import ConfigError, unknown
    from rudra.job.jobfiles import shipped_jobs

    shipped = shipped_jobs()
    if arguments.name is not None and arguments.name not in shipped:
        raise ConfigError(f"job {unknown(arguments.name, shipped)}")
    if arguments.paths:
        print("\n".join(str(path) for name, path in shipped.items() if arguments.name in {None, name}))
    elif arguments.name is not None:
        print(shipped[arguments.name].read_text(encoding="utf-8"), end="")
    else:
        for name, path in shipped.items():
            print(_described(name, path))
    return 0


def _described(name: str, path: Path) -> str:
    from rudra.job.job import Job

    job = Job.load(path)
    return f"{name:24} {protocol_text(job)}, learners: {job.cluster.learners or 'default'}\n    {about(path)}"


def about(path: Path) -> str:
    """Returns the description in the first line of a job file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
