"""Position of the training after an update: all that a resumed run needs in addition to weights and optimiser state."""

from typing import NamedTuple

from msgspec import Struct

from topologies import Plan


class DecidedChange(NamedTuple):
    """Change of the job that was decided during the run.

    Attributes:
        change: JSON of the table `[[changes]]` that would do the same.
        place: Number of changes that took effect before it, planned or decided. -1: it has not taken effect yet.
        restarts: Whether all replicas restart from the weights when it takes effect.
    """

    change: str
    place: int = -1
    restarts: bool = False


class TrainingState(Struct, frozen=True):
    """Counters of the owner of the weights, right after an update.

    Gradients that were in flight are not part of the state. They are computed again from these weights. So learners
    also continue from this state.

    Attributes:
        timestamp: Timestamp of the weights.
        epoch: Number of complete epochs.
        samples: Number of applied samples.
        applied: Number of applied gradients.
        time_s: Seconds of training.
        steps: For each learner, the number of its next mini-batch: one more than the last applied one.
        learned: For each learner, the number of samples in its applied gradients.
        drawn: For each stream of samples, the position of its next batch, after the last applied one.
        epoch_loss, epoch_errors, epoch_staleness, epoch_gradients, epoch_samples: Sums over the current epoch.
        again: With a coordinator, samples that were assigned and not applied: first place in the epoch, and number.
        sizes, counts: For each worker of a coordinator, the size of its last batch for each thread, and its count of
            updates.
        averaged: Number of updates whose weights are in their average over time. 0: the next one begins a new average.
        protocol, protocol_state: Name of the protocol, and its state after the last update from `protocols.saved`.
            Empty: it has no state.
        lowered: Complete epochs after which the learning rate fell, or will fall, because evaluations did not improve.
        decided: Changes of the job that were decided during the run, in the order of the decisions.
    """

    timestamp: int = 0
    epoch: int = 0
    samples: int = 0
    applied: int = 0
    time_s: float = 0.0
    steps: tuple[int, ...] = ()
    learned: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()
    epoch_loss: float = 0.0
    epoch_errors: float = 0.0
    epoch_staleness: int = 0
    epoch_gradients: int = 0
    epoch_samples: int = 0
    lowered: tuple[int, ...] = ()
    again: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    counts: tuple[float, ...] = ()
    averaged: int = 0
    protocol: str = ""
    protocol_state: str = ""
    decided: tuple[DecidedChange, ...] = ()

    @property
    def in_effect(self) -> tuple[DecidedChange, ...]:
        """Decided changes that have taken effect."""
        return tuple(each for each in self.decided if each.place >= 0)

    def step(self, learner: int) -> int:
        """Returns the number of the next mini-batch of a learner."""
        return self.steps[learner] if self.steps else 0

    def learned_by(self, learner: int) -> int:
        """Returns the number of samples in a learner's applied gradients."""
        return self.learned[learner] if self.learned else 0

    def drawn_from(self, stream: int) -> int:
        """Returns the position of the next batch of a stream."""
        return self.drawn[stream] if self.drawn else 0

    def updates_with(self, learner: int) -> int:
        """Returns the number of updates that a learner took part in, if no server makes updates.

        If the learner took part in the training only for some time, this is its part of all mini-batches.
        """
        most = max(self.steps, default=0)
        return self.timestamp * self.steps[learner] // most if most else 0

    def below(self, plan: Plan, role: int) -> int:
        """Returns the number of applied gradients that passed a role."""
        own = [self.step(plan.roles[role].index)] if role in plan.learners else []
        return sum(own) + sum(self.below(plan, child) for child in plan.children[role])


BEGINNING = TrainingState()
