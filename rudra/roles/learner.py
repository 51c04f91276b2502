"""The learner: compute a gradient, push it, get the weights if they are newer, again.

Source: rudra.txt §2 and §3.2. The learner asks for the server's timestamp and holds on to its weights
where they are current. We send the question right behind the gradient, and the server answers it
once it has that gradient; newer weights follow the answer at once. That is the paper's order with one
round trip less.

    WAITING     first weights               -> HASHING
    HASHING     their digest                -> READY      tell the server
    READY       training starts             -> COMPUTING
    COMPUTING   gradient ready              -> EXCHANGING push, ask
    EXCHANGING  delivered, answered, and the newer weights received -> COMPUTING
    any         stop                        -> STOPPED    as soon as no transfer is under way
    STOPPED     everything is recorded      -> DONE
"""

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np

from rudra import records
from rudra.config import FaultsTable, ResultsTable
from rudra.events import (
    Action,
    Compute,
    Computed,
    Fail,
    Halt,
    Hash,
    Hashed,
    Receive,
    Received,
    Send,
    Sent,
    Started,
    Warn,
)
from rudra.messages import Kind, Message
from rudra.roles.machine import Machine, Outbox
from topologies import Plan

WEIGHTS = "weights"
GRADIENT = "gradient"


class State(Enum):
    WAITING = auto()
    HASHING = auto()
    READY = auto()
    COMPUTING = auto()
    EXCHANGING = auto()
    STOPPED = auto()
    DONE = auto()


class Learner(Machine):
    """One learner.

    Args:
        role: id in the plan; its parent is the server that it pushes to.
        plan: who is who.
        faults: what a non-finite loss does.
        results: how long reports may wait.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[Enum, Any], str]] = {
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
        (State.STOPPED, Kind.DONE): "_finish",
    }

    def __init__(self, role: int, plan: Plan, faults: FaultsTable, results: ResultsTable) -> None:
        super().__init__(role, plan)
        parent = plan.roles[role].parent
        assert parent is not None
        self.server = parent
        self.learner = plan.roles[role].index
        self.state = State.WAITING
        self.timestamp = -1
        self.step = 0
        self.pushed = 0
        self._non_finite_stops = faults.non_finite_loss == "stop"
        self._warned = False
        self._outbox = Outbox(role, plan.statistics, results.report_s)
        self._stopping = False
        self._delivered_at: float | None = None
        self._answered_at: float | None = None
        self._expects_weights = False
        self._pushed_at = self._since = self._began = 0.0
        self._samples = self._pulls = self._skipped_pulls = 0
        self._compute_s = self._push_s = self._wait_s = self._pull_s = 0.0

    @property
    def waiting_for(self) -> str:
        server = self.plan.roles[self.server].name
        if self.state is State.EXCHANGING:
            if self._delivered_at is None:
                return f"the {server} to take gradient {self.pushed - 1}"
            return f"the {server} to answer its pull (it holds timestamp {self.timestamp})"
        waits: dict[Enum, str] = {
            State.WAITING: f"the first weights from the {server}",
            State.READY: f"the {server} to start training",
            State.STOPPED: "the statistics server to finish",
        }
        return waits.get(self.state, "")

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Receive(WEIGHTS, self.server)]

    def _first_weights(self, event: Received, now: float) -> list[Action]:
        self.state = State.HASHING
        self.timestamp = event.message.timestamp
        return [Hash(WEIGHTS)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = State.READY
        return [Send(self.server, Message(Kind.READY, self.id, value=event.digest))]

    def _begin(self, event: Received, now: float) -> list[Action]:
        self._began = now
        return self._compute(now)

    def _compute(self, now: float) -> list[Action]:
        self.state = State.COMPUTING
        self._since = now
        return [Compute(self.step, WEIGHTS, GRADIENT)]

    def _push(self, event: Computed, now: float) -> list[Action]:
        self._compute_s += now - self._since
        time_s = now - self._began
        row = (self.learner, event.samples, event.step, self.timestamp, event.loss, event.errors, 0, time_s)
        self._outbox.add(Kind.MINIBATCHES, row)
        actions = self._outbox.due(now)
        if not math.isfinite(event.loss):
            text = f"the loss of mini-batch {event.step} is {event.loss}: a smaller learning_rate may help"
            if self._non_finite_stops:
                return [*self._outbox.flush(now), Fail(text)]
            if not self._warned:
                self._warned = True
                actions.append(Warn(f"{text} (training goes on, as [faults] non_finite_loss says)"))
        self.step += 1
        if self._stopping:
            return actions + self._leave(now)
        self.state = State.EXCHANGING
        self.pushed += 1
        self._samples += event.samples
        self._pushed_at = now
        self._delivered_at = self._answered_at = None
        self._expects_weights = False
        account = (-1, self.learner, event.samples, event.step, self.timestamp, -1, 1.0, event.loss, event.errors, 0)
        record = np.array([account], records.GRADIENT)
        gradient = Message(Kind.GRADIENT, self.id, self.timestamp, self.pushed, record)
        pull = Message(Kind.PULL, self.id, self.timestamp, self.pushed)
        return [Send(self.server, gradient, GRADIENT), Send(self.server, pull), *actions]

    def _delivered(self, event: Sent, now: float) -> list[Action]:
        self._delivered_at = now
        return self._advance(now)

    def _answered(self, event: Received, now: float) -> list[Action]:
        self._answered_at = now
        self._expects_weights = event.message.timestamp > self.timestamp
        if self._expects_weights:
            self._pulls += 1
            return [Receive(WEIGHTS, self.server)]
        self._skipped_pulls += 1
        return self._advance(now)

    def _pulled(self, event: Received, now: float) -> list[Action]:
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._advance(now)

    def _stop_soon(self, event: Received, now: float) -> list[Action]:
        self._stopping = True
        return [] if self.state is State.COMPUTING else self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Goes on when no transfer is under way: to the next mini-batch, or away."""
        answered = self._answered_at is not None or self._stopping
        if self._delivered_at is None or self._expects_weights or not answered:
            return []
        delivered, asked = self._delivered_at, self._answered_at
        self._push_s += delivered - self._pushed_at
        answer = now if asked is None else max(asked, delivered)  # a stop is an answer too
        self._wait_s += answer - delivered
        self._pull_s += now - answer
        return self._leave(now) if self._stopping else self._compute(now)

    def _leave(self, now: float) -> list[Action]:
        self.state = State.STOPPED
        row = (self.learner, self.plan.roles[self.id].world_rank, self.pushed, self._samples, self._pulls)
        times = (self._skipped_pulls, self._compute_s, self._push_s, self._wait_s, self._pull_s)
        self._outbox.add(Kind.LEARNERS, row + times)
        return [*self._outbox.flush(now), Send(self.server, Message(Kind.BYE, self.id, value=self.pushed))]

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = State.DONE
        return [Halt()]
