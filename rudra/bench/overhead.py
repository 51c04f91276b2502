"""Rudra's own time per step: the rest after subtracting the times of torch, transfers and update."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.ranks import (
    LEARNER,
    SERVER,
    PlainLoop,
    exchange,
    in_turns,
    lenet_job,
    on_ranks,
    step_s,
    train,
    write_images,
)
from rudra.benchmark_report import Goal, Report, spread
from rudra.compute import networks
from rudra.compute.flat import FlatModel
from rudra.compute.optim import UpdateRule
from rudra.job.job import Job
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

STEPS = {4: 120, 16: 60, 64: 24}
PARTS = ("torch", "transfer", "update")
GOAL_AT = 16


def run(*, quick: bool) -> Report:
    """Measures a server, a statistics server and one learner under async, with one torch thread each."""
    steps = {GOAL_AT: 8} if quick else STEPS
    _, _, learner = on_ranks(measure, steps=steps, rounds=0 if quick else 15)
    taken = {size: {name: np.array(learner[str(size)][name]) for name in learner[str(size)]} for size in steps}
    own = {size: t["step"] - sum(t[part] for part in PARTS) for size, t in taken.items()}
    report = Report(["milliseconds per step", *(f"μ = {size}" for size in steps)])

    def row(name: str, key: str) -> None:
        report.rows.append((name, *(spread(taken[size][key] * 1e3) for size in steps)))

    row("Rudra's step", "step")
    row("- forward and backward (plain torch)", "torch")
    row("- transfers (raw ping-pong)", "transfer")
    row("- update (optimiser only)", "update")
    report.rows.append(("= Rudra's own", *(spread(own[size] * 1e3) for size in steps)))
    shares = {size: spread(own[size] / taken[size]["step"] * 100) for size in steps}
    report.rows.append(("  percent of the step", *(shares[size] for size in steps)))
    for name in ("compute", "push", "wait", "pull"):
        row(f"learner: {name}", name)
    row("the same step by hand (blocking MPI calls)", "bare")
    row("  of it push, update and pull (cold caches)", "exchange")
    row("plain torch loop, with update", "plain")
    behind = {size: spread((t["step"] - t["torch"] - t["exchange"]) / t["step"] * 100) for size, t in taken.items()}
    report.rows.append(("own, percent, relative to that exchange", *(behind[size] for size in steps)))
    against = {size: spread(t["step"] / t["bare"]) for size, t in taken.items()}
    report.rows.append(("Rudra's step / the step by hand", *(against[size] for size in steps)))
    row("Rudra's step by messages", "messages")
    faster = {size: spread(t["messages"] / t["step"]) for size, t in taken.items()}
    report.rows.append(("Rudra's step by messages / by memory", *(faster[size] for size in steps)))
    report.notes = [
        "raw ping-pong and update run with warm caches; after a gradient the same bytes cost several times as much,",
        "so the whole step is also done by hand, and Rudra's own time is also given relative to that exchange;",
        "Rudra's ranks read each other's memory, but the step by hand uses messages: its own time may be negative",
    ]
    report.goals = [
        Goal(f"own time <= 3 % of the step at μ = {GOAL_AT}", [shares[GOAL_AT].median], at_most=3.0),
        Goal(f"the same against the exchange by hand, μ = {GOAL_AT}", [behind[GOAL_AT].median], at_most=3.0),
    ]
    return report


def measure(comm: "MPI.Comm", directory: Path, steps: dict[int, int], rounds: int) -> dict[str, Any]:
    """Measures all parts in turns, and returns on the learner: size -> name -> seconds, one value for each round."""
    if comm.rank == SERVER:
        write_images(directory)
    rest(comm)
    figures: dict[str, Any] = {}
    for size, count in steps.items():
        job = lenet_job(directory, "async", 1, size, count)
        step = _Step(comm, job)
        for taken in in_turns(rounds, figures.setdefault(str(size), {})):
            taken |= _turn(comm, directory / "run.h5", job, step, count)
    return figures


def _turn(comm: "MPI.Comm", path: Path, job: Job, step: "_Step", steps: int) -> dict[str, float]:
    with train(job, path) as results:
        taken = {"step": step_s(results.minibatches["time_s"])}
        account = results.learners[0]
    taken |= {name: float(account[f"{name}_s"]) / steps for name in ("compute", "push", "wait", "pull")}
    with train(job.with_(cluster={"node_memory": False}), path) as results:
        taken["messages"] = step_s(results.minibatches["time_s"])
    rest(comm)
    if comm.rank == LEARNER:
        step.plain.run(2)
        taken["plain"], taken["torch"] = step.plain.run(steps)
    rest(comm)
    taken["transfer"] = step.transfers(50)
    rest(comm)
    update_s = step.updates(50) if comm.rank == SERVER else 0.0
    rest(comm)
    taken["update"] = comm.bcast(update_s, SERVER)
    taken["bare"], taken["exchange"] = step.by_hand(steps)
    rest(comm)
    return taken


class _Step:
    """The parts of a step without Rudra's roles and driver, between the ranks of the server and the learner."""

    def __init__(self, comm: "MPI.Comm", job: Job) -> None:
        self._comm = comm
        self._flat = FlatModel(networks.lenet((1, 28, 28), 10), gradients="direct")
        self._weights, self._gradient = (torch.full((self._flat.size,), 0.0) for _ in range(2))
        self._both = self._gradient.numpy(), self._weights.numpy()
        self._flat.read_into(self._weights)
        self._rule = UpdateRule(job.optimizer, self._weights)
        self._rule.prepare()
        size = job.training.minibatch_size
        self._batch = torch.randn(size, 1, 28, 28), torch.randint(10, (size,))
        self.plain = PlainLoop(size)

    def transfers(self, count: int) -> float:
        """Returns the seconds for sending a gradient and receiving weights."""
        exchange(self._comm, *self._both, 2)
        return exchange(self._comm, *self._both, count)[0]

    def updates(self, count: int) -> float:
        self._rule.step(self._gradient, 1e-9)
        began = time.perf_counter()
        for _ in range(count):
            self._rule.step(self._gradient, 1e-9)
        return (time.perf_counter() - began) / count

    def by_hand(self, steps: int) -> tuple[float, float]:
        """Returns seconds per step with blocking calls: of the whole step, and of push, update and pull only."""

        def compute() -> None:
            self._flat.bind(self._weights)
            self._flat.gradient(*self._batch, self._gradient, 0)

        update = partial(self._rule.step, self._gradient, 1e-9)
        return exchange(self._comm, *self._both, steps, before=compute, between=update)
