"""Oracle of `rudra tune`: every point with every rate and momentum, trained to the target in virtual time.

The curves of an oracle are kept in small files, so that strategies can be compared without training.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import data_directory
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.tuning.journal import outcomes
from rudra.tuning.prices import Price, dominated
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.rounds import MOMENTA, MOMENTUM, RATE
from rudra.tuning.space import Candidate, untimed, with_settings
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

FIXED: dict[str, Sequence[Any]] = {key: [None] for key in ("optimizer.average.window", "averaging.outer.momentum")}
"""Keys that no strategy may vary, because no curve has another value."""

LEARNERS, EPOCHS = 32, 30


def job_of(task: str, cluster: str, *, quick: bool = False) -> Job:
    """Returns the job as given: hardsync with a usual rate and momentum. The data may be missing."""
    about = TASKS[task]
    limit = {"train_limit": 1200, "test_limit": 100} if quick else {}
    return Job(
        name=f"{task}-{cluster}",
        model={"name": "mlp"} if quick else about.tables["model"],
        data={**about.tables["data"], "path": str(data_directory() / task), **limit},
        protocol={"name": "hardsync"},
        optimizer={"learning_rate": about.learning_rate, "momentum": 0.9},
        training={"epochs": 8 if quick else EPOCHS, "minibatch_size": 8},
        cluster={"learners": 2 if quick else LEARNERS, "threads_per_rank": 1},
        simulation={**COSTS, **CLUSTERS[cluster], "compute_s": about.compute_s, "batching": "big-batch"},
    )


class Oracle:
    """Recorded curves of an oracle, with the prices of its points.

    Args:
        training_samples: Samples in an epoch.
        prices: Prices. The first one belongs to the job as given.
        curves: Probes with their outcomes, each at its greatest length.
    """

    def __init__(self, training_samples: int, prices: Sequence[Price], curves: Iterable[tuple[Probe, Outcome]]) -> None:
        self._training_samples, self._prices = training_samples, prices
        self.curves = {probe.name: (probe, outcome) for probe, outcome in curves}

    def begun(self, loss: float, budget: float) -> SearchState:
        """Returns the state of a search with the rates and momenta of the oracle."""
        rates = sorted({probe.by_key[RATE] for probe, _ in self.curves.values() if probe.settings})
        return SearchState(
            self._prices[0].point.job,
            Target("validation", "loss", at_least=False, value=loss),
            self._prices,
            untimed=untimed({}),
            training_samples=self._training_samples,
            budget=budget,
            longest=EPOCHS,
            given={**SPACE, **FIXED, RATE: rates, MOMENTUM: MOMENTA},
        )

    def outcome(self, probe: Probe) -> Outcome:
        """Returns what a probe measures at its length. If no curve is as long, it has failed."""
        _, found = self.curves.get(probe.name, (probe, Outcome(())))
        short = "" if len(found.marks) >= probe.epochs else found.failed or "no curve is as long"
        return found._replace(marks=found.marks[: probe.epochs], failed=short)

    def write(self, path: Path) -> None:
        """Writes a line about all, a line for each price, and a line for each curve."""
        lines: list[dict[str, Any]] = [{"training samples": self._training_samples}]
        for price in self._prices:
            about = {"samples/s": price.samples_per_s, "staleness": price.staleness, "bound": price.bound}
            lines.append({"point": price.point.settings, **about})
        for probe, (marks, failed, noise) in self.curves.values():
            about = {"settings": probe.by_key, "origin": probe.origin, "epochs": probe.epochs, "seed": probe.seed}
            points = [[mark.samples, float(f"{mark.loss:.5g}"), float(f"{mark.time_s:.6g}")] for mark in marks]
            lines.append({**about, "failed": failed, "noise": noise, "samples, loss, seconds": points})
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    @classmethod
    def read(cls, path: Path, job: Job) -> "Oracle":
        """Reads the curves of a job's oracle."""
        first, *lines = map(json.loads, path.read_text().splitlines())
        prices, entries = [], []
        for line in lines:
            if (settings := line.get("point")) is not None:
                point = Candidate(settings, with_settings(job, settings))
                prices.append(Price(point, line["samples/s"], line["staleness"], line["bound"]))
            else:
                marks = [(samples, loss, loss, s) for samples, loss, s in line["samples, loss, seconds"]]
                entries.append({"kind": "probe", "marks": marks, **line})
        return cls(first["training samples"], dominated(prices), outcomes(entries))
