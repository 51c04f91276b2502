"""Batch of an update of a point, and the learning rate that suits it.

Staleness σ acts like a momentum of 1 - 1/(1 + σ). So points are alike if they have the same effective rate:

    rate x modulation x (1 + σ) / (1 - momentum)

As many gradients as are under way act like one batch of b x (1 + σ) samples. The best rate for such a batch is
proportional to 1 / (1 + B/b). The gradient noise scale B is measured once, in the cold start
(`rudra.results.noise_scale`). All this is only a first guess, and probes decide: noise misjudges the best batch.

Sources: omnivore.txt §IV-C, theorem 1; McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9. Source of the doubt: Merrill
et al. 2025, arXiv 2505.23971.
"""

import math
from typing import NamedTuple

from rudra.job.job import Job
from rudra.job.table import named

STALE = 0.5
"""Largest mean staleness that hardly matters."""

CAUTION = 1 / math.sqrt(10)
"""Factor on the effective rate of a point that becomes stale. On recorded curves the best effective rates of stale
points were 0.3 (LeNet) and 0.7 to 0.9 (cifar10_full) of hardsync's best one."""

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

    @property
    def under_way(self) -> float:
        """Samples whose gradients are under way."""
        return self.samples * (1 + self.staleness)

    @property
    def acts(self) -> float:
        """Effective rate of a learning rate of 1 without momentum."""
        return self.factor * (1 + self.staleness)

    @property
    def stale(self) -> bool:
        """Whether most gradients are stale."""
        return self.staleness > STALE

    @property
    def momentum(self) -> float:
        """Momentum that the staleness adds."""
        return 1 - 1 / (1 + self.staleness) if self.stale else 0.0


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
    """Returns the learning rate of another batch with the same effective rate, for the same momentum.

    A batch that becomes stale gets less, because staleness is less stable than as much momentum.

    Args:
        rate: Learning rate that suits `before`.
        noise_scale: B, in samples. NaN: unknown, and the rate stays.
        before: Batch that the rate suits.
        after: The other batch.
    """
    noise = 0.0 if math.isnan(noise_scale) else noise_scale
    grown = (1 + noise / before.under_way) / (1 + noise / after.under_way)
    found = rate * grown * before.acts / after.acts
    return found * CAUTION if after.stale > before.stale else found


def nearest(series: list[float], rate: float) -> float:
    """Returns the rate of a series that is nearest to another one, as a ratio."""
    return min(series, key=lambda each: abs(math.log(each / rate)))
