"""The server's update of a large model, against the time of its memory traffic."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.shared import seconds
from rudra.bench.ranks import compared
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.owners import ServerExecutor
from rudra.core.actions import Accumulate, Update
from rudra.data.load import DataInfo
from rudra.job.job import Job
from rudra.machine import cores

INFO = DataInfo("bench", 1, 1, (3, 224, 224), 1000)
ADD = 3  # vectors that `a += b` moves: it reads two and writes one of them
SGD, ADAM = 5, 7  # reads gradient, state and weights, and writes state and weights
FUSED = 6  # as SGD, but with two gradients
SMALL = DataInfo("bench", 1, 1, (1, 28, 28), 10)  # as for LeNet, 1.7 MB


def run(*, quick: bool) -> Report:
    """Measures in this process, with one thread and with all."""
    options = {"width": 64} if quick else {}
    flat = FlatModel(models.build(Job(model={"name": "alexnet", "options": options}).model, INFO, 0))
    threads = torch.get_num_threads()
    report = Report(["update", "threads", "ms", "GB/s", "bound, GB/s", "of the bound"])
    medians = []
    try:
        for count in sorted({1, cores()}):
            torch.set_num_threads(count)
            for name, momentum, vectors in (("sgd", 0.9, SGD), ("adam", 0.0, ADAM)):
                job = Job(optimizer={"name": name, "momentum": momentum})
                server = ServerExecutor(flat.layout, flat.size, flat.parameter_count, 1)
                plan = job.resolved(learners=1).plan()
                server.own(job, plan, flat)
                rows = _rows(server, name, vectors)
                for what, function, moved in rows:
                    medians.append(_measure(report, what, count, function, moved, flat.size, 2 if quick else 9))
                if name == "sgd":
                    _compare(report, server, count, 2 if quick else 9)
            job = Job(model={"name": "lenet"}, optimizer={"momentum": 0.9})
            lenet = FlatModel(models.build(job.model, SMALL, 0))
            server = ServerExecutor(lenet.layout, lenet.size, lenet.parameter_count, 1)
            server.own(job, plan, lenet)
            server.prepare()
            _compare(report, server, count, 20 if quick else 500)
    finally:
        torch.set_num_threads(threads)
    report.notes = [
        f"model: {flat.size * 4 / 1e6:.0f} MB; bound: the rate of a += b on two such vectors,",
        "for what must move: gradient, optimiser's state and weights in, the last two out; of an average of two and",
        "its step, fused or not: both gradients in, and not their sum",
    ]
    report.goals = [Goal("of the bound >= 0.9, in every row of one thing alone", medians, at_least=0.9)]
    return report


def _rows(executor: ServerExecutor, name: str, vectors: int) -> list[tuple[str, Callable[[], object], int]]:
    """Returns the measurements: name, function, and number of vectors to move."""
    executor.buffer("gradient 0").vector.fill_(1e-3)
    executor.buffer("gradient 1").vector.fill_(1e-3)

    update = Update("gradient 0", "weights", 1e-6, 1)
    rows: list[tuple[str, Callable[[], object], int]] = [(f"{name} step", lambda: executor.update(update), vectors)]
    if name == "sgd":
        average = Accumulate("gradient 0", "gradient 1", 0.5, 1.0)
        rows.append(("average a gradient in", lambda: executor.accumulate(average), ADD))
    return rows


def _compare(report: Report, server: ServerExecutor, threads: int, rounds: int) -> None:
    """Adds rows: an average of two gradients and an update, one after the other and slice by slice."""
    average, update = Accumulate("gradient 0", "gradient 1", 0.5, 1.0), Update("gradient 0", "weights", 1e-6, 1)

    def both() -> None:
        server.accumulate(average)
        server.update(update)

    for server.lazy_average, how in ((False, "one after the other"), (True, "fused")):
        what = f"average of two and sgd step, {server.size * 4 / 1e6:.3g} MB, {how}"
        _measure(report, what, threads, both, FUSED, server.size, rounds)
    server.lazy_average = False


def _measure(
    report: Report, name: str, threads: int, ours: Callable[[], object], vectors: int, size: int, rounds: int
) -> float:
    """Adds one row, and returns the median of its ratio to the bound."""
    a, b = torch.ones(size), torch.ones(size)
    moved = vectors * size * 4
    ways = {"ours": partial(seconds, ours), "bound": partial(seconds, lambda: a.add_(b, alpha=1e-9))}
    times, sums = compared(ways, rounds).values()  # the first turn, which does not count, creates the optimiser's state
    bounds = [bound * vectors / ADD for bound in sums]
    report.rows.append(
        (
            name,
            str(threads),
            spread(t * 1e3 for t in times),
            spread(moved / t / 1e9 for t in times),
            spread(moved / t / 1e9 for t in bounds),
            ratio := ratios(bounds, times),
        )
    )
    return ratio.median
