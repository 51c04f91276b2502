"""Predictions for changes of a recorded run, with the costs of its rows.

A prediction leaves out what its cost model does not know. So the run itself is predicted first, and the times of all
changes are scaled by its measured time divided by its predicted time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rudra.core.wire import tail_bytes
from rudra.job.job import Job
from rudra.prepare.cost_files import costs_of_run
from rudra.prepare.recorded_job import recorded_job
from rudra.prepare.run_costs import RunCosts
from rudra.results.reader import Results, open_results
from rudra.simulation.predict import Outline, Prediction, predict, steady_rate


@dataclass(frozen=True)
class FittedRun:
    """Run that predictions begin with.

    Attributes:
        path: Result file.
        base: Its job, before it is resolved.
        costs: Costs of its rows.
        outline: Size of its data and model.
        epoch_s: Measured time of an epoch, at the steady rate of the run.
        itself: Prediction for the run itself, with the predicted time.
        trust: See `recorded_job`.
    """

    path: Path
    base: Job
    costs: RunCosts
    outline: Outline
    epoch_s: float
    itself: Prediction
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
            _, per_s = steady_rate(results.updates)
        costs = costs_of_run(path, job)
        itself = predict(job, known=outline)
        return cls(path, job, costs, outline, outline.training_samples / per_s, itself, trust)

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
            return recorded_job(results, overrides, trust=self.trust)

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
        return f"Costs {self.costs.as_text()}.\nThey predict {off}; times are scaled by {self.ratio:.3f}."


def _sized_by(job: Job) -> tuple[Any, ...]:
    return job.model, job.data, job.task, job.placement


def _outline(results: Results) -> Outline:
    layout = results.layout
    size = sum(entry.size for entry in layout)
    buffers = sum(entry.size for entry in layout if entry.kind != "parameter")
    return Outline(int(results.attributes["training_samples"]), size * 4 + tail_bytes(1), None, buffers)
