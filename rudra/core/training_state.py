"""Where training stands at an update: all that a run needs, beside weights and optimiser state, to go on from there."""

from msgspec import Struct

from topologies import Plan


class TrainingState(Struct, frozen=True):
    """The books of the weights' owner, right after an update.

    Nothing of what is under way then belongs to it: gradients that are not applied are computed again, of the weights
    that are here. So the learners, too, go on from this alone.

    Attributes:
        timestamp: of the weights.
        epoch: completed epochs.
        samples: applied.
        applied: gradients.
        time_s: training so far.
        steps: for each learner, the next mini-batch: one more than the last whose gradient was applied.
        learned: for each learner, the samples of its applied gradients.
        drawn: for each stream of samples, where the next batch begins: after the last that was applied.
        epoch_loss, epoch_errors, epoch_staleness, epoch_gradients, epoch_samples: sums over the epoch under way.
        again: where a coordinator deals the samples out: those that it gave to somebody and that are not applied, by
            their places in the epoch: the first and how many.
        sizes, counts: for each of its workers, the size of the last batch, for each thread, and the count of updates.
        protocol, protocol_state: name of the protocol, and its state after the last update, as `protocols.saved`
            gave it; empty where it has none.
        lowered: completed epochs after which the rate fell, or is to fall, because tests got no better.
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
    protocol: str = ""
    protocol_state: str = ""

    def step(self, learner: int) -> int:
        """The next mini-batch of a learner."""
        return self.steps[learner] if self.steps else 0

    def learned_by(self, learner: int) -> int:
        """Samples of a learner's gradients."""
        return self.learned[learner] if self.learned else 0

    def drawn_from(self, stream: int) -> int:
        """Where the next batch of a stream begins."""
        return self.drawn[stream] if self.drawn else 0

    def below(self, plan: Plan, role: int) -> int:
        """How many of the applied gradients passed a role."""
        own = [self.step(plan.roles[role].index)] if role in plan.learners else []
        return sum(own) + sum(self.below(plan, child) for child in plan.children[role])


BEGINNING = TrainingState()
