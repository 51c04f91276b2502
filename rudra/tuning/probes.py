"""Probes: short runs that a search trains to learn what a sample is worth under some settings.

A probe is prolonged, never repeated. Its name is a digest of its settings, its beginning and its seed, so a search that
continues finds it again.
"""

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from rudra.job.job import Job
from rudra.job.target import Target
from rudra.tuning.ruler import Mark
from rudra.tuning.space import Settings

HELD_OUT = 0.1
"""Fraction of the training set that judges probes, if the job has no validation split."""


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
        return cls(tuple(sorted((key, _encoded(value)) for key, value in settings.items())), origin, epochs, seed)

    @property
    def by_key(self) -> dict[str, Any]:
        """Settings by key."""
        return {key: _decoded(value) for key, value in self.settings}

    @property
    def name(self) -> str:
        """Digest of everything but the length."""
        return _digest(self.settings, self.origin, self.seed)

    @property
    def begins_at(self) -> int:
        """Number of epochs before it."""
        return int(self.origin.rpartition("-")[2] or 0)

    @property
    def end(self) -> str:
        """Name of its checkpoint at its present length."""
        return f"{self.name}-{self.begins_at + self.epochs}"


def _encoded(value: Any) -> str:
    """Returns a value as JSON. Searches encode the same few values thousands of times."""
    return _json_of(value) if isinstance(value, str | int | float | None) else json.dumps(value)


def _decoded(text: str) -> Any:
    """Returns the value of a text of JSON. Lists and tables are the caller's own."""
    return json.loads(text) if text[0] in "[{" else _value_of(text)


_json_of = lru_cache(1 << 14, typed=True)(json.dumps)  # typed, as True, 1 and 1.0 are equal
_value_of = lru_cache(1 << 14)(json.loads)


@lru_cache(1 << 14)
def _digest(settings: tuple[tuple[str, str], ...], origin: str, seed: int) -> str:
    """Returns the digest of a probe. Strategies ask for the same ones again and again."""
    return hashlib.sha256(json.dumps([settings, origin, seed]).encode()).hexdigest()[:16]


class ProbeNoise(NamedTuple):
    """Gradient noise scale that a probe has measured.

    Attributes:
        samples: B, in samples.
        error: Its standard error.
    """

    samples: float
    error: float


class Outcome(NamedTuple):
    """Result of a probe.

    Attributes:
        marks: Its evaluations, by epoch, without the one at its beginning.
        failed: Why it ended early, such as a loss that is not finite. Empty: it did not.
        noise: Gradient noise scale, which the cold start measures. None: it is not known.
    """

    marks: tuple[Mark, ...]
    failed: str = ""
    noise: ProbeNoise | None = None


Train = Callable[[Probe, Outcome | None], Outcome]
"""Trains a probe, from the end of its previous outcome, and returns the new one."""


def searched(job: Job, target: Target) -> Job:
    """Returns the job that probes vary: with one validation split for all seeds.

    Args:
        job: The user's job.
        target: Target on the validation split.
    """
    split = job.data.validation_split or HELD_OUT
    seed = job.training.seed if job.data.split_seed is None else job.data.split_seed
    return job.without_tests().with_(
        hooks=(),
        changes=(),
        data={"validation_split": split, "split_seed": seed, "test_limit": 64},
        training={"evaluate": True, "target": target.text, "target_window": 1, "stop_at_target": False},
        results={"keep_checkpoints": "1 epochs", "checkpoint_every": "never", "keep_every": None},
        optimizer={"schedule": "step", "milestones": (), "schedule_options": {}, "schedule_every": "epoch"},
    )
