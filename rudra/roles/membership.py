"""Membership of a server: its children, the learners below them, and the number of gradients from each."""

from collections.abc import Collection

from rudra.core.messages import AppliedInPlace, PushedGradient
from rudra.core.training_state import TrainingState
from topologies import Plan


class Membership:
    """Roles that push to one server, and the gradients that they pushed.

    Args:
        plan: roles of the run and their connections.
        role: id of the server.
        position: state of training at the start.

    Attributes:
        children: ids of the remaining children.
        worker: child -> its number among the protocol's workers. A group is one worker.
        below: child -> number of remaining learners below it, including the child if it is a learner.
        pushed: number of gradients of each remaining learner, or of each group.
        received: child -> number of gradients that arrived from it.
        left: child that has left -> number of gradients that it pushed.
    """

    def __init__(self, plan: Plan, role: int, position: TrainingState) -> None:
        self._plan = plan
        self.children = list(plan.children[role])
        self.worker = {child: worker for worker, child in enumerate(self.children)}
        self.below = {child: plan.learners_below(child) for child in self.children}
        workers = [members[0] for members in plan.groups] or plan.learners
        self.pushed = [position.step(plan.roles[worker].index) for worker in workers]
        self._from_lost = position.applied - sum(self.pushed)  # number of gradients of lost learners
        self._places = [-1] * plan.learner_numbers  # learner -> its place in `pushed`, or -1 if it is lost
        for place, learner in enumerate(plan.learners):
            self._places[plan.roles[learner].index] = place
        self.received = {child: position.below(plan, child) for child in self.children}
        self.left: dict[int, int] = {}
        self._grouped = bool(plan.groups)

    def validate(self, received: int) -> None:
        """Raises AssertionError unless `received` is the number of all gradients that arrived."""
        assert self._grouped or received == sum(self.pushed) + self._from_lost

    @property
    def complete(self) -> bool:
        """Whether every child has left and all its pushed gradients have arrived."""
        return all(self.left.get(child) == self.received[child] for child in self.children)

    def names(self, but: Collection[int] = ()) -> list[str]:
        """Returns the names of the children, except those in `but`."""
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
        """Removes a lost learner, which is `child` or below it, and returns its number of pushed gradients."""
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
