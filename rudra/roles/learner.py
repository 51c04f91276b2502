"""The learner: compute a gradient, push it, get the weights if they are newer, again.

Source: rudra.txt §2 and §3.2. There the learner asks for the server's timestamp when its gradient is delivered, and
holds on to its weights where they are current. Here the gradient is the question: the server answers it when it has
handled the gradient, and newer weights follow the answer at once. That is the paper's order with one round trip less.

    WAITING     first weights               -> HASHING
    HASHING     their digest                -> READY      tell the server
    READY       training starts             -> COMPUTING
    COMPUTING   gradient ready              -> EXCHANGING push
    EXCHANGING  delivered, answered, and the newer weights received -> COMPUTING
    any         stop                        -> STOPPED    as soon as no transfer is under way
    STOPPED     everything is recorded      -> DONE
"""

from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar

from rudra.core.events import (
    Action,
    Compute,
    Computed,
    Event,
    Hash,
    Hashed,
    Receive,
    Received,
    Send,
    Sent,
    Started,
)
from rudra.core.messages import Kind, Message
from rudra.core.records import Gradient
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.tables import FaultToleranceTable, ResultsTable
from rudra.roles.machine import States, halt, short
from rudra.roles.minibatch_log import MinibatchLog
from topologies import Plan

DROPPED = -1
"""In a message to stop: what this learner still sends is not taken."""

WEIGHTS = "weights"
GRADIENT = "gradient"


class State(States):
    WAITING = auto()
    HASHING = auto()
    READY = auto()
    COMPUTING = auto()
    EXCHANGING = auto()
    HELD = auto()  # this one and the next are of learners that overlap communication alone
    LEAVING = auto()
    STOPPED = auto()
    DONE = auto()


# Names for what is looked up all the time: an enum's attributes are slow.
COMPUTING, EXCHANGING, PUSH = State.COMPUTING, State.EXCHANGING, Kind.GRADIENT


class Learner(MinibatchLog):
    """One learner.

    Args:
        role: id in the plan; its parent is the server that it pushes to.
        plan: who is who.
        tolerance: what a non-finite loss does.
        results: how long reports may wait.
        position: where training begins.
    """

    __slots__ = (
        "_answered_at",
        "_delivered_at",
        "_expects_weights",
        "_pulls",
        "_pushed_at",
        "_receive",
        "_skipped_pulls",
        "_source",
        "_stopping",
        "pushed",
        "server",
    )

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {
        (State.WAITING, Started): "_start",
        (State.WAITING, Kind.WEIGHTS): "_first_weights",
        (State.HASHING, Hashed): "_report_digest",
        (State.READY, Kind.START): "_begin",
        (State.COMPUTING, Computed): "_push",
        (State.COMPUTING, Kind.STOP): "_stop_soon",
        (State.EXCHANGING, Sent): "_delivered",
        (State.EXCHANGING, Kind.TIMESTAMP): "_answered",
        (State.EXCHANGING, Kind.WEIGHTS): "_pulled",
        (State.EXCHANGING, Kind.STOP): "_stop_soon",
        **{(State.STOPPED, event): "_in_vain" for event in (Sent, Kind.TIMESTAMP, Kind.WEIGHTS)},  # it was dropped
        **{(state, Kind.DONE): "_finish" for state in (State.COMPUTING, State.EXCHANGING)},
        (State.STOPPED, Kind.DONE): "_finish",
    }

    def __init__(
        self,
        role: int,
        plan: Plan,
        tolerance: FaultToleranceTable,
        results: ResultsTable,
        position: TrainingState = BEGINNING,
    ) -> None:
        super().__init__(role, plan)
        self._open_books(tolerance, results, position)
        parent = plan.roles[role].parent
        self.server = role if parent is None else parent
        self.state = State.WAITING
        self.timestamp = -1
        self.pushed = self.step
        self._stopping = False
        self._delivered_at: float | None = None
        self._answered_at: float | None = None
        self._expects_weights = False
        giver = plan.weight_source(plan.roles[role])
        self._source = self.server if giver is None else giver
        self._receive = Receive(WEIGHTS, self._source)
        self._pushed_at = 0.0
        self._pulls = self._skipped_pulls = 0

    @property
    def waiting_for(self) -> str:
        server = self.plan.roles[self.server].name
        if self.state is State.EXCHANGING:
            if self._delivered_at is None:
                return f"the {server} to take gradient {self.pushed - 1}"
            return f"the {server} to answer its pull (it holds timestamp {self.timestamp})"
        waits: dict[States, str] = {
            State.WAITING: f"the first weights from the {server}",
            State.READY: f"the {server} to start training",
            State.STOPPED: "the statistics server to finish",
        }
        return waits.get(self.state, "")

    def _start(self, event: Started, now: float) -> list[Action]:
        return [self._receive]

    def _first_weights(self, event: Received, now: float) -> list[Action]:
        self.state = State.HASHING
        self.timestamp = event.message.timestamp
        return [Hash(WEIGHTS)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = State.READY
        return [Send(self.server, Message(Kind.READY, self.id, value=short(event.digest)))]

    def _begin(self, event: Received, now: float) -> list[Action]:
        self._began = event.message.value * 1e-9
        return self._next(now)

    def _next(self, now: float) -> list[Action]:
        self.state = COMPUTING
        self._since = now
        return [Compute(self.step, WEIGHTS, GRADIENT, self.timestamp, now - self._began)]

    def _push(self, event: Computed, now: float) -> list[Action]:
        warnings, ends = self._computed(event, now)
        if ends:
            return warnings
        self.state = EXCHANGING
        timestamp = self.timestamp
        message = Message(PUSH, self.id, timestamp, timestamp, None, (self._gradient(event, now),))
        return [Send(self.server, message, GRADIENT), *warnings]

    def _computed(self, event: Computed, now: float) -> tuple[list[Action], bool]:
        """Takes a mini-batch into the books; what to do about it, and whether that is all because training ends."""
        actions, fails = self._enter(event, now)
        if fails or not self._stopping:
            return actions, fails
        self._report(0.0, 0.0, 0.0)
        return actions + self._leave(now), True

    def _gradient(self, event: Computed, now: float) -> Gradient:
        """Counts a gradient that is pushed now, and describes it."""
        self.pushed += 1
        self._pushed_at = now
        self._delivered_at = self._answered_at = None
        return self._describe(event)

    def _delivered(self, event: Sent, now: float) -> list[Action]:
        self._delivered_at = now
        return self._advance(now) if self._answered_at is not None or self._stopping else []

    def _answered(self, event: Received, now: float) -> list[Action]:
        self._answered_at = now
        if event.message.timestamp > self.timestamp:
            self._expects_weights = True
            self._pulls += 1
            return [self._receive]
        self._skipped_pulls += 1
        return self._advance(now)

    def _pulled(self, event: Received, now: float) -> list[Action]:
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._advance(now)

    def _stop_soon(self, event: Received, now: float) -> list[Action]:
        self._stopping = True
        if self.state is State.COMPUTING:
            return []
        return self._leave(now) if event.message.value == DROPPED else self._advance(now)

    def _in_vain(self, event: Event, now: float) -> list[Action]:
        return []

    def _advance(self, now: float) -> list[Action]:
        """Goes on when no transfer is under way: to the next mini-batch, or away."""
        delivered, asked = self._delivered_at, self._answered_at
        if delivered is None or self._expects_weights or (asked is None and not self._stopping):
            return []
        push_s = delivered - self._pushed_at
        answer = now if asked is None else max(asked, delivered)  # a stop is an answer too
        self._spent(push_s, answer - delivered, now - answer)
        due = self._diary.due(now) if self._reports_minibatches else []
        if self._stopping:
            return due + self._leave(now)
        return self._next(now) + due if due else self._next(now)

    def _leave(self, now: float) -> list[Action]:
        self.state = State.STOPPED
        account = self._close_books(now, self.pushed, self._pulls, self._skipped_pulls)
        return [*account, Send(self.server, Message(Kind.BYE, self.id, value=self.pushed))]

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = State.DONE
        return [halt(event)]
