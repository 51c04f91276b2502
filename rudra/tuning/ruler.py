"""The ruler of a search: how many samples of a reference run one sample of another run is worth.

The reference is the job as given, trained once from the common checkpoint towards the target. A probe's worth follows
from how far along the reference's loss its own loss has come. No curve is fitted, no model of the noise is assumed, and
one ruler measures every protocol.

    slope = (samples of the reference from one loss of the probe to a later one) / (samples of the probe between them)
    samples to the target = samples of the probe + (samples of the reference that are left) / slope
    worth = (samples of the reference to the target) / (samples to the target)
    time to the target = (samples to the target) / (samples per second)

A probe has two slopes: of all its epochs, and of all but the first. The smaller one counts: a learning rate below the
reference's has a gain in its first epoch that does not come again. On curves of LeNet this raised the rank correlation
of predicted and true times from 0.71-0.74 to 0.83-0.91 with probes of two epochs (`rudra bench strategies`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mark(NamedTuple):
    """Evaluation of a run on the held-out samples.

    Attributes:
        samples: Samples that the run has applied since it left the common checkpoint.
        loss: Mean loss of the averaged weights.
        metric: Metric of the target.
        time_s: Training time since the common checkpoint.
    """

    samples: int
    loss: float
    metric: float
    time_s: float


class Ruler:
    """Loss of the reference over its samples.

    Args:
        marks: Evaluations of the reference, the first one at the common checkpoint.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.samples = np.array([mark.samples for mark in marks], float)
        self.loss = np.minimum.accumulate([mark.loss for mark in marks])

    def position(self, loss: float) -> float:
        """Returns the samples after which the reference has this loss, or all of its samples if it never has.

        Between two evaluations the loss is linear in the samples. If the reference got no better, the first of its
        samples with the loss counts.
        """
        if not loss <= self.loss[0]:
            return 0.0
        if loss < self.loss[-1]:
            return float(self.samples[-1])
        after = int(np.argmax(self.loss <= loss))
        if after == 0:
            return 0.0
        high, low = self.loss[after - 1], self.loss[after]
        share = (high - loss) / (high - low)
        return float(self.samples[after - 1] + share * (self.samples[after] - self.samples[after - 1]))

    def worth(self, marks: Sequence[Mark], total: float = math.inf) -> float:
        """Returns the worth of a probe's samples.

        Args:
            marks: Evaluations of the probe, the first one at the common checkpoint.
            total: Samples of the reference to the target, at most those that it has.
        """
        last = marks[-1]
        if not math.isfinite(last.loss):
            return 0.0
        total, place = min(total, float(self.samples[-1])), self.position(last.loss)
        if len(marks) == 2 or place >= total:
            return place / last.samples
        first = marks[1]
        slope = min(place / last.samples, (place - self.position(first.loss)) / (last.samples - first.samples))
        return total / (last.samples + (total - place) / slope) if slope > 0 else 0.0


def reached(marks: Sequence[Mark], target: float, *, at_least: bool) -> Mark | None:
    """Returns the first evaluation that reaches a target, or None."""
    return next((mark for mark in marks if (mark.metric >= target if at_least else mark.metric <= target)), None)


def crossed(marks: Sequence[Mark], target: float, *, at_least: bool) -> float:
    """Returns the samples after which a target is reached. Between two evaluations the metric is linear in them.

    Returns:
        The samples. Infinity: no evaluation reaches the target.
    """
    end = reached(marks, target, at_least=at_least)
    if end is None:
        return math.inf
    before = marks[max(0, marks.index(end) - 1)]
    rise = end.metric - before.metric
    share = (target - before.metric) / rise if rise else 1.0
    return before.samples + share * (end.samples - before.samples)
