"""Push and pull of a large model through roles and driver, against MPI ping-pong between the same ranks."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, on_ranks
from rudra.bench.stubs import StubLearner, StubServer, StubStatistics, drive
from rudra.findings import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.mpi.session import rest

if TYPE_CHECKING:
    from mpi4py import MPI

FLOATS = 72_221_944  # alexnet's parameters
TAG = 7


def run(*, quick: bool) -> Report:
    """Measures on a server, a statistics server and one learner, async."""
    floats = FLOATS // 64 if quick else FLOATS
    server, statistics, _ = on_ranks(measure, floats=floats, rounds=1 if quick else 9, steps=8)
    gigabytes = floats * 4 / 1e9
    raw, copy = ([count * gigabytes / s for s in server[name]] for name, count in (("raw", 2), ("copy", 1)))
    accounts = statistics["accounts"]
    push = [a["pushed"] * gigabytes / a["push_s"] for a in accounts]
    pull = [a["pulls"] * gigabytes / a["pull_s"] for a in accounts]
    both = [(a["pushed"] + a["pulls"]) * gigabytes / (a["push_s"] + a["wait_s"] + a["pull_s"]) for a in accounts]
    against = ratios(both, raw)
    report = Report([f"{floats * 4 / 1e6:.0f} MB each way", "GB/s", "/ raw"])
    report.rows = [
        ("Rudra: push", spread(push), ratios(push, raw)),
        ("Rudra: pull", spread(pull), ratios(pull, raw)),
        ("Rudra: push, wait for the answer, pull", spread(both), against),
        ("raw: Send and Recv in turns", spread(raw), 1.0),
        ("bound: memcpy on one core", spread(copy), ratios(copy, raw)),
    ]
    report.notes = ["gradients and updates are stand-ins that take no time"]
    report.goals = [Goal("Rudra / raw >= 0.9", [against.median], at_least=0.9)]
    return report


def measure(comm: "MPI.Comm", directory: Path, floats: int, rounds: int, steps: int) -> dict[str, Any]:
    """Takes turns; `raw` and `copy` in seconds, and the learner's account of each run through the roles."""
    job = Job(
        data={"classes": 2},
        training={"epochs": 1, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "async"},
        cluster={"learners": 1, "threads_per_rank": 1},
    )
    plan = job.plan()
    executor = {SERVER: StubServer, STATISTICS: StubStatistics, LEARNER: StubLearner}[comm.rank](floats)
    there, back = np.zeros(floats, np.float32), np.ones(floats, np.float32)
    figures: dict[str, Any] = {"raw": [], "copy": [], "accounts": []}
    for turn in range(rounds + 1):
        account = drive(comm, job, plan, executor, steps)
        rest(comm)
        raw_s = _ping_pong(comm, there, back, steps)
        rest(comm)
        began = time.perf_counter()
        if comm.rank == SERVER:
            np.copyto(there, back)
        copy_s = time.perf_counter() - began
        rest(comm)
        if turn:  # the first one warms up
            for name, value in (("raw", raw_s), ("copy", copy_s), ("accounts", account[0] if account else {})):
                figures[name].append(value)
    return figures


def _ping_pong(comm: "MPI.Comm", there: Any, back: Any, count: int) -> float:
    """Seconds for both ways."""
    began = time.perf_counter()
    for _ in range(count):
        if comm.rank == LEARNER:
            comm.Send(there, SERVER, TAG)
            comm.Recv(back, SERVER, TAG)
        elif comm.rank == SERVER:
            comm.Recv(there, LEARNER, TAG)
            comm.Send(back, LEARNER, TAG)
    return (time.perf_counter() - began) / count
