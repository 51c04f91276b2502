"""Hardsync by allreduce against torch DDP on gloo, on two hosts behind a network link.

Both cut the gradient into buckets and exchange them while the backward pass goes on. Each gets the best of several bucket
sizes. Model, batches, optimiser and number of threads are the same.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional

from benchmarks import links
from benchmarks.shared import unconnected
from rudra.bench.ranks import LEARNER, STATISTICS, lenet_job, step_s, train, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import networks
from rudra.compute.optim import uncompiled
from rudra.job.job import Job
from rudra.mpi.agreement import rest

if TYPE_CHECKING:
    from mpi4py import MPI

GBIT_S, LEARNERS, STEPS = 1.0, 2, 8
HIDDEN = {"21.7 MB": (1600, 1600, 1000)}  # layers of a perceptron on 28 x 28 images
SIZE = 256  # μ
MEGABYTES = (1.0, 2.0, 4.0, 10.0)  # sizes of buckets that are tried
SHAPE, CLASSES, RATE, MOMENTUM = (1, 28, 28), 10, 0.001, 0.9


def run(*, quick: bool) -> Report:
    """Measures one learner on each host, with one torch thread each, in turns."""
    models = {"0.4 MB": (100, 100)} if quick else HIDDEN
    steps, rounds, sizes = (3, 0, MEGABYTES[:1]) if quick else (STEPS, 1, (4.0,))
    given: dict[str, Any] = {"models": models, "steps": steps, "sizes": sizes}
    report = Report(
        [
            f"μ = {SIZE}, {GBIT_S:g} Gbit/s",
            "ms/step",
            "bucket, MB",
            "/ DDP's speed",
            "bound, ms",
            "of the bound's speed",
        ]
    )
    figures = links.measured(report, measure, list(models), rounds, gbit_s=GBIT_S, learners=LEARNERS, **given)
    for name in figures:
        _add(report, name, figures[name], sizes)
    report.notes += [
        "whole: buckets = 'off'. Buckets: the best of the sizes, as for DDP (bucket_cap_mb)",
        "bound: a gradient's bytes must cross the link each way, and forward and backward take their time alone; both at "
        "the same time",
        links.ALONE,
        links.HALF,
    ]
    return report


def _add(report: Report, name: str, found: dict[str, Any], sizes: tuple[float, ...]) -> None:
    """Adds the rows and the goals of a model."""

    def best(way: str) -> float:
        return min(sizes, key=lambda size: sorted(found[f"{way} {size:g}"])[len(found[f"{way} {size:g}"]) // 2])

    ddp, ours = best("ddp"), best("buckets")
    bound = [max(alone, found["bytes"][0] / rate) for alone, rate in zip(found["alone"], found["link"], strict=True)]
    rows = {
        "DDP, gloo": (found[f"ddp {ddp:g}"], f"{ddp:g}"),
        "hardsync, buckets": (found[f"buckets {ours:g}"], f"{ours:g}"),
        "hardsync, auto": (found["auto"], "auto"),
        "hardsync, whole": (found["off"], ""),
        "computing alone": (found["alone"], ""),
    }
    for way, (taken, size) in rows.items():
        against = ratios(found[f"ddp {ddp:g}"], taken)
        report.rows.append(
            (f"{name}: {way}", spread([1000 * s for s in taken]), size, against)
            + (spread([1000 * s for s in bound]), ratios(bound, taken))
        )
    reached = ratios(found[f"ddp {ddp:g}"], found[f"buckets {ours:g}"]).median
    report.goals.append(Goal(f"{name}: hardsync / DDP >= 1.2", [reached], at_least=1.2))


def measure(
    comm: "MPI.Comm",
    directory: Path,
    models: dict[str, tuple[int, ...]],
    steps: int,
    sizes: tuple[float, ...],
    rounds: int,
) -> dict[str, Any]:
    """Runs all ways in turns. Returns on learners: model -> way -> seconds per step, one value for each round."""
    links.on_half_the_cores()
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory, LEARNERS * SIZE * steps)
    if comm.rank >= LEARNER:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        store = f"file://{directory}/store"
        distributed.init_process_group("gloo", init_method=store, rank=comm.rank - LEARNER, world_size=LEARNERS)
    rest(comm)
    ranks = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    figures: dict[str, Any] = {}
    for name, hidden in models.items():
        job = lenet_job(directory, "hardsync", LEARNERS, SIZE, steps)
        job = job.with_(model={"name": "mlp", "options": {"hidden": list(hidden)}}, topology={"name": "groups"})
        loops = {f"ddp {size:g}": _ddp(tuple(hidden), size) for size in sizes} if comm.rank >= LEARNER else {}
        for taken in links.in_turns_behind(comm, GBIT_S, rounds, figures.setdefault(name, {})):
            ways = {f"buckets {size:g}": size for size in sizes} | {"auto": "auto", "off": "off"}
            for way, buckets in ways.items():
                _rudra(comm, ranks, job.with_(cluster={"buckets": buckets}), directory, taken, way)
            rest(comm)
            if comm.rank >= STATISTICS:
                taken["alone"], _, taken["bytes"] = links.trained(
                    ranks, unconnected(job, steps), directory / "run.h5", connected=False
                )
            for size in sizes:
                rest(comm)
                if loops:
                    loops[f"ddp {size:g}"](2)
                    distributed.barrier()
                    taken[f"ddp {size:g}"] = loops[f"ddp {size:g}"](steps)
    rest(comm)
    if comm.rank >= LEARNER:
        distributed.destroy_process_group()
    return figures


def _rudra(comm: "MPI.Comm", ranks: "MPI.Comm", job: Job, directory: Path, taken: dict[str, Any], way: str) -> None:
    rest(comm)
    if comm.rank >= STATISTICS:
        with train(job, directory / "run.h5", ranks) as results:
            taken[way] = step_s(results.updates["time_s"])


def _ddp(hidden: tuple[int, ...], megabytes: float) -> Callable[[int], float]:
    """Returns a function that trains by DDP for a number of steps, and returns seconds per step."""
    network = networks.mlp(SHAPE, CLASSES, hidden=list(hidden))
    model = torch.nn.parallel.DistributedDataParallel(
        network, bucket_cap_mb=megabytes, gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = uncompiled(torch.optim.SGD)(network.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * SIZE, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (4 * SIZE,), generator=generator)
    order = torch.randperm(4 * SIZE, generator=generator)

    def train(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            chosen = order[step % 4 * SIZE : (step % 4 + 1) * SIZE]
            functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / steps

    return train
