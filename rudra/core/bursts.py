"""Bursts of updates: what the records of a bank ask of its device, and what it answers (`rudra.roles.bursts`)."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rudra.core.actions import StepReplica
from rudra.core.work import Work

MOST_UPDATES = 64
"""Most updates of a burst."""


class Burst(Struct, frozen=True, gc=False):
    """Several updates of averaged replicas, without asking their learners in between. `BurstMade` has the results.

    All learners of the run take part, and their rank does what they would ask for. It may end early.

    Attributes:
        updates: Largest number of updates, K.
        learners: Step and samples of the next mini-batch of each learner, by learner.
        timestamp: Timestamp of the weights before these updates.
        rates: Learning rate of each step of the replicas, K times the period.
        weight_rates: Learning rate of each update of the weights, K.
        step: Last step of a period, at any learning rate.
        elasticity: Fraction of the distance by which replicas move towards the weights after each update. None: they
            do not.
    """

    updates: int
    learners: tuple[tuple[int, Work], ...]
    timestamp: int
    rates: tuple[float, ...]
    weight_rates: tuple[float, ...]
    step: StepReplica
    elasticity: float | None

    @property
    def period(self) -> int:
        """Number of mini-batches of each learner between two updates, τ."""
        return len(self.rates) // self.updates


class BurstMade(Struct, frozen=True, gc=False):
    """Results of a burst: k updates of m replicas with τ mini-batches each.

    Attributes:
        burst: The burst.
        losses: (k, τ, m) float64, mean loss of each mini-batch.
        errors: (k, τ, m) float64, wrong samples of each mini-batch.
        distances: (k, m) float64, distance of each replica from the weights.
        digests: (k,) uint64, digest of a sample of the weights after each update.
        gradient_s, step_s, average_s: Seconds of all gradients, of the steps of replicas, and of averages and updates.
    """

    burst: Burst
    losses: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    distances: npt.NDArray[np.float64]
    digests: npt.NDArray[np.uint64]
    gradient_s: float
    step_s: float
    average_s: float

    def first(self, updates: int) -> "BurstMade":
        """Returns the first updates."""
        if updates == len(self.losses):
            return self
        some = slice(updates)
        figures = self.losses[some], self.errors[some], self.distances[some], self.digests[some]
        return BurstMade(self.burst, *figures, self.gradient_s, self.step_s, self.average_s)
