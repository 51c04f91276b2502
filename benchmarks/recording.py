"""Cost of recording a run for a replay: rows of gradients and updates, digests and hashes."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.ranks import SERVER, STATISTICS, in_turns, lenet_job, on_ranks, step_s, train, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute.executor import Executor
from rudra.compute.learners import StatisticsExecutor
from rudra.compute.optim import UpdateRule
from rudra.compute.vectors import Buffer
from rudra.core.messages import MessageKind
from rudra.job.tables import OptimizerTable
from rudra.mpi.quiet import rest
from rudra.probe import Method, wrapped
from rudra.results.recorder import Recorder
from rudra.roles.outbox import Outbox

if TYPE_CHECKING:
    from mpi4py import MPI

STEPS = {4: 240, 16: 120}
LEARNERS = 2
LARGE = 72_000_000
REPLAYED = {MessageKind.GRADIENTS, MessageKind.UPDATES}
PIECES = (
    (Buffer, "digest"),
    (StatisticsExecutor, "sha256"),
    (Recorder, "record"),
    (Outbox, "extend"),
    (Outbox, "flush"),
)
"""Methods that record."""


def run(*, quick: bool) -> Report:
    """Trains with and without records in turns, and times every part of the recording."""
    steps = {4: 8} if quick else STEPS
    ranks = on_ranks(measure, LEARNERS, steps=steps, rounds=1 if quick else 9)
    taken = {size: {name: np.array(ranks[SERVER][str(size)][name]) for name in ("on", "off", "run")} for size in steps}
    spent = {size: {rank: np.array(ranks[rank][str(size)]["spent"]) for rank in (SERVER, STATISTICS)} for size in steps}
    report = Report([f"LeNet, async, {LEARNERS} learners", *(f"μ = {size}" for size in steps)])

    def row(name: str, figures: Callable[[int], Any]) -> None:
        report.rows.append((name, *(figures(size) for size in steps)))

    shares = {size: spread(spent[size][SERVER] / taken[size]["run"] * 100) for size in steps}
    row("step with records, ms", lambda size: spread(taken[size]["on"] * 1e3))
    row("step without, ms", lambda size: spread(taken[size]["off"] * 1e3))
    row("with / without, in turns", lambda size: ratios(list(taken[size]["on"]), list(taken[size]["off"])))
    row(
        "server: rows and digests, µs per update",
        lambda size: spread(spent[size][SERVER] / _updates(steps, size) * 1e6),
    )
    row("  percent of the run", lambda size: shares[size])
    row(
        "statistics server: rows and hashes, percent",
        lambda size: spread(spent[size][STATISTICS] / taken[size]["run"] * 100),
    )
    floats = LARGE // 64 if quick else LARGE
    digest_s, update_s = (np.array(times) for times in _large(floats))
    share = spread(digest_s / update_s * 100)
    report.notes = [
        f"model of {floats * 4 / 1e6:.0f} MB: a digest takes {spread(digest_s * 1e6)} µs, {share} percent of an update",
        "the statistics server works beside the training; off: no digests, no hashes, no rows of gradients and updates",
    ]
    report.goals = [Goal("rows and digests <= 1 % of the run", [shares[size].median for size in steps], at_most=1.0)]
    return report


def _updates(steps: dict[int, int], size: int) -> int:
    return steps[size] * LEARNERS


def measure(comm: "MPI.Comm", directory: Path, steps: dict[int, int], rounds: int) -> dict[str, Any]:
    """Runs cases in turns. Returns on every rank: size -> seconds per step on and off, of the run, and of recording."""
    if comm.rank == SERVER:
        write_images(directory)
    rest(comm)
    figures: dict[str, Any] = {}
    for size, count in steps.items():
        job = lenet_job(directory, "async", LEARNERS, size, count)
        for taken in in_turns(rounds, figures.setdefault(str(size), {})):
            for name in ("on", "off"):
                spent = [0.0]
                with _timed(spent) if name == "on" else _unrecorded(), train(job, directory / "run.h5") as results:
                    taken[name] = LEARNERS * step_s(np.sort(results.minibatches["time_s"]))  # of all learners
                    if name == "on":
                        taken |= {"run": float(results.totals["time_s"][0]), "spent": spent[0]}
                rest(comm)
    return figures


@contextmanager
def _timed(spent: list[float]) -> Iterator[None]:
    """Adds up the time that this rank spends on recording."""

    def timed(function: Method) -> Method:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    with ExitStack() as until:
        for owner, name in PIECES:
            until.enter_context(wrapped(owner, name, timed))
        yield


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Leaves out records that only a replay needs."""

    def others(extend: Method) -> Method:
        def call(outbox: Outbox, kind: MessageKind, rows: Any) -> None:
            if kind not in REPLAYED:
                extend(outbox, kind, rows)

        return call

    with (
        wrapped(Buffer, "digest", lambda _: lambda weights, timestamp: 0),
        wrapped(Executor, "sha256", lambda _: lambda executor, name: "0" * 64),
        wrapped(Outbox, "extend", others),
    ):
        yield


def _large(size: int) -> tuple[list[float], list[float]]:
    """Returns seconds of digests and of the updates between them, for weights larger than any cache."""
    weights, gradient = Buffer(size, 0), torch.full((size,), 1e-3)
    rule = UpdateRule(OptimizerTable(momentum=0.9), weights.vector)
    rule.prepare()
    digests, updates = [], []
    for timestamp in range(8):
        began = time.perf_counter()
        rule.step(gradient, 1e-6)
        updated = time.perf_counter()
        weights.digest(timestamp)
        digests.append(time.perf_counter() - updated)
        updates.append(updated - began)
    return digests[1:], updates[1:]
