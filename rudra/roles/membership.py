"""Who pushes to a server: its children, the learners behind them, and how many gradients came of each."""

from collections.abc import Collection

from rudra.core.messages import AppliedInPlace, PushedGradient
from rudra.core.training_state import TrainingState
from topologies import Plan


class Membership:
    """Membership of one server: the roles that push to it.

    Args:
        plan: who is who.
        role: id of the server.
        position: where training begins.

    Attributes:
        children: ids of those that are left.
        worker: child -> its place in what the protocol is told of; a group is one worker.
        below: child -> learners that are left behind it, or are it.
        pushed: gradients of each learner that is left, or of each group.
        received: child -> gradients that came of it.
        left: children that took leave -> gradients that they pushed.
    """

    def __init__(self, plan: Plan, role: int, position: TrainingState) -> None:
        self._plan = plan
        self.children = list(plan.children[role])
        self.worker = {child: worker for worker, child in enumerate(self.children)}
        self.below = {child: plan.learners_below(child) for child in self.children}
        workers = [members[0] for members in plan.groups] or plan.learners
        self.pushed = [position.step(plan.roles[worker].index) for worker in workers]
        self._from_lost = position.applied - sum(self.pushed)  # gradients of learners that are no more
        self._places = [-1] * plan.learner_numbers  # learner -> its place in `pushed`; -1: it is no more
        for place, learner in enumerate(plan.learners):
            self._places[plan.roles[learner].index] = place
        self.received = {child: position.below(plan, child) for child in self.children}
        self.left: dict[int, int] = {}
        self._grouped = bool(plan.groups)

    def validate(self, received: int) -> None:
        """Raises AssertionError unless so many gradients came in all."""
        assert self._grouped or received == sum(self.pushed) + self._from_lost

    @property
    def complete(self) -> bool:
        """Whether every child has left, and every gradient that it pushed came."""
        return all(self.left.get(child) == self.received[child] for child in self.children)

    def names(self, but: Collection[int] = ()) -> list[str]:
        """Of the children, without some."""
        return [self._plan.roles[child].name for child in self.children if child not in but]

    def count(self, message: PushedGradient | AppliedInPlace) -> None:
        """Counts the gradients that arrived."""
        self.received[message.sender] += len(message.gradients)
        if self._grouped:
            self.pushed[self.worker[message.sender]] += 1
            return
        for gradient in message.gradients:
            place = self._places[gradient.learner]
            if place >= 0:
                self.pushed[place] += 1
            else:
                self._from_lost += 1

    def lose(self, role: int, child: int) -> int:
        """A learner behind a child is no more, or is that child; how many gradients it had pushed."""
        place = self._places[self._plan.roles[role].index]
        pushed = self.pushed.pop(place)
        self._from_lost += pushed
        self._places = [i - 1 if i > place else -1 if i == place else i for i in self._places]
        self.below[child] -= 1
        if child == role:
            self.children.remove(child)
            self.worker = {child: worker for worker, child in enumerate(self.children)}
            self.left.pop(child, None)
        return pushed
