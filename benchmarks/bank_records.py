"""Time of the host for the records of a bank, with learners that compute nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from rudra.compute.executor import Executor
from rudra.core.actions import Compute, ExecutorAction, StepReplica
from rudra.core.bursts import MOST_ROUNDS, Burst, BurstMade
from rudra.core.events import Computed, ReplicaStepped
from rudra.job.job import Job
from rudra.mpi.bursts import Bursts
from rudra.probe import wrapped

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (1, 8, 32)
ASKED = 0
"""Instead of a number of rounds: the learners are asked for each step."""

ROUNDS = {
    "updates": {1: 5_000, MOST_ROUNDS: 20_000},
    "local steps": {ASKED: 2_000, MOST_ROUNDS: 20_000},
}
"""Kind of rounds -> number of rounds in a burst, K -> number of rounds of a run."""

PERIOD = 10 * MOST_ROUNDS + 1
"""Mini-batches of an epoch, and of its only period, if rounds are local steps. The learners compute its last one."""

QUICK = {"updates": {1: 200, MOST_ROUNDS: 640}, "local steps": {ASKED: 200, MOST_ROUNDS: 1_300}}

ROWS_GOAL = 200_000


def run(*, quick: bool) -> Report:
    """Measures processor time per round on one rank, from the second tenth of a run on.

    All roles are on this rank. Each update has a row for itself, and three for each learner. Each local step has a row
    for each learner.
    """
    rounds = (QUICK if quick else ROUNDS).items()
    settings = [(kind, count, number) for kind, counts in rounds for count, number in counts.items()]
    sizes, turns = (SIZES[:1], 1) if quick else (SIZES, 5)
    found = on_ranks(measure, settings=settings, sizes=sizes, turns=turns)
    report = Report(["learners m", "rounds", "K of a burst", "µs per round", "µs per round and learner", "rows/s"])
    for m, kind, count, taken in found[0]["figures"]:
        us, updates = spread(np.array(taken) * 1e6), kind == "updates"
        rate = (3 * m + 1 if updates else m) / us.median * 1e6
        report.rows.append((m, kind, count or "asked", us, us.median / m, round(rate)))
        if count == ASKED:
            continue
        goal = 60 + 4 * m if count == 1 else 5
        about = f"m = {m}, K = {count}, {kind}"
        report.goals.append(Goal(f"{about}: at most {goal} µs per round", [us.median], at_most=goal))
        if count > 1:
            report.goals.append(Goal(f"{about}: {ROWS_GOAL:,} rows/s", [rate], at_least=ROWS_GOAL))
    return report


def samples(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Data set of zeros."""
    inputs, labels = torch.zeros(count, 4), torch.zeros(count, dtype=torch.int64)
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


def measure(
    comm: "MPI.Comm", directory: Path, settings: list[tuple[str, int, int]], sizes: list[int], turns: int
) -> dict[str, Any]:
    """Measures on the first rank. Returns (m, kind, K, seconds of a round in each turn) for each setting."""
    if comm.rank:
        return {}
    figures = [(m, *setting, list[float]()) for m in sizes for setting in settings]
    for _ in range(turns):
        for m, kind, count, rounds, taken in figures:
            taken.append(round_s(directory / "run.h5", m, kind, count, rounds))
    return {"figures": [(m, kind, count, taken) for m, kind, count, _, taken in figures]}


def round_s(path: Path, learners: int, kind: str, count: int, rounds: int) -> float:
    """Returns the processor time of a round in a run whose bursts have `count` rounds."""
    from mpi4py import MPI

    marks: list[tuple[float, int]] = []  # processor time and mini-batch of the first learner

    def begin(begin: Callable[..., Made]) -> Callable[..., Made]:
        def nothing(making: BankBursts, burst: Burst) -> Made:
            marks.append((time.process_time(), burst.learners[0][0]))
            return Made(burst.rounds, burst.averages, _nothing(burst, 1.0 if count == 1 else 0.0))

        return nothing

    def perform(perform: Callable[..., Any]) -> Callable[..., Any]:
        def nothing(executor: Executor, action: ExecutorAction) -> Any:
            if isinstance(action, Compute):
                marks.append((time.process_time(), action.step))
                return iter((Computed(action.step, 0.5, 0.5, action.work.count),))
            return iter((ReplicaStepped(0.0, 0.1),)) if isinstance(action, StepReplica) else perform(executor, action)

        return nothing

    def holds(holds: Callable[..., bool]) -> Callable[..., bool]:
        return (lambda *_: False) if count == ASKED else holds

    period = PERIOD if kind == "local steps" else 1
    epochs, steps = (-(-rounds // period), period) if period > 1 else (1, rounds)
    job = Job(
        name="records",
        model={"name": "mlp"},
        data={"name": samples, "options": {"count": steps * learners}, "classes": 2},
        training={"epochs": epochs, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "sma"},
        averaging={"period": period},
        cluster={"learners": learners, "learners_per_device": learners, "bank": "loop", "one_rank": True},
    )
    probes = (BankBursts, "begin", begin), (Executor, "perform", perform), (Bursts, "holds", holds)
    with ExitStack() as stack:
        for probe in probes:
            stack.enter_context(wrapped(*probe))
        train(job, path, MPI.COMM_SELF).close()
    (began, first), (ended, last) = marks[len(marks) // 10], marks[-1]
    return (ended - began) / (last - first)


def _nothing(burst: Burst, seconds: float) -> Iterator[BurstMade]:
    """Yields the results of a burst that computes nothing and says that it took so long, which limits the next ones."""
    losses, distances, digests = _figures(burst.rounds, burst.period, len(burst.learners))
    updates = len(burst.weight_rates)
    yield BurstMade(burst, losses, losses, distances[:updates], digests[:updates], seconds, 0.0, 0.0)


@cache
def _figures(count: int, period: int, m: int) -> tuple[Any, Any, Any]:
    """Returns losses, distances and digests, made once."""
    return np.full((count, period, m), 0.5), np.full((count, m), 0.1), np.zeros(count, np.uint64)
