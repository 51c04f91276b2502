"""Broadcast of weight copies down the weights' tree, to learners that do not request weights."""

from collections.abc import Iterable

from rudra.core.actions import Action, Copy, Send
from rudra.core.buffer_names import DOWNCAST, WEIGHTS
from rudra.core.events import Sent
from rudra.core.messages import GradientApplied, Weights
from rudra.core.records import Gradient
from topologies import Plan

COPIES = (f"{DOWNCAST} 0", f"{DOWNCAST} 1")
"""Names of two copies, so that a slow edge does not delay the other edges."""


class WeightBroadcast:
    """Broadcast of weights from the root of the weights' tree.

    Args:
        plan: roles of the run and their connections.
        role: id of the root.
        timestamp: timestamp of the weights that the receivers hold.
    """

    def __init__(self, plan: Plan, role: int, timestamp: int) -> None:
        self._copies = dict.fromkeys(COPIES, (-1, 0))  # timestamp, number of transfers under way
        self._given = dict.fromkeys(plan.receivers[role], timestamp)
        self._busy: set[int] = set()  # receivers with a transfer under way
        self._learners: dict[int, int] = {}  # by number: learners to notify when a gradient is applied
        if plan.outstanding is not None:
            self._learners = {plan.roles[learner].index: learner for learner in plan.learners}
        self._to_tell: list[int] = []  # learners with a pending gradient

    def validate(self) -> None:
        assert all(lent >= 0 for _, lent in self._copies.values())

    @property
    def under_way(self) -> bool:
        """Whether a transfer of a copy is under way."""
        return bool(self._busy)

    def await_update(self, gradients: Iterable[Gradient]) -> None:
        """Notes pending gradients, so that `updated` notifies their learners."""
        if self._learners:
            self._to_tell += [self._learners[gradient.learner] for gradient in gradients]

    def updated(self, weights: Weights) -> list[Action]:
        """Notifies learners of applied gradients if outstanding gradients are bounded. Sends newer weights."""
        told, self._to_tell = self._to_tell, []
        applied = GradientApplied(weights.sender, weights.timestamp)
        return [*(Send(learner, applied) for learner in told), *self.publish(weights)]

    def publish(self, weights: Weights) -> list[Action]:
        """Sends the newest weights down every edge that is idle."""
        actions: list[Action] = []
        for to, given in self._given.items():
            if to in self._busy or given == weights.timestamp:
                continue
            ready = [copy for copy, (timestamp, _) in self._copies.items() if timestamp == weights.timestamp]
            if not ready:
                ready = [copy for copy, (_, lent) in self._copies.items() if not lent][:1]
                if not ready:
                    break  # both copies are in use; the first free one will carry the newest weights
                actions.append(Copy(WEIGHTS, ready[0]))
            self._copies[ready[0]] = (weights.timestamp, self._copies[ready[0]][1] + 1)
            self._given[to] = weights.timestamp
            self._busy.add(to)
            actions.append(Send(to, weights, ready[0]))
        return actions

    def returned(self, event: Sent) -> bool:
        """Frees an edge if the completed transfer was a copy. Returns whether it was."""
        if event.buffer not in self._copies:
            return False
        timestamp, lent = self._copies[event.buffer]
        self._copies[event.buffer] = (timestamp, lent - 1)
        self._busy.discard(event.to)
        return True
