"""The simulator: the same roles in one process and virtual time, with real gradients.

A queue of events ordered by (time, priority, sequence) drives the roles, so a simulation is
deterministic, ties included. Gradients are computed for real, at the virtual moment at which they would be
ready; only their duration, and that of messages, comes from the job's `[simulation]` table. Transfers of tensors wait
until the receiver has posted a buffer, as MPI's rendezvous does.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rudra.config import SimulationTable
from rudra.errors import RunError
from rudra.events import (
    Accumulate,
    Action,
    Compute,
    Computed,
    Copy,
    Evaluate,
    Evaluated,
    Event,
    Fail,
    Finish,
    Halt,
    Hash,
    Hashed,
    Receive,
    Received,
    Record,
    Send,
    Sent,
    Started,
    Update,
    Warn,
)
from rudra.messages import Message
from rudra.roles import Machine
from rudra.sampling import mix
from topologies import Plan
from topologies.plan import LEARNER, PARAMETER_SERVER


class Hands(Protocol):
    """What the simulator needs done with tensors.

    `lent` and `sent` frame the time in which a buffer must not change; `posted` says that its content is void.
    """

    def lent(self, role: int, buffer: str) -> None: ...
    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None: ...
    def sent(self, role: int, buffer: str) -> None: ...
    def posted(self, role: int, buffer: str) -> None: ...
    def hash(self, role: int, buffer: str) -> int: ...
    def compute(self, role: int, action: Compute) -> Computed: ...
    def accumulate(self, role: int, action: Accumulate) -> None: ...
    def update(self, role: int, action: Update) -> None: ...
    def copy(self, role: int, action: Copy) -> None: ...
    def evaluate(self, role: int, action: Evaluate) -> Evaluated: ...


class Recorder(Protocol):
    """Where the statistics server's rows go."""

    def record(self, action: Record) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...


@dataclass(slots=True)
class _Actor:
    """One role in virtual time."""

    machine: Machine
    random: random.Random
    size_bytes: int
    compute_s: float
    message_s: float
    update_s: float
    busy_until: float = 0.0
    halted: bool = False
    inbox: deque[Event] = field(default_factory=deque)  # came while the role was busy
    posted: deque[Receive] = field(default_factory=deque)
    offered: deque[Send] = field(default_factory=deque)  # tensors whose sender waits for a buffer
    senders: deque[int] = field(default_factory=deque)


class Simulation:
    """A whole cluster in one process.

    Args:
        plan: who is who.
        machines: every role of the plan, by id.
        hands: what handles tensors.
        recorder: where results go.
        costs: durations.
        size_bytes: of one tensor on the wire.
        seed: of jitter.
        check: called after every event with the machine that took it; tests use it.
    """

    def __init__(
        self,
        plan: Plan,
        machines: Mapping[int, Machine],
        hands: Hands,
        recorder: Recorder,
        costs: SimulationTable,
        *,
        size_bytes: int,
        seed: int,
        check: Callable[[Machine], None] | None = None,
    ) -> None:
        self.plan, self.hands, self.recorder, self.costs = plan, hands, recorder, costs
        self.now = 0.0
        self._check = check
        self._queue: list[tuple[float, int, int, int, Callable[[], None] | Event]] = []
        self._sequence = 0
        self._last_delivery: dict[tuple[int, int], float] = {}
        self._actors = {i: self._actor(i, machine, size_bytes, seed) for i, machine in machines.items()}

    def _actor(self, role: int, machine: Machine, size_bytes: int, seed: int) -> _Actor:
        costs, place = self.costs, self.plan.roles[role]
        serves = place.kind == PARAMETER_SERVER
        slowdown = costs.slowdown.get(place.index, 1.0) if place.kind == LEARNER else 1.0
        return _Actor(
            machine,
            random.Random(mix(seed, role)),
            size_bytes,
            compute_s=costs.compute_s * slowdown,
            message_s=costs.message_s if serves else 0.0,
            update_s=costs.update_s if serves else 0.0,
        )

    def run(self) -> float:
        """Runs until every role has halted.

        Returns:
            The virtual time at the end, in seconds.

        Raises:
            RunError: a role failed, or all wait for each other.
        """
        for role in self._actors:
            self._at(0.0, role, Started())
        while self._queue:
            time, _, _, role, what = heapq.heappop(self._queue)
            self.now = time
            if callable(what):
                what()
                continue
            actor = self._actors[role]
            if actor.inbox or actor.busy_until > time:
                actor.inbox.append(what)
                if len(actor.inbox) == 1:
                    self._wake(role, actor)
            elif not actor.halted:
                self._handle(role, actor, what)
        stuck = [a.machine for a in self._actors.values() if not a.halted]
        if stuck:
            raise RunError("; ".join(f"{m.name} waits for {m.waiting_for or 'nothing'}" for m in stuck[:4]))
        return self.now

    def _at(self, time: float, role: int, what: Callable[[], None] | Event, priority: int = 1) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time, priority, self._sequence, role, what))

    def _wake(self, role: int, actor: _Actor) -> None:
        """Hands over what waits in the inbox, one event at a time, when the role is free."""

        def take() -> None:
            if actor.busy_until > self.now:
                self._wake(role, actor)
                return
            event = actor.inbox[0]
            if not actor.halted:
                self._handle(role, actor, event)
            actor.inbox.popleft()
            if actor.inbox:
                self._wake(role, actor)

        self._at(max(self.now, actor.busy_until), role, take)

    def _handle(self, role: int, actor: _Actor, event: Event) -> None:
        actions = actor.machine.handle(event, self.now)
        if self._check:
            self._check(actor.machine)
        if isinstance(event, Received):
            actor.busy_until = max(actor.busy_until, self.now) + actor.message_s
        for action in actions:
            self._do(role, actor, action)

    def _do(self, role: int, actor: _Actor, action: Action) -> None:
        time = max(self.now, actor.busy_until)
        match action:
            case Send(buffer=None):
                self._at(self._arrival(role, action.to, time), action.to, Received(action.message))
            case Send():
                self.hands.lent(role, action.buffer or "")
                arrival = self._arrival(role, action.to, time)
                self._at(arrival, action.to, lambda: self._offer(role, action), priority=0)
            case Receive():
                self.hands.posted(role, action.buffer)
                actor.posted.append(action)
                self._match(role, actor, time)
            case Compute():
                jitter = 1.0 + self.costs.jitter * actor.random.uniform(-1.0, 1.0)
                ready = time + actor.compute_s * jitter
                self._at(ready, role, lambda: self._computed(role, actor, action), priority=0)
            case Accumulate():
                self.hands.accumulate(role, action)
            case Update():
                self.hands.update(role, action)
                actor.busy_until = time + actor.update_s
            case Copy():
                self.hands.copy(role, action)
            case Hash():
                self._at(time, role, Hashed(self.hands.hash(role, action.buffer)))
            case Evaluate():
                ready = time + self.costs.evaluation_s
                self._at(ready, role, lambda: self._handle(role, actor, self.hands.evaluate(role, action)), priority=0)
            case Record():
                self.recorder.record(action)
            case Finish():
                self.recorder.finish(role, action)
            case Warn():
                self.recorder.warn(actor.machine.name, action.text)
            case Fail():
                raise RunError(f"{actor.machine.name}: {action.text}")
            case Halt():
                actor.halted = True

    def _computed(self, role: int, actor: _Actor, action: Compute) -> None:
        self._handle(role, actor, self.hands.compute(role, action))

    def _delay(self, actor: _Actor) -> float:
        extra = self.costs.latency_jitter_s
        return self.costs.latency_s + (actor.random.uniform(0.0, extra) if extra else 0.0)

    def _arrival(self, role: int, to: int, time: float) -> float:
        """When a message sent now is there; messages between two roles do not overtake each other."""
        arrival = max(time + self._delay(self._actors[role]), self._last_delivery.get((role, to), 0.0))
        self._last_delivery[role, to] = arrival
        return arrival

    def _offer(self, sender: int, send: Send) -> None:
        receiver = self._actors[send.to]
        receiver.offered.append(send)
        receiver.senders.append(sender)
        self._match(send.to, receiver, self.now)

    def _match(self, role: int, actor: _Actor, time: float) -> None:
        """Starts the transfers for which there are both a tensor and a buffer, in order of arrival."""
        for receive in list(actor.posted):
            for place, sender in enumerate(actor.senders):
                if receive.source in (None, sender):
                    send = actor.offered[place]
                    del actor.offered[place], actor.senders[place]
                    actor.posted.remove(receive)
                    self._transfer(sender, send, role, receive, time)
                    break

    def _transfer(self, sender: int, send: Send, to: int, receive: Receive, time: float) -> None:
        assert send.buffer is not None
        buffer = send.buffer
        end = time + self._actors[to].size_bytes / self.costs.bandwidth_bytes_per_s

        def deliver() -> None:
            self.hands.transfer(sender, buffer, to, receive.buffer)
            self._at(self.now, to, Received(_copied(send.message), receive.buffer))
            self._at(self.now, sender, Sent(buffer, send.to))
            self.hands.sent(sender, buffer)

        self._at(end, to, deliver, priority=0)


def _copied(message: Message) -> Message:
    """The receiver's own rows: roles write into the rows that they receive."""
    if message.rows is None:
        return message
    return Message(message.kind, message.sender, message.timestamp, message.value, message.rows.copy())


class TimingOnly:
    """Hands without tensors: what a cluster would do, at any scale."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def lent(self, role: int, buffer: str) -> None: ...
    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None: ...
    def sent(self, role: int, buffer: str) -> None: ...
    def posted(self, role: int, buffer: str) -> None: ...
    def accumulate(self, role: int, action: Accumulate) -> None: ...
    def update(self, role: int, action: Update) -> None: ...
    def copy(self, role: int, action: Copy) -> None: ...

    def hash(self, role: int, buffer: str) -> int:
        return 0

    def compute(self, role: int, action: Compute) -> Computed:
        return Computed(action.step, 0.0, 0, self._samples)

    def evaluate(self, role: int, action: Evaluate) -> Evaluated:
        return Evaluated(action.buffer, 0.0, 0.0, 0.0, 0.0)
