"""Final output of a run or a simulation."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rudra.cli.options import has, job_of
from rudra.errors import EXIT_STOPPED, RudraError, one_line, printable

if TYPE_CHECKING:
    from rudra.api import ProgressMode
    from rudra.results.reader import Results


def report(arguments: argparse.Namespace, execute: Callable[..., "Results"]) -> int:
    """Runs or simulates, then prints the outcome."""
    job = job_of(arguments)
    results = execute(job, output=arguments.output, force=arguments.force, progress=mode_of(arguments))
    return finished(arguments, results, force=arguments.force)


def mode_of(arguments: argparse.Namespace) -> "ProgressMode | None":
    return "quiet" if arguments.quiet else None


def finished(arguments: argparse.Namespace, results: "Results", *, force: bool = True) -> int:
    """Prints the summary and draws the picture, on one rank only."""
    from rudra.mpi.launch import world_rank, world_size
    from rudra.results.progress import summary_table

    if world_size() is not None and world_rank() != 0:
        return 0
    with results:
        code = EXIT_STOPPED if results.status == "interrupted" else 0  # a non-finite loss stopped a simulation
        if arguments.quiet:
            print(results.path)
            return code
        print(summary_table(results.summary()))
        written = [results.path]
    if has("matplotlib"):
        from rudra.report.plot import plot

        picture = written[0].with_suffix(".png")
        if force or not os.path.lexists(picture):
            try:
                plot(written, picture, force=force)
                written.append(picture)
            except Exception as error:  # the run has succeeded, whatever is wrong with matplotlib or the disk
                text = str(error) if isinstance(error, RudraError) else f"{picture}: {one_line(error)}"
                print(f"rudra: no picture: {printable(text)}", file=sys.stderr)
    print("wrote " + ", ".join(map(str, written)))
    return code
