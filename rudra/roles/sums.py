"""Counts of gradients and samples for the next update, for an epoch, and for each learner."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rudra.core import records
from rudra.core.messages import MessageKind, Rows
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.wire import PACK
from rudra.core.work import portion
from rudra.job.job import Job
from topologies import Plan

ROW = PACK[MessageKind.GRADIENTS]


@dataclass(slots=True)
class PendingUpdate:
    """Sums and rows of the gradients in the next update.

    Attributes:
        rows: packed row of `records.GRADIENT` for each gradient.
        samples: number of samples in all gradients.
        staleness: sum of the gradients' staleness, in updates.
        loss: sum of the losses of all samples.
        errors: number of wrong samples, each counted by its wrong share.
        drawn: for each stream, the position after the last sample of these gradients.
    """

    rows: list[bytes] = field(default_factory=list)
    samples: int = 0
    staleness: int = 0
    loss: float = 0.0
    errors: float = 0.0
    drawn: dict[int, int] = field(default_factory=dict)


class LearnerCounts:
    """Counters for each learner, and for each stream of samples.

    Args:
        job: resolved job.
        plan: roles of the run and their connections.
        period: number of mini-batches per gradient.
        position: state of training at the start.

    Attributes:
        steps: for each learner, the number of the mini-batch after the last counted one.
        samples_applied: number of counted samples of each learner.
        samples_drawn: for each stream, the position after the last applied sample.
    """

    def __init__(self, job: Job, plan: Plan, period: int, position: TrainingState) -> None:
        learners = range(plan.learner_numbers)
        self.steps = [position.step(i) for i in learners]
        self.samples_applied = [position.learned_by(i) for i in learners]
        self.samples_drawn = [position.drawn_from(i) for i in learners]
        size, parts, between = job.training.minibatch_size, job.cluster.parts, period - 1
        mine = {plan.roles[i].index: portion(plan, i, size, parts) for i in plan.learners} if between and parts else {}
        # With shares, samples of other learners are between the mini-batches of a period.
        self._others = {learner: between * (own.batch - own.count) for learner, own in mine.items()}

    def add(
        self, gradients: Iterable[Gradient], scale: float, update: int, sums: "PendingUpdate", *, each: bool = False
    ) -> int:
        """Counts gradients, adds them to the sums of an update, and adds their rows.

        Args:
            gradients: gradients in the update.
            scale: scale of each gradient in the update.
            update: number of the update.
            sums: sums of the update. The gradients are added to them.
            each: whether each gradient is an update of its own. Then its `timestamp` is its staleness.

        Returns:
            Number of samples of the gradients.
        """
        drawn, others, samples = sums.drawn, self._others, 0
        for g in gradients:
            learner, count, step = g.learner, g.samples, g.step
            first, timestamp, stream = g.first, g.timestamp, g.stream
            loss, errors = g.loss, g.errors
            if each:
                timestamp = max(0, update - 1 - timestamp)
            staleness = update - 1 - timestamp
            sums.rows.append(
                ROW(update, learner, count, step, first, timestamp, staleness, scale, loss, errors, stream)
            )
            self.steps[learner] = step + 1
            self.samples_applied[learner] += count
            end = first + count
            if others:
                end += others.get(learner, 0)
            if end > drawn.get(stream, 0):
                drawn[stream] = end
            samples += count
            sums.staleness += staleness
            sums.loss += loss * count
            sums.errors += errors
            if each:
                update += 1
        sums.samples += samples
        return samples

    def enter(self, rows: Rows, updates: int) -> None:
        """Counts gradients that several updates have applied, one gradient of each learner in each of them.

        Args:
            rows: `records.GRADIENT` of the last update.
            updates: number of updates.
        """
        for learner, count, step, first, stream in rows[["learner", "samples", "step", "first", "stream"]].tolist():
            self.steps[learner] = step + 1
            self.samples_applied[learner] += updates * count
            end = first + count + self._others.get(learner, 0)
            self.samples_drawn[stream] = max(self.samples_drawn[stream], end)

    def follow(self, other: "LearnerCounts") -> None:
        """Takes over the counters of another owner of the same weights."""
        self.steps, self.samples_applied = [*other.steps], [*other.samples_applied]
        self.samples_drawn = [*other.samples_drawn]

    def without(self, pending: "PendingUpdate", period: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns `steps` and `samples_applied` without the gradients that are counted but not applied."""
        steps, learned = list(self.steps), list(self.samples_applied)
        for row in np.frombuffer(b"".join(pending.rows), records.GRADIENT)[::-1]:
            steps[row["learner"]] = int(row["step"]) + 1 - period
            learned[row["learner"]] -= int(row["samples"])
        return tuple(steps), tuple(learned)


@dataclass(slots=True)
class EpochSums:
    """Sums over the gradients applied in an epoch.

    Attributes:
        loss: sum of the losses of all samples.
        errors: number of wrong samples, each counted by its wrong share.
        staleness: sum of the gradients' staleness, in updates.
        gradients: number of gradients.
        samples: number of samples.
    """

    loss: float = 0.0
    errors: float = 0.0
    staleness: int = 0
    gradients: int = 0
    samples: int = 0

    @classmethod
    def of(cls, position: TrainingState) -> "EpochSums":
        """Returns the sums of the epoch under way at a position."""
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
        """Mean loss per sample."""
        return _mean(self.loss, self.samples)

    @property
    def error(self) -> float:
        """Fraction of wrong samples."""
        return _mean(self.errors, self.samples)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the gradients, in updates."""
        return _mean(self.staleness, self.gradients)


def _mean(total: float, count: int) -> float:
    """Returns the mean, or NaN. An epoch has no gradient if one update ended both it and the previous epoch."""
    return total / count if count else math.nan
