"""Oracle of `rudra tune`: every point with every rate and momentum, trained to the target in virtual time.

The curves of an oracle are kept in small files, so that strategies can be compared without training.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import data_directory
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.tuning import tune
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.ruler import Mark
from rudra.tuning.state import SearchState

RECORDED = Path(__file__).parent / "oracle_curves"
"""Directory of curves that were recorded: a file for each task and cluster."""


class Task(NamedTuple):
    """A job to tune.

    Attributes:
        tables: Tables of the job.
        loss: Target: this held-out loss or less.
        learning_rate: Learning rate of the job as given.
        compute_s: Mini-batch size -> seconds of a gradient, as measured on one core.
    """

    tables: Mapping[str, Any]
    loss: float
    learning_rate: float
    compute_s: Mapping[int, float]


TASKS = {
    "fashion-mnist": Task(
        {"data": {"name": "idx", "train_limit": 12_000}, "model": {"name": "lenet"}},
        0.325,
        0.02,
        {1: 0.0028, 2: 0.0031, 4: 0.0040, 8: 0.0056, 16: 0.0088, 32: 0.0145, 64: 0.026},
    ),
    "cifar-10": Task(
        {"data": {"name": "cifar10", "train_limit": 10_000}, "model": {"name": "cifar10_full"}},
        1.62,
        0.00632,
        {1: 0.005, 2: 0.006, 4: 0.0085, 8: 0.0135, 16: 0.022, 32: 0.039, 64: 0.075},
    ),
}
COSTS = {"jitter": 0.05, "latency_s": 5e-5, "message_s": 2e-5, "update_s": 2e-4, "copy_s_per_byte": 1e-10}
FAST, SLOW = 1.25e10, 1.25e8
CLUSTERS: dict[str, dict[str, Any]] = {
    "even": {"bandwidth_bytes_per_s": FAST},
    "stragglers": {"bandwidth_bytes_per_s": FAST, "straggler_probability": 0.05, "straggler_factor": 10.0},
    "slow-network": {"bandwidth_bytes_per_s": SLOW},
}
SPACE: dict[str, Sequence[Any]] = {
    "protocol.name": ["hardsync", "sma", "async", "softsync"],
    "topology.name": ["base", "replicas"],
    "protocol.n": [4],
    "averaging.period": [1],
    "training.minibatch_size": [8],
    "cluster.learners_per_rank": [1],
}
"""Four points, with three rates and four momenta each: 48 settings, half of them synchronous."""

LEARNERS, EPOCHS = 32, 30


def job_of(task: str, cluster: str, *, quick: bool = False) -> Job:
    """Returns the job as given: hardsync with a usual rate and momentum. The data may be missing."""
    about = TASKS[task]
    limit = {"train_limit": 600} if quick else {}
    return Job(
        name=f"{task}-{cluster}",
        model=about.tables["model"],
        data={**about.tables["data"], "path": str(data_directory() / task), **limit},
        protocol={"name": "hardsync"},
        optimizer={"learning_rate": about.learning_rate, "momentum": 0.9},
        training={"epochs": EPOCHS, "minibatch_size": 8},
        cluster={"learners": 4 if quick else LEARNERS, "threads_per_rank": 1},
        simulation={**COSTS, **CLUSTERS[cluster], "compute_s": about.compute_s, "batching": "big-batch"},
    )


def begun(job: Job, loss: float, budget: float, space: Mapping[str, Sequence[Any]]) -> SearchState:
    """Returns the state of a search that begins."""
    plan = tune.plan(job, target=f"loss <= {loss:g}", given=space, quiet=True)
    return plan.begun(budget, space)


class Curves:
    """Recorded curves of an oracle.

    Args:
        probes: Probes with their outcomes, each at its greatest length.
    """

    def __init__(self, probes: Mapping[Probe, Outcome]) -> None:
        self._by_name = {probe.name: (probe, outcome) for probe, outcome in probes.items()}

    def __iter__(self) -> Iterator[tuple[Probe, Outcome]]:
        return iter(self._by_name.values())

    def outcome(self, probe: Probe) -> Outcome:
        """Returns what a probe measures at its length. If no curve is as long, it has failed."""
        _, found = self._by_name.get(probe.name, (probe, Outcome(())))
        short = "" if len(found.marks) >= probe.epochs else found.failed or "no curve is as long"
        return found._replace(marks=found.marks[: probe.epochs], failed=short)

    def write(self, path: Path) -> None:
        """Writes the curves: a line for each."""
        lines = []
        for probe, (marks, failed, noise) in self:
            about = {"settings": probe.by_key, "origin": probe.origin, "epochs": probe.epochs, "seed": probe.seed}
            points = [[mark.samples, float(f"{mark.loss:.5g}"), float(f"{mark.time_s:.6g}")] for mark in marks]
            lines.append(json.dumps({**about, "failed": failed, "noise": noise, "samples, loss, seconds": points}))
        path.write_text("\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Curves":
        """Reads curves.

        Raises:
            ConfigError: There are none.
        """
        if not path.is_file():
            raise ConfigError(f"{path}: no recorded curves; rudra bench tune --keep DIR records them")
        probes = {}
        for line in path.read_text().splitlines():
            found = json.loads(line)
            marks = tuple(Mark(samples, loss, loss, s) for samples, loss, s in found["samples, loss, seconds"])
            noise = ProbeNoise(*found["noise"]) if found["noise"] else None
            probe = Probe.of(found["settings"], found["origin"], found["epochs"], found["seed"])
            probes[probe] = Outcome(marks, found["failed"], noise)
        return cls(probes)
