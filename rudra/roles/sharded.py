"""Shards: several servers that each hold a part of the weights and make the same updates.

The first shard is an ordinary parameter server. It decides about the order of gradients, learning rates and answers to
learners. The other shards carry out the first shard's log on their own parts, entry by entry, as soon as their own
transfers allow it. So there is one timestamp, and only the first shard keeps counters and records.

A learner announces a gradient to the first shard in a message without a tensor, and sends every shard its part. The
first shard chooses a buffer, and all shards receive their parts into it. The gradient is handled only after all shards
have their parts, so either all parts of a gradient count or none. If a learner dies in between, all shards drop the
parts that have arrived.

If the job changes, all roles restart from the weights of an update. A shard learns of the restart by the log and by its
driver, in any order, and needs both to continue. In between it completes the updates before the restart, because all
shards have their gradients. It drops the transfers with learners that the log still has.

The shards send their parts of the weights to a learner after the first shard's answer. They send them to the statistics
server after the announcement of a snapshot.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import auto
from typing import Any, ClassVar

from rudra.core.actions import (
    Accumulate,
    Action,
    CancelReceive,
    Copy,
    Correct,
    DeclareLost,
    Hash,
    Receive,
    Reconfigure,
    Save,
    Send,
    Update,
)
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.events import Computed, Lost, Received, Sent, Started, Updated
from rudra.core.messages import (
    GradientPart,
    LogEntries,
    MessageKind,
    PartTaken,
    PullAnswer,
    PushedGradient,
    Shutdown,
    WeightsPart,
)
from rudra.roles.gradient_buffers import GradientBuffers
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.log_follower import Entry, LogFollower
from rudra.roles.machine import Machine, Setup, States, Transition, halt, self_loops
from rudra.roles.multi_owner import LOGGED, Log, stepped
from rudra.roles.optimizer_settings import changed_settings
from rudra.roles.server import TRAINING, ParameterServer, ServerState


@dataclass(slots=True)
class _Coming:
    """Gradient with parts that are on their way.

    Attributes:
        message: learner's announcement of the gradient.
        number: number of the gradient in the log.
        missing: ids of the shards that do not have their part yet.
    """

    message: PushedGradient
    number: int
    missing: set[int]


class GradientParts:
    """Gradients on their way to all shards, and the log for the other shards. The first shard has this object.

    The shards receive a gradient only after its learner has announced it. They receive gradients in the order of the
    announcements, unless the protocol sets an order.

    Args:
        role: id of the first shard.
        shards: ids of the other shards.
        buffers: receive buffers for gradients.
    """

    def __init__(self, role: int, shards: tuple[int, ...], buffers: GradientBuffers) -> None:
        self._id, self._buffers = role, buffers
        self._log = Log(role, shards)
        self._announced: deque[PushedGradient] = deque()  # gradients without a buffer yet
        self._rooms: dict[str, int | None] = {}  # buffers without an announced gradient -> the only source allowed
        self._coming: dict[str, _Coming] = {}  # gradients on their way, by buffer
        self._number = 0

    def begin_anew(self, buffers: GradientBuffers) -> None:
        """Forgets all gradients on their way: all roles restart, with these receive buffers."""
        self._buffers = buffers
        self._announced.clear()
        self._rooms.clear()
        self._coming.clear()

    def validate(self) -> None:
        assert not self._rooms.keys() & self._coming.keys()
        assert self._buffers.posted.keys() >= self._coming.keys()

    def share(self, actions: Iterable[Action]) -> list[Action]:
        """Returns the decided actions that the first shard itself carries out. The other shards follow the log."""
        own: list[Action] = []
        todo = deque(actions)
        while todo:
            match action := todo.popleft():
                case Receive():
                    self._rooms[action.buffer] = action.source
                case CancelReceive():
                    if action.buffer in self._rooms:  # else its gradient is on its way
                        del self._rooms[action.buffer]
                        self._buffers.withdrawn(action.buffer)
                        todo.extend(self._buffers.post(False))  # receives are withdrawn when training has ended
                case Send(buffer=str()):
                    if action.message.kind is MessageKind.SNAPSHOT:
                        own.append(Send(action.to, action.message))
                    own.append(self._log.add(Send(action.to, WeightsPart(self._id), action.buffer)))
                case Correct() | Accumulate() | Update() | Copy() | Save() | DeclareLost() | Reconfigure():
                    own.append(self._log.add(action))
                case _:
                    own.append(action)
        own += self._receive_announced()
        return [*self._log.told(), *own]

    def _receive_announced(self) -> list[Action]:
        """Receives announced gradients while there are buffers for them."""
        actions: list[Action] = []
        for buffer, source in list(self._rooms.items()) if self._announced else ():
            message = next((m for m in self._announced if source is None or m.sender == source), None)
            if message is not None:
                self._announced.remove(message)
                del self._rooms[buffer]
                self._number += 1
                self._coming[buffer] = _Coming(message, self._number, {self._id, *self._log.readers})
                actions.append(self._log.add(Receive(buffer, message.sender, gradient=True), self._number))
        return actions

    def announce(self, message: PushedGradient) -> None:
        """Notes that a learner will send the parts of a gradient."""
        self._announced.append(message)

    def part_here(self, buffer: str) -> Received[PushedGradient] | None:
        """Notes the part of the first shard. Returns the gradient if all shards now have their parts."""
        return self._arrived(buffer, self._id)

    def part_there(self, message: PartTaken) -> Received[PushedGradient] | None:
        """Notes the part of another shard. Returns the gradient if all shards now have their parts."""
        buffer = next((buffer for buffer, coming in self._coming.items() if coming.number == message.number), None)
        return None if buffer is None else self._arrived(buffer, message.sender)

    def _arrived(self, buffer: str, shard: int) -> Received[PushedGradient] | None:
        coming = self._coming[buffer]
        coming.missing.discard(shard)
        if coming.missing:
            return None
        del self._coming[buffer]
        return Received(coming.message, buffer)

    def lose(self, role: int) -> None:
        """Drops the incomplete gradients of a dead learner on all shards."""
        self._announced = deque(m for m in self._announced if m.sender != role)
        for buffer, coming in list(self._coming.items()):
            if coming.message.sender == role:
                del self._coming[buffer]
                self._log.add(CancelReceive(buffer))
                if self._buffers.posted[buffer] is None:  # else the buffer was for that learner only
                    self._rooms[buffer] = None


class FirstShard(ParameterServer):
    """Parameter server that decides for all shards. It has the same arguments as `ParameterServer`."""

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **ParameterServer.TRANSITIONS,
        **{
            (state, trigger): Transition(method, *ParameterServer.TRANSITIONS[state, MessageKind.GRADIENT].states)
            for state in (ServerState.TRAINING, ServerState.DRAINING)
            for trigger, method in (
                (MessageKind.GRADIENT, "_announced"),
                (MessageKind.GRADIENT_PART, "_part_here"),
                (MessageKind.TAKEN, "_part_there"),
            )
        },
        **self_loops([ServerState.CLOSING], {MessageKind.TAKEN: "_ignore"}),  # part of a learner that has since died
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._parts = GradientParts(role, setup.plan.front_owners[1:], self.buffers)
        self._co_owned = (self._parts, *self._co_owned)

    def _start(self, event: Started, now: float) -> list[Action]:
        if not self.ledger.clock.started:
            return super()._start(event, now)
        return [*self.ledger.rules.settings(self.id), *self._send_to_all()]  # no role could hash all weights

    def _begin_anew(self, now: float) -> list[Action]:
        actions = super()._begin_anew(now)
        self._parts.begin_anew(self.buffers)
        return actions

    def validate(self) -> None:
        super().validate()
        self._parts.validate()

    def _announced(self, event: Received[PushedGradient], now: float) -> list[Action]:
        if event.message.sender not in self._dead:
            self._parts.announce(event.message)
        return []

    def _part_here(self, event: Received[GradientPart], now: float) -> list[Action]:
        assert event.buffer is not None
        return self._complete(self._parts.part_here(event.buffer), now)

    def _part_there(self, event: Received[PartTaken], now: float) -> list[Action]:
        return self._complete(self._parts.part_there(event.message), now)

    def _complete(self, gradient: Received[PushedGradient] | None, now: float) -> list[Action]:
        if gradient is None:
            return []
        return self._gradient(gradient, now) if self.state is TRAINING else self._late_gradient(gradient, now)

    def _lose(self, event: Lost, now: float) -> list[Action]:
        self._parts.lose(event.role)
        return super()._lose(event, now)


class ShardState(States):
    FOLLOWING = auto()
    DONE = auto()


FOLLOWING = ShardState.FOLLOWING


class Shard(Machine):
    """Shard that carries out the log of the first shard.

        FOLLOWING   an entry of the log, or an event that the next entry waits for -> FOLLOWING  do all possible entries
        FOLLOWING   everything is recorded                                         -> DONE

    Some entries may have to wait. An update waits until all transfers of the weights have ended. A copy waits until the
    previous copy is sent. The buffer of a dropped gradient waits for the part to arrive, or for the learner's loss to
    be known.

    Args:
        role: id of the shard in the plan.
        setup: arguments of the role.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(
            [FOLLOWING],
            {
                Started: "_start",
                MessageKind.LOG: "_read",
                MessageKind.GRADIENT_PART: "_part",
                Sent: "_returned",
                Updated: "_stepped",
                Lost: "_lose",
            },
        ),
        (FOLLOWING, MessageKind.SHUTDOWN): Transition("_finish", ShardState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup.plan)
        self.state = FOLLOWING
        self._first = setup.plan.server
        self._follower = LogFollower(role, setup.plan, self._dead)
        self._settings = changed_settings(role, setup.phases_in_effect, setup.job, setup.plan)
        self._restarts = self._reported = 0  # number of restarts by the driver, and of those that the log has reported

    def inherit(self, before: "Shard") -> None:
        self._follower.inherit(before._follower)
        self._restarts, self._reported = before._restarts + 1, before._reported

    def validate(self) -> None:
        self._follower.validate()

    @property
    def waiting_for(self) -> str:
        return self._follower.waiting_for

    def _start(self, event: Started, now: float) -> list[Action]:
        return [*self._settings, *self._follow_log()] if self._is_current else self._follow_log()

    @property
    def _is_current(self) -> bool:
        """Whether the log has reported every restart."""
        return self._reported == self._restarts

    def _read(self, event: Received[LogEntries], now: float) -> list[Action]:
        self._follower.read(event.message.rows.tolist())
        return self._follow_log()

    def _follow_log(self) -> list[Action]:
        """Carries out the log as far as possible now."""
        actions = self._follower.carry_out(self._due)
        return actions + self._follower.receive_ahead() if self._is_current else actions

    def _due(self, entry: Entry) -> list[Action] | None:
        """Returns the actions for an entry of the log, or None if the entry must wait."""
        what, role, *_ = entry
        kind = LOGGED[what]
        if kind is Reconfigure:
            if self._is_current:
                return None  # until the driver restarts this role
            self._reported += 1
            return [*self._settings]
        with_learner = kind in (Receive, CancelReceive) or (kind is Send and role != self.plan.statistics)
        return [] if with_learner and not self._is_current else self._follower.due(entry)

    def _part(self, event: Received[GradientPart], now: float) -> list[Action]:
        assert event.buffer is not None
        number = self._follower.arrived(event.buffer)
        return [Send(self._first, PartTaken(self.id, number)), *self._follow_log()]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        self._follower.lent[event.buffer] -= 1
        return self._follow_log()

    def _stepped(self, event: Updated, now: float) -> list[Action]:
        return [Send(self._first, message) for message in stepped(self.id, event)]

    def _lose(self, event: Lost, now: float) -> list[Action]:
        return self._follow_log()

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = ShardState.DONE
        return [halt(event)]


class ShardedLearner(Learner):
    """Learner that pushes to several shards and pulls from them. It has the same arguments as `Learner`.

    Unlike for `Learner`, a gradient counts as delivered when all its parts are delivered, and weights count as received
    when all their parts are received.
    """

    __slots__ = ("_going", "_missing", "_newer", "_owners", "_receives")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **{key: to for key, to in Learner.TRANSITIONS.items() if key[1] is not MessageKind.WEIGHTS},
        (LearnerState.WAITING, MessageKind.WEIGHTS_PART): Transition(
            "_first_part", LearnerState.WAITING, LearnerState.HASHING
        ),
        (LearnerState.EXCHANGING, Sent): Transition(
            "_part_delivered", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.STOPPED
        ),
        (LearnerState.EXCHANGING, MessageKind.WEIGHTS_PART): Transition(
            "_part_pulled", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.STOPPED
        ),
        **self_loops([LearnerState.STOPPED], {MessageKind.WEIGHTS_PART: "_ignore"}),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._owners = setup.plan.front_owners
        self._receives = [Receive(WEIGHTS, owner) for owner in self._owners]
        self._missing = len(self._owners)  # number of weight parts that have not arrived
        self._going = 0  # number of gradient parts that are not delivered
        self._newer = setup.position.timestamp  # timestamp of the weights on their way

    def _start(self, event: Started, now: float) -> list[Action]:
        return [*self._receives]

    def _first_part(self, event: Received[WeightsPart], now: float) -> list[Action]:
        if not self._have_all():
            return []
        self.state = LearnerState.HASHING
        return [Hash(WEIGHTS)]

    def _have_all(self) -> bool:
        """Counts a part of the weights. Returns whether it was the last one."""
        self._missing -= 1
        if not self._missing:
            self.timestamp = self._newer
        return not self._missing

    def _push(self, event: Computed, now: float) -> list[Action]:
        warnings, ends = self._computed(event, now)
        if ends:
            return warnings
        self.state = LearnerState.EXCHANGING
        timestamp = self.timestamp
        told = PushedGradient(self.id, timestamp, timestamp, (self._gradient(event, now),))
        self._going = len(self._owners)
        part = GradientPart(self.id)
        return [Send(self.server, told), *(Send(owner, part, GRADIENT) for owner in self._owners), *warnings]

    def _part_delivered(self, event: Sent, now: float) -> list[Action]:
        self._going -= 1
        return [] if self._going else self._delivered(event, now)

    def _answered(self, event: Received[PullAnswer], now: float) -> list[Action]:
        actions = super()._answered(event, now)
        if not self._expects_weights:
            return actions
        self._newer, self._missing = event.message.timestamp, len(self._owners)
        return [*self._receives]

    def _part_pulled(self, event: Received[WeightsPart], now: float) -> list[Action]:
        if not self._have_all():
            return []
        self._expects_weights = False
        return self._advance(now)
