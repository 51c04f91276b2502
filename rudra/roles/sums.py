"""Sums that the books keep: over the gradients of the next update, and over those of an epoch."""

import math
from dataclasses import dataclass, field

from rudra.core.training_state import TrainingState


@dataclass(slots=True)
class PendingUpdate:
    """What is known of the gradients that the next update takes in.

    Attributes:
        rows: one of `records.GRADIENT` for each, packed.
        samples: in all.
        staleness: sum, in updates.
        loss: sum over the samples.
        errors: samples that were wrong.
        drawn: for each stream, the end of what they have of it.
    """

    rows: list[bytes] = field(default_factory=list)
    samples: int = 0
    staleness: int = 0
    loss: float = 0.0
    errors: float = 0.0
    drawn: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class EpochSums:
    """Sums over the gradients that were applied in an epoch.

    Attributes:
        loss: over the samples.
        errors: samples that were wrong.
        staleness: in updates.
        gradients: how many.
        samples: how many.
    """

    loss: float = 0.0
    errors: float = 0.0
    staleness: int = 0
    gradients: int = 0
    samples: int = 0

    @classmethod
    def of(cls, position: TrainingState) -> "EpochSums":
        """The sums of the epoch under way at a position."""
        sums = (position.epoch_loss, position.epoch_errors, position.epoch_staleness)
        return cls(*sums, position.epoch_gradients, position.epoch_samples)

    def add(self, loss: float, errors: float, staleness: int, gradients: int, samples: int) -> None:
        """Adds the sums over some gradients."""
        self.loss += loss
        self.errors += errors
        self.staleness += staleness
        self.gradients += gradients
        self.samples += samples

    @property
    def mean_loss(self) -> float:
        """Mean over the samples."""
        return _mean(self.loss, self.samples)

    @property
    def error(self) -> float:
        """Share of the samples that were wrong."""
        return _mean(self.errors, self.samples)

    @property
    def mean_staleness(self) -> float:
        """Mean over the gradients, in updates."""
        return _mean(self.staleness, self.gradients)


def _mean(total: float, count: int) -> float:
    """The mean; an epoch has no gradient if the update that ended it ended the epoch before, too."""
    return total / count if count else math.nan
