"""Lockstep: if learners of several ranks average, each rank asks only its first learner, for all its learners.

All learners of a rank do the same at the same time. So the rank asks only the first one, the leader, what to do. It
does that for all of them, and then the leader gets the event. The others follow: `Followers` has their records, and
brings their differences, or gradients (hardsync), into the averages together with the leader's. They share the leader's
copy of the weights, so only the leader gets the average, and the rank updates the weights once. In the same way they
share the reference, if they are in one block of `hierarchical`.

Everything else ends the lockstep: a message for a learner, a death, a request of any learner, or an average that ends
the training or a job. Then the others catch up with the leader, and are asked again. Weights and rows are bitwise the
same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import NamedTuple

from rudra.compute.bank.bursts import BankBursts
from rudra.compute.device.streams import Pending
from rudra.core import buffer_names
from rudra.core.actions import Action, Compute, PullReplica, Reduce, StepReplica, Update
from rudra.core.bursts import BankDone, BurstMade
from rudra.core.events import Computed, Event, MemoryExhausted, Received, Reduced, ReplicaStepped, Sent, Updated
from rudra.mpi.reductions import Reductions
from rudra.roles import Machine
from rudra.roles.following import Followers
from rudra.roles.owner_duties import MAINTENANCE
from rudra.roles.replica import Replica

OWN_DUTIES = {*MAINTENANCE, Sent}
"""Events of checkpoints and of snapshots that only concern the learner that makes them."""


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
        reductions: The rank's part in reductions.
    """

    machines: Mapping[int, Machine]
    do: Callable[[int, Action], None]
    perform: Callable[[int, Compute], None]
    handle: Callable[[int, Event], None]
    begin: Callable[[int, Iterator[BurstMade | BankDone | Pending | None]], None]
    events: deque[tuple[int, Event]]
    clock: Callable[[], float]
    reductions: Reductions


class Lockstep:
    """Lockstep of the learners of a rank.

    Args:
        roles: Learners of the rank, in learner order.
        making: Does actions of all learners.
        hands: The driver.
    """

    def __init__(self, roles: Sequence[int], making: BankBursts, hands: DriverHands) -> None:
        self._roles, self._making, self._hands = roles, making, hands
        self._leader: Replica
        self._followers: Followers | None = None  # None: there is no lockstep
        self._computing: Sequence[Compute] = ()  # the last mini-batch of each
        self._averaging: dict[int, str] = {}  # group -> buffer, of reductions whose result only the leader gets
        self._postponed: list[tuple[int, Event]] = []
        self._unusual: BankDone | None = None  # what ends the lockstep, as soon as the leader has settled

    @property
    def is_on(self) -> bool:
        """Whether learners follow a leader."""
        return self._followers is not None

    def start(self, learners: Sequence[Replica], actions: Mapping[int, Compute]) -> None:
        """Begins with mini-batches that all learners wait for."""
        self._leader, *others = learners
        self._followers = Followers(self._leader, others, actions[self._leader.id].timestamp)
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
        assert self._followers is not None
        match action:
            case Compute():
                followed = self._followers.next(action)
                if self._leader.local_steps < fewest_steps:
                    self._compute([action, *followed])
                    return True
                self.end()
                for role, compute in zip(self._roles[1:], followed, strict=True):
                    self._hands.do(role, compute)
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
        if self._followers is None or not (done.events and all(map(_is_usual, done.events))):
            self._unusual = done
            self.proceed()
            return
        first, *others = done.events
        if computed := [event for event in others if isinstance(event, Computed)]:
            self._followers.computed(computed, self._hands.clock())
        else:
            self._followers.stepped([event for event in others if isinstance(event, ReplicaStepped)])
        self._hands.handle(self._leader.id, first)

    def reduces(self, role: int, action: Reduce) -> bool:
        """Returns whether all learners contribute to a reduction, which the leader begins. Only it gets the result."""
        if self._followers is None or role != self._leader.id:
            return False
        if action.buffer == buffer_names.DIFFERENCE and self._followers.share_reference:
            self._making.share_difference()
        self._averaging[action.group] = action.buffer
        self._hands.reductions.begin_all(action, self._followers.contributions(action))
        return True

    def proceed(self) -> bool:
        """Ends the lockstep by what was done, unless an average is settling. Returns whether it did."""
        if self._unusual is None or (self.is_on and self._leader.is_settling):
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
        leader = self._leader
        if role == leader.id:
            if (event.message.kind if isinstance(event, Received) else type(event)) in OWN_DUTIES:
                return False
            if isinstance(event, Updated | ReplicaStepped | MemoryExhausted):
                self._hands.events.extendleft(reversed(self._postponed))
                self._postponed.clear()
                return False
            if isinstance(event, Reduced) and leader.only_updates(event):
                self._averaging.pop(event.group, None)
                events = self._hands.events
                while events and events[0][1] is event:  # the same one for all learners: the others need not know
                    events.popleft()
                return False
        elif role not in self._roles:
            return False
        if leader.is_settling:
            self._postponed.append((role, event))
            return True
        self.end()
        return False

    def end(self, *, averages: bool = True) -> None:
        """Lets all learners be asked again, if there is a lockstep.

        Args:
            averages: Whether they need the results of reductions under way.
        """
        if self._followers is None:
            return
        self._followers.catch_up()
        self._followers = None
        for group, buffer in self._averaging.items() if averages else ():
            if not self._hands.reductions.give_all(group):
                self._making.share_average(buffer)
        self._averaging.clear()
        self._making.settle()


def _is_usual(event: Event) -> bool:
    return isfinite(event.loss) if isinstance(event, Computed) else isinstance(event, ReplicaStepped)
