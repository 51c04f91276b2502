"""DiLoCo against hardsync by allreduce on two hosts of two learners each, with a slow link: a character LSTM.

The bound of each method is its computing time, plus the time of its data on the link. For each average or mini-batch
the link carries the contributions of two learners and the sums for two learners ("ordered", as in the job `wan`). If
each host adds its contributions first ("nodes"), the link carries half. This is the best case of hardsync.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import links
from benchmarks.shared import data_directory, unconnected, write_text
from rudra.bench.ranks import STATISTICS
from rudra.benchmark_report import Goal, Report, ratios
from rudra.job.job import Job
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

GBIT_S, HOSTS, LEARNERS, SIZE = 0.1, 2, 4, 8
BATCH = LEARNERS * SIZE
HIDDEN = {"1.1 MB": 128, "4.3 MB": 256}  # number of units of the LSTM
AVERAGES, STEPS = 3, 10  # in a run of DiLoCo, and in a run of hardsync
WAYS = {"diloco": "DiLoCo", "ordered": "hardsync", "nodes": 'hardsync, "nodes"'}


def run(*, quick: bool) -> Report:
    """Measures learners of one torch thread each, in turns."""
    period, rounds = (4, 0) if quick else (50, 3)
    heads = ["way", "samples/s", "DiLoCo / it", "bound, samples/s", "/ bound", "bytes sent / sample"]
    report = Report([f"λ = {LEARNERS}, μ = {SIZE}, {GBIT_S * 1000:g} Mbit/s", *heads])
    text = data_directory() / "tinyshakespeare" / "input.txt"
    models = {"0.1 MB": 32} if quick else HIDDEN
    given: dict[str, Any] = {"models": models, "period": period, "text": str(text)}
    figures = links.measured(report, measure, list(models), rounds, gbit_s=GBIT_S, learners=LEARNERS, **given)
    if not figures:
        return report
    for name in models:
        _add(report, name, figures[name], period)
    report.notes += [
        f"DiLoCo: an average every {period} mini-batches; a sample is 64 characters "
        + ("of tinyshakespeare" if text.is_file() else f"of noise, as there is no {text}"),
        'hardsync: by allreduce, all to all; "nodes": gradients are added on each host first',
        "bound: computing alone, and then what must cross the link, each way, at that rate",
        links.ALONE,
        f"sent: what has left a host; the {LEARNERS} {links.HALF}",
    ]
    return report


def _add(report: Report, name: str, found: dict[str, Any], period: int) -> None:
    """Adds rows and goal of a model."""
    against = {way: ratios(found[way], found["diloco"]) for way in ("ordered", "nodes")}  # ratios of times
    whole = LEARNERS / HOSTS
    crossing = {"diloco": whole / period, "ordered": whole, "nodes": 1.0}
    links.add_ways(report, name, found, WAYS, crossing=crossing, against=against, unit=BATCH)
    both = [ratio.median for ratio in against.values()]
    report.goals.append(Goal(f"{name}: DiLoCo / hardsync >= 5, in either order", both, at_least=5))


def measure(
    comm: "MPI.Comm", directory: Path, models: dict[str, int], period: int, rounds: int, text: str
) -> dict[str, Any]:
    """Runs all ways in turns. Returns on learners: model -> figure -> one value for each round."""
    links.on_half_the_cores()
    torch.set_num_threads(1)
    file = Path(text)
    if not file.is_file():
        file = directory / "input.txt"
        if comm.rank == 0:
            write_text(file)
    rest(comm)
    ranks = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    figures: dict[str, Any] = {}
    for name, hidden in models.items():
        for taken in links.in_turns_behind(comm, GBIT_S, rounds, figures.setdefault(name, {})):
            for way in (*WAYS, "alone"):
                rest(comm)
                if comm.rank >= STATISTICS:
                    taken |= _trained(ranks, _job(file, hidden, way, period), directory / "run.h5", way)
            if comm.rank >= STATISTICS:  # the cost of starting and ending a run is also part of the single average
                taken["diloco, sent"] -= taken.pop("alone, sent")
                taken["diloco, sent"] /= BATCH * period * (AVERAGES - 1)
                for way in ("ordered", "nodes"):
                    taken[f"{way}, sent"] /= BATCH * STEPS
    return figures


def _job(text: Path, hidden: int, way: str, period: int) -> Job:
    steps = AVERAGES * period if way == "diloco" else STEPS
    job = Job(
        name="bench",
        model={"name": "lstm", "options": {"hidden": hidden}},
        data={"name": "text", "path": text, "options": {"length": 64}, "train_limit": BATCH * steps},
        task={"name": "language"},
        training={"epochs": 1, "minibatch_size": SIZE, "evaluate": False},
        optimizer={"name": "adamw", "learning_rate": 0.004},
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
    )
    if way == "alone":
        return unconnected(job, steps)
    if way == "diloco":
        return job.with_(protocol={"name": "diloco"}, topology={"name": "replicas"}, averaging={"period": period})
    return job.with_(protocol={"name": "hardsync"}, topology={"name": "groups", "options": {"reduction": way}})


def _trained(ranks: "MPI.Comm", job: Job, path: Path, way: str) -> dict[str, Any]:
    """Returns seconds per mini-batch, and the bytes sent by the host that sends more."""
    taken_s, sent, size = links.trained(ranks, job, path, connected=way != "alone")
    steps = job.averaging.period or 1 if way == "diloco" else 1
    return {way: taken_s / steps, f"{way}, sent": sent, "bytes": size}
