"""Gradients in buckets on two hosts behind a network link: hardsync by allreduce, and hardsync with a server.

Allreduce is compared with torch DDP on gloo. Both cut the gradient into buckets and exchange them during the backward
pass. Each gets the best of several bucket sizes. Model, data, batches, optimiser and number of threads are the same.
Pushes to a server on the first host, and averages of replicas after every step, are compared with whole ones.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed

from benchmarks import links
from benchmarks.shared import unconnected, write_text
from rudra.bench.ddp import connect, wrapped
from rudra.bench.ranks import LEARNER, MOMENTUM, RATE, STATISTICS, lenet_job, step_s, train, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import models, tasks
from rudra.compute.optimizers import uncompiled
from rudra.data.load import load
from rudra.job.job import Job
from rudra.mpi.group_reduction import MEASURED_STEPS
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

MEGABYTES = (0.5, 1.0, 2.0, 5.0)  # sizes of buckets that are tried
LANGUAGE = {"task": {"name": "language"}, "data": {"name": "text", "options": {"length": 64}}}
PERCEPTRON = {"model": {"name": "mlp", "options": {"hidden": [1600, 1600, 1000]}}}


@dataclass(frozen=True, slots=True)
class Case:
    """A model behind a link.

    Attributes:
        tables: tables of the job.
        size: μ.
        goal: steps per second, as a multiple of DDP's, or of those with whole vectors for a server and for replicas.
        steps: steps of a run.
        learners: number of learners, half of them on each host, or all on the second one if there is a server.
        gbit_s: bandwidth of the link.
        server: whether a server on the first host updates the weights.
        replicas: whether replicas are averaged after every step, instead of gradients.
    """

    tables: dict[str, Any]
    size: int
    goal: float
    steps: int = 20
    learners: int = 2
    gbit_s: float = 1.0
    server: bool = False
    replicas: bool = False

    @property
    def by_ddp(self) -> bool:
        """Whether DDP can do the same."""
        return not self.server and not self.replicas

    @property
    def on_second_host(self) -> int:
        """Number of learners on the second host."""
        return self.learners if self.server else self.learners // 2


CASES = {
    "mlp 21.7 MB": Case(PERCEPTRON, 256, 1.2),
    "mlp 21.7 MB, 10 Gbit/s": Case(PERCEPTRON, 256, 1.2, gbit_s=10.0),
    "resnet32 1.9 MB": Case({"model": {"name": "resnet32"}}, 32, 1.0),
    "lstm 4.3 MB": Case({**LANGUAGE, "model": {"name": "lstm", "options": {"hidden": 256}}}, 8, 1.0, 26),
    "replicas, mlp 21.7 MB": Case(PERCEPTRON, 256, 1.1, replicas=True),
    "replicas, mlp 21.7 MB, 10 Gbit/s": Case(PERCEPTRON, 256, 1.0, gbit_s=10.0, replicas=True),
    "mlp 21.7 MB, λ = 4": Case(PERCEPTRON, 256, 1.3, 14, learners=4),
    "server, mlp 21.7 MB, λ = 1": Case(PERCEPTRON, 256, 1.1, learners=1, server=True),
    "server, mlp 21.7 MB, λ = 2": Case(PERCEPTRON, 256, 1.1, learners=2, server=True),
}
SMALL = {"model": {"name": "mlp", "options": {"hidden": [100, 100]}}}
QUICK = {"mlp 0.4 MB": Case(SMALL, 16, 1.0, 3)}


def run(*, quick: bool) -> Report:
    """Measures learners with one torch thread each, in turns."""
    cases, rounds, sizes = (QUICK, 0, MEGABYTES[:1]) if quick else (CASES, 3, MEGABYTES)
    heads = ["μ", "way", "ms/step", "bucket, MB", "DDP's time / its", "bound, ms", "bound / its"]
    report, notes = Report(["two hosts", *heads]), list[str]()
    for name, case in cases.items():
        given: dict[str, Any] = {"name": name, "sizes": sizes, "gbit_s": case.gbit_s, "learners": case.learners}
        given["away"] = case.on_second_host
        figures = links.measured(report, measure, [name], rounds, **given)
        notes += [f"{name}: {note}" if figures else note for note in report.notes]
        if not figures:
            break
        _add(report, name, case, figures[name], sizes)
    report.notes = [
        *notes,
        "first steps, which decide whether forward passes begin early, are left out",
        "whole: cluster.buckets = 'off'; of the sizes of buckets (DDP: bucket_cap_mb) the best one is shown",
        "bound: computing alone, or the transfer of one model each way, whichever takes longer; with a server, of one "
        "model up and one down for each learner, one after the other",
        links.ALONE,
        links.HALF,
    ]
    return report


def _add(report: Report, name: str, case: Case, found: dict[str, Any], sizes: tuple[float, ...]) -> None:
    """Adds the rows and the goals of a case."""

    def best(way: str) -> float:
        return min(sizes, key=lambda size: float(np.median(found[f"{way} {size:g}"])))

    ours = best("buckets")
    # Models that must cross the link one after the other: pushes of all learners, and then weights for all.
    models = 2 * case.learners if case.server else 1
    by_link = [models * found["bytes"][0] / rate for rate in found["link"]]
    bound = [max(times) for times in zip(found["alone"], by_link, strict=True)]
    rule = "average" if case.replicas else "hardsync"
    rows = {
        f"{rule}, buckets": (found[f"buckets {ours:g}"], f"{ours:g}"),
        f"{rule}, auto": (found["auto"], "auto"),
        f"{rule}, whole": (found["off"], ""),
        "computing alone": (found["alone"], ""),
    }
    other, ddp = "whole", found["off"]
    if case.by_ddp:
        size = best("ddp")
        other, ddp = "DDP", found[f"ddp {size:g}"]
        rows = {"DDP, gloo": (ddp, f"{size:g}")} | rows
    for way, (taken, bucket) in rows.items():
        milliseconds = spread([1000 * s for s in taken])
        against = ratios(ddp, taken) if case.by_ddp else ""
        cells = (milliseconds, bucket, against, spread([1000 * s for s in bound]), ratios(bound, taken))
        report.rows.append((name, str(case.size), way, *cells))
    reached = ratios(ddp, found[f"buckets {ours:g}"]).median
    report.goals.append(Goal(f"{name}: {rule} / {other} >= {case.goal:g}", [reached], at_least=case.goal))


def measure(comm: "MPI.Comm", directory: Path, name: str, sizes: tuple[float, ...], rounds: int) -> dict[str, Any]:
    """Runs all ways in turns. Returns on learners: name -> way -> seconds per step, one value for each round."""
    case = (CASES | QUICK)[name]
    links.on_half_the_cores()
    torch.set_num_threads(1)
    job = _job(directory, case)
    if comm.rank == 0:
        write_images(directory, case.learners * case.size * case.steps)
        write_text(directory / "input.txt")
    rest(comm)
    by_ddp = comm.rank >= LEARNER and case.by_ddp
    if by_ddp:
        connect(comm.rank, directory, case.learners, "eth0")
    loops = {f"ddp {size:g}": DDPLoop(job, size) for size in sizes} if by_ddp else {}
    ranks = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    trains = case.server or comm.rank >= STATISTICS
    figures: dict[str, Any] = {name: {}}
    ways = {f"buckets {size:g}": size for size in sizes} | {"auto": "auto", "off": "off"}
    for taken in links.in_turns_behind(comm, case.gbit_s, rounds, figures[name]):
        for way, buckets in ways.items():
            rest(comm)
            if trains:
                together = comm if case.server else ranks
                with train(job.with_(cluster={"buckets": buckets}), directory / "run.h5", together) as results:
                    time_s = results.updates["time_s"]
                    taken[way] = step_s(time_s[min(MEASURED_STEPS + 1, len(time_s) - 3) :])
        rest(comm)
        if comm.rank >= STATISTICS:
            alone = unconnected(job, case.steps)
            taken["alone"], _, taken["bytes"] = links.trained(ranks, alone, directory / "run.h5", connected=False)
        for size in sizes:
            rest(comm)
            if loops:
                loops[f"ddp {size:g}"].run(2)
                distributed.barrier()
                taken[f"ddp {size:g}"] = loops[f"ddp {size:g}"].run(case.steps)
    rest(comm)
    if by_ddp:
        distributed.destroy_process_group()
    return figures


def _job(directory: Path, case: Case) -> Job:
    job = lenet_job(directory, "hardsync", case.learners, case.size, case.steps).with_(**case.tables)
    if job.data.name == "text":
        job = job.with_(data={"path": directory / "input.txt"})
    if case.server:
        return job
    if case.replicas:
        return job.with_(protocol={"name": "average", "modulation": "auto"}, topology={"name": "replicas"})
    options = {"reduction": "nodes"} if case.learners > len(links.NAMES) else {}
    return job.with_(topology={"name": "groups", "options": options})


class DDPLoop:
    """Trains a job's model by DDP, on the job's first samples.

    Args:
        job: the job.
        megabytes: size of a bucket.
    """

    def __init__(self, job: Job, megabytes: float) -> None:
        data = load(job.data, test=False)
        assert data.training is not None
        self._size = job.training.minibatch_size
        self._batches = [data.training.batch(np.arange(i * self._size, (i + 1) * self._size)) for i in range(2)]
        network = models.build(job.model, data.info, 0)
        self._task = tasks.make(job.task, data.info.classes)
        self._model = wrapped(network, megabytes)
        self._optimizer = uncompiled(torch.optim.SGD)(network.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)

    def run(self, steps: int) -> float:
        """Trains for a number of steps. Returns seconds per step."""
        began = time.perf_counter()
        for step in range(steps):
            inputs, target = self._batches[step % 2]
            self._task.loss(self._model(inputs), target).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
        return (time.perf_counter() - began) / steps
