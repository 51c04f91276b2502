"""Copies of the weights on their way down the weights' tree, for learners that ask for none."""

from collections.abc import Iterable

from rudra.core.events import DOWNCAST, WEIGHTS, Action, Copy, Send, Sent
from rudra.core.messages import GradientApplied, Weights
from rudra.core.records import Gradient
from topologies import Plan

COPIES = (f"{DOWNCAST} 0", f"{DOWNCAST} 1")
"""Two, so that one slow edge holds up no other."""


class WeightBroadcast:
    """What the root of the weights' tree sends.

    Args:
        plan: who is who.
        role: id of the root.
        timestamp: of the weights that its receivers hold.
    """

    def __init__(self, plan: Plan, role: int, timestamp: int) -> None:
        self._copies = dict.fromkeys(COPIES, (-1, 0))  # timestamp, transfers under way
        self._given = dict.fromkeys(plan.receivers[role], timestamp)
        self._busy: set[int] = set()  # edges
        self._learners: dict[int, int] = {}  # who wants to hear when a gradient of its is applied, by number
        if plan.outstanding is not None:
            self._learners = {plan.roles[learner].index: learner for learner in plan.learners}
        self._to_tell: list[int] = []  # of those, whose gradients are pending

    def validate(self) -> None:
        assert all(lent >= 0 for _, lent in self._copies.values())

    @property
    def under_way(self) -> bool:
        """Whether a copy is."""
        return bool(self._busy)

    def await_update(self, gradients: Iterable[Gradient]) -> None:
        """These are pending."""
        if self._learners:
            self._to_tell += [self._learners[gradient.learner] for gradient in gradients]

    def updated(self, weights: Weights) -> list[Action]:
        """Tells learners, where these bound their outstanding gradients, which weights hold them; sends these."""
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
                    break  # all copies are under way; the first that is back carries the newest weights then
                actions.append(Copy(WEIGHTS, ready[0]))
            self._copies[ready[0]] = (weights.timestamp, self._copies[ready[0]][1] + 1)
            self._given[to] = weights.timestamp
            self._busy.add(to)
            actions.append(Send(to, weights, ready[0]))
        return actions

    def returned(self, event: Sent) -> bool:
        """Frees an edge, if it is a copy that has arrived."""
        if event.buffer not in self._copies:
            return False
        timestamp, lent = self._copies[event.buffer]
        self._copies[event.buffer] = (timestamp, lent - 1)
        self._busy.discard(event.to)
        return True
