"""How many gradients of 1.7 MB a server takes in a second, from several senders, and whether it treats them alike.

Async, through roles and driver, with gradients that are there at once: each push is answered with new weights, so as
much goes out as comes in. Beside it the same without the update, and the bare MPI calls that move as much.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, on_ranks
from rudra.bench.stubs import StubLearner, StubServer, StubStatistics, UpdatingServer, drive
from rudra.findings import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.machine import cores
from rudra.mpi.session import rest

if TYPE_CHECKING:
    from mpi4py import MPI

FLOATS = 431_080  # lenet's parameters
SENDERS = (1, 2, 4)
TAG = 7


def run(*, quick: bool) -> Report:
    """Measures one, two and four learners."""
    pushes, rounds = (100, 1) if quick else (4000, 7)
    report = Report(
        [
            f"{FLOATS * 4 / 1e6:.1f} MB",
            "pushes/s",
            "without update",
            "bare MPI",
            "/ without",
            "/ bare",
            "least / mean",
            "most / mean",
        ]
    )
    fair = []
    for senders in SENDERS[:1] if quick else SENDERS:
        ranks = on_ranks(measure, senders, senders=senders, pushes=pushes, rounds=rounds)
        found, bare = ranks[STATISTICS], ranks[SERVER]["bare"]
        rates = {name: [r["rate"] for r in found[name]] for name in ("update", "without")}
        least = spread(min(r["pushed"]) / np.mean(r["pushed"]) for r in found["update"])
        most = spread(max(r["pushed"]) / np.mean(r["pushed"]) for r in found["update"])
        fair += [abs(1 - least.median), abs(most.median - 1)]
        against = (ratios(rates["update"], rates["without"]), ratios(rates["update"], bare))
        shown = (*(spread(rates[name]) for name in ("update", "without")), spread(bare))
        report.rows.append((f"{senders} sender{'s' * (senders > 1)}", *shown, *against, least, most))
    report.notes = [
        "bare MPI: each sender sends as much and receives as much, and nothing is added, updated or recorded",
        "least, most / mean: gradients of the sender with the fewest, and the most, against the mean",
    ]
    report.goals = [Goal("each sender within 5 % of the mean", fair, at_most=0.05)]
    return report


def measure(comm: "MPI.Comm", directory: Path, senders: int, pushes: int, rounds: int) -> dict[str, Any]:
    """Takes turns; on the statistics server's rank what the roles did, on the server's the bare rates."""
    job = Job(
        data={"classes": 2},
        training={"epochs": 1, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "async"},
        cluster={"learners": senders, "threads_per_rank": 1},
        results={"minibatches": False},
    )
    plan = job.plan()
    kinds = {
        name: {SERVER: server, STATISTICS: StubStatistics}.get(comm.rank, StubLearner)(FLOATS)
        for name, server in (("update", UpdatingServer), ("without", StubServer))
    }
    buffers = np.zeros(FLOATS, np.float32), np.ones(FLOATS, np.float32)
    figures: dict[str, Any] = {"update": [], "without": [], "bare": []}
    for turn in range(rounds + 1):
        for name, executor in kinds.items():
            accounts = drive(comm, job, plan, executor, pushes, spins=senders < cores())
            if turn and accounts:
                pushed = [account["pushed"] for account in accounts]
                figures[name].append({"rate": sum(pushed) / accounts[0]["time_s"], "pushed": pushed})
        rest(comm)
        rate = _bare(comm, senders, pushes, *buffers)
        if turn and comm.rank == SERVER:
            figures["bare"].append(rate)
    return figures


def _bare(comm: "MPI.Comm", senders: int, pushes: int, there: Any, back: Any) -> float:
    """Round trips per second, on the server."""
    import time

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
