"""`rudra tune` against its oracle, in virtual time: both train, and their answers run with fresh seeds.

The weights of synchronous points are trained once for all clusters. Probes stay in a directory, so an interrupted
benchmark continues. Times are of virtual time: the machine may be busy.
"""

import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.oracle import CLUSTERS, LEARNERS, SPACE, TASKS, Oracle, job_of
from benchmarks.shared import check_only, chosen
from rudra.benchmark_report import Goal, Report
from rudra.errors import ConfigError, RunError
from rudra.tuning import tune
from rudra.tuning.answer import Verdict
from rudra.tuning.journal import NAME, outcomes, read
from rudra.tuning.rounds import MOMENTUM, RATE

BUDGET, UNLIMITED = 8.0, 1e6
QUICK_LOSS = 1.0
QUICK_SPACE = {
    **SPACE,
    "protocol.name": ["hardsync", "async"],
    "topology.name": ["base"],
    RATE: [0.02],
    MOMENTUM: [0.9],
}
"""Two settings."""


def run(*, quick: bool, only: Collection[str] = (), keep: Path | None = None) -> Report:
    """Trains the oracle, and lets `rudra tune` search.

    Args:
        quick: One cluster and two settings, with few samples.
        only: Names of tasks and clusters.
        keep: Directory of the searches. A probe that is there is not repeated. It gets the curves of the oracle, which
            `rudra bench strategies` reads.

    Raises:
        ConfigError: The data is missing, or a word is unknown.
    """
    check_only("tune", only, [*TASKS, *CLUSTERS])
    report = Report(["task, cluster", "s to target", "oracle's", "times as late", "runs searched", "the answer"])
    late: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        for task in ["fashion-mnist"] if quick else chosen(only, TASKS):
            for cluster in ["stragglers"] if quick else chosen(only, CLUSTERS):
                place = (keep or Path(name)) / task
                best = _search(task, cluster, place, "grid", UNLIMITED, quick=quick)
                record(task, cluster, place, quick=quick)
                ours = _search(task, cluster, place, tune.DEFAULT, BUDGET, quick=quick)
                times = [answer.winner.time_s for answer in (ours, best) if answer.winner]
                late.append(times[0] / times[1])
                says = next(ours.lines()).partition(" is ")[2]
                report.rows.append((f"{task}, {cluster}", *times, late[-1], ours.spent, says))
    report.notes = [f"λ = {LEARNERS}, μ = 8; times are virtual, medians of fresh seeds; runs: reference runs"]
    but_one = sorted(late)[-2:][:1] if len(late) > 1 else late
    report.goals = [
        Goal(f"{tune.DEFAULT} <= 1.15 times as late as the oracle, in all cases but one", but_one, at_most=1.15)
    ]
    return report


def record(task: str, cluster: str, place: Path, *, quick: bool = False) -> None:
    """Writes the curves of an oracle beside its search."""
    entries, _ = read(place / cluster / "grid" / NAME)
    plan = tune.plan(job_of(task, cluster, quick=quick), **_about(task, quick), quiet=True)
    longest = {probe.name: (probe, outcome) for probe, outcome in outcomes(entries)}
    Oracle(plan.training_samples, plan.prices, longest.values()).write(place.parent / f"{task}-{cluster}.jsonl")


def _about(task: str, quick: bool) -> dict[str, Any]:
    """Returns target and space of a search."""
    if quick:
        return {"target": f"loss <= {QUICK_LOSS:g}", "given": QUICK_SPACE}
    return {"target": f"loss <= {TASKS[task].loss:g}", "given": SPACE}


def _search(task: str, cluster: str, place: Path, strategy: str, budget: float, *, quick: bool) -> Verdict:
    """Searches, or continues a search.

    Raises:
        ConfigError: The data is missing.
        RunError: Nothing reached the target.
    """
    job = job_of(task, cluster, quick=quick)
    if not Path(str(job.data.path)).is_dir():
        raise ConfigError(f"bench tune: {task} is not in {job.data.path}; RUDRA_DATA names the directory that it is in")
    about = {**_about(task, quick), "store": place / "probes", "quiet": not sys.stderr.isatty()}
    answer = tune.tune(job, strategy=strategy, budget=budget, output=place / cluster / strategy, **about)
    if answer.winner is None:
        raise RunError(f"bench tune: {next(answer.lines())}")
    return answer
