"""Averaging of replicas in parallel with training: SMA after every mini-batch, on two real ranks, against a bound.

The bound is the step time of the same learners without averaging, plus the time to move the additional data of an
average through memory. A step reads the weights and writes the difference. The update reads the differences of all
learners, and reads and writes the weights and their momentum. The memory's speed is measured by `a += b` on such
vectors, on both ranks at once.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.shared import learner_step_s, unconnected
from rudra.bench.ranks import LEARNER, STATISTICS, alexnet_job, in_turns, on_ranks, train
from rudra.benchmark_report import Goal, Report, Spread, ratios, spread
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.job.job import Job

LEARNERS, SIZE = 2, 4
WIDTHS = {"18 MB": 64, "289 MB": 4616}  # width of AlexNet's fully connected layers
ADD = 3  # vectors that `a += b` moves
ADDED = 2 + LEARNERS + 4  # vectors that an average moves
WAYS = {"averaged": "by memory", "messages": "by messages", "alone": "none averaged", "bound": "bound"}


def run(*, quick: bool) -> Report:
    """Measures learners of one torch thread each, in turns."""
    size, steps, rounds = (1, 3, 0) if quick else (SIZE, 16, 5)
    report = Report(["steps per second", *WAYS.values(), "/ none averaged", "/ bound", "by messages / bound"])
    shares = []
    for case, width in list(WIDTHS.items())[: 1 if quick else None]:
        figures = on_ranks(measure, LEARNERS, size=size, width=width, steps=steps, rounds=rounds)[LEARNER:]
        rates = {way: [1 / max(turn) for turn in zip(*(f[way] for f in figures), strict=True)] for way in WAYS}
        found: list[Spread] = [spread(rates[way]) for way in WAYS]
        against = [("averaged", "alone"), ("averaged", "bound"), ("messages", "bound")]
        found += [ratios(rates[ours], rates[theirs]) for ours, theirs in against]
        report.rows.append((case, *found))
        shares.append(found[-2].median)
    report.notes = [
        f"sma, averaged with every mini-batch of {size}, two learners of one torch thread each, SGD without momentum",
        "by messages: cluster.node_memory = false; otherwise ranks read differences in each other's memory",
        f"bound: a step when nothing is averaged, and {ADDED} vectors through memory",
    ]
    report.goals = [Goal("by memory >= 0.9 of the bound, in both sizes", shares, at_least=0.9)]
    return report


def measure(comm: "MPI.Comm", directory: Path, size: int, width: int, steps: int, rounds: int) -> dict[str, Any]:
    """Runs all ways in turns. Returns on learners: way -> seconds per step, one value for each round."""
    torch.set_num_threads(1)
    ranks = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    figures: dict[str, list[float]] = {}
    for taken in in_turns(rounds, figures):
        for way in ("averaged", "messages", "alone"):
            rest(comm)
            if comm.rank < STATISTICS:
                continue
            with train(_job(way, size, width, steps), directory / "run.h5", ranks) as results:
                taken[way] = learner_step_s(results, max(comm.rank - LEARNER, 0))
                model = results.weights_of().size
        rest(comm)
        if comm.rank >= LEARNER:
            taken["bound"] = taken["alone"] + ADDED / ADD * _add_s(model)
    rest(comm)
    return figures


def _job(way: str, size: int, width: int, steps: int) -> "Job":
    job = alexnet_job("hardsync", LEARNERS, size, steps, width=width)
    if way == "alone":
        return unconnected(job, steps)
    return job.with_(
        protocol={"name": "sma"},
        averaging={"period": 1},
        topology={"name": "replicas"},
        cluster={"node_memory": way != "messages"},
    )


def _add_s(size: int) -> float:
    """Returns the seconds to add one vector to another in memory."""
    a, b = torch.ones(size), torch.ones(size)
    a.add_(b)
    began, turns = time.perf_counter(), max(3, 100_000_000 // size)
    for _ in range(turns):
        a.add_(b, alpha=1e-9)
    return (time.perf_counter() - began) / turns
