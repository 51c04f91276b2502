"""Hardsync by allreduce on two hosts of two learners each, with a link: comparison of the orders of addition.

If each learner sends its gradient to all ("ordered"), gradients cross the link once for each learner of the other
host. Sums of the hosts ("nodes") cross it once. The bound of a step is its computing time, plus the time of its bytes
on the link.

For comparison, bare MPI calls send the data of "nodes" without adding: half of a gradient each way as sums, and half
as means. Either all members send at the same time, as in Rudra, or one leader of each host sends everything.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import links
from benchmarks.shared import unconnected
from rudra.bench.ranks import LEARNER, STATISTICS, lenet_job, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.job.job import Job

GBIT_S, HOSTS, LEARNERS, SIZE = 1, 2, 4, 4
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # for images of 28x28: [model], and steps of a run
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
    """Adds rows and goal of a model."""
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
    """Runs all ways in turns. Returns on learners: model -> figure -> one value for each round."""
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
    """Returns seconds per step, and the bytes that crossed the link each way, in sizes of the model."""
    steps = (job.data.train_limit or 0) // (LEARNERS * SIZE)
    if way == "alone":
        taken_s, _, size = links.trained(ranks, unconnected(job, steps), path, connected=False)
        return {"alone": taken_s, "bytes": size}
    grouped = job.with_(topology={"name": "groups", "options": {"reduction": way}})
    taken_s, sent, size = links.trained(ranks, grouped, path, connected=True)
    return {way: taken_s, f"{way}, sent": sent / size / steps}


def _exchange_s(learners: "MPI.Comm", size: int, *, leader: bool, times: int) -> float:
    """Returns the seconds of an exchange between the hosts: half a vector as sums, and then half as means.

    Args:
        learners: communicator of the learners, one host after the other, with as many on each.
        size: size of the vector, in bytes.
        leader: the first learner of each host sends everything. Otherwise each learner sends its part to one learner of
            the other host.
        times: number of exchanges.
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
