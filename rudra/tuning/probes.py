"""Probes: short runs that a search trains to learn what a sample is worth under some settings.

A probe is prolonged, never repeated: its checkpoint stays until the search ends. Its name is a digest of everything
that decides its weights, so a search that continues finds it again.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rudra import api
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.log import only_errors
from rudra.results import checkpoint
from rudra.tuning.ruler import Mark
from rudra.tuning.space import Settings, with_settings

HELD_OUT = 0.1
"""Fraction of the training set that judges probes, if the job has no validation split."""

HORIZON = 0.25
"""Epochs over which the average of the weights that judges a probe reaches back."""


class Probe(NamedTuple):
    """A run to train.

    Attributes:
        settings: Settings of the job, by key, as sorted pairs of key and JSON.
        origin: Checkpoint that it begins with: `Probe.end` of another probe. Empty: the initial weights.
        epochs: Number of epochs to train from there.
        seed: Added to the seed of the job.
    """

    settings: tuple[tuple[str, str], ...]
    origin: str
    epochs: int
    seed: int = 0

    @classmethod
    def of(cls, settings: Settings, origin: str, epochs: int, seed: int = 0) -> "Probe":
        """Makes a probe from settings by key."""
        return cls(tuple(sorted((key, json.dumps(value)) for key, value in settings.items())), origin, epochs, seed)

    @property
    def by_key(self) -> dict[str, Any]:
        """Settings by key."""
        return {key: json.loads(value) for key, value in self.settings}

    @property
    def name(self) -> str:
        """Digest of everything but the length."""
        text = json.dumps([self.settings, self.origin, self.seed])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def begins_at(self) -> int:
        """Number of epochs before it."""
        return int(self.origin.rpartition("-")[2] or 0)

    @property
    def end(self) -> str:
        """Name of its checkpoint at its present length."""
        return f"{self.name}-{self.begins_at + self.epochs}"


class Outcome(NamedTuple):
    """Result of a probe.

    Attributes:
        marks: Its evaluations, by epoch, without the one at its beginning.
        failed: Why it ended early, such as a loss that is not finite. Empty: it did not.
    """

    marks: tuple[Mark, ...]
    failed: str = ""


Train = Callable[[Probe, Outcome | None], Outcome]
"""Trains a probe, from the end of its previous outcome, and returns the new one."""


def searched(job: Job, target: Target) -> Job:
    """Returns the job that probes vary: with a validation split, and an average of the weights over time.

    Args:
        job: The user's job.
        target: Target on the validation split.
    """
    split = job.data.validation_split or HELD_OUT
    return job.without_tests().with_(
        hooks=(),
        changes=(),
        data={"validation_split": split, "test_limit": 64},
        training={"evaluate": True, "target": target.text, "target_window": 1, "stop_at_target": False},
        results={"keep_checkpoints": "1 epochs", "checkpoint_every": "never", "keep_every": None},
        optimizer={"schedule": "step", "milestones": (), "schedule_options": {}, "schedule_every": "epoch"},
    )


class Trainer:
    """Trains probes in virtual time.

    Args:
        job: Job as `searched` returns it, with its costs.
        target: Target of the search.
        directory: Directory of the checkpoints of probes.
        training_samples: Number of samples in an epoch.
    """

    def __init__(self, job: Job, target: Target, directory: Path, training_samples: int) -> None:
        self._job, self._target, self._directory, self._samples = job, target, directory, training_samples

    def job_of(self, settings: Mapping[str, Any]) -> Job:
        """Returns the job of a probe."""
        job = with_settings(self._job, settings)
        share = min(1.0, job.gradients_per_update(job.plan()) * job.training.minibatch_size / (HORIZON * self._samples))
        return job.with_(optimizer={"average": {"rate": share}}) if not job.optimizer.average.given else job

    def train(self, probe: Probe, before: Outcome | None) -> Outcome:
        """Trains a probe up to its length. See `Train`."""
        marks = before.marks if before else ()
        stem = probe._replace(epochs=len(marks)).end if marks else probe.origin
        begin = self._directory / f"{stem}.ckpt" if stem else None
        job = self.job_of(probe.by_key)
        total = probe.begins_at + probe.epochs
        job = job.with_(training={"epochs": total, "seed": job.training.seed + probe.seed})
        output = self._directory / f"part-{probe.end}.h5"
        carry: api.Carry = "state" if begin else "weights"
        try:
            with (
                only_errors(),
                api.simulate(job, output=output, force=True, from_=begin, carry=carry, progress="quiet") as results,
            ):
                epochs, metrics = results.epochs, results.metrics
        except RunError as error:
            return Outcome(marks, str(error))
        for kept in self._directory.glob(f"{output.stem}-*.ckpt"):
            kept.rename(self._directory / f"{probe.end}.ckpt") if kept.stem.endswith(f"-{total}") else kept.unlink()
        base = marks[-1] if marks else Mark(0, 0.0, 0.0, 0.0)
        start_samples, start_s = (0, 0.0) if begin is None else self._position(begin)
        for row in epochs:
            scores = {name: float(row[f"validation_{name}"]) for name in ("loss", "error")}
            mine = metrics[(metrics["epoch"] == row["epoch"]) & (metrics["split"] == b"validation")]
            scores |= {metric["name"].decode(): float(metric["value"]) for metric in mine}
            value = self._target.of(scores)
            samples, time_s = int(row["samples"]) - start_samples, float(row["time_s"]) - start_s
            value = math.nan if value is None else value
            marks = (*marks, Mark(base.samples + samples, scores["loss"], value, base.time_s + time_s))
        output.unlink()
        return Outcome(marks)

    def clear(self) -> None:
        """Removes the checkpoints of all probes."""
        for path in self._directory.glob("*.ckpt"):
            path.unlink()

    @staticmethod
    def _position(path: Path) -> tuple[int, float]:
        position = checkpoint.read(path)[0].position
        return position.samples, position.time_s
