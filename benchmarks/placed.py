"""Layers placed on a stage server, against whole models with a server and with allreduce: on two linked hosts, and one.

The model has convolutions with a twentieth of the parameters, followed by fully connected layers. The servers are on
the first host and all learners on the second. Allreduce has no server, so one of its learners is on the first host to
use the link. A prediction from the link only is a ratio of bytes: the bytes of a step that cross the link one after
the other, by Park et al.'s model (`rudra.core.placement`).
"""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.links import behind_a_link, in_turns_behind, missing, on_half_the_cores, sent_bytes
from rudra.bench.ranks import STATISTICS, in_turns, lenet_job, on_ranks, step_s, train, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.core.placement import Layer, PlacementHardware, choose
from rudra.job.job import Job
from rudra.machine import cores
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS, SIZE, CUT, CROSSING, HIDDEN = 3, 16, 5, 1024, 1280
STAGE = 2  # world rank, on the first host like the two other servers. The learners' ranks follow
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("base", {}),
    "allreduce": ("allreduce", {"topology": {"name": "groups"}}),
    "async": ("base, async", {"protocol": {"name": "async"}}),
    "ralp": ("placed, synchronous (RALP)", {"placement": {"cut": CUT, "rule": "synchronous"}}),
    "merged": ("placed, merged, async", {"placement": {"cut": CUT, "rule": "merged"}, "protocol": {"name": "async"}}),
}
SLOWEST = "100 Mbit/s"
LINKS = {0.1: (4, 8, 4, 20, 20), 1.0: (10, 20, 10, 40, 40)}  # Gbit/s -> steps of a run, for each way
MEMORY = (60, 0, 0, 60, 60)
ROUNDS = 2


def network(input_shape: Sequence[int], classes: int, hidden: int = HIDDEN) -> nn.Module:
    """Two convolutions and two fully connected layers, for images of 28x28."""
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(CROSSING, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
    )


def run(*, quick: bool) -> Report:
    """Measures learners of one torch thread each, in turns. `quick`: on the slowest link, or on one host without it."""
    rounds, hidden = (0, 256) if quick else (ROUNDS, HIDDEN)
    heads = ["way", "samples/s", "/ base", "predicted", "/ predicted", "the link only, samples/s", "MB a step", "sent"]
    report = Report([f"λ = {LEARNERS}, μ = {SIZE}", *heads])
    moved = crossing(hidden)
    given: dict[str, Any] = {"rounds": rounds, "hidden": hidden}
    links: Mapping[float, Sequence[int]] = {0.1: (4, 4, 4, 4, 4)} if quick else LINKS
    if lacking := missing():
        links, report.notes = {}, [f"no rows of a link: {lacking}"]
    for gbit_s, steps in links.items():
        about = given | {"link_gbit_s": gbit_s, "steps": steps}
        found = behind_a_link(measure, gbit_s=gbit_s, learners=LEARNERS + 1, away=LEARNERS, turns=rounds + 1, **about)[
            STATISTICS
        ]
        _add(report, f"{gbit_s * 1000:g} Mbit/s", found, moved)
        report.notes.append(
            f"{gbit_s * 1000:g} Mbit/s, by MPI from rank to rank: {spread(rate / 1e6 for rate in found['link'])} MB/s"
        )
    steps = (4, 0, 0, 4, 4) if quick else MEMORY
    if not (quick and links):
        found = on_ranks(measure, LEARNERS + 1, link_gbit_s=0.0, steps=steps, **given)[STATISTICS]
        _add(report, "one host, by memory", found, {})
    front, back = _sizes(hidden)
    report.notes += [
        f"the model: {(front + back) / 1e6:.3g} MB, {back / (front + back):.0%} of it placed; "
        f"{4 * CROSSING * SIZE / 1e6:.2g} MB of activations of a mini-batch cross the cut",
        "predicted: bytes that must cross the link one after the other, base's by the way's; computing takes no time",
        "MB a step: that must cross, both ways together; sent: that did, with what begins and ends a run",
        "servers on the first host, learners on the second; allreduce: one of them on the first, and its traffic goes "
        "both ways at the same time, as async's may",
        f"one torch thread for each learner and server; each host has half of this machine's {cores()} cores",
    ]
    return report


def crossing(hidden: int) -> dict[str, tuple[float, int]]:
    """Returns way -> bytes of all learners' step that must cross the link, and number of directions used at once."""
    front, back = _sizes(hidden)
    layers = [Layer("front", "convolution", front, 4 * CROSSING), Layer("back", "linear", back, 0)]
    traffic = choose("ralp", layers, PlacementHardware(LEARNERS, SIZE))
    placed = traffic.cuts[0].placed_bytes
    ring = 2 * traffic.allreduce_bytes / LEARNERS  # on a member's own link, both directions
    server = traffic.server_bytes
    return {
        "base": (server, 1),
        "allreduce": (ring, 2),
        "async": (server, 1),
        "ralp": (placed, 1),
        "merged": (placed, 1),
    }


def _sizes(hidden: int) -> tuple[int, int]:
    """Returns the bytes of the parameters before the cut and after it."""
    layers = list(network((1, 28, 28), 10, hidden).children())
    front, back = (
        sum(4 * p.numel() for layer in part for p in layer.parameters()) for part in (layers[:CUT], layers[CUT:])
    )
    return front, back


def _add(report: Report, place: str, found: dict[str, list[float]], moved: Mapping[str, tuple[float, int]]) -> None:
    """Adds rows and goals of a link, or of a single host without a link."""
    against = {way: ratios(found[way], found["base"]) for way in WAYS if way in found}
    predicted = {way: moved["base"][0] / size * ways for way, (size, ways) in moved.items()}
    for way, ratio in against.items():
        compared: tuple[Any, ...] = ("",) * 3
        crossed: tuple[Any, ...] = ("",) * 3
        if way != "base":
            compared = (
                ratio,
                *((predicted[way], spread(value / predicted[way] for value in ratio)) if moved else ("", "")),
            )
        if moved:
            size, ways = moved[way]
            alone = spread(LEARNERS * SIZE * rate * ways / size for rate in found["link"])
            crossed = (alone, size / 1e6, spread(found[f"{way}, sent"]))
        report.rows.append((place, WAYS[way][0], spread(found[way]), *compared, *crossed))
    placed = {way: against[way].median for way in ("ralp", "merged")}
    if not moved:
        report.goals.append(Goal(f"{place}: placed / base >= 0.9", [*placed.values()], at_least=0.9))
    elif place == SLOWEST:
        shares = [ratio / predicted[way] for way, ratio in placed.items()]
        report.goals.append(Goal(f"{place}: placed / base >= 5", [*placed.values()], at_least=5))
        report.goals.append(Goal(f"{place}: placed / base >= 0.8 of the prediction", shares, at_least=0.8))


def measure(
    comm: "MPI.Comm", directory: Path, link_gbit_s: float, steps: Sequence[int], rounds: int, hidden: int
) -> dict[str, list[float]]:
    """Runs all ways in turns. Returns figure -> one value for each round, on the statistics server.

    Args:
        comm: communicator with the servers' ranks, followed by the learners' ranks.
        directory: directory for files.
        link_gbit_s: bandwidth of the link. 0: there is no link.
        steps: steps of a run for each way. 0: the way is not run.
        rounds: number of turns that count.
        hidden: units of the model's hidden layer.
    """
    if link_gbit_s:
        on_half_the_cores()
    torch.set_num_threads(1)
    if comm.rank == 0:
        write_images(directory)
    rest(comm)
    figures: dict[str, list[float]] = {}
    turns = in_turns(rounds, figures)
    if link_gbit_s:
        turns = in_turns_behind(comm, link_gbit_s, rounds, figures, seconds=0.5 if rounds else 0.1)
    for taken in turns:
        for way, count in zip(WAYS, steps, strict=True):
            rest(comm)
            before = sent_bytes() if link_gbit_s else 0
            if count:
                taken[way] = _trained(comm, directory, way, count, hidden)
            rest(comm)
            if link_gbit_s:
                sent = dict(comm.allgather((socket.gethostname(), sent_bytes() - before)))
                taken[f"{way}, sent"] = sum(sent.values()) / count / 1e6
    return figures


def _trained(comm: "MPI.Comm", directory: Path, way: str, steps: int, hidden: int) -> float:
    """Returns the samples per second of a run, and 0 on ranks that the run does not need."""
    places = {rank: rank for rank in range(comm.size)}
    if way == "allreduce":  # the stage server's rank learns instead of the last learner
        without = [0, comm.size - 1]
    elif "placement" in WAYS[way][1]:
        places[STAGE], without = comm.size, []
    else:
        without = [STAGE]
    ranks = comm.Split(int(comm.rank in without), places[comm.rank])
    found = 0.0
    if comm.rank not in without:
        model = {"name": f"{__name__}:{network.__name__}", "options": {"hidden": hidden}}
        job: Job = lenet_job(directory, "hardsync", LEARNERS, SIZE, steps).with_(model=model)
        with train(job.with_(**WAYS[way][1]), directory / "run.h5", ranks) as results:
            updated = results.updates["time_s"]
        found = LEARNERS * SIZE * steps / len(updated) / step_s(updated)
    ranks.Free()
    return found
