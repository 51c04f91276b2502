"""Gradients that servers apply in a second, from several senders, and fairness of a server to its senders.

The protocol is async, with roles and driver, but gradients need no computation. Each push makes an update
and is answered with new weights. One server takes gradients of 1.7 MB in turns through shared memory and through
messages. For comparison, bare MPI calls move the same data, and one process makes the same memory accesses. Several
servers own a part of 29 MB each. Here they share the memory and cores of one machine, so they can only be slower.
"""

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, TAG, in_turns, on_ranks
from rudra.bench.stubs import Maker, StubLearner, StubStatistics, drive, kept, stub_job
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute.executor import Executor
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import ServerExecutor
from rudra.compute.vectors import Memory
from rudra.core.digest import sha256
from rudra.core.layout import Part
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from rudra.machine import cores
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

FLOATS = 431_080  # parameters of lenet
SENDERS = (1, 2, 4)
WAYS, BESIDE = ("memory", "messages"), ("bare", "traffic")
SHARED_FLOATS, SHARED_SENDERS, SERVERS = 7_200_000, 3, (1, 2, 3)
TABLE = OptimizerTable(learning_rate=1e-6, momentum=0.9)


class UpdatingServer(ServerExecutor):
    """Server that averages and updates as in a run: SGD with momentum, on all weights or a part of them."""

    def __init__(self, floats: int, memory: Memory | None = None, part: slice | None = None) -> None:
        length = floats if part is None else part.stop - part.start
        Executor.__init__(self, (), length, length, 1, memory=memory)
        self._owned_part, self._of = None if part is None else Part((part,)), floats
        self._first_sha256 = sha256(np.zeros(floats, np.float32))
        self._rule = UpdateRule(TABLE, self.buffer("weights").vector)
        self.prepare()


def run(*, quick: bool) -> Report:
    """Measures one, two and four learners with one server, and three with one, two and three servers."""
    pushes, rounds = (20, 0) if quick else (4000, 7)
    heads = ("by memory", "by messages", "bare MPI", "memory traffic", "memory / messages", "/ memory traffic")
    report = Report([f"{FLOATS * 4 / 1e6:.1f} MB, pushes/s", *heads, "least / mean", "most / mean", "/ one server"])
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
        report.rows.append((f"{senders} sender{'s' * (senders > 1)}", *shown, *against, least, most, ""))
    pushes, rounds = (9, 0) if quick else (300, 7)
    given = {"senders": SHARED_SENDERS, "pushes": pushes, "rounds": rounds}
    figures = on_ranks(measure_servers, SHARED_SENDERS + SERVERS[-1] - 1, **given)
    shared = {count: [rate for rank in figures for rate in rank.get(str(count), [])] for count in SERVERS}
    for count in SERVERS:
        name = f"{SHARED_FLOATS * 4 / 1e6:.0f} MB, {SHARED_SENDERS} senders, {count} servers"
        report.rows.append((name, spread(shared[count]), *[""] * 7, ratios(shared[count], shared[1])))
    report.notes = [
        "bare MPI: each sender sends as much and receives as much, and nothing is added, updated or recorded",
        "memory traffic, the bound: one process alone updates the weights by each gradient, and copies them",
        "least, most / mean: gradients of the sender with the fewest, and the most, against the mean; by memory",
    ]
    report.goals = [
        Goal("memory / messages >= 2.0", faster, at_least=2.0),
        Goal("each sender within 5 % of the mean", fair, at_most=0.05),
        Goal("two servers / one >= 0.9", [ratios(shared[2], shared[1]).median], at_least=0.9),
    ]
    return report


def measure(comm: "MPI.Comm", directory: Path, senders: int, pushes: int, rounds: int) -> dict[str, Any]:
    """Measures in turns. Returns figures of roles on the statistics server's rank, of comparisons on the server's."""
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
    """Returns updates per second. Senders take turns, and a copy for the sender follows each update."""
    weights = torch.full((FLOATS,), 0.0)
    gradients, copies = (torch.full((senders, FLOATS), 0.0) for _ in range(2))
    rule = UpdateRule(TABLE, weights)
    rule.prepare()
    began = time.perf_counter()
    for push in range(pushes):
        rule.step(gradients[push % senders], TABLE.learning_rate)
        copies[push % senders].copy_(weights)
    return pushes / (time.perf_counter() - began)


def _bare(comm: "MPI.Comm", senders: int, pushes: int, there: Any, back: Any) -> float:
    """Returns round trips per second, on the server."""
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


def measure_servers(comm: "MPI.Comm", directory: Path, senders: int, pushes: int, rounds: int) -> dict[str, Any]:
    """Measures in turns. Returns pushes/s for each number of servers, on the statistics servers' ranks."""
    torch.set_num_threads(1)  # each rank has at most one core
    figures: dict[str, Any] = {}
    for taken in in_turns(rounds, figures):
        for count in SERVERS:
            sharded = {"name": "sharded", "options": {"shards": count}}
            job = stub_job(senders, topology=sharded, results={"minibatches": False})
            if (rate := _rate(comm, job, pushes)) is not None:
                taken[str(count)] = rate
            rest(comm)
    return figures


def _rate(comm: "MPI.Comm", job: Job, pushes: int) -> float | None:
    """Returns the pushes/s of a run on the rank of its statistics server, and None elsewhere."""
    from mpi4py import MPI

    plan = job.plan()
    mine = comm.Split(0 if comm.rank < plan.ranks else MPI.UNDEFINED, comm.rank)
    if mine == MPI.COMM_NULL:
        return None
    ends = [SHARED_FLOATS * i // len(plan.owners) // 16 * 16 for i in range(len(plan.owners))] + [SHARED_FLOATS]
    parts = {owner: slice(*ends) for owner, ends in zip(plan.owners, pairwise(ends), strict=True)}
    (role,) = plan.on_rank(mine.rank)

    def made(memory: Memory | None) -> Executor:
        if role in parts:
            return UpdatingServer(SHARED_FLOATS, memory, parts[role] if plan.parted else None)
        executor = (StubStatistics if role == plan.statistics else StubLearner)(SHARED_FLOATS, memory)
        executor.slices_by_owner = parts if plan.parted else {}
        return executor

    accounts = drive(mine, job, plan, made, pushes, spins=plan.ranks <= cores())
    mine.Free()
    return sum(account["pushed"] for account in accounts) / accounts[0]["time_s"] if accounts else None
