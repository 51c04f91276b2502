"""Push, average and pull of a large model's gradient and weights, against MPI ping-pong with the same average.

Rudra's roles and driver run with shared node memory and with messages. These two and plain MPI take turns on the same
ranks.
"""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, exchange, in_turns, on_ranks
from rudra.bench.stubs import AveragingServer, Maker, StubLearner, StubStatistics, drive, kept, stub_job
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

FLOATS = 72_221_944  # alexnet's parameters
WAYS = ("memory", "messages")


def run(*, quick: bool) -> Report:
    """Measures a server, a statistics server and one learner under async."""
    floats = FLOATS // 64 if quick else FLOATS
    server, statistics, _ = on_ranks(measure, floats=floats, rounds=1 if quick else 9, steps=8)
    gigabytes = floats * 4 / 1e9
    raw, copy = ([count * gigabytes / s for s in server[name]] for name, count in (("raw", 2), ("copy", 1)))
    rates: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        accounts = statistics[way]
        rates[way] = {
            "push": [a["pushed"] * gigabytes / (a["push_s"] + a["wait_s"]) for a in accounts],
            "pull": [a["pulls"] * gigabytes / a["pull_s"] for a in accounts],
            "both": [
                (a["pushed"] + a["pulls"]) * gigabytes / (a["push_s"] + a["wait_s"] + a["pull_s"]) for a in accounts
            ],
        }
    report = Report([f"{floats * 4 / 1e6:.0f} MB each way, GB/s", *WAYS, "memory / messages", "memory / raw"])
    for name, text in (("push", "push, averaged in"), ("pull", "pull, copied"), ("both", "push and pull")):
        memory, messages = (rates[way][name] for way in WAYS)
        report.rows.append(
            (f"Rudra: {text}", spread(memory), spread(messages), ratios(memory, messages), ratios(memory, raw))
        )
    report.rows += [
        ("raw: Send and Recv in turns, and the average", "-", spread(raw), "-", 1.0),
        ("bound: memcpy on one core", spread(copy), "-", "-", ratios(copy, raw)),
    ]
    report.notes = [
        "gradients take no time; the server averages each into another vector, and weights are new without an update",
        "push: until the server answers; if ranks read each other's memory, a push only averages",
    ]
    against = ratios(rates["memory"]["both"], raw)
    report.goals = [Goal("push and pull / raw >= 1.8", [against.median], at_least=1.8)]
    return report


def measure(comm: "MPI.Comm", directory: Path, floats: int, rounds: int, steps: int) -> dict[str, Any]:
    """Takes turns, and returns `raw` and `copy` in seconds, and for each way the learner's totals in each run."""
    torch.set_num_threads(1)
    job = stub_job(1)
    kind = {SERVER: AveragingServer, STATISTICS: StubStatistics, LEARNER: StubLearner}[comm.rank]
    makers: dict[str, Maker] = {"memory": partial(kind, floats), "messages": kept(kind(floats))}
    plan = job.plan()
    there, back, average = (np.full(floats, i, np.float32) for i in range(3))
    averages = partial(torch.from_numpy(average).lerp_, torch.from_numpy(there), 0.5)
    figures: dict[str, Any] = {}
    for taken in in_turns(rounds, figures):
        for way in WAYS:
            near = job.with_(cluster={"node_memory": way == "memory"})
            account = drive(comm, near, plan, makers[way], steps)
            taken[way] = account[0] if account else {}
            rest(comm)
        taken["raw"] = exchange(comm, there, back, steps, between=averages)[0]
        rest(comm)
        began = time.perf_counter()
        if comm.rank == SERVER:
            np.copyto(there, back)
        taken["copy"] = time.perf_counter() - began
        rest(comm)
    return figures
