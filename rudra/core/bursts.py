"""Bursts: what the records of a bank ask of its device, and what it answers (`rudra.roles.bursts`).

Learners in lockstep (`rudra.mpi.lockstep`) ask for one action of all of them, and get its events at once.
"""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rudra.core.actions import StepReplica
from rudra.core.buffer_names import DIFFERENCE, GRADIENT
from rudra.core.events import Event
from rudra.core.work import Work

MOST_ROUNDS = 64
"""Most rounds of a burst."""


class Burst(Struct, frozen=True, gc=False):
    """Several rounds of a bank, without asking its learners in between. `BurstMade` has the results.

    Each round is an update: τ mini-batches of each learner, an average over all learners of the run, and a step of the
    weights. Or each round is a local step: one mini-batch of each learner of a rank, and no average.

    If learners have replicas, their differences from the weights are averaged. Otherwise τ is 1, and their gradients at
    the weights are averaged.

    All learners of the rank take part, and their rank does what they would ask for. The burst may end early.

    Attributes:
        rounds: Largest number of rounds, K.
        learners: Step and samples of the next mini-batch of each learner, by learner.
        timestamp: Timestamp of the weights before these rounds.
        rates: Learning rate of each step of the replicas, K·τ. Empty without replicas.
        weight_rates: Learning rate of each update of the weights, K. Empty: the rounds are local steps.
        step: Last step of a period, at any learning rate. None: there are no replicas.
        elasticity: Fraction of the distance by which replicas move towards the weights after each update. None: they
            do not.
    """

    rounds: int
    learners: tuple[tuple[int, Work], ...]
    timestamp: int
    rates: tuple[float, ...]
    weight_rates: tuple[float, ...]
    step: StepReplica | None
    elasticity: float | None

    @property
    def period(self) -> int:
        """Number of mini-batches of each learner in a round, τ."""
        return len(self.rates) // self.rounds or 1

    @property
    def averages(self) -> bool:
        """Whether each round ends with an average."""
        return bool(self.weight_rates)

    @property
    def averaged(self) -> str:
        """Name of the learners' buffer whose average updates the weights."""
        return GRADIENT if self.step is None else DIFFERENCE


class BurstMade(Struct, frozen=True, gc=False):
    """Results of a burst: k rounds of m learners with τ mini-batches each. k' is k, or 0 without averages.

    Attributes:
        burst: The burst.
        losses: (k, τ, m) float64, mean loss of each mini-batch.
        errors: (k, τ, m) float64, wrong samples of each mini-batch.
        distances: (k', m) float64, distance of each replica from the weights. (k', 0) without replicas.
        digests: (k',) uint64, digest of a sample of the weights after each update.
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

    @property
    def seconds(self) -> float:
        """Seconds of the whole burst."""
        return self.gradient_s + self.step_s + self.average_s

    def first(self, rounds: int) -> "BurstMade":
        """Returns the first rounds."""
        if rounds == len(self.losses):
            return self
        some = slice(rounds)
        figures = self.losses[some], self.errors[some], self.distances[some], self.digests[some]
        return BurstMade(self.burst, *figures, self.gradient_s, self.step_s, self.average_s)


class BankDone(Struct, frozen=True, gc=False):
    """End of an action of all learners of a rank.

    Attributes:
        events: Event of each learner, in learner order.
    """

    events: tuple[Event, ...]
