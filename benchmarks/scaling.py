"""Time per epoch over the number of learners, up to thousands, for every topology: where each saturates.

The network of Rudra's Table 4 (72 M parameters), μ = 4, 1-softsync, in the virtual time of its cluster.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import IMAGENET
from rudra.findings import Report
from rudra.job.job import Job
from rudra.simulation.predict import Prediction, predict

LEARNERS = [2**i for i in range(2, 13)]
GAIN = 0.1
"""A doubling of λ that shortens an epoch by less than this is beyond saturation."""

LEAF = 4
"""Most learners of a leaf server: as many as there are on a node of the cluster."""

FAN_OUTS = (2, 4, 8, 16)
TOPOLOGIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "base": ("base", {}),
    "adv": ("adv", {}),
    **{f"adv, fan-out {f}": ("adv", {"fan_out": [LEAF, f]}) for f in FAN_OUTS},
    "adv*": ("adv*", {}),
    **{f"adv*, fan-out {f}": ("adv*", {"fan_out": [LEAF, f]}) for f in FAN_OUTS},
}
GROUPS = {"groups of 8": 8, "groups of 64": 64}
ALLREDUCE = "one group (hardsync)"


def run(*, quick: bool) -> Report:
    """Predicts every topology at every λ."""
    learners = [16, 128] if quick else LEARNERS
    columns = ["min/epoch", *(f"λ = {size:,}" for size in learners), "saturates at λ", "overlap", "⟨σ⟩", "bound"]
    report = Report(columns)
    times: dict[str, list[float]] = {}
    for name in (*TOPOLOGIES, *GROUPS, ALLREDUCE):
        found = [_predict(name, size, quick) for size in learners]
        times[name] = [math.nan if p is None else p.epoch_s / 60 for p in found]
        last = next(p for p in reversed(found) if p is not None)
        cells = ["" if p is None else f"{p.epoch_s / 60:.4g}" for p in found]
        details = f"{last.shares['compute']:.1%}", f"{last.mean_staleness:.2f}", last.bound
        report.rows.append((name, *cells, saturation(learners, times[name]), *details))
    for topology in ("adv", "adv*"):
        by_size = zip(*(times[f"{topology}, fan-out {f}"] for f in FAN_OUTS), strict=True)
        fastest = [FAN_OUTS[minutes.index(min(minutes))] for minutes in by_size]
        report.rows.append((f"best fan-out of {topology}", *map(str, fastest), "", "", "", ""))
    report.notes = [
        "72 M parameters, μ = 4, 1-softsync, costs p775; without a fan-out all leaf servers are right below the root",
        f"saturates: beyond this λ a doubling shortens an epoch by less than {GAIN:.0%}; behind it, of the last λ",
    ]
    return report


def saturation(learners: Sequence[int], times: Sequence[float]) -> str:
    """The λ beyond which time per epoch falls by less than `GAIN` per doubling."""
    pairs = zip(learners, times, times[1:], strict=False)
    found = next((size for size, now, then in pairs if then > now * (1 - GAIN)), None)
    return f"> {learners[-1]:,}" if found is None else f"{found:,}"


def _predict(name: str, learners: int, quick: bool) -> Prediction | None:
    """None: there are too few learners for the topology."""
    protocol: dict[str, Any] = {"name": "softsync", "n": 1}
    if name == ALLREDUCE:
        protocol, topology = {"name": "hardsync"}, {"name": "groups", "options": {"groups": 1}}
    elif name in GROUPS:
        if learners < 2 * GROUPS[name]:
            return None
        topology = {"name": "groups", "options": {"groups": learners // GROUPS[name]}}
    else:
        kind, options = TOPOLOGIES[name]
        topology = {"name": kind, "options": dict(options)}
    job = Job(
        model={"name": "alexnet"},
        training={"minibatch_size": 4},
        protocol=protocol,
        topology=topology,
        cluster={"learners": learners},
        simulation={"costs": "p775"},
    )
    updates = 8 if quick else max(8, min(100, 2000 // learners))
    return predict(job, updates=updates, known=IMAGENET)
