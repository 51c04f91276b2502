"""How many gradients of 1.7 MB a server applies in a second, from several senders, and whether it treats them alike.

Async, through roles and driver, with gradients that are there at once: each push makes an update, and is answered with
new weights. Where ranks read each other's memory, and by messages, in turns; beside them bare MPI calls that move as
much, and what the same reads and writes of memory take one process.
"""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.pushes import MOMENTUM, RATE, UpdatingServer
from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, TAG, in_turns, on_ranks
from rudra.bench.stubs import Maker, StubLearner, StubStatistics, drive, kept, stub_job
from rudra.compute.optim import UpdateRule
from rudra.findings import Goal, Report, ratios, spread
from rudra.job.tables import OptimizerTable
from rudra.machine import cores
from rudra.mpi.agreement import rest

if TYPE_CHECKING:
    from mpi4py import MPI

FLOATS = 431_080  # lenet's parameters
SENDERS = (1, 2, 4)
WAYS, BESIDE = ("memory", "messages"), ("bare", "traffic")


def run(*, quick: bool) -> Report:
    """Measures one, two and four learners."""
    pushes, rounds = (100, 1) if quick else (4000, 7)
    heads = ("by memory", "by messages", "bare MPI", "memory traffic", "memory / messages", "/ memory traffic")
    report = Report([f"{FLOATS * 4 / 1e6:.1f} MB, pushes/s", *heads, "least / mean", "most / mean"])
    fair, faster = [], []
    for senders in SENDERS[:1] if quick else SENDERS:
        ranks = on_ranks(measure, senders, senders=senders, pushes=pushes, rounds=rounds)
        found, server = ranks[STATISTICS], ranks[SERVER]
        rates = {way: [r["rate"] for r in found[way]] for way in WAYS} | {way: server[way] for way in BESIDE}
        least = spread(min(r["pushed"]) / np.mean(r["pushed"]) for r in found["memory"])
        most = spread(max(r["pushed"]) / np.mean(r["pushed"]) for r in found["memory"])
        fair += [abs(1 - least.median), abs(most.median - 1)]
        against = [ratios(rates["memory"], rates[way]) for way in ("messages", "traffic")]
        faster.append(against[0].median)
        shown = [spread(rates[way]) for way in (*WAYS, *BESIDE)]
        report.rows.append((f"{senders} sender{'s' * (senders > 1)}", *shown, *against, least, most))
    report.notes = [
        "bare MPI: each sender sends as much and receives as much, and nothing is added, updated or recorded",
        "memory traffic, the bound: one process alone updates the weights by each gradient, and copies them",
        "least, most / mean: gradients of the sender with the fewest, and the most, against the mean; by memory",
    ]
    report.goals = [
        Goal("memory / messages >= 2.0", faster, at_least=2.0),
        Goal("each sender within 5 % of the mean", fair, at_most=0.05),
    ]
    return report


def measure(comm: "MPI.Comm", directory: Path, senders: int, pushes: int, rounds: int) -> dict[str, Any]:
    """Takes turns; on the statistics server's rank what the roles did, on the server's the rates of what is beside."""
    torch.set_num_threads(1)
    job = stub_job(senders, results={"minibatches": False})
    plan = job.plan()
    kind = {SERVER: UpdatingServer, STATISTICS: StubStatistics}.get(comm.rank, StubLearner)
    makers: dict[str, Maker] = {"memory": partial(kind, FLOATS), "messages": kept(kind(FLOATS))}
    buffers = np.zeros(FLOATS, np.float32), np.ones(FLOATS, np.float32)
    figures: dict[str, Any] = {}
    for taken in in_turns(rounds, figures):
        for way in WAYS:
            near = job.with_(cluster={"node_memory": way == "memory"})
            accounts = drive(comm, near, plan, makers[way], pushes, spins=senders < cores())
            if accounts:
                pushed = [account["pushed"] for account in accounts]
                taken[way] = {"rate": sum(pushed) / accounts[0]["time_s"], "pushed": pushed}
        rest(comm)
        bare = _bare(comm, senders, pushes, *buffers)
        if comm.rank == SERVER:
            taken |= {"bare": bare, "traffic": _traffic(senders, pushes)}
        rest(comm)
    return figures


def _traffic(senders: int, pushes: int) -> float:
    """Updates per second by gradients of that many senders in turn, each followed by a copy for its sender."""
    weights = torch.full((FLOATS,), 0.0)
    gradients, copies = (torch.full((senders, FLOATS), 0.0) for _ in range(2))
    rule = UpdateRule(OptimizerTable(learning_rate=RATE, momentum=MOMENTUM), weights)
    rule.prepare()
    began = time.perf_counter()
    for push in range(pushes):
        rule.step(gradients[push % senders], RATE)
        copies[push % senders].copy_(weights)
    return pushes / (time.perf_counter() - began)


def _bare(comm: "MPI.Comm", senders: int, pushes: int, there: Any, back: Any) -> float:
    """Round trips per second, on the server."""
    from mpi4py import MPI

    group = comm.Split(int(comm.rank != STATISTICS), comm.rank)
    each = pushes // senders
    began = time.perf_counter()
    if comm.rank == SERVER:
        status = MPI.Status()
        for _ in range(each * senders):
            group.Recv(there, MPI.ANY_SOURCE, TAG, status)
            group.Send(back, status.Get_source(), TAG)
    elif comm.rank >= LEARNER:
        for _ in range(each):
            group.Send(there, SERVER, TAG)
            group.Recv(back, SERVER, TAG)
    rate = each * senders / (time.perf_counter() - began)
    rest(comm)
    group.Free()
    return rate
