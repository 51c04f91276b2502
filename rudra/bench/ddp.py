"""Hardsync against torch DDP on gloo: by allreduce and through the parameter server.

Model, batches and optimiser are the same.
"""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rudra.bench.ranks import (
    LEARNER,
    STATISTICS,
    PlainLoop,
    alexnet_job,
    in_turns,
    lenet_job,
    on_ranks,
    step_s,
    train,
    write_images,
)
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS = 2
STEPS = {
    "lenet, μ = 4": 120,
    "lenet, μ = 16": 60,
    "lenet, μ = 64": 20,
    "lenet compiled, μ = 4": 120,
    "lenet compiled, μ = 16": 60,
    "289 MB, μ = 4": 6,
}
AGAINST_DDP = {"lenet, μ = 4": 2.0, "lenet, μ = 16": 1.5, "lenet, μ = 64": 1.1, "289 MB, μ = 4": 1.2}
OF_BOUND = {  # goals as fractions of the speed without communication: by allreduce, through the server
    "lenet, μ = 4": (0.88, 0.75),
    "lenet, μ = 16": (0.95, 0.88),
    "lenet, μ = 64": (0.97, 0.93),
    "289 MB, μ = 4": (0.97, 0.93),
}
WAYS = {
    "ordered": "by allreduce",
    "ordered, by messages": "the same by messages",
    "mpi": "its order MPI's",
    "server": "through the server",
    "server, by messages": "the same by messages",
    "ddp": "DDP, gloo",
    "hand": "by hand",
    "alone": "no communication",
}


def run(*, quick: bool) -> Report:
    """Measures two learners of one torch thread each. DDP runs in the learners' processes."""
    steps, compiler = {"lenet, μ = 4": 8} if quick else STEPS, os.environ.get("CXX", "g++").split()[0]
    if lacking := shutil.which(compiler) is None:
        steps = {case: count for case, count in steps.items() if "compiled" not in case}
    learner = on_ranks(measure, LEARNERS, steps=steps, rounds=0 if quick else 9)[LEARNER]
    pairs = {
        "allreduce / DDP": ("ordered", "ddp"),
        "server / DDP": ("server", "ddp"),
        "by hand / DDP": ("hand", "ddp"),
        "bound / DDP": ("alone", "ddp"),
        "allreduce / bound": ("ordered", "alone"),
        "server / bound": ("server", "alone"),
        "allreduce / by messages": ("ordered", "ordered, by messages"),
        "server / by messages": ("server", "server, by messages"),
        "cost of order": ("mpi", "ordered"),
    }
    report = Report(["steps per second", *WAYS.values(), *pairs])
    server = []
    for case in steps:
        rates = {way: [1 / s for s in learner[case][way]] for way in WAYS}
        found = {name: ratios(rates[ours], rates[theirs]) for name, (ours, theirs) in pairs.items()}
        report.rows.append((case, *(spread(rates[way]) for way in WAYS), *found.values()))
        if case not in AGAINST_DDP:
            continue
        least = {"allreduce / DDP": AGAINST_DDP[case]}
        least |= zip(("allreduce / bound", "server / bound"), OF_BOUND[case], strict=True)
        report.goals += [
            Goal(f"{case}: {name} >= {goal}", [found[name].median], at_least=goal) for name, goal in least.items()
        ]
        server.append(found["server / DDP"].median)
    report.notes = [
        "by allreduce: topology groups with one group, gradients added in group_rank order (replayable)",
        "by messages: cluster.node_memory = false; otherwise ranks read gradients and weights in each other's memory",
        "by hand: plain torch with one MPI.Allreduce of a flat gradient instead of DDP",
        "no communication, the bound: both learners compute and update, but exchange nothing",
        "cost of order: steps per second with the MPI library's own reduction relative to the fixed order",
        "compiled: gradients by torch.compile, in all variants; DDP wraps the compiled module",
    ]
    if lacking:
        report.notes[-1] = f"no rows with compiled gradients: there is no C++ compiler here ({compiler})"
    report.goals.append(Goal("server / DDP >= 1.0 everywhere", server, at_least=1.0))
    return report


def measure(comm: "MPI.Comm", directory: Path, steps: dict[str, int], rounds: int) -> dict[str, Any]:
    """Takes turns, and returns on learners: case -> way -> seconds per step, one value for each round."""
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory)
    if comm.rank >= LEARNER:
        connect(comm.rank, directory)
    rest(comm)
    serverless = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    learners = comm.Split(int(comm.rank >= LEARNER), comm.rank)
    figures: dict[str, Any] = {}
    for case, count in steps.items():
        size = int(case.rpartition(" ")[2])
        job = lenet_job(directory, "hardsync", LEARNERS, size, count)
        if not case.startswith("lenet"):
            job = alexnet_job("hardsync", LEARNERS, size, count)
        job = job.with_(training={"compile": "compiled" in case})
        loops = {}
        if comm.rank >= LEARNER:
            model = job.model.name if isinstance(job.model.name, str) else ""
            plain = partial(PlainLoop, size, model=model, compiled=job.training.compile)
            loops = {"ddp": plain(wrap=wrapped), "hand": plain(exchange=partial(_average, learners)), "alone": plain()}
        few = rounds if case.startswith("lenet,") else min(rounds, 3)  # a large model, or one that each run compiles
        for taken in in_turns(few, figures.setdefault(case, {})):
            taken |= _rudra(comm, serverless, directory / "run.h5", job)
            for name in ("ddp", "hand", "alone"):
                rest(comm)
                if name in loops:
                    loops[name].run(2)
                    distributed.barrier()
                    taken[name] = loops[name].run(count)[0]
    rest(comm)
    if comm.rank >= LEARNER:
        distributed.destroy_process_group()
    return figures


def _rudra(comm: "MPI.Comm", serverless: "MPI.Comm", path: Path, job: Job) -> dict[str, float]:
    """Returns way -> seconds per step, for hardsync in all of Rudra's ways."""
    taken = {}
    for more, near in (("", True), (", by messages", False)):
        placed = job.with_(cluster={"node_memory": near})
        with train(placed, path) as results:
            taken[f"server{more}"] = step_s(results.updates["time_s"])
        for reduction in ("ordered", "mpi") if near else ("ordered",):
            rest(comm)
            if comm.rank >= STATISTICS:
                grouped = placed.with_(topology={"name": "groups", "options": {"reduction": reduction}})
                with train(grouped, path, serverless) as results:
                    taken[f"{reduction}{more}"] = step_s(results.updates["time_s"])
        rest(comm)
    return taken


def connect(rank: int, directory: Path, learners: int = LEARNERS, interface: str = "lo") -> None:
    """Connects the learners through gloo and a network interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = f"file://{directory}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank - LEARNER, world_size=learners)


def wrapped(model: torch.nn.Module, bucket_mb: float | None = None) -> torch.nn.Module:
    """Wraps a model in DDP, with its fastest options, and with the default size of a bucket if none is given."""
    return torch.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True
    )


def _average(comm: "MPI.Comm", gradient: torch.Tensor) -> None:
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, gradient.numpy())
    gradient.div_(comm.size)
