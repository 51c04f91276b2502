"""Hardsync against torch DDP on gloo: by allreduce and through the parameter server; same model, batches and
optimiser."""

import os
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
    lenet_job,
    on_ranks,
    step_s,
    train,
    write_images,
)
from rudra.findings import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.mpi.session import rest

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS = 2
STEPS = {"lenet, μ = 4": 120, "lenet, μ = 16": 60, "lenet, μ = 64": 20, "289 MB, μ = 4": 6}
GOALS = {"lenet, μ = 4": 2.0, "lenet, μ = 16": 1.5, "lenet, μ = 64": 1.1, "289 MB, μ = 4": 1.2}
WAYS = ("ordered", "mpi", "server", "ddp", "hand", "alone")
HEADS = ("by allreduce", "its order MPI's", "through the server", "DDP, gloo", "by hand", "no communication")


def run(*, quick: bool) -> Report:
    """Measures two learners of one torch thread each; DDP runs in the learners' processes."""
    steps = {"lenet, μ = 4": 8} if quick else STEPS
    learner = on_ranks(measure, LEARNERS, steps=steps, rounds=1 if quick else 9)[LEARNER]
    ratio = ("allreduce / DDP", "server / DDP", "by hand / DDP", "bound / DDP", "cost of order")
    report = Report(["steps per second", *HEADS, *ratio])
    server = []
    for case in steps:
        rates = {way: [1 / s for s in learner[case][way]] for way in WAYS}
        against = {way: ratios(rates[way], rates["ddp"]) for way in ("ordered", "server", "hand", "alone")}
        shown = [spread(rates[way]) for way in WAYS]
        report.rows.append((case, *shown, *against.values(), ratios(rates["mpi"], rates["ordered"])))
        report.goals.append(
            Goal(f"{case}: allreduce / DDP >= {GOALS[case]}", [against["ordered"].median], at_least=GOALS[case])
        )
        server.append(against["server"].median)
    report.notes = [
        "by allreduce: topology groups with one group, gradients added in group_rank order (what a replay can repeat)",
        "by hand: plain torch with one MPI.Allreduce of a flat gradient in place of DDP, and nothing else",
        "no communication, the bound: both learners compute and update, and nothing is exchanged",
        "cost of order: steps per second with the MPI library's own reduction against those with the fixed order",
    ]
    report.goals.append(Goal("server / DDP >= 1.0 everywhere", server, at_least=1.0))
    return report


def measure(comm: "MPI.Comm", directory: Path, steps: dict[str, int], rounds: int) -> dict[str, Any]:
    """Takes turns; on learners: case -> way -> seconds per step, one for each round."""
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory)
    if comm.rank >= LEARNER:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{directory}/store"
        distributed.init_process_group("gloo", init_method=store, rank=comm.rank - LEARNER, world_size=LEARNERS)
    rest(comm)
    serverless = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    learners = comm.Split(int(comm.rank >= LEARNER), comm.rank)
    figures: dict[str, Any] = {}
    for case, count in steps.items():
        size = int(case.rpartition(" ")[2])
        job = lenet_job(directory, "hardsync", LEARNERS, size, count)
        if not case.startswith("lenet"):
            job = alexnet_job("hardsync", LEARNERS, size, count)
        loops = {}
        if comm.rank >= LEARNER:
            model = job.model.name if isinstance(job.model.name, str) else ""
            loops = {
                "ddp": PlainLoop(size, _ddp, model=model),
                "hand": PlainLoop(size, model=model, exchange=partial(_average, learners)),
                "alone": PlainLoop(size, model=model),
            }
        for turn in range((rounds if case.startswith("lenet") else min(rounds, 3)) + 1):
            taken = _rudra(comm, serverless, directory / "run.h5", job)
            for name in ("ddp", "hand", "alone"):
                rest(comm)
                if name in loops:
                    loops[name].run(2)
                    distributed.barrier()
                    taken[name] = loops[name].run(count)[0]
            if turn:  # the first one warms up
                for name, value in taken.items():
                    figures.setdefault(case, {}).setdefault(name, []).append(value)
    rest(comm)
    if comm.rank >= LEARNER:
        distributed.destroy_process_group()
    return figures


def _rudra(comm: "MPI.Comm", serverless: "MPI.Comm", path: Path, job: Job) -> dict[str, float]:
    """Seconds per step of hardsync in three ways."""
    taken = {}
    with train(job, path) as results:
        taken["server"] = step_s(results.updates["time_s"])
    for reduction in ("ordered", "mpi"):
        rest(comm)
        if comm.rank >= STATISTICS:
            grouped = job.with_(topology={"name": "groups", "options": {"reduction": reduction}})
            with train(grouped, path, serverless) as results:
                taken[reduction] = step_s(results.updates["time_s"])
    rest(comm)
    return taken


def _ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def _average(comm: "MPI.Comm", gradient: torch.Tensor) -> None:
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, gradient.numpy())
    gradient.div_(comm.size)
