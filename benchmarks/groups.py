"""Hardware efficiency of compute groups: time per iteration beside Omnivore's model.

Source: omnivore.txt §IV-B and appendix D-D1. An iteration is one gradient of one group, of a batch of b samples. Held
constant are b and the number of machines λ; with g groups, each of k = λ/g machines computes μ = b/k samples of it.

    HE(g) = max(t_server, (t_compute(k) + t_server) / g)

t_compute(k): a group's iteration without the server: computing b/k samples, adding up gradients in the group, and
    handing the weights on in it.
t_server: what the server adds to the iteration of a lone group, from its gradient to its new weights: transfer there,
    the message, the update, transfer back.

Once our server is saturated, the first t_server above is shorter, t_busy = max(transfer there, update + transfer back)
(`rudra.simulation.efficiency`); both are shown. With g = 1 there is no server here: learners update replicas, and
t_server is the update alone.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rudra.api import run as train
from rudra.bench.ranks import PlainLoop, write_images
from rudra.compute.executor import torch_as_in
from rudra.core.messages import tensor_bytes
from rudra.findings import Goal, Report, Spread, spread
from rudra.job.job import Job
from rudra.machine import cores
from rudra.prepare.resolve import nodes_of
from rudra.simulation.costs import CostModel
from rudra.simulation.efficiency import Times, unmerged
from rudra.simulation.predict import Outline, predict, steady_rate

MACHINES = 32
BATCH = 256
CONVOLUTIONS_BYTES = 9_300_000
"""AlexNet's convolutional layers, 2.3 M parameters: what crosses the network where the server holds the others."""

OMNIVORE: dict[str, Any] = {
    # §II-C: 1.6 TFLOP of convolutions in a batch of 256; Figure 3: at 56 % of 742 GFLOPS; a machine's share is b/k.
    "compute_s": {BATCH: 1.6e12 / (0.56 * 0.742e12)},
    # The fully connected phase, 80 GFLOP at the same speed, and 9,216 activations of 256 images there and back.
    "update_s": 80e9 / (0.56 * 0.742e12) + 2 * BATCH * 9216 * 4 / 125e6,
    "bandwidth_bytes_per_s": 125e6,  # Figure 9: 1 Gbit/s
    "latency_s": 1e-4,
    "jitter": 0.06,  # Figure 22
    "distribution": "lognormal",
}
"""Machines c4.4xlarge, and one for the fully connected layers, whose work and traffic are the server's update here."""

LIGHT = {**OMNIVORE, "compute_s": {BATCH: 1.6e12 / (0.52 * 4.89e12)}, "update_s": 0.01}
"""Machines with four K520 (Figures 3, 9) and a server that only adds gradients: its link takes most of its time."""

LENET_BATCH = 64
POWERS = (1, 2, 4, 8, 16, 32)


def run(*, quick: bool) -> Report:
    """Simulates 32 machines, then measures a few ranks here."""
    heads = ["g", "k", "μ", "t_compute, ms", "t_server, ms", "t_busy, ms", "HE(g), ms", "found, ms", "found / HE"]
    report = Report(["", *heads, "P_HE", "⟨σ⟩"])
    off: dict[str, list[float]] = {"simulated": [], "measured": []}
    for name, table in (("FC at the server", OMNIVORE), ("light server", LIGHT)):
        found = [simulated(table, groups, 100 if quick else 2000) for groups in ((1, 4) if quick else POWERS)]
        off["simulated"] += _add(report, f"simulated, {name}", MACHINES, BATCH, found)
    for learners in (2,) if quick else (2, 4):
        found = measured(learners, turns=1 if quick else 3, steps=20 if quick else 150)
        apart = _add(report, f"ranks, LeNet, {cores()} cores", learners, LENET_BATCH, found)
        off["measured"] += apart if learners <= cores() else []
    report.notes = [
        "constant: λ and b, the batch of a group (an iteration is one group's gradient); μ = b/k",
        "found: simulated, or on real ranks; P_HE: against g = 1; HE(g) = max(t_busy, (t_compute(k) + t_server)/g)",
        "ranks: t_compute is a plain torch loop at μ, times learners per core, and what a run of one group of k takes",
        "beyond that at μ = 1; t_server is what a run of one learner and a server takes beyond it at μ = 1",
    ]
    report.goals = [
        Goal("simulated within 15 % of HE(g)", off["simulated"], at_most=0.15),
        Goal("measured within 15 % of HE(g), a core for each learner", off["measured"], at_most=0.15),
    ]
    return report


class Found(NamedTuple):
    """Figures of one number of groups.

    Attributes:
        groups: g, the number of groups.
        times: times of Omnivore's model.
        iteration_s: seconds per iteration.
        staleness: mean staleness.
    """

    groups: int
    times: Times
    iteration_s: Spread
    staleness: float


def _add(report: Report, name: str, learners: int, batch: int, found: Sequence[Found]) -> list[float]:
    """Adds a row for each number of groups, of which the first is 1; returns how far each time is from the model."""
    off = []
    for groups, times, seconds, staleness in found:
        ratio = seconds.median / times.iteration_s(groups)
        off.append(abs(ratio - 1))
        ms = (round(1e3 * each, 2) for each in (*times, times.iteration_s(groups)))
        shown = Spread(*(1e3 * each for each in seconds)) if seconds.low < seconds.high else 1e3 * seconds.median
        against = seconds.median / found[0].iteration_s.median
        k = learners // groups
        cells = (groups, k, batch // k, *ms, shown, round(ratio, 3), round(against, 3), round(staleness, 2))
        report.rows.append((f"{name}, λ = {learners}", *cells))
    return off


# In virtual time.


def simulated(table: dict[str, Any], groups: int, updates: int = 2000) -> Found:
    """Simulates 32 machines in this number of groups."""
    job = _job(MACHINES, groups, BATCH, simulation=table)
    found = predict(job, updates=updates, known=Outline(BATCH, CONVOLUTIONS_BYTES))  # an epoch of one batch
    return Found(groups, model(job, CONVOLUTIONS_BYTES), spread([found.epoch_s]), found.mean_staleness)


def model(job: Job, size_bytes: int) -> Times:
    """The times that the costs of a job with compute groups imply."""
    table, plan = job.simulation, job.plan(nodes_of(job))
    charges = CostModel(table, plan, job.training.minibatch_size, size_bytes=tensor_bytes(size_bytes))
    return unmerged(charges, size_bytes)


# On real ranks.


def measured(learners: int, *, turns: int, steps: int) -> list[Found]:
    """Measures each possible number of groups, in turns."""
    numbers = [g for g in (1, 2, 4) if g <= learners]
    sizes = [k for k in (2, 4) if k <= learners]
    found: dict[int, list[float]] = {g: [] for g in numbers}
    alone: dict[int, list[float]] = {}
    grouped: dict[int, list[float]] = {k: [] for k in sizes}
    served: list[float] = []
    staleness = dict.fromkeys(numbers, 0.0)
    with torch_as_in(_job(learners, 1, LENET_BATCH)):
        for _ in range(turns):
            for g in numbers:
                seconds, staleness[g] = _measure(_job(learners, g, LENET_BATCH), steps)
                found[g].append(seconds)
            for size in {1, *(LENET_BATCH * g // learners for g in numbers)}:
                alone.setdefault(size, []).append(PlainLoop(size).run(steps)[1])
            for k in sizes:
                grouped[k].append(_measure(_job(k, 1, k), steps)[0])
            served.append(_measure(_job(1, 1, 1).with_(topology={"name": "base", "options": {}}), steps)[0])
    compute = {size: spread(values).median for size, values in alone.items()}
    group_s = {1: 0.0, **{k: max(0.0, spread(values).median - compute[1]) for k, values in grouped.items()}}
    server_s = max(0.0, spread(served).median - compute[1])
    crowd = max(1.0, learners / cores())  # learners that share a core
    rows = []
    for g in numbers:
        k = learners // g
        compute_s = crowd * compute[LENET_BATCH // k] + group_s[k]
        times = Times(compute_s, server_s, server_s) if g > 1 else Times(compute_s, 0.0, 0.0)
        rows.append(Found(g, times, spread(found[g]), staleness[g]))
    return rows


def _measure(job: Job, steps: int) -> tuple[float, float]:
    """Seconds per update and mean staleness of a run of so many updates on real ranks."""
    batch = job.training.minibatch_size * job.learners // job.plan().workers
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        write_images(Path(name), steps * batch)
        job = job.with_(data={"path": name})
        with train(job, output=Path(name) / "run.h5", progress="quiet") as results:
            _, samples_per_s = steady_rate(results.updates)
            return batch / samples_per_s, float(results.gradients["staleness"].mean())


def _job(
    learners: int, groups: int, batch: int, *, name: str = "groups", simulation: dict[str, Any] | None = None
) -> Job:
    """Groups of k learners whose μ is b/k."""
    return Job(
        name=name,
        model={"name": "lenet"},
        data={"name": "idx"},
        training={"epochs": 1, "minibatch_size": batch * groups // learners, "evaluate": False},
        protocol={"name": "async", "modulation": "none"},
        topology={"name": "groups", "options": {"groups": groups}},
        cluster={"learners": learners, "threads_per_rank": 1, "device": "cpu"},
        simulation=simulation or {},
    )
