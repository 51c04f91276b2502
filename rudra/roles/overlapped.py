"""Learner that pushes gradients and receives weights while it computes, instead of waiting for a server.

Source: rudra.txt §3.3, Rudra-adv*.

The learner pushes every gradient, but only after the previous one is delivered. It has two gradient buffers: it
computes into one while it sends the other.

Weights come down a tree of the root and all learners, whenever newer weights are available. The learner has three
weight buffers: one for the computation, one with the newest weights, and one that receives the next weights. A
mini-batch begins with the newest complete weights, which needs no copy: the buffers only change their roles.

Each learner forwards weights to its receivers. On each edge it sends the newest weights as soon as the edge is idle, so
versions may be skipped but never queue up. A buffer in use by a computation or a transfer is not overwritten.

Not in the paper: the plan may bound a learner's outstanding gradients. Then the server notifies the learner of each
applied gradient. The learner pauses while its newest weights lack `Plan.outstanding` or more of its own gradients.

    WAITING    first weights                      -> HASHING
    HASHING    digest of the weights              -> READY      forward the weights; notify the server
    READY      training starts                    -> COMPUTING
    COMPUTING  gradient ready, previous one delivered     -> COMPUTING   push it, next mini-batch
    COMPUTING  gradient ready, previous one not delivered -> EXCHANGING  until the previous one is delivered
    COMPUTING, EXCHANGING  too many outstanding gradients -> HELD        until newer weights include enough of them
    any        stop                               -> LEAVING    when the present gradient is ready
    LEAVING    no transfer of this learner is under way -> STOPPED
    STOPPED    everything is recorded             -> DONE
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from rudra.core.actions import Action, Hash, Receive, Send
from rudra.core.buffer_names import ACTIVATIONS, GRADIENT, WEIGHTS
from rudra.core.events import Computed, Hashed, Received, Sent, Started
from rudra.core.messages import (
    NOT_PULLING,
    GradientApplied,
    MessageKind,
    PushedGradient,
    Ready,
    Shutdown,
    Stop,
    Weights,
)
from rudra.core.records import Gradient
from rudra.roles.learner import THROUGH_STAGE, Learner, LearnerState
from rudra.roles.machine import Setup, States, Transition, halt, self_loops, short_digest

WEIGHT_BUFFERS = (WEIGHTS, f"{WEIGHTS} 1", f"{WEIGHTS} 2")
GRADIENT_BUFFERS = (f"{GRADIENT} 0", f"{GRADIENT} 1")
UNDERWAY: dict[Any, str] = {Sent: "_returned", MessageKind.WEIGHTS: "_arrived", MessageKind.APPLIED: "_hear_of_applied"}


class OverlappedLearner(Learner):
    """Learner of topology adv*. It has the same arguments as `Learner`."""

    __slots__ = (
        "_applied",
        "_computing_with",
        "_edges",
        "_given",
        "_into",
        "_newest",
        "_open",
        "_outstanding",
        "_receivers",
        "_sending",
        "_sent_at",
        "_stamps",
        "_waiting",
    )

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        (LearnerState.WAITING, Started): Transition("_start", LearnerState.WAITING),
        (LearnerState.WAITING, MessageKind.WEIGHTS): Transition("_first_weights", LearnerState.HASHING),
        (LearnerState.HASHING, Hashed): Transition("_report_digest", LearnerState.READY),
        **self_loops([LearnerState.HASHING, LearnerState.READY], {Sent: "_returned", MessageKind.WEIGHTS: "_arrived"}),
        (LearnerState.READY, MessageKind.START): Transition("_begin", LearnerState.COMPUTING),
        (LearnerState.COMPUTING, Computed): Transition(
            "_push",
            LearnerState.COMPUTING,
            LearnerState.EXCHANGING,
            LearnerState.HELD,
            LearnerState.LEAVING,
            LearnerState.STOPPED,
        ),
        **self_loops([LearnerState.COMPUTING], THROUGH_STAGE),
        **self_loops([LearnerState.COMPUTING, LearnerState.LEAVING, LearnerState.STOPPED], UNDERWAY),
        (LearnerState.COMPUTING, MessageKind.STOP): Transition("_stop_soon", LearnerState.COMPUTING),
        **self_loops(
            [LearnerState.EXCHANGING], {MessageKind.WEIGHTS: "_arrived", MessageKind.APPLIED: "_hear_of_applied"}
        ),
        (LearnerState.EXCHANGING, Sent): Transition(
            "_returned", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.HELD, LearnerState.LEAVING
        ),
        (LearnerState.EXCHANGING, MessageKind.STOP): Transition("_stop_soon", LearnerState.EXCHANGING),
        (LearnerState.HELD, Sent): Transition("_returned", LearnerState.HELD),
        (LearnerState.HELD, MessageKind.WEIGHTS): Transition("_arrived", LearnerState.HELD, LearnerState.COMPUTING),
        (LearnerState.HELD, MessageKind.APPLIED): Transition(
            "_hear_of_applied", LearnerState.HELD, LearnerState.COMPUTING
        ),
        (LearnerState.HELD, MessageKind.STOP): Transition("_stop_held", LearnerState.LEAVING, LearnerState.STOPPED),
        (LearnerState.LEAVING, Sent): Transition("_returned", LearnerState.LEAVING, LearnerState.STOPPED),
        (LearnerState.STOPPED, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._receivers = setup.plan.receivers[role]
        self._stamps = dict.fromkeys(WEIGHT_BUFFERS, -1)
        self._open: str | None = WEIGHT_BUFFERS[0]  # buffer that receives the next weights
        self._newest = WEIGHT_BUFFERS[0]
        self._computing_with: str | None = None
        self._edges: dict[int, str] = {}  # receiver -> buffer that is being sent to it
        self._given = dict.fromkeys(self._receivers, -1)
        self._into = 0  # index of the gradient buffer for the computation
        self._sending: str | None = None
        self._waiting: Gradient | None = None  # ready gradient, while the previous one is being sent
        self._sent_at = 0.0  # time when the newest gradient was sent
        self._outstanding = 0  # pushed gradients that the newest weights do not include
        self._applied: deque[int] = deque()  # timestamps of weights to come, each with one more of them

    @property
    def waiting_for(self) -> str:
        server = self.plan.roles[self.server].name
        if self.state is LearnerState.EXCHANGING:
            return f"the {server} to take gradient {self.pushed - 2}"
        if self.state is LearnerState.HELD:
            source = self.plan.roles[self._source].name
            return f"weights from the {source} that hold more of its gradients (it has timestamp {self.timestamp})"
        if self.state is LearnerState.LEAVING:
            last = [] if self._sending is None else [f"the {server} to take gradient {self.pushed - 1}"]
            return ", ".join([*last, *(f"{self.plan.roles[to].name} to take weights" for to in self._edges)])
        waits: dict[States, str] = {
            LearnerState.WAITING: f"the first weights from the {self.plan.roles[self._source].name}",
            LearnerState.READY: f"the {server} to start training",
            LearnerState.COMPUTING: self._request.waiting_for,
            LearnerState.STOPPED: "the statistics server to finish",
        }
        return waits.get(self.state, "")

    def validate(self) -> None:
        assert self._open is None or self._open not in {self._computing_with, *self._edges.values()}
        assert self.state is LearnerState.WAITING or self._open != self._newest
        assert self._sending is None or self._sending != GRADIENT_BUFFERS[self._into] or self._waiting is None

    # Start.

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Receive(WEIGHT_BUFFERS[0], self._source)]

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        self.state = LearnerState.HASHING
        return [*self._arrived(event, now), Hash(self._newest)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = LearnerState.READY
        return [Send(self.server, Ready(self.id, short_digest(event.digest)))]

    # Weights: receiving and forwarding.

    def _arrived(self, event: Received[Weights], now: float) -> list[Action]:
        assert event.buffer is not None
        self._newest, self._open = event.buffer, None
        self._stamps[event.buffer] = event.message.timestamp
        self._pulls += self.state in {LearnerState.COMPUTING, LearnerState.EXCHANGING, LearnerState.HELD}
        actions = self._hand_on() + self._reopen()
        return actions + self._continue(now) if self.state is LearnerState.HELD else actions

    def _hand_on(self) -> list[Action]:
        """Sends the newest weights along every idle edge, until training ends."""
        if self.state in {LearnerState.LEAVING, LearnerState.STOPPED}:
            return []
        stamp, actions = self._stamps[self._newest], list[Action]()
        for to in self._receivers:
            if to not in self._edges and self._given[to] < stamp:
                self._edges[to], self._given[to] = self._newest, stamp
                actions.append(Send(to, Weights(self.id, stamp), self._newest))
        return actions

    def _reopen(self) -> list[Action]:
        """Begins to receive the next weights if a buffer is free and no receive is open."""
        if self._open is not None:
            return []
        used = {self._newest, self._computing_with, *self._edges.values()}
        self._open = next((buffer for buffer in WEIGHT_BUFFERS if buffer not in used), None)
        return [] if self._open is None else [Receive(self._open, self._source)]

    # Gradients.

    def _next(self, now: float) -> list[Action]:
        self.state = LearnerState.COMPUTING
        self._computing_with = self._newest
        self.timestamp = self._stamps[self._newest]
        compute = self.log.begin(self._newest, GRADIENT_BUFFERS[self._into], self.timestamp, now)
        return [self._request.begin(compute), *self._reopen()]

    def _push(self, event: Computed, now: float) -> list[Action]:
        warnings, ends = self._computed(event, now)
        if ends:
            return warnings
        self._waiting = self._gradient(event, now)
        if self._sending is None:
            return [*warnings, *self._send(now)]
        self.state = LearnerState.EXCHANGING
        return warnings

    def _send(self, now: float) -> list[Action]:
        """Pushes the ready gradient, and continues with the other gradient buffer."""
        gradient, self._waiting = self._waiting, None
        assert gradient is not None
        self._sending, self._sent_at = GRADIENT_BUFFERS[self._into], now
        self._into = 1 - self._into
        self._outstanding += 1
        message = PushedGradient(self.id, gradient.timestamp, NOT_PULLING, (gradient,))
        return [Send(self.server, message, self._sending), *self._continue(now)]

    def _continue(self, now: float) -> list[Action]:
        """Begins the next mini-batch, or leaves, or waits for weights that include more of the pushed gradients."""
        if not self._stopping and self._too_many_outstanding():
            self.state, self._computing_with = LearnerState.HELD, None
            return self._reopen()
        self.log.spend(0.0, self._sent_at - self._pushed_at, now - self._sent_at, 0.0)
        after = self._leave(now) if self._stopping else self._next(now)
        return [*after, *self.log.due(now)]

    def _too_many_outstanding(self) -> bool:
        if self.plan.outstanding is None:
            return False
        while self._applied and self._applied[0] <= self._stamps[self._newest]:
            self._applied.popleft()
            self._outstanding -= 1
        return self._outstanding >= self.plan.outstanding

    def _hear_of_applied(self, event: Received[GradientApplied], now: float) -> list[Action]:
        self._applied.append(event.message.timestamp)
        return self._continue(now) if self.state is LearnerState.HELD else []

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.to == self.server and event.buffer == self._sending:
            self._sending = None
            if self.state is LearnerState.EXCHANGING:
                return self._send(now)
            return self._left(now)
        if event.buffer == ACTIVATIONS:
            return self._request.take(event)
        del self._edges[event.to]
        return self._hand_on() + self._reopen() + self._left(now)

    # The end.

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        self._stopping = True
        return []

    def _stop_held(self, event: Received[Stop], now: float) -> list[Action]:
        self._stopping = True
        return self._continue(now)

    def _leave(self, now: float) -> list[Action]:
        self.state = LearnerState.LEAVING
        self._computing_with = None
        return [*self._reopen(), *self._left(now)]

    def _left(self, now: float) -> list[Action]:
        """Leaves when no transfer is under way. Weights are still received, so that their sender does not wait."""
        if self.state is not LearnerState.LEAVING or self._sending is not None or self._edges:
            return []
        return super()._leave(now)

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = LearnerState.DONE
        return [halt(event)]
