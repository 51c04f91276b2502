"""The benchmark `overlap` with a link: the servers are on one host, the learner on the other."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.links import behind_a_link, missing, turn_is_over
from rudra.bench import overlap
from rudra.benchmark_report import Report

if TYPE_CHECKING:
    from mpi4py import MPI

GBIT_S = 10


def run(*, quick: bool) -> Report:
    """Measures one learner of one torch thread."""
    report = overlap.new_report()
    if lacking := missing():
        report.notes = [f"no rows: {lacking}"]
        return report
    about = overlap.SMALLEST if quick else overlap.SIZES
    link = {"gbit_s": GBIT_S, "learners": 1, "away": 1, "turns": about["rounds"]}
    ranks = behind_a_link(measure, **link, **about)
    overlap.add(report, f"1, {GBIT_S} Gbit/s", ranks, overlap=0.95, rates={"adv*": 0.72})
    return report


def measure(comm: "MPI.Comm", directory: Path, **about: Any) -> dict[str, Any]:
    """Measures in turns, as `overlap.measure` does."""
    return overlap.measure(comm, directory, 1, **about, over=turn_is_over)
