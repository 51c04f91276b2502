"""Hardsync through the parameter server against torch DDP on gloo: the same model, mini-batches and optimiser."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rudra.bench.ranks import LEARNER, PlainLoop, lenet_job, on_ranks, rest, step_s, train, write_images
from rudra.bench.report import Goal, Report, ratios, spread

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS = 2
STEPS = {4: 120, 16: 60, 64: 20}


def run(*, quick: bool) -> Report:
    """Measures two learners of one torch thread each; DDP runs in the learners' processes."""
    steps = {4: 8} if quick else STEPS
    learner = on_ranks(measure, LEARNERS, steps=steps, rounds=1 if quick else 11)[LEARNER]
    report = Report(
        ["steps per second", "Rudra hardsync", "DDP, gloo", "no communication", "Rudra / DDP", "Rudra / bound"]
    )
    medians = []
    for size in steps:
        rudra, ddp, alone = ([1 / s for s in learner[str(size)][name]] for name in ("rudra", "ddp", "alone"))
        against = ratios(rudra, ddp)
        medians.append(against.median)
        report.rows.append((f"μ = {size}", spread(rudra), spread(ddp), spread(alone), against, ratios(rudra, alone)))
    report.notes = ["bound: both learners compute and update, and nothing is exchanged"]
    report.goals = [Goal("Rudra / DDP >= 1.0 at every μ", medians, at_least=1.0)]
    return report


def measure(comm: "MPI.Comm", directory: Path, steps: dict[int, int], rounds: int) -> dict[str, Any]:
    """Takes turns; on learners: size -> name -> seconds per step, one for each round."""
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory)
    if comm.rank >= LEARNER:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{directory}/store"
        distributed.init_process_group("gloo", init_method=store, rank=comm.rank - LEARNER, world_size=LEARNERS)
    rest(comm)
    figures: dict[str, Any] = {}
    for size, count in steps.items():
        job = lenet_job(directory, "hardsync", LEARNERS, size, count)
        loops = {"ddp": PlainLoop(size, _ddp), "alone": PlainLoop(size)} if comm.rank >= LEARNER else {}
        for turn in range(rounds + 1):
            with train(job, directory / "run.h5") as results:
                taken = {"rudra": step_s(results.updates["time_s"])}
            for name in ("ddp", "alone"):
                rest(comm)
                if name in loops:
                    loops[name].run(2)
                    distributed.barrier()
                    taken[name] = loops[name].run(count)[0]
            if turn:  # the first one warms up
                for name, value in taken.items():
                    figures.setdefault(str(size), {}).setdefault(name, []).append(value)
    rest(comm)
    if comm.rank >= LEARNER:
        distributed.destroy_process_group()
    return figures


def _ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
