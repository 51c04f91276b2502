"""Predictions for changes of a recorded run, with the costs of its rows.

A prediction leaves out what its cost model does not know. So the run itself is predicted first. If its learners need
longer for an exchange with the server than predicted, the server needs longer for a message. The times of all changes
are then scaled by the run's measured time divided by its predicted time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rudra.core.messages import Rows
from rudra.core.wire import tail_bytes
from rudra.job.job import Job
from rudra.prepare.cost_files import costs_of_run
from rudra.prepare.recorded_job import recorded_job
from rudra.prepare.run_costs import WARM, RunCosts
from rudra.prepare.run_network import ROWS
from rudra.results.reader import Results, open_results
from rudra.simulation.predict import Outline, Prediction, predict, steady_rate

_EXCHANGE = ("push_s", "wait_s", "pull_s")
_KEPT = 0.98  # share of the exchanges that counts, the shortest first
_CLOSE, _ROUNDS = 0.02, 4


@dataclass(frozen=True)
class FittedRun:
    """Run that predictions begin with.

    Attributes:
        path: Result file.
        base: Its job, before it is resolved.
        costs: Costs of its rows.
        outline: Size of its data and model.
        epoch_s: Measured time of an epoch, at the steady rate of the run.
        itself: Prediction for the run itself, after the last change of its job, with the predicted time.
        message_s: Server's time for a message by which the run's learners need as long for an exchange as measured.
            None: as in `costs`.
        trust: See `recorded_job`.
    """

    path: Path
    base: Job
    costs: RunCosts
    outline: Outline
    epoch_s: float
    itself: Prediction
    message_s: float | None
    trust: bool

    @classmethod
    def read(cls, path: Path, *, trust: bool = False) -> "FittedRun":
        """Reads a run, fits its costs and predicts the run itself.

        Raises:
            ConfigError: The run has too few rows, or its job cannot be predicted.
            ResultsError: The file cannot be read.
        """
        with open_results(path) as results:
            job = recorded_job(results, trust=trust)
            outline = _outline(results)
            _, per_s = steady_rate(_after_changes(results, job))
            exchange_s = _exchange_s(results)
        costs, last = costs_of_run(path, job), job.after(len(job.changes))
        itself, message_s = predict(last, known=outline), None
        if exchange_s is not None:
            itself, message_s = _with_exchange(last, itself, outline, exchange_s)
        epoch_s = outline.training_samples / per_s
        return cls(path, _paying(job, message_s), costs, outline, epoch_s, itself, message_s, trust)

    @property
    def job(self) -> Job:
        """Job of the run, resolved."""
        return self.itself.job

    @property
    def ratio(self) -> float:
        """Measured time of an epoch divided by its predicted time."""
        return self.epoch_s / self.itself.epoch_s

    def written(self, overrides: Sequence[str] = ()) -> Job:
        """Returns the job of the run with changes.

        Args:
            overrides: Changes, each a text `table.key=value`.
        """
        with open_results(self.path) as results:
            job = recorded_job(results, overrides, trust=self.trust)
        return _paying(job, self.message_s if job.simulation.costs == self.base.simulation.costs else None)

    def predict(self, job: Job, *, samples: int | None = None, updates: int | None = None) -> Prediction:
        """Predicts a changed job of the run.

        Args:
            job: Result of `written`, or a part of it.
            samples: Number of samples per epoch, by default as in the run.
            updates: Number of updates to simulate, by default as many as a steady rate needs.

        Raises:
            RudraError: The job has a mistake.
        """
        # Finding other sizes may run code that the job names.
        same = _sized_by(job) == _sized_by(self.base)
        known = self.outline if same else None
        found = predict(job, samples=samples, updates=updates, known=known)
        per_s = found.samples_per_s / self.ratio
        return replace(
            found, epoch_s=found.epoch_s * self.ratio, bound_s=found.bound_s * self.ratio, samples_per_s=per_s
        )

    def as_text(self) -> str:
        """Returns two lines: the sources of the costs, and how well they describe the run."""
        off = f"{self.itself.epoch_s:.4g} s per epoch of the run itself, which took {self.epoch_s:.4g} s"
        own = f"With {self.message_s * 1e3:.2g} ms for a message of the server, they" if self.message_s else "They"
        return f"Costs {self.costs.as_text()}.\n{own} predict {off}; times are scaled by {self.ratio:.3f}."


def _after_changes(results: Results, job: Job) -> Rows:
    """Returns the updates after the last change of a run. If there are few, all updates."""
    updates, begins = results.updates, 0
    if job.changes and (number := job.changes[-1].boundary.number):
        ends = results.epochs["timestamp"][:number]
        begins = number if job.changes[-1].boundary.key == "at_update" else int(ends[-1])
    later = updates[updates["timestamp"] > begins]
    return later if len(later) >= ROWS else updates


def _paying(job: Job, message_s: float | None) -> Job:
    """Returns a job with the server's time for a message. Its own key stays."""
    if message_s is None or "message_s" in job.simulation.model_fields_set:
        return job
    return job.with_(simulation={"message_s": message_s})


def _exchange_s(results: Results) -> float | None:
    """Returns the mean time of a learner's exchange with a server. None: the rows do not show it."""
    plan, rows = results.plan(), results.minibatches
    rows = rows[(rows["step"] >= WARM) & (rows["push_s"] > 0)]
    if plan.overlapped or not plan.served or results.attributes.get("early_passes") or not len(rows):
        return None
    taken = np.sort(sum(rows[name] for name in _EXCHANGE))
    return float(taken[: math.ceil(len(taken) * _KEPT)].mean())


def _with_exchange(job: Job, itself: Prediction, known: Outline, measured_s: float) -> tuple[Prediction, float | None]:
    """Returns a prediction whose exchanges take as long as measured, and the server's time for a message in it.

    The time for a message is found by the secant rule.
    """
    found = [(itself.job.simulation.message_s, measured_s - _exchanging_s(itself), itself)]
    message_s = max(0.0, found[0][0] + found[0][1] / 2)  # a push, and a request for weights
    while abs(found[-1][1]) > _CLOSE * measured_s and len(found) <= _ROUNDS:
        itself = predict(_paying(job, message_s), known=known)
        found.append((message_s, measured_s - _exchanging_s(itself), itself))
        (before, then_s, _), (now, now_s, _) = found[-2:]
        if now == before or now_s >= then_s:
            break
        message_s = max(0.0, now + now_s * (now - before) / (then_s - now_s))
    message_s, _, itself = min(found, key=lambda each: abs(each[1]))
    return itself, None if itself is found[0][2] else message_s


def _exchanging_s(found: Prediction) -> float:
    """Returns the predicted mean time of a learner's exchange with a server."""
    cycle_s = found.job.learners * found.job.training.minibatch_size / found.samples_per_s
    return sum(found.shares[name.removesuffix("_s")] for name in _EXCHANGE) * cycle_s


def _sized_by(job: Job) -> tuple[Any, ...]:
    return job.model, job.data, job.task, job.placement


def _outline(results: Results) -> Outline:
    layout = results.layout
    size = sum(entry.size for entry in layout)
    buffers = sum(entry.size for entry in layout if entry.kind != "parameter")
    return Outline(int(results.attributes["training_samples"]), size * 4 + tail_bytes(1), None, buffers)
