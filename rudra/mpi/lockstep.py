"""Lockstep: if learners of several ranks average, each rank asks only its first learner, for all its learners.

All learners of a rank do the same at the same time. So the rank asks only the first one, the leader, what to do. It
does that for all of them, and then the leader gets the event. The others follow: they only note their own mini-batches,
and bring their own differences, or gradients (hardsync), into the averages. They share the leader's copy of the
weights, so the rank updates the weights once. In the same way they share the reference, if they are in one block of
`hierarchical`.

Everything else ends the lockstep: a message for a learner, a death, a request of any learner, or an average that ends
an epoch. Then the others catch up with the leader, and are asked again. Weights and rows are bitwise the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import NamedTuple

from rudra.compute.bank.bursts import BankBursts
from rudra.compute.device.streams import Pending
from rudra.core import buffer_names
from rudra.core.actions import Action, Compute, PullReplica, StepReplica, Update
from rudra.core.bursts import BankDone, BurstMade
from rudra.core.events import Computed, Event, MemoryExhausted, Reduced, ReplicaStepped, Updated
from rudra.roles import Machine
from rudra.roles.replica import Replica


class DriverHands(NamedTuple):
    """Parts of a rank's driver, for its bursts and its lockstep.

    Attributes:
        machines: Current state machine of each role.
        do: Does an action of a role.
        perform: Does a computation of a role, without the others.
        handle: Lets a role take an event.
        begin: Begins long work of a role.
        events: Events that wait for roles.
        clock: Returns the seconds on the driver's clock.
    """

    machines: Mapping[int, Machine]
    do: Callable[[int, Action], None]
    perform: Callable[[int, Compute], None]
    handle: Callable[[int, Event], None]
    begin: Callable[[int, Iterator[BurstMade | BankDone | Pending | None]], None]
    events: deque[tuple[int, Event]]
    clock: Callable[[], float]


class Lockstep:
    """Lockstep of the learners of a rank.

    Args:
        roles: Learners of the rank, in learner order.
        making: Does actions of all learners.
        hands: The driver.
    """

    def __init__(self, roles: Sequence[int], making: BankBursts, hands: DriverHands) -> None:
        self._roles, self._making, self._hands = roles, making, hands
        self._learners: list[Replica] = []  # the leader, and those that follow it. Empty: there is no lockstep
        self._computing: Sequence[Compute] = ()  # the last mini-batch of each
        self._known = 0  # followers that still get the event of an average that the leader has taken for them
        self._postponed: list[tuple[int, Event]] = []
        self._unusual: BankDone | None = None  # what ends the lockstep, as soon as the leader has settled

    @property
    def is_on(self) -> bool:
        """Whether learners follow a leader."""
        return bool(self._learners)

    def start(self, learners: Sequence[Replica], actions: Mapping[int, Compute]) -> None:
        """Begins with mini-batches that all learners wait for."""
        self._learners, self._known = [*learners], 0
        self._compute([actions[learner.id] for learner in learners])

    def _compute(self, actions: Sequence[Compute]) -> None:
        self._computing = actions
        self._hands.begin(self._roles[0], self._making.compute(actions))

    def _step(self, action: StepReplica) -> None:
        """Steps all replicas: at once, unless a device does it."""
        work = self._making.step(action)
        first = next(work)
        if isinstance(first, BankDone):
            self.take(first)
        else:
            self._hands.begin(self._roles[0], chain((first,), work))

    def takes(self, action: Action, fewest_steps: float) -> bool:
        """Returns whether an action of the leader is done for all learners.

        Args:
            action: The action.
            fewest_steps: Fewest local steps that are not made in lockstep.
        """
        leader, *followers = self._learners
        match action:
            case Compute():
                now, actions = self._hands.clock(), [action]
                for follower in followers:
                    compute, *due = follower.follow_next(leader, now)
                    assert isinstance(compute, Compute)
                    actions.append(compute)
                    for each in due:
                        self._hands.do(follower.id, each)
                if leader.local_steps < fewest_steps:
                    self._compute(actions)
                    return True
                self.end()
                for follower, compute in zip(followers, actions[1:], strict=True):
                    self._hands.do(follower.id, compute)
            case StepReplica(replica=buffer_names.REPLICA):
                self._step(action)
                return True
            case PullReplica(replica=buffer_names.REPLICA):
                self._making.approach(action.elasticity)
                return True
            case Update() | StepReplica():  # of the weights, or of the reference of a block
                self._making.apart = True
        return False

    def take(self, done: BankDone) -> None:
        """Tells the learners what they have done together."""
        if not (self.is_on and done.events and all(map(_is_usual, done.events))):
            self._unusual = done
            self.proceed()
            return
        leader, *followers = self._learners
        first, *others = done.events
        now = self._hands.clock()
        for follower, event in zip(followers, others, strict=True):
            assert isinstance(event, Computed | ReplicaStepped)
            for action in follower.follow(event, leader, now):
                self._hands.do(follower.id, action)
        self._hands.handle(leader.id, first)

    def proceed(self) -> bool:
        """Ends the lockstep by what was done, unless an average is settling. Returns whether it did."""
        if self._unusual is None or (self.is_on and self._learners[0].is_settling):
            return False
        done, self._unusual = self._unusual, None
        self.end()
        if done.events:
            for role, event in zip(self._roles, done.events, strict=True):
                self._hands.handle(role, event)
        else:  # each learner finds out by itself that the memory does not suffice
            for role, compute in zip(self._roles, self._computing, strict=True):
                self._hands.perform(role, compute)
        return True

    def keeps(self, role: int, event: Event) -> bool:
        """Returns whether an event does not reach its role, now or at all. An unusual event ends the lockstep."""
        leader, *followers = self._learners
        if role == leader.id:
            if isinstance(event, ReplicaStepped):
                self._bring_differences(event)
            if isinstance(event, Updated | ReplicaStepped | MemoryExhausted):
                self._hands.events.extendleft(reversed(self._postponed))
                self._postponed.clear()
                return False
            if isinstance(event, Reduced) and leader.only_updates(event):
                self._known = len(followers)
                return False
        elif isinstance(event, Reduced) and self._known:
            self._known -= 1
            return True
        elif role not in self._roles:
            return False
        if leader.is_settling:
            self._postponed.append((role, event))
            return True
        self.end()
        return False

    def _bring_differences(self, event: ReplicaStepped) -> None:
        """Lets the followers bring the difference of the reference of their block, if a period ends with its step."""
        leader, *followers = self._learners
        now, brought = self._hands.clock(), list[tuple[int, Action]]()
        for follower in followers:
            brought += ((follower.id, action) for action in follower.follow_correction(event, leader, now))
        if brought:
            self._making.share_difference()
        for role, action in brought:
            self._hands.do(role, action)

    def end(self) -> None:
        """Lets all learners be asked again, if there is a lockstep."""
        if not self._learners:
            return
        (leader, *followers), self._learners = self._learners, []
        for follower in followers:
            follower.catch_up(leader)
        self._making.settle()


def _is_usual(event: Event) -> bool:
    return isfinite(event.loss) if isinstance(event, Computed) else isinstance(event, ReplicaStepped)
