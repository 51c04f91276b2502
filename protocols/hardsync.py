"""Hardsync: one gradient of every learner makes an update, and every learner waits for it.

Source: rudra.txt §3.1, eq. 3. Staleness is always zero. The gradients are added in learner order, so the result does
not depend on the speed of the learners.
"""

from protocols.base import Clock, Protocol


class Hardsync(Protocol):
    ordered = True
    grants_on_push = False
    default_modulation = "sqrt"
    modulations = ("none", "sqrt")

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.gradients_per_update = learners

    @property
    def expected_staleness(self) -> float:
        return 0.0

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return clock.timestamp > timestamp


PROTOCOL = Hardsync
