"""Pushes/s that several servers take that own a part of the weights each, against one server.

In virtual time behind links of 10 Gbit/s, with a model and learners that keep a server's link busy. And on real ranks
here, where all servers share the memory and the cores of one machine, so that several can only be slower; through roles
and driver, with gradients that are there at once, as in the benchmark `requests`.
"""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.pushes import UpdatingServer
from rudra.bench.ranks import in_turns, on_ranks
from rudra.bench.stubs import StubLearner, StubStatistics, drive, stub_job
from rudra.compute.executor import Executor
from rudra.compute.vectors import Memory
from rudra.findings import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.machine import cores
from rudra.mpi.agreement import rest
from rudra.simulation.predict import Outline, predict

if TYPE_CHECKING:
    from mpi4py import MPI

LINK = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 2e-5, "message_s": 5e-6}
"""10 Gbit/s, and a server that takes 5 µs for a message."""

MODEL = 72_000_000
UPDATE_S = MODEL * 4 * 5 / 20e9  # SGD with momentum reads three vectors and writes two, at 20 GB/s of memory
VIRTUAL = (1, 2, 4, 8)
LEARNERS, COMPUTE_S = 16, 0.1

FLOATS = 7_200_000
HERE = (1, 2, 3)
SENDERS = 3


def run(*, quick: bool) -> Report:
    """Simulates, then measures."""
    report = Report(["", "servers", "pushes/s", "/ one server", "bound, pushes/s"])
    rates = {}
    for shards in VIRTUAL:
        rates[shards], bound = simulated(shards, updates=60 if quick else 400)
        about = f"virtual time, 10 Gbit/s, {MODEL * 4 / 1e6:.0f} MB, λ = {LEARNERS}"
        report.rows.append((about, shards, f"{rates[shards]:.1f}", f"{rates[shards] / rates[1]:.2f}", f"{bound:.1f}"))
    pushes, rounds = (30, 1) if quick else (300, 7)
    figures = on_ranks(measure, SENDERS + HERE[-1] - 1, senders=SENDERS, pushes=pushes, rounds=rounds)
    found = {shards: [rate for rank in figures for rate in rank.get(str(shards), [])] for shards in HERE}
    for shards in HERE:
        about = f"real ranks, {FLOATS * 4 / 1e6:.0f} MB, {SENDERS} learners"
        report.rows.append((about, shards, spread(found[shards]), ratios(found[shards], found[1]), "-"))
    report.notes = [
        "bound: what the servers' links let in, if nothing else took time; below it are updates, and learners' links",
        "async: every push makes an update, and is answered with new weights",
    ]
    report.goals = [
        Goal("4 servers behind 10 Gbit/s", [rates[4] / rates[1]], at_least=3.0),
        Goal("2 servers on real ranks here", [ratios(found[2], found[1]).median], at_least=0.9),
    ]
    return report


def simulated(shards: int, updates: int) -> tuple[float, float]:
    """Pushes/s of learners that compute faster than one server can take their gradients, and the links' bound."""
    job = Job(
        training={"minibatch_size": 1},
        protocol={"name": "async"},
        topology={"name": "sharded", "options": {"shards": shards}},
        cluster={"learners": LEARNERS},
        simulation={"compute_s": COMPUTE_S, "update_s": UPDATE_S, **LINK},
    )
    found = predict(job, updates=updates, known=Outline(updates, MODEL * 4))
    return found.samples_per_s, shards * LINK["bandwidth_bytes_per_s"] / (MODEL * 4)


def measure(comm: "MPI.Comm", directory: Path, senders: int, pushes: int, rounds: int) -> dict[str, Any]:
    """Takes turns; on the statistics servers' ranks pushes/s, by the number of servers."""
    torch.set_num_threads(1)  # each rank has a core at most
    figures: dict[str, Any] = {}
    for taken in in_turns(rounds, figures):
        for shards in HERE:
            sharded = {"name": "sharded", "options": {"shards": shards}}
            job = stub_job(senders, topology=sharded, results={"minibatches": False})
            if (rate := _rate(comm, job, pushes)) is not None:
                taken[str(shards)] = rate
            rest(comm)
    return figures


def _rate(comm: "MPI.Comm", job: Job, pushes: int) -> float | None:
    """Pushes/s of a run, on the rank of its statistics server; None elsewhere."""
    from mpi4py import MPI

    plan = job.plan()
    mine = comm.Split(0 if comm.rank < plan.ranks else MPI.UNDEFINED, comm.rank)
    if mine == MPI.COMM_NULL:
        return None
    ends = [FLOATS * i // len(plan.owners) // 16 * 16 for i in range(len(plan.owners))] + [FLOATS]
    parts = {owner: slice(*ends) for owner, ends in zip(plan.owners, pairwise(ends), strict=True)}
    (role,) = plan.on_rank(mine.rank)

    def made(memory: Memory | None) -> Executor:
        if role in parts:
            return UpdatingServer(FLOATS, memory, parts[role] if plan.parted else None)
        executor = (StubStatistics if role == plan.statistics else StubLearner)(FLOATS, memory)
        executor.parts = parts if plan.parted else {}
        return executor

    accounts = drive(mine, job, plan, made, pushes, spins=plan.ranks <= cores())
    mine.Free()
    return sum(account["pushed"] for account in accounts) / accounts[0]["time_s"] if accounts else None
