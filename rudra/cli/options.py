"""Options that several commands share, and functions that parse their texts."""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rudra.errors import ConfigError

if TYPE_CHECKING:
    from rudra.job.job import Job

ROOTS = ("pyproject.toml", "setup.cfg", "setup.py", ".git")
"""Files or directories that mark the root of a project."""


def job_argument(parser: argparse.ArgumentParser, *, or_results: bool = False) -> None:
    text = "TOML file, or name of a shipped job (see `rudra jobs`)"
    metavar, more = ("JOB|FILE.h5", "; or result file of a run") if or_results else ("JOB", "")
    parser.add_argument("job", metavar=metavar, help=text + more)


def job_options(parser: argparse.ArgumentParser, *, runs: bool, or_results: bool = False) -> None:
    job_argument(parser, or_results=or_results)
    parser.add_argument(
        "--learners", type=int, metavar="N", help="number of learners; short for --set cluster.learners=N"
    )
    set_option(parser)
    if runs:
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE.h5", help="result file. Default: the job's name and the time"
        )
        force_option(parser, "FILE.h5")
        parser.add_argument("--quiet", action="store_true", help="no progress; print only the name of the result file")


def force_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--force", action="store_true", help=f"replace {what} if it exists")


def from_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for a start from another run."""
    parser.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="FILE.ckpt|FILE.h5",
        help="start with the weights of another run, or with its whole checkpoint",
    )
    parser.add_argument(
        "--carry",
        choices=("weights", "state", "all"),
        help="what to start with: weights (default), state (also optimiser state, epochs and samples), "
        "or all (also the recorded rows)",
    )


def origin_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments for a start from another run."""
    if arguments.carry is not None and arguments.origin is None:
        raise ConfigError("--carry is only for a start from another run; also give --from FILE.ckpt")
    return {"from_": arguments.origin, "carry": arguments.carry or "weights"}


def log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", action="store_true", help="logarithmic axes for error, loss and learning rate")


def verbose_option(parser: argparse.ArgumentParser) -> None:
    text = "if the run fails, also show what MPI and mpirun printed"
    parser.add_argument("--verbose", action="store_true", help=text)


def set_option(parser: argparse.ArgumentParser, about: str = "change any key of the job; repeatable") -> None:
    more = "; without VALUE: the key's default"
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides", help=about + more
    )


def trust_option(parser: argparse.ArgumentParser) -> None:
    text = "run the code that the file names although you have not signed it; see `Security` in the documentation"
    parser.add_argument("--trust", action="store_true", help=text)


def layer_options(parser: argparse.ArgumentParser, draw: str) -> None:
    """Adds options of commands that measure a job's layers: picture, changes of the job, duration, and JSON."""
    parser.add_argument("-o", "--output", type=Path, metavar="PICTURE.png", help=f"{draw}: .png, .svg or .pdf")
    set_option(parser)
    force_option(parser, "PICTURE.png")
    parser.add_argument("--seconds", type=positive, metavar="S", help="seconds of computation. Default: 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def job_of(arguments: argparse.Namespace) -> "Job":
    """Returns the job of the command line."""
    from rudra.job.job import Job

    return Job.load(arguments.job, overrides_of(arguments))


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the changes that the command line makes to the job."""
    search_beside(arguments.job)
    learners = [] if arguments.learners is None else [f"cluster.learners={arguments.learners}"]
    return [*arguments.overrides, *learners]


def search_beside(file: str | Path) -> None:
    """Adds places for `package.module:callable` in a job file: its directory, its project's root, and the current one.

    The places come last on `sys.path`, so that they cannot hide other modules.
    """
    places = [Path.cwd()]
    if os.path.isfile(file):
        directory = Path(file).resolve().parent
        roots = (place for place in (directory, *directory.parents) if any((place / mark).exists() for mark in ROOTS))
        places = [directory, next(roots, directory), *places]
    sys.path += [place for place in dict.fromkeys(map(str, places)) if place not in sys.path]


def numbers(option: str, text: str | None) -> list[int]:
    """Returns whole numbers between commas, or an empty list if the option is not given."""
    if text is None:
        return []
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(found) != len(text.split(",")) or 0 in found:
        raise ConfigError(f"{option} {text}: must be whole numbers >= 1 between commas, such as 1,2,4")
    return found


def start_plainly(command: str) -> None:
    """Raises ConfigError in a rank, because the command starts ranks itself."""
    from rudra.mpi.launch import world_size

    if world_size() is not None:
        raise ConfigError(f"rudra {command} starts mpirun itself: start it without mpirun or srun")


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, not '{text}'")
        return int(text)

    return number


def positive(text: str) -> float:
    """Returns a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, not '{text}'")
    return number


def beside(file: Path, suffix: str) -> Path:
    """Returns the file's name with another suffix."""
    if not file.name:
        raise ConfigError(f"{file}: is a directory; give a result file")
    return file.with_suffix(suffix)


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def protocol_text(job: "Job") -> str:
    from rudra.results.summary import protocol_label

    name = job.protocol.name if isinstance(job.protocol.name, str) else job.protocol.name.__name__
    return protocol_label({"protocol": name, "n": job.protocol.n or 1})


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
