"""The learner: compute a gradient, push it, receive the weights if they are newer, and repeat.

Source: rudra.txt §2 and §3.2. In the paper the learner asks for the server's timestamp when its gradient is delivered,
and keeps its weights if they are current. Here the gradient is also that request: the server answers after it has
handled the gradient, and newer weights follow at once. The order is the paper's, with one round trip less.

    WAITING     first weights               -> HASHING
    HASHING     digest of the weights       -> READY      report the digest to the server
    READY       training starts             -> COMPUTING
    COMPUTING   activations ready or delivered, or their gradient received -> COMPUTING
    COMPUTING   gradient ready              -> EXCHANGING push
    EXCHANGING  delivered, answered, and the newer weights received -> COMPUTING
    any         stop                        -> STOPPED    when no transfer is under way
    STOPPED     everything is recorded      -> DONE

A learner that has only the first layers exchanges activations with a stage server while it is COMPUTING
(`rudra.roles.gradient_requests`). The time to compute a gradient includes this exchange.
"""

from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar

from rudra.core.actions import Action, Hash, Receive, Send
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.events import ActivationsReady, Computed, Hashed, Received, Sent, Started
from rudra.core.messages import (
    ChildDone,
    MessageKind,
    PullAnswer,
    PushedGradient,
    Ready,
    Shutdown,
    Stop,
    TrainingStarted,
    Weights,
)
from rudra.core.records import Gradient
from rudra.roles.gradient_requests import request_of
from rudra.roles.machine import Machine, Setup, States, Transition, halt, self_loops, short_digest
from rudra.roles.minibatch_log import MinibatchLog

DROPPED = -1
"""Value of `Stop.pushed` for a dropped learner: the server ignores all that it still sends."""


class LearnerState(States):
    WAITING = auto()
    HASHING = auto()
    READY = auto()
    COMPUTING = auto()
    EXCHANGING = auto()
    HELD = auto()  # this state and the next one: only learners that overlap communication
    LEAVING = auto()
    TESTING = auto()  # only workers
    STEPPING = auto()  # only learners that average
    STOPPED = auto()
    DONE = auto()


THROUGH_STAGE: Mapping[Any, str] = dict.fromkeys((ActivationsReady, MessageKind.ACTIVATION_GRADIENT), "_through_stage")
"""Events between the beginning of a mini-batch and its gradient, if a stage server has the last layers."""

# Names for states that are looked up often: the attributes of an enum are slow.
COMPUTING, EXCHANGING = LearnerState.COMPUTING, LearnerState.EXCHANGING


class Learner(Machine):
    """Learner that pushes gradients to a server and pulls weights from it.

    Args:
        role: id in the plan. The parent of this role is the server that it pushes to.
        setup: arguments of the role.

    Attributes:
        log: log of the learner's mini-batches.
        timestamp: timestamp of the weights that it computes with.
    """

    # A simulation has thousands of learners. Without a dictionary each of them needs fewer cache lines.
    __slots__ = (
        "_answered_at",
        "_computed_at",
        "_delivered_at",
        "_expects_weights",
        "_pulls",
        "_pushed_at",
        "_receive",
        "_request",
        "_skipped_pulls",
        "_source",
        "_stopping",
        "log",
        "pushed",
        "server",
        "timestamp",
    )

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        (LearnerState.WAITING, Started): Transition("_start", LearnerState.WAITING),
        (LearnerState.WAITING, MessageKind.WEIGHTS): Transition("_first_weights", LearnerState.HASHING),
        (LearnerState.HASHING, Hashed): Transition("_report_digest", LearnerState.READY),
        (LearnerState.READY, MessageKind.START): Transition("_begin", LearnerState.COMPUTING),
        (LearnerState.COMPUTING, Computed): Transition("_push", LearnerState.EXCHANGING, LearnerState.STOPPED),
        **self_loops([LearnerState.COMPUTING], {**THROUGH_STAGE, Sent: "_through_stage"}),
        (LearnerState.COMPUTING, MessageKind.STOP): Transition("_stop_soon", LearnerState.COMPUTING),
        (LearnerState.EXCHANGING, Sent): Transition(
            "_delivered", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.STOPPED
        ),
        (LearnerState.EXCHANGING, MessageKind.TIMESTAMP): Transition(
            "_answered", LearnerState.EXCHANGING, LearnerState.COMPUTING
        ),
        (LearnerState.EXCHANGING, MessageKind.WEIGHTS): Transition(
            "_pulled", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.STOPPED
        ),
        (LearnerState.EXCHANGING, MessageKind.STOP): Transition(
            "_stop_soon", LearnerState.EXCHANGING, LearnerState.STOPPED
        ),
        **self_loops(
            [LearnerState.STOPPED], dict.fromkeys((Sent, MessageKind.TIMESTAMP, MessageKind.WEIGHTS), "_ignore")
        ),  # after the learner was dropped
        **{
            (state, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE)
            for state in (LearnerState.COMPUTING, LearnerState.EXCHANGING, LearnerState.STOPPED)
        },
    }

    def __init__(self, role: int, setup: Setup) -> None:
        plan = setup.plan
        super().__init__(role, plan)
        self.log = self._make_log(role, setup)
        self._request = request_of(role, plan)
        parent = plan.roles[role].parent
        self.server = role if parent is None else parent
        self.state = LearnerState.WAITING
        self.timestamp = -1
        self.pushed = self.log.step
        self._stopping = False
        self._delivered_at: float | None = None
        self._answered_at: float | None = None
        self._expects_weights = False
        source = plan.weight_source(plan.roles[role])
        self._source = self.server if source is None else source
        self._receive = Receive(WEIGHTS, self._source)
        self._computed_at = self._pushed_at = 0.0
        self._pulls = self._skipped_pulls = 0

    def _make_log(self, role: int, setup: Setup) -> MinibatchLog:
        return MinibatchLog(role, setup)

    def inherit(self, before: "Learner") -> None:
        self.log.inherit(before.log)

    @property
    def waiting_for(self) -> str:
        server = self.plan.roles[self.server].name
        if self.state is LearnerState.EXCHANGING:
            if self._delivered_at is None:
                return f"the {server} to take gradient {self.pushed - 1}"
            return f"the {server} to answer its pull (it holds timestamp {self.timestamp})"
        waits: dict[States, str] = {
            LearnerState.WAITING: f"the first weights from the {server}",
            LearnerState.READY: f"the {server} to start training",
            LearnerState.COMPUTING: self._request.waiting_for,
            LearnerState.STOPPED: "the statistics server to finish",
        }
        return waits.get(self.state, "")

    def _start(self, event: Started, now: float) -> list[Action]:
        return [self._receive]

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        self.state = LearnerState.HASHING
        self.timestamp = event.message.timestamp
        return [Hash(WEIGHTS)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = LearnerState.READY
        return [Send(self.server, Ready(self.id, short_digest(event.digest)))]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self.log.began = event.message.began_ns * 1e-9
        return self._next(now)

    def _next(self, now: float) -> list[Action]:
        self.state = COMPUTING
        return [self._request.begin(self.log.begin(WEIGHTS, GRADIENT, self.timestamp, now))]

    def _through_stage(self, event: Any, now: float) -> list[Action]:
        return self._request.take(event)

    def _push(self, event: Computed, now: float) -> list[Action]:
        warnings, ends = self._computed(event, now)
        if ends:
            return warnings
        self.state = EXCHANGING
        timestamp = self.timestamp
        message = PushedGradient(self.id, timestamp, timestamp, (self._gradient(event, now),))
        return [Send(self.server, message, GRADIENT), *warnings]

    def _computed(self, event: Computed, now: float) -> tuple[list[Action], bool]:
        """Notes a mini-batch and returns actions, and whether training ends with them."""
        actions, fails = self.log.enter(event, self.timestamp, now)
        if fails or not self._stopping:
            return actions, fails
        self.log.report_unused()
        return actions + self._leave(now), True

    def _gradient(self, event: Computed, now: float) -> Gradient:
        """Counts and describes a gradient that is pushed now."""
        self.pushed += 1
        self._computed_at = self._pushed_at = now
        self._delivered_at = self._answered_at = None
        return self.log.describe(event, self.timestamp)

    def _delivered(self, event: Sent, now: float) -> list[Action]:
        self._delivered_at = now
        return self._advance(now) if self._answered_at is not None or self._stopping else []

    def _answered(self, event: Received[PullAnswer], now: float) -> list[Action]:
        return self._continue_with(event.message.timestamp, now)

    def _continue_with(self, timestamp: int, now: float) -> list[Action]:
        """Receives the weights of a timestamp if they are newer, and otherwise continues."""
        self._answered_at = now
        if timestamp > self.timestamp:
            self._expects_weights = True
            self._pulls += 1
            return [self._receive]
        self._skipped_pulls += 1
        return self._advance(now)

    def _pulled(self, event: Received[Weights], now: float) -> list[Action]:
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._advance(now)

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        self._stopping = True
        if self.state is LearnerState.COMPUTING:
            return []
        return self._leave(now) if event.message.pushed == DROPPED else self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Continues if no transfer is under way: begins the next mini-batch, or leaves."""
        delivered, asked = self._delivered_at, self._answered_at
        if delivered is None or self._expects_weights or (asked is None and not self._stopping):
            return []
        push_s = delivered - self._pushed_at
        answer = now if asked is None else max(asked, delivered)  # a stop counts as an answer
        log = self.log
        log.spend(self._pushed_at - self._computed_at, push_s, answer - delivered, now - answer)
        due = log.due(now)
        if self._stopping:
            return due + self._leave(now)
        return self._next(now) + due if due else self._next(now)

    def _leave(self, now: float) -> list[Action]:
        self.state = LearnerState.STOPPED
        account = self.log.close(now, self.pushed, self._pulls, self._skipped_pulls)
        return [*account, Send(self.server, ChildDone(self.id, self.pushed))]

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = LearnerState.DONE
        return [halt(event)]
