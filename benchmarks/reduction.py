"""Hardsync by allreduce on two hosts of two learners each, behind a link: by the order in which gradients are added.

Gradients all to all ("ordered") cross the link once for each learner of the other host, sums of the hosts ("nodes")
once. The bound of a step is what it takes to compute, and then to bring its bytes over the link.

Beside it, bare MPI calls that bring over the link what "nodes" does, half of a gradient each way as sums and half as
means, and add nothing: by all members at the same time, as Rudra does it, and by one leader of each host for all.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import links
from benchmarks.shared import unconnected
from rudra.bench.ranks import LEARNER, STATISTICS, lenet_job, write_images
from rudra.findings import Goal, Report, ratios, spread
from rudra.mpi.agreement import rest

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.job.job import Job

GBIT_S, HOSTS, LEARNERS, SIZE = 1, 2, 4, 4
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # of images of 28x28: [model], and steps of a run
    "lenet, 1.7 MB": ({"name": "lenet"}, 60),
    "mlp, 20 MB": ({"name": "mlp", "options": {"hidden": [2048, 1640]}}, 8),
}
WAYS = {"ordered": "ordered", "nodes": "nodes", "mpi": "MPI's own"}
EXCHANGES = {"parallel": "all in parallel", "leader": "one leader"}


def run(*, quick: bool) -> Report:
    """Measures learners of one torch thread each, in turns."""
    heads = ["way", "1/s", "/ ordered", "bound, 1/s", "/ bound", "sent each way / model", "/ one leader"]
    report = Report([f"λ = {LEARNERS}, μ = {SIZE}, {GBIT_S} Gbit/s", *heads])
    names, rounds = list(MODELS)[: 1 if quick else None], 0 if quick else 5
    given = {"names": names, "quick": quick}
    figures = links.measured(report, measure, names, rounds, gbit_s=GBIT_S, learners=LEARNERS, **given)
    if not figures:
        return report
    for name in names:
        _add(report, name, figures[name])
    report.notes += [
        "bound: computing alone (without, for bare MPI), and then one model each way by the link, the least there is",
        links.ALONE,
        f"sent: what has left a host, for each step; the {LEARNERS} {links.HALF}",
        "bare MPI: each host sends half a model as sums, and when the other half has come, half a model as means, as "
        '"nodes" does; nothing is added; by all its learners, each its part, or by one for all',
    ]
    return report


def _add(report: Report, name: str, found: dict[str, Any]) -> None:
    """Rows and goal of a model."""
    rates = {way: [1 / s for s in found[way]] for way in (*WAYS, *EXCHANGES)}
    against = {way: ratios(rates[way], rates["ordered"]) for way in ("nodes", "mpi")}
    links.add_ways(report, name, found, WAYS, crossing=dict.fromkeys(WAYS, 1.0), against=against)
    free = [rate / found["bytes"][0] for rate in found["link"]]
    beside = {"parallel": ratios(rates["parallel"], rates["leader"])}
    for way, about in EXCHANGES.items():
        cells = (spread(rates[way]), "", spread(free), ratios(rates[way], free))
        report.rows.append((name, f"bare MPI, {about}", *cells, "", beside.get(way, "")))
    report.goals.append(Goal(f"{name}: nodes >= ordered", [against["nodes"].median], at_least=1.0))


def measure(comm: "MPI.Comm", directory: Path, names: list[str], rounds: int, quick: bool) -> dict[str, Any]:
    """Takes turns; on learners: model -> figure -> one for each round."""
    links.on_half_the_cores()
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory)
    rest(comm)
    ranks = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    learners = comm.Split(int(comm.rank >= LEARNER), comm.rank)
    figures: dict[str, Any] = {}
    for name in names:
        model, steps = MODELS[name]
        job = lenet_job(directory, "hardsync", LEARNERS, SIZE, 8 if quick else steps).with_(model=model)
        link = {"gbit_s": GBIT_S, "rounds": rounds, "figures": figures.setdefault(name, {})}
        for taken in links.in_turns_behind(comm, **link, seconds=0.1 if quick else 0.5):
            for way in (*WAYS, "alone"):
                rest(comm)
                if comm.rank >= STATISTICS:
                    taken |= _trained(ranks, job, way, directory / "run.h5")
            for way in EXCHANGES:
                rest(comm)
                if comm.rank >= LEARNER:
                    taken[way] = _exchange_s(learners, taken["bytes"], leader=way == "leader", times=2 if quick else 10)
    return figures


def _trained(ranks: "MPI.Comm", job: "Job", way: str, path: Path) -> dict[str, Any]:
    """Seconds per step, and what has crossed the link, each way, in sizes of the model."""
    steps = (job.data.train_limit or 0) // (LEARNERS * SIZE)
    if way == "alone":
        taken_s, _, size = links.trained(ranks, unconnected(job, steps), path, connected=False)
        return {"alone": taken_s, "bytes": size}
    grouped = job.with_(topology={"name": "groups", "options": {"reduction": way}})
    taken_s, sent, size = links.trained(ranks, grouped, path, connected=True)
    return {way: taken_s, f"{way}, sent": sent / size / steps}


def _exchange_s(learners: "MPI.Comm", size: int, *, leader: bool, times: int) -> float:
    """Seconds in which the hosts bring each other half a vector as sums, and then half as means.

    Args:
        learners: as many on each host, one host after the other.
        size: of the vector, in bytes.
        leader: the first of each host sends all of it; else each its part, to one of the other host.
        times: how often.
    """
    from mpi4py import MPI

    half = learners.size // HOSTS
    partner = (learners.rank + half) % learners.size
    part = size // HOSTS // (1 if leader else half)
    out, into = np.ones(part, np.uint8), np.ones(part, np.uint8)
    rest(learners)
    began = time.perf_counter()
    for phase in range(2 * times if learners.rank % half == 0 or not leader else 0):
        requests = [learners.Irecv(into, partner, phase), learners.Isend(out, partner, phase)]
        while not MPI.Request.Testall(requests):
            time.sleep(5e-5)
    rest(learners)
    return (time.perf_counter() - began) / times
