"""One role in virtual time."""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf

from rudra.core.events import Action, BackpropFirstStage, Compute, Event, ExecutorAction, Receive, RunFirstStage, Send
from rudra.data.sampling import mix
from rudra.roles import Machine
from rudra.simulation.costs import Link
from rudra.simulation.links import Port, Ports

Offer = tuple["Route", Send, float]
"""A tensor on its way, and when it comes."""


class Actor:
    """A role's machine, and what the simulator has to know of it.

    Args:
        role: id in the plan.
        machine: of the role.
        serves: it takes the messages of many, one at a time.
        message_s: how long each of these takes it.
        seed: of the simulation.

    Attributes:
        handle: gives an event to the machine.
        take: takes an event in, now or when the role is free.
        random: its own luck.
        busy_until: virtual time in seconds.
        halted: it has ended, or died.
        compute_s: seconds of the next mini-batch.
        local_s: seconds of its other local actions; those that are not there take no time.
        computing: a mini-batch is under way.
        delay_s: what a server on the node has taken from that computation.
        neighbours: those that compute on a server's node, where cores may be short.
        inbox: what came while the role was busy.
        posted: receives, in order.
        offered: tensors without a buffer, by sender, as they came: weights, gradients.
        routes: to others, by role.
        turns: mini-batches that the learners of its rank want computed, the one under way first; they share it.
    """

    __slots__ = (
        "busy_until",
        "compute_s",
        "computing",
        "delay_s",
        "halted",
        "handle",
        "inbox",
        "local_s",
        "machine",
        "message_s",
        "neighbours",
        "offered",
        "posted",
        "random",
        "role",
        "routes",
        "take",
        "turns",
    )

    def __init__(self, role: int, machine: Machine, *, serves: bool, message_s: float, seed: int) -> None:
        self.role, self.machine = role, machine
        self.handle: Callable[[Event, float], list[Action]] = machine.handle
        self.take: Callable[[Actor, Event], None]
        self.random = random.Random(mix(seed, role))
        self.message_s = message_s
        self.busy_until = 0.0
        self.halted = False
        self.compute_s: Callable[[], float] = float
        self.local_s: Mapping[type[ExecutorAction], float] = {}
        self.computing = False
        self.delay_s = 0.0
        self.neighbours: list[Actor] = []
        self.inbox: deque[Event] = deque()
        self.posted: list[Receive] = []
        # Gradients of many: a dict would be slow to find its first key.
        self.offered: tuple[dict[int, list[Offer]], ...] = ({}, OrderedDict() if serves else {})
        self.routes: dict[int, Route] = {}
        self.turns: deque[tuple[Actor, Compute | RunFirstStage | BackpropFirstStage]] = deque()


class Route:
    """From one role to another; control messages do not overtake each other on it."""

    __slots__ = (
        "between",
        "blocking",
        "bytes_per_s",
        "delivered_at",
        "into",
        "latency_s",
        "out",
        "receiver",
        "sender",
        "transfer_s",
    )

    def __init__(self, sender: Actor, receiver: Actor, link: Link, size_bytes: float, ports: Ports, own: Ports) -> None:
        self.sender, self.receiver = sender, receiver
        self.latency_s = link.latency_s
        self.transfer_s = size_bytes * link.seconds_per_byte
        self.bytes_per_s = rate = 1 / link.seconds_per_byte if link.seconds_per_byte else inf
        self.between = link.out[0] == "node"
        of = ports if self.between else own
        self.out = of.setdefault(("out", *link.out), Port(rate))
        self.into = of.setdefault(("into", *link.into), Port(rate))
        # Of servers whose calls block, both ways are one.
        self.blocking = [own.setdefault(("both", *end), Port(rate)) for end in link.blocking]
        self.delivered_at = 0.0
