"""The simulator: the same roles in one process and virtual time, with real gradients or with none.

A queue of events ordered by (time, priority, sequence) drives the roles, so a simulation is deterministic, ties
included. Gradients are computed for real, at the virtual moment at which they would be ready; how long that and
everything else takes comes from a cost model (`rudra.simulation.costs`). A transfer of a tensor waits until the
receiver has posted a buffer, as MPI's rendezvous does, and until both ends' ports are free.
"""

import gc
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import Any, Protocol

import msgspec

from rudra.core.events import (
    Accumulate,
    Action,
    Commit,
    Committed,
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
    Keep,
    Local,
    Receive,
    Received,
    Record,
    Reduce,
    Reduced,
    Save,
    Saved,
    Send,
    Sent,
    Started,
    Stopped,
    Sync,
    Tick,
    Update,
    Updated,
    Warn,
    Withdraw,
    Withdrawn,
)
from rudra.core.messages import Kind
from rudra.core.training_state import TrainingState
from rudra.data.sampling import mix
from rudra.errors import RunError
from rudra.roles import Machine
from rudra.simulation.costs import CostModel, Link
from rudra.simulation.faults import Faults
from topologies import Plan

GRADIENT = Kind.GRADIENT
_LATER = 1 << 58  # where the sequence numbers begin of what comes last among things of one moment


class Hands(Protocol):
    """What the simulator needs done with tensors; the first eight may be None, where there is nothing to do.

    `lent` and `sent` frame the time in which a buffer must not change; `posted` says that its content is void;
    `planned` that what a long action reads is fixed from now on; `lost` that a role is no more, `regroup` that it
    drops what it was about, and takes over the weights of their owner if it updates some itself. `perform` does a
    local action, and gives what comes of it, which has taken so many seconds; nothing comes of those that are `idle`.
    """

    @property
    def idle(self) -> Collection[type[Local]]: ...
    @property
    def lent(self) -> Callable[[int, str], None] | None: ...
    @property
    def transfer(self) -> Callable[[int, str, int, str], None] | None: ...
    @property
    def sent(self) -> Callable[[int, str], None] | None: ...
    @property
    def posted(self) -> Callable[[int, str], None] | None: ...
    @property
    def planned(self) -> Callable[[int, Local], None] | None: ...
    @property
    def reduce(self) -> Callable[[Mapping[int, Reduce]], None] | None: ...
    @property
    def lost(self) -> Callable[[int], None] | None: ...
    @property
    def regroup(self) -> Callable[[int, int], None] | None: ...

    def perform(self, role: int, action: Local, seconds: float) -> Event | None: ...


class RowSink(Protocol):
    """Where the statistics server's rows go."""

    def record(self, action: Record) -> None: ...
    def keep(self, role: int, action: Keep) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...


class _Port:
    """One direction of a link: one tensor at a time."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


class _Way:
    """From one role to another; control messages do not overtake each other on it."""

    __slots__ = ("blocking", "delivered_at", "into", "latency_s", "out", "receiver", "sender", "transfer_s")

    def __init__(
        self,
        sender: "_Actor",
        receiver: "_Actor",
        link: Link,
        size_bytes: int,
        ports: dict[tuple[str, str, int], _Port],
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.latency_s = link.latency_s
        self.transfer_s = size_bytes * link.seconds_per_byte
        self.out = ports.setdefault(("out", *link.out), _Port())
        self.into = ports.setdefault(("into", *link.into), _Port())
        # Of servers whose calls block, both ways are one.
        self.blocking = [ports.setdefault(("both", *end), _Port()) for end in link.blocking]
        self.delivered_at = 0.0


_Offer = tuple[_Way, Send, float]
"""A tensor on its way, and when it comes."""


class _Actor:
    """One role in virtual time."""

    __slots__ = (
        "busy_until",
        "compute_s",
        "computing",
        "delay_s",
        "halted",
        "handle",
        "inbox",
        "machine",
        "message_s",
        "neighbours",
        "offered",
        "posted",
        "random",
        "role",
        "take",
        "ways",
    )

    def __init__(self, role: int, machine: Machine, message_s: float, seed: int) -> None:
        self.role, self.machine = role, machine
        self.handle: Callable[[Event, float], list[Action]] = machine.handle
        self.take: Callable[[_Actor, Event], None]
        self.random = random.Random(mix(seed, role))
        self.message_s = message_s
        self.busy_until = 0.0
        self.halted = False
        self.compute_s: Callable[[], float] = float  # of the next mini-batch
        self.computing = False
        self.delay_s = 0.0  # what a server on the node has taken from the computation under way
        self.neighbours: list[_Actor] = []  # on a server's node, where cores may be short
        self.inbox: deque[Event] = deque()  # came while the role was busy
        self.posted: list[Receive] = []
        # Tensors without a buffer, by sender, as they came: weights, gradients.
        self.offered: tuple[dict[int, list[_Offer]], ...] = ({}, {})
        self.ways: dict[int, _Way] = {}


class Simulation:
    """A whole cluster in one process.

    Args:
        plan: who is who.
        machines: every role of the plan, by id.
        hands: what handles tensors.
        recorder: where results go.
        costs: durations.
        size_bytes: of one tensor on the wire.
        seed: of everything random in the costs.
        gradient_share: size of a gradient on the wire, as a fraction of that.
        make: a role's machine for a new plan, where roles may be lost.
        save: called with a role and its `Save`, to keep what a checkpoint holds; by default nothing is kept.
        check: called after every event with the machine that took it; tests use it.

    Attributes:
        code: the exit code that the roles agreed on: 0, or `EXIT_STOPPED` and the like of a run that was stopped.
    """

    def __init__(
        self,
        plan: Plan,
        machines: Mapping[int, Machine],
        hands: Hands,
        recorder: RowSink,
        costs: CostModel,
        *,
        size_bytes: int,
        seed: int,
        gradient_share: float = 1.0,
        make: Callable[[int, Plan, TrainingState], Machine] | None = None,
        save: Callable[[int, Save], None] | None = None,
        check: Callable[[Machine], None] | None = None,
    ) -> None:
        self._gradient_share, self._saver, self._check = gradient_share, save, check
        self.plan, self.hands, self.recorder, self.costs = plan, hands, recorder, costs
        self.now = 0.0
        self.messages = self.code = 0
        self._table = costs.table
        self._cores = costs.table.cores_per_node
        self._lent, self._transferred, self._sent = hands.lent, hands.transfer, hands.sent
        self._posted, self._planned, self._performed = hands.posted, hands.planned, hands.perform
        self._reducer, self._lost = hands.reduce, hands.lost
        self._size_bytes = size_bytes
        # Where all latencies are alike, tensors arrive in the order in which they are sent: that needs no event.
        self._latency_jitter_s = self._table.latency_jitter_s
        self._in_order = not self._latency_jitter_s and self._table.local_latency_s in {
            None,
            self._table.latency_s,
        }
        self._queue: list[tuple[float, int, Callable[[Any, Any], None], Any, Any]] = []
        self._first, self._last = count(), count(_LATER)  # sequence numbers
        self._ports: dict[tuple[str, str, int], _Port] = {}
        self._do: dict[type[Action], Callable[[_Actor, Any, float], None]] = {
            Send: self._send,
            Receive: self._receive,
            Withdraw: self._withdraw,
            Reduce: self._reduce,
            Save: self._save,
            Commit: lambda actor, action, time: self._soon(actor, Committed(action.timestamp)),
            Sync: lambda actor, action, time: None,
            Record: lambda actor, action, time: recorder.record(action),
            Keep: lambda actor, action, time: recorder.keep(actor.role, action),
            Finish: lambda actor, action, time: recorder.finish(actor.role, action),
            Warn: lambda actor, action, time: recorder.warn(actor.machine.name, action.text),
            Fail: self._fail,
            Halt: self._halt,
        }
        self._seconds = {kind: seconds for kind, seconds in costs.local_s.items() if seconds}
        for kind in Local.__subclasses__():
            free = kind in hands.idle and kind not in self._seconds
            self._do[kind] = _nothing if free else self._begin if kind.long else self._perform
        self._reductions: dict[tuple[int, int], dict[int, Reduce]] = {}
        self._actors: dict[int, _Actor] = {}
        for role, machine in machines.items():
            serves = plan.roles[role].about.serves
            actor = self._actors[role] = _Actor(role, machine, self._table.message_s if serves else 0.0, seed)
            if serves:
                actor.take = self._take
                actor.offered = ({}, OrderedDict())  # of many: a dict would be slow to find its first key
            else:
                actor.take = self._handle  # never busy
            actor.handle = self.handler(machine)
            if role in costs.compute_s:
                actor.compute_s = costs.computation(role, actor.random)
        if self._cores is not None:
            for role, actor in self._actors.items():
                if role not in costs.compute_s:
                    actor.neighbours = [self._actors[i] for i in costs.compute_s if costs.node[i] == costs.node[role]]
        if self._table.faults or any(machine.tick_s is not None for machine in machines.values()):
            Faults(self, seed, make)

    def run(self) -> float:
        """Runs until every role has halted.

        Returns:
            The virtual time at the end, in seconds.

        Raises:
            RunError: a role failed, or all wait for each other.
        """
        self.start()
        thresholds = gc.get_threshold()
        if self._lent is None:  # only tensors might be worth the search for cycles, which takes a seventh of the time
            gc.set_threshold(100_000, *thresholds[1:])
        try:
            self.settle()
        finally:
            gc.set_threshold(*thresholds)
        stuck = [a.machine for a in self._actors.values() if not a.halted]
        if stuck:
            raise RunError("; ".join(f"{m.name} waits for {m.waiting_for or 'nothing'}" for m in stuck[:4]))
        return self.now

    def handler(self, machine: Machine) -> Callable[[Event, float], list[Action]]:
        """What gives events to a machine."""
        return _checked(machine, self._check) if self._check else machine.handle

    def start(self) -> None:
        for actor in self._actors.values():
            self._at(0.0, actor.take, actor, Started())
            if actor.machine.tick_s is not None:
                self._later(actor.machine.tick_s, self._tick, actor, None)

    def _tick(self, actor: _Actor, _: None) -> None:
        actor.take(actor, Tick())
        tick_s = actor.machine.tick_s
        # As long as something else happens: else all wait for each other, and it would never end.
        if tick_s is not None and not actor.halted and any(type(of) is not Faults for of in self._whose()):
            self._later(self.now + tick_s, self._tick, actor, None)

    def _whose(self) -> Iterator[Any]:
        """Whose methods are in the queue."""
        return (getattr(entry[2], "__self__", None) for entry in self._queue)

    def stop_at(self, time: float) -> None:
        """Asks the run to stop in order at a moment."""
        owner = self._actors[self.plan.server]
        self._later(time, owner.take, owner, Stopped())

    def settle(self) -> None:
        """Lets happen whatever follows from what is in the queue."""
        queue = self._queue
        while queue:
            self.now, _, what, whom, about = heappop(queue)
            what(whom, about)

    def step(self) -> None:
        """Lets happen what is next in the queue."""
        self.now, _, what, whom, about = heappop(self._queue)
        what(whom, about)

    def _at(self, time: float, what: Callable[[Any, Any], None], whom: Any, about: Any) -> None:
        """Ends of transfers and computations: first among what happens at one moment."""
        heappush(self._queue, (time, next(self._first), what, whom, about))

    def _later(self, time: float, what: Callable[[Any, Any], None], whom: Any, about: Any) -> None:
        """Events for roles: after the ends of transfers and computations of the same moment."""
        heappush(self._queue, (time, next(self._last), what, whom, about))

    # Events to roles: one at a time, and none while a role is busy.

    def _take(self, actor: _Actor, event: Event) -> None:
        if actor.inbox or actor.busy_until > self.now:
            actor.inbox.append(event)
            if len(actor.inbox) == 1:
                self._later(max(self.now, actor.busy_until), self._take_next, actor, None)
        else:
            self._handle_busily(actor, event)

    def _take_next(self, actor: _Actor, _: None) -> None:
        """Hands over what waits in the inbox, one event at a time, when the role is free."""
        inbox = actor.inbox
        while actor.busy_until <= self.now:
            self._handle_busily(actor, inbox[0])
            inbox.popleft()
            if not inbox:
                return
        self._later(actor.busy_until, self._take_next, actor, None)

    def _handle(self, actor: _Actor, event: Event) -> None:
        now = self.now
        do = self._do
        for action in actor.handle(event, now):
            do[type(action)](actor, action, now)

    def _handle_busily(self, actor: _Actor, event: Event) -> None:
        """The same for a server: it has the time of a message to spend, and begins what follows when that is over."""
        now = self.now
        actions = actor.handle(event, now)
        if actor.message_s and type(event) is Received:
            self._work(actor, now, actor.message_s)
        do = self._do
        for action in actions:
            time = actor.busy_until
            do[type(action)](actor, action, time if time > now else now)

    def _work(self, actor: _Actor, time: float, seconds: float) -> None:
        """A server is busy; where cores are short, it takes them from the learners that compute on its node."""
        actor.busy_until = time + seconds
        if actor.neighbours:
            busy = [a for a in actor.neighbours if a.computing]
            if len(busy) >= (self._cores or 0):
                for learner in busy:
                    learner.delay_s += seconds / len(busy)

    # Actions of roles.

    def _send(self, actor: _Actor, action: Send, time: float) -> None:
        self.messages += 1
        way = actor.ways.get(action.to) or self._way(actor, action.to)
        arrival = time + way.latency_s
        if self._latency_jitter_s:
            arrival += actor.random.uniform(0.0, self._latency_jitter_s)
        if arrival < way.delivered_at:
            arrival = way.delivered_at
        way.delivered_at = arrival
        receiver = way.receiver
        if action.buffer is None:
            self._later(arrival, receiver.take, receiver, Received(action.message))
            return
        if self._lent:
            self._lent(actor.role, action.buffer)
        if self._in_order:
            self._offer(receiver, (way, action, arrival))
        else:
            self._at(arrival, self._offer, receiver, (way, action, arrival))

    def _way(self, actor: _Actor, to: int) -> _Way:
        link = self.costs.link(actor.role, to)
        way = actor.ways[to] = _Way(actor, self._actors[to], link, self._size_bytes, self._ports)
        return way

    def _receive(self, actor: _Actor, action: Receive, time: float) -> None:
        if self._posted:
            self._posted(actor.role, action.buffer)
        offered, source = actor.offered[action.gradient], action.source
        if source is None and offered:
            source = next(iter(offered))
        if source not in offered:
            actor.posted.append(action)
            return
        offers = offered[source]
        way, send, arrival = offers.pop(0)
        if not offers:
            del offered[source]
        self._transfer(way, send, action, arrival if arrival > time else time)

    def _withdraw(self, actor: _Actor, action: Withdraw, time: float) -> None:
        for place, receive in enumerate(actor.posted):
            if receive.buffer == action.buffer:
                del actor.posted[place]
                self._later(self.now, actor.take, actor, Withdrawn(action.buffer))  # before a loss seen from now on
                return

    def _offer(self, receiver: _Actor, offer: _Offer) -> None:
        """A tensor has come to its receiver's door."""
        way, send, arrival = offer
        source, gradient = way.sender.role, send.message.kind is GRADIENT
        for place, receive in enumerate(receiver.posted):
            if receive.gradient is gradient and (receive.source is None or receive.source == source):
                del receiver.posted[place]
                self._transfer(way, send, receive, arrival)
                return
        offered = receiver.offered[gradient]
        if source in offered:
            offered[source].append(offer)
        else:
            offered[source] = [offer]

    def _transfer(self, way: _Way, send: Send, receive: Receive, time: float) -> None:
        """Occupies both ports, from when both are free."""
        out, into = way.out, way.into
        if out.free_at > time:
            time = out.free_at
        if into.free_at > time:
            time = into.free_at
        if way.blocking:
            time = max(time, *(port.free_at for port in way.blocking))
        transfer_s = way.transfer_s * self._gradient_share if send.message.kind is GRADIENT else way.transfer_s
        out.free_at = into.free_at = time = time + transfer_s
        for port in way.blocking:
            port.free_at = time
        heappush(self._queue, (time, next(self._first), self._deliver, way, (send, receive)))

    def _deliver(self, way: _Way, transfer: tuple[Send, Receive]) -> None:
        send, receive = transfer
        sender, receiver, buffer, message = way.sender, way.receiver, send.buffer or "", send.message
        if self._transferred:
            self._transferred(sender.role, buffer, receiver.role, receive.buffer)
        if self._sent:
            self._sent(sender.role, buffer)
        if message.rows is not None:  # the receiver's own: roles write into the rows that they receive
            message = msgspec.structs.replace(message, rows=message.rows.copy())
        receiver.take(receiver, Received(message, receive.buffer))
        sender.take(sender, Sent(buffer, receiver.role))

    def _perform(self, actor: _Actor, action: Local, time: float) -> None:
        """Short work: done at once, and what comes of it is known when its time is over."""
        seconds = self._seconds.get(type(action), 0.0)
        event = self._performed(actor.role, action, seconds)
        if seconds:
            self._work(actor, time, seconds)
            time = actor.busy_until
        if event is not None:
            self._later(time, actor.take, actor, event)

    def _begin(self, actor: _Actor, action: Local, time: float) -> None:
        """Long work: done when its time is over."""
        if self._planned:
            self._planned(actor.role, action)
        actor.computing = True
        seconds = actor.compute_s() if type(action) is Compute else self._seconds.get(type(action), 0.0)
        heappush(self._queue, (time + seconds, next(self._first), self._end, actor, action))

    def _end(self, actor: _Actor, action: Local) -> None:
        if actor.delay_s:
            delay_s, actor.delay_s = actor.delay_s, 0.0
            self._at(self.now + delay_s, self._end, actor, action)
            return
        actor.computing = False
        event = self._performed(actor.role, action, self._seconds.get(type(action), 0.0))
        if event is not None:
            self._handle(actor, event)

    def _reduce(self, actor: _Actor, action: Reduce, time: float) -> None:
        """A collective begins when its last member comes, and occupies the members' ports until it is over."""
        key = (action.group, action.sequence)
        here = self._reductions.setdefault(key, {})
        here[actor.role] = action
        members = self.plan.group_of(actor.role)
        if len(here) < len(members):
            return
        del self._reductions[key]
        pairs = [(self._actors[a], b) for a, b in pairwise(members)]
        ways = [a.ways.get(b) or self._way(a, b) for a, b in pairs]
        ports = [port for way in ways for port in (way.out, way.into)]
        end = max([time, *(port.free_at for port in ports)]) + self.costs.reduction_s(members, self._size_bytes)
        for port in ports:
            port.free_at = end
        self._at(end, self._reduced, members, {role: here[role] for role in members})

    def _reduced(self, members: Sequence[int], reductions: dict[int, Reduce]) -> None:
        if self._reducer:
            self._reducer(reductions)
        event = Reduced(reductions[members[0]].sequence, tuple(action.gradient for action in reductions.values()))
        for role in members:
            self._later(self.now, self._actors[role].take, self._actors[role], event)

    def _save(self, actor: _Actor, action: Save, time: float) -> None:
        if self._saver is not None:
            self._saver(actor.role, action)
        self._soon(actor, Saved(action.position.timestamp))

    def _soon(self, actor: _Actor, event: Event) -> None:
        """Once the role is free."""
        self._later(max(self.now, actor.busy_until), actor.take, actor, event)

    def _fail(self, actor: _Actor, action: Fail, time: float) -> None:
        raise RunError(f"{actor.machine.name}: {action.text}")

    def _halt(self, actor: _Actor, action: Halt, time: float) -> None:
        actor.halted = True
        actor.handle = _ignore
        self.code = max(self.code, action.code)


def _checked(machine: Machine, check: Callable[[Machine], None]) -> Callable[[Event, float], list[Action]]:
    def handle(event: Event, now: float) -> list[Action]:
        actions = machine.handle(event, now)
        check(machine)
        return actions

    return handle


def _nothing(actor: _Actor, action: Action, time: float) -> None: ...


def _ignore(event: Event, now: float) -> list[Action]:
    return []


class TimingOnly:
    """Hands without tensors: what a cluster would do, at any scale."""

    lent: Callable[[int, str], None] | None = None
    transfer: Callable[[int, str, int, str], None] | None = None
    sent: Callable[[int, str], None] | None = None
    posted: Callable[[int, str], None] | None = None
    planned: Callable[[int, Local], None] | None = None
    reduce: Callable[[Mapping[int, Reduce]], None] | None = None
    lost: Callable[[int], None] | None = None
    regroup: Callable[[int, int], None] | None = None

    idle: Collection[type[Local]] = (Accumulate, Copy)

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def perform(self, role: int, action: Local, seconds: float) -> Event | None:
        match action:
            case Compute():
                return Computed(action.step, 0.0, 0.0, self._samples)
            case Update():
                return Updated(action.timestamp, 0, seconds)
            case Evaluate():
                return Evaluated(action.buffer, (), seconds)
            case Hash():
                return Hashed("")  # of nothing
        return None
