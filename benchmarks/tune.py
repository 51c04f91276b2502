"""`rudra tune` against an oracle: every point with every rate and momentum, trained to the target, in virtual time.

The weights of synchronous points are trained once for all clusters. Every strategy searches with the same probes, which
stay in a directory, so an interrupted benchmark continues. Times are of virtual time: the machine may be busy.
"""

import math
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.shared import check_only, chosen, data_directory
from rudra.benchmark_report import Goal, Report
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.tuning import tune
from rudra.tuning.answer import Verdict
from rudra.tuning.journal import NAME, outcomes, read
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.state import SearchState, key_of


class Task(NamedTuple):
    """A job to tune.

    Attributes:
        tables: Tables of the job.
        target: Target of the search.
        learning_rate: Learning rate of the job as given.
        compute_s: Mini-batch size -> seconds of a gradient, as measured on one core.
    """

    tables: Mapping[str, Any]
    target: str
    learning_rate: float
    compute_s: Mapping[int, float]


TASKS = {
    "fashion-mnist": Task(
        {"data": {"name": "idx", "train_limit": 12_000}, "model": {"name": "lenet"}},
        "loss <= 0.34",
        0.02,
        {1: 0.0028, 2: 0.0031, 4: 0.0040, 8: 0.0056, 16: 0.0088, 32: 0.0145, 64: 0.026},
    ),
    "cifar-10": Task(
        {"data": {"name": "cifar10", "train_limit": 10_000}, "model": {"name": "cifar10_full"}},
        "loss <= 1.5",
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

STRATEGIES = ("guided", "halving", "first-epoch", "omnivore")
LEARNERS, EPOCHS, BUDGET, UNLIMITED = 32, 30, 8.0, 1e6
NEAR, EARLY = 1.05, 2


def run(*, quick: bool, only: Collection[str] = (), keep: Path | None = None) -> Report:
    """Trains the oracle, and lets every strategy search.

    Args:
        quick: One cluster and one strategy, with few samples.
        only: Names of tasks, clusters and strategies.
        keep: Directory of the searches. A probe that is there is not repeated.

    Raises:
        ConfigError: The data is missing, or a word is unknown.
    """
    check_only("tune", only, [*TASKS, *CLUSTERS, *STRATEGIES])
    columns = ("s to target", "oracle's", "times as late", "runs searched", "runs until 5 %", "rank correlation")
    report = Report(["task, cluster: strategy", *columns])
    late: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        for task in ["fashion-mnist"] if quick else chosen(only, TASKS):
            for cluster in ["stragglers"] if quick else chosen(only, CLUSTERS):
                case = _Case(task, cluster, keep or Path(name), quick)
                for strategy in ["guided"] if quick else chosen(only, STRATEGIES):
                    report.rows.append((f"{task}, {cluster}: {strategy}", *(row := case.compared(strategy))))
                    if strategy == tune.DEFAULT:
                        late.append(row[2])
    report.notes = [
        f"λ = {LEARNERS}, μ = 8; times are virtual, medians over fresh seeds; runs: reference runs of samples",
        "runs until 5 %: until the best estimate is within 5 % of the oracle's best from the common checkpoint",
        "rank correlation: predicted times of probes of two epochs, and times of the oracle",
    ]
    but_one = sorted(late)[-2:][:1] if len(late) > 1 else late
    report.goals = [
        Goal(f"{tune.DEFAULT} <= 1.15 times as late as the oracle, in all cases but one", but_one, at_most=1.15)
    ]
    return report


class _Case:
    """A task on a cluster, with its oracle."""

    def __init__(self, task: str, cluster: str, keep: Path, quick: bool) -> None:
        self._job, self._place = _job(task, cluster, quick), keep / task
        self._cluster = cluster
        self._target = "loss <= 0.5" if quick else TASKS[task].target
        answer, self._state, _ = self._search("grid", UNLIMITED)
        if answer.winner is None:
            raise RunError(f"bench tune: {next(answer.lines())}")
        self._best_s = answer.winner.time_s
        self._truth = {key_of(e.settings): e.time_s for e in self._state.estimates() if e.certain}

    def compared(self, strategy: str) -> tuple[float, float, float, float, float, float]:
        """Returns a row of the table, without its name."""
        answer, _, probes = self._search(strategy, BUDGET)
        time_s = answer.winner.time_s if answer.winner else math.inf
        until = self._runs_until(probes)
        return time_s, self._best_s, time_s / self._best_s, answer.spent, until, self._rank_correlation()

    def _search(self, strategy: str, budget: float) -> tuple[Verdict, SearchState, list[tuple[Probe, Outcome]]]:
        """Searches, or continues a search. Returns its answer, its state, and its probes in the order of training."""
        directory = self._place / self._cluster / strategy
        about: dict[str, Any] = {"target": self._target, "given": SPACE}
        store = self._place / "probes"
        answer = tune.tune(
            self._job,
            strategy=strategy,
            budget=budget,
            output=directory,
            store=store,
            quiet=not sys.stderr.isatty(),
            **about,
        )
        state = tune.plan(self._job, quiet=True, **about).begun(budget, SPACE)
        entries, _ = read(directory / NAME)
        probes = [*outcomes(entries)]
        for told in probes:
            state.tell(*told)
        return answer, state, probes

    def _runs_until(self, probes: Sequence[tuple[Probe, Outcome]]) -> float:
        """Returns the reference runs that a search has trained until its best estimate is nearly the oracle's best."""
        state = tune.plan(self._job, quiet=True, target=self._target, given=SPACE).begun(BUDGET, SPACE)
        best_s = min(self._truth.values())
        for told in probes:
            state.tell(*told)
            if state.reference is None or not math.isfinite(state.reference_samples):
                continue
            first = state.estimates()[0]
            true_s = self._truth.get(key_of(first.settings), first.time_s if first.certain else math.inf)
            if true_s <= NEAR * best_s:
                return state.spent / state.one_run
        return math.nan

    def _rank_correlation(self) -> float:
        """Returns the rank correlation of predictions after two epochs, and times."""
        pairs = []
        for probe in self._state.probes.values():
            time_s, marks = self._truth.get(probe.settings), self._state.marks(probe)
            if probe.origin and time_s is not None and len(marks) > EARLY:
                worth = self._state.ruler.worth(marks[: EARLY + 1])
                predicted = self._state.reference_samples / (max(worth, 1e-9) * self._state.rate(probe.by_key))
                pairs.append((predicted, time_s))
        if len(pairs) < 2:
            return math.nan
        predicted_s, true_s = (np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True))
        return float(np.corrcoef(predicted_s, true_s)[0, 1])


def _job(task: str, cluster: str, quick: bool) -> Job:
    """Returns the job as given: hardsync with a usual rate and momentum.

    Raises:
        ConfigError: The data is missing.
    """
    path = data_directory() / task
    if not path.is_dir():
        raise ConfigError(f"bench tune: {task} is not in {path}; RUDRA_DATA names the directory that it is in")
    about = TASKS[task]
    data = {**about.tables["data"], "path": str(path)} | ({"train_limit": 600} if quick else {})
    return Job(
        name=f"{task}-{cluster}",
        model=about.tables["model"],
        data=data,
        protocol={"name": "hardsync"},
        optimizer={"learning_rate": about.learning_rate, "momentum": 0.9},
        training={"epochs": EPOCHS, "minibatch_size": 8},
        cluster={"learners": 4 if quick else LEARNERS, "threads_per_rank": 1},
        simulation={**COSTS, **CLUSTERS[cluster], "compute_s": about.compute_s, "batching": "big-batch"},
    )
