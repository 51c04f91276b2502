"""Time of the host for the records of a bank, with learners that compute nothing."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from rudra.bench.ranks import on_ranks, train
from rudra.benchmark_report import Goal, Report, spread
from rudra.compute.bank.bursts import BankBursts
from rudra.compute.bank.recorded import Made
from rudra.core.bursts import MOST_ROUNDS, Burst, BurstMade
from rudra.job.job import Job
from rudra.probe import wrapped

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (1, 8, 32)
UPDATES = {1: 5_000, MOST_ROUNDS: 20_000}
"""Number of updates in a burst, K -> number of updates of a run."""

ROWS_GOAL = 200_000


def run(*, quick: bool) -> Report:
    """Measures processor time per update on one rank, from the second tenth of a run on.

    All roles are on this rank. Each update has a row for itself, and three for each learner.
    """
    updates = {1: 200, MOST_ROUNDS: 640} if quick else UPDATES
    found = on_ranks(measure, updates=[*updates.items()], sizes=SIZES[:1] if quick else SIZES, rounds=1 if quick else 5)
    report = Report(["learners m", "updates in a burst K", "µs per update", "µs per update and learner", "rows/s"])
    for m, count, taken in found[0]["figures"]:
        us = spread(np.array(taken) * 1e6)
        rate = (3 * m + 1) / us.median * 1e6
        report.rows.append((m, count, us, us.median / m, round(rate)))
        goal = 60 + 4 * m if count == 1 else 5
        report.goals.append(Goal(f"m = {m}, K = {count}: at most {goal} µs per update", [us.median], at_most=goal))
        if count > 1:
            report.goals.append(Goal(f"m = {m}: {ROWS_GOAL:,} rows/s", [rate], at_least=ROWS_GOAL))
    return report


def samples(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Data set of zeros."""
    inputs, labels = torch.zeros(count, 4), torch.zeros(count, dtype=torch.int64)
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


def measure(
    comm: "MPI.Comm", directory: Path, updates: list[tuple[int, int]], sizes: list[int], rounds: int
) -> dict[str, Any]:
    """Measures on the first rank. Returns (m, K, seconds of an update in each round) for each setting."""
    if comm.rank:
        return {}
    figures = [(m, count, list[float]()) for m in sizes for count, _ in updates]
    for _ in range(rounds):
        for m, count, taken in figures:
            taken.append(update_s(directory / "run.h5", m, count, dict(updates)[count]))
    return {"figures": figures}


def update_s(path: Path, learners: int, count: int, updates: int) -> float:
    """Returns the processor time of an update in a run whose bursts have `count` updates."""
    from mpi4py import MPI

    marks: list[tuple[float, int]] = []

    def instead(begin: Callable[..., Made]) -> Callable[..., Made]:
        def nothing(making: BankBursts, burst: Burst) -> Made:
            marks.append((time.process_time(), burst.timestamp))
            return Made(burst.rounds, burst.averages, _nothing(burst, 1.0 if count == 1 else 0.0))

        return nothing

    job = Job(
        name="records",
        model={"name": "mlp"},
        data={"name": samples, "options": {"count": updates * learners}, "classes": 2},
        training={"epochs": 1, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "sma"},
        cluster={"learners": learners, "learners_per_device": learners, "bank": "loop", "one_rank": True},
    )
    with wrapped(BankBursts, "begin", instead):
        train(job, path, MPI.COMM_SELF).close()
    (began, first), (ended, last) = marks[len(marks) // 10], marks[-1]
    return (ended - began) / (last - first)


def _nothing(burst: Burst, seconds: float) -> Iterator[BurstMade]:
    """Yields the results of a burst that computes nothing and says that it took so long, which limits the next ones."""
    losses, distances, digests = _figures(burst.rounds, burst.period, len(burst.learners))
    yield BurstMade(burst, losses, losses, distances, digests, seconds, 0.0, 0.0)


@cache
def _figures(count: int, period: int, m: int) -> tuple[Any, Any, Any]:
    """Returns losses, distances and digests, made once."""
    return np.full((count, period, m), 0.5), np.full((count, m), 0.1), np.zeros(count, np.uint64)
