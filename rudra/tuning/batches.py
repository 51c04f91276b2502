"""Batch of an update of a point, and the learning rate that suits the noise of its gradients.

The gradient noise scale B is measured once, in the cold start (`rudra.results.noise_scale`). The best rate for b
samples is proportional to 1 / (1 + B/b). This is only a first guess, and probes decide: noise misjudges the best batch.

Source of the rule: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9. Source of the doubt: Merrill et al. 2025,
arXiv 2505.23971.
"""

import math
from typing import NamedTuple

from rudra.job.job import Job
from rudra.job.table import named

APART = 2.0
"""Largest ratio of two batches that agree."""


class UpdateBatch(NamedTuple):
    """Batch of an update.

    Attributes:
        family: Key that is equal for points which are much alike: those with the same λ, cut and averaging protocol, or
            if gradients are averaged, with equally many in an update. n-softsync and n asynchronous compute groups are
            alike.
        samples: b, samples of an update. If weights are averaged, the samples of one mini-batch of all learners.
        factor: Modulation of the learning rate.
        staleness: Expected mean staleness.
    """

    family: tuple[object, ...]
    samples: int
    factor: float
    staleness: float


def batch_of(job: Job) -> UpdateBatch:
    """Returns the batch of an update of a job."""
    plan = job.plan()
    protocol = job.make_protocol(plan)
    common = (job.learners, job.placement.cut)
    if protocol.averages:
        family: tuple[object, ...] = (*common, named(job.protocol.name))
        gradients, staleness = job.learners, 0.0
    else:
        gradients = job.gradients_per_update(plan)
        family = (*common, protocol.ordered, gradients)
        staleness = 0.0 if protocol.ordered else protocol.expected_staleness
    factor = protocol.modulation.rate_factor(staleness)
    return UpdateBatch(family, gradients * job.training.minibatch_size, factor, staleness)


def rescaled(rate: float, noise_scale: float, before: UpdateBatch, after: UpdateBatch) -> float:
    """Returns a learning rate for another batch: proportional to 1 / (1 + B/b), together with the modulation.

    A staler point gets no higher rate, because what diverges without staleness diverges with it.

    Args:
        rate: Learning rate that suits `before`.
        noise_scale: B, in samples. NaN: unknown, and the rate stays.
        before: Batch that the rate suits.
        after: The other batch.
    """
    if math.isnan(noise_scale):
        return rate
    grown = (1 + noise_scale / before.samples) / (1 + noise_scale / after.samples)
    found = rate * grown * before.factor / after.factor
    return min(rate, found) if after.staleness > before.staleness else found


def nearest(series: list[float], rate: float) -> float:
    """Returns the rate of a series that is nearest to another one, as a ratio."""
    return min(series, key=lambda each: abs(math.log(each / rate)))
