"""One role in virtual time."""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf

from rudra.core.actions import Action, BackpropFirstStage, Compute, ExecutorAction, Receive, RunFirstStage, Send
from rudra.core.backward import WHOLE
from rudra.core.events import Event
from rudra.core.forward import EarlyTimes
from rudra.data.sampling import mix
from rudra.roles import Machine
from rudra.simulation.costs import Link
from rudra.simulation.links import Port, Ports

Offer = tuple["Route", Send, float]
"""A tensor that is ready to be sent, and the virtual time when it arrives."""


class Actor:
    """A role's machine with its state in the simulation.

    Args:
        role: Id of the role in the plan.
        machine: State machine of the role.
        serves: Whether the role handles messages from many roles, one at a time.
        message_s: Seconds that the role needs for each of these messages.
        seed: Seed of the simulation.

    Attributes:
        handle: Function that passes an event to the machine.
        take: Function that accepts an event, now or when the role is free.
        random: Random generator of this role.
        busy_until: Virtual time in seconds until which the role is busy.
        halted: Whether the role has ended or died.
        compute_s: Function that draws the seconds of the next mini-batch.
        local_s: Seconds of each other local action. An action that is missing here takes no time.
        computing: Whether a mini-batch is being computed.
        ahead: Seconds that the next mini-batch still takes, and those of its forward pass, which is complete as soon as
            the role is told of the weights or of the average. None: the pass has not begun.
        pulled: Weights in parts that have come for the next forward pass. From each server: times of the pass, seconds
            of the transfer, and the time of its end. None: the role has not computed a mini-batch, so no pass begins.
        delay_s: Seconds that a server on the same node has taken from the current computation.
        crowds: Node where a server's work delays learners if they occupy all cores. None: it delays none.
        inbox: Events that arrived while the role was busy.
        posted: Posted receives, in order.
        offered: Tensors without a buffer, by sender, in order of arrival: weights, gradients.
        routes: Routes to other roles, by role.
        early: Routes for parts of gradients that the actor sends while it computes the gradients, if links are shared.
        turns: Mini-batches that learners on this rank requested, the current one first. The learners share this deque.
    """

    __slots__ = (
        "ahead",
        "busy_until",
        "compute_s",
        "computing",
        "crowds",
        "delay_s",
        "early",
        "halted",
        "handle",
        "inbox",
        "local_s",
        "machine",
        "message_s",
        "offered",
        "posted",
        "pulled",
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
        self.ahead: tuple[float, float] | None = None
        self.pulled: list[tuple[EarlyTimes, float, float]] | None = None
        self.delay_s = 0.0
        self.crowds: int | None = None
        self.inbox: deque[Event] = deque()
        self.posted: list[Receive] = []
        # A server gets gradients from many senders, and a dict would be slow to find its first key.
        self.offered: tuple[dict[int, list[Offer]], ...] = ({}, OrderedDict() if serves else {})
        self.routes: dict[int, Route] = {}
        self.early: list[Route] = []
        self.turns: deque[tuple[Actor, Compute | RunFirstStage | BackpropFirstStage]] = deque()


class Route:
    """Route from one role to another. Control messages on it do not overtake each other.

    Attributes:
        leads: Moments of a backward pass when more of a gradient may be sent. Only one: gradients are sent as a whole.
        pulled: Times of a forward pass that begins while weights cross the route. None: it begins after their arrival.
        began_at: Virtual time when weights last began to cross the route.
        ahead: Number of gradients whose early parts have crossed shared links, minus the number of gradients that were
            sent after them.
        waiting: Gradients that wait until their early parts have crossed shared links.
        core_s: Node -> seconds of a core that a tensor takes. Empty: they delay no learner.
    """

    __slots__ = (
        "ahead",
        "began_at",
        "between",
        "blocking",
        "bytes_per_s",
        "core_s",
        "delivered_at",
        "into",
        "latency_s",
        "leads",
        "out",
        "pulled",
        "receiver",
        "sender",
        "transfer_s",
        "waiting",
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
        # A server with blocking calls has one port for both directions.
        self.blocking = [own.setdefault(("both", *end), Port(rate)) for end in link.blocking]
        self.delivered_at = 0.0
        self.leads = WHOLE
        self.pulled: EarlyTimes | None = None
        self.began_at = 0.0
        self.ahead = 0
        self.waiting: deque[tuple[Send, Receive]] = deque()
        self.core_s: Mapping[int, float] = {}
