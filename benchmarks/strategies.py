"""Strategies of `rudra tune` on recorded curves of real training: they ask for probes, and the curves answer.

The curves belong to the oracle of `rudra bench tune`. Each case has its target and two easier ones.
"""

import math
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.oracle import CLUSTERS, RECORDED, TASKS, Oracle, job_of
from benchmarks.shared import check_only, chosen
from rudra.benchmark_report import Goal, Report
from rudra.errors import ConfigError
from rudra.tuning import tune
from rudra.tuning.ruler import crossed
from rudra.tuning.state import SearchState, Strategy, key_of
from rudra.tuning.strategies import shipped

BUDGET, UNLIMITED, NEAR = 8.0, 1e6, 1.05
EASIER = (1.0, 1.06, 1.12)
"""Factors on the loss of a target."""

EARLY = (1, 2, 3)
"""Lengths of probes in epochs, for the correlation of predicted and true times."""


class Found(NamedTuple):
    """What a strategy found on a case.

    Attributes:
        late: True time of its best estimate when the budget ended, over the best time.
        until: Reference runs of samples until the best estimate stayed within 5 % of the best time. Infinity: never.
    """

    late: float
    until: float


def run(*, quick: bool, only: Collection[str] = ()) -> Report:
    """Compares strategies. It trains nothing.

    Args:
        quick: Only the first case.
        only: Names of tasks, clusters and strategies.

    Raises:
        ConfigError: No curves are recorded, or a word is unknown.
    """
    valid = [name for name in shipped() if name != "grid"]
    check_only("strategies", only, [*TASKS, *CLUSTERS, *valid])
    names = [(task, cluster) for task in chosen(only, TASKS) for cluster in chosen(only, CLUSTERS)]
    there = [(task, cluster) for task, cluster in names if _path(task, cluster).is_file()]
    if not there:
        raise ConfigError(f"bench strategies: no curves in {RECORDED}; rudra bench tune --keep DIR records them")
    cases = [Case(task, cluster, easier) for task, cluster in there[: 1 if quick else None] for easier in EASIER]
    report = Report(["strategy", "times as late (median)", "worst", "runs until 5 % (median)", "never"])
    for name in chosen(only, valid):
        found = [case.searched(shipped()[name]) for case in cases]
        late, until = zip(*found, strict=True)
        report.rows.append((name, median(late), max(late), median(until), sum(map(math.isinf, until))))
        if name == tune.DEFAULT:
            report.goals.append(
                Goal(f"{name} is within 5 % of the best after <= 4 reference runs", [median(until)], at_most=4.0)
            )
    for epochs in EARLY:
        values = [value for case in cases if not math.isnan(value := case.correlation(epochs))]
        report.notes.append(
            f"rank correlation of predicted and true times, probes of {epochs} epochs: median {median(values):.2f}, "
            f"{min(values):.2f} to {max(values):.2f}"
        )
    report.notes += [
        f"{len(cases)} cases: {', '.join(f'{task} {cluster}' for task, cluster in there)}, with losses {EASIER} x the "
        "target of the recording",
        "runs until 5 %: reference runs of samples until the best estimate stays within 5 % of the best point",
    ]
    return report


def _path(task: str, cluster: str) -> Path:
    return RECORDED / f"{task}-{cluster}.jsonl"


class Case:
    """A recorded oracle with a target.

    Args:
        task: Name of the task.
        cluster: Name of the cluster.
        easier: Factor on the loss of the target.
    """

    def __init__(self, task: str, cluster: str, easier: float) -> None:
        self._oracle = Oracle.read(_path(task, cluster), job_of(task, cluster))
        self._loss = easier * TASKS[task].loss
        self._end = self._oracle.begun(self._loss, UNLIMITED)
        for told in self._oracle.curves.values():
            self._end.tell(*told)
        self._truth = {key_of(e.settings): e.time_s for e in self._end.estimates() if e.certain}

    def searched(self, strategy: Strategy) -> Found:
        """Lets a strategy search."""
        state, seen = self._oracle.begun(self._loss, BUDGET), [(0.0, math.inf)]
        while (asked := strategy(state)) and not any(probe.seed for probe in asked):
            for probe in asked:
                state.tell(probe, self._oracle.outcome(probe))
            if math.isfinite(state.reference_samples):
                seen.append((state.spent / state.one_run, self._lateness(state)))
        far = max(place for place, (_, late) in enumerate(seen) if late > NEAR)
        return Found(seen[-1][1], seen[far + 1][0] if far + 1 < len(seen) else math.inf)

    def _lateness(self, state: SearchState) -> float:
        """Returns the true time of the best estimate, over the best time."""
        return self._truth.get(key_of(state.estimates()[0].settings), math.inf) / min(self._truth.values())

    def correlation(self, epochs: int) -> float:
        """Returns the rank correlation of the times that probes of some epochs predict, and the true ones."""
        state, pairs = self._end, []
        for probe in state.probes.values():
            true_s, marks = self._truth.get(probe.settings), state.marks(probe)
            if probe.origin and true_s is not None and len(marks) > epochs:
                samples = crossed(marks[: epochs + 1], state.target.value, at_least=False)
                if not math.isfinite(samples):
                    worth = state.ruler.worth(marks[: epochs + 1], state.reference_samples)
                    samples = state.reference_samples / max(worth, 1e-9)
                pairs.append((samples / state.rate(probe.by_key), true_s))
        if len(pairs) < 3:
            return math.nan
        ranks = np.array([np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True)])
        return float(np.asarray(np.corrcoef(ranks))[0, 1])
