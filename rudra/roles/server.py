"""The parameter server: sum gradients, update the weights when the protocol says so, answer pulls.

Source: rudra.txt §2, §3.1 and §3.2. The server is serial: one message after the other. Weights that
are being sent are lent out, and an update waits until they are back; what arrives meanwhile is
handled after the update, as a serial server would.

    INITIALISING  weights sent, digests compared      -> TRAINING  start everybody
    TRAINING      the last epoch's samples applied    -> DRAINING  stop the learners
    DRAINING      every learner left, and every gradient that it pushed came -> CLOSING  account
    CLOSING       everything is recorded              -> DONE

A gradient buffer is in one place at a time: free, posted (a transfer may land in it), arrived (to be
handled), or the accumulator (the first gradient of an update; the others are averaged into it, weighted
by their samples). Two of them serve any number of learners.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

import numpy as np

from protocols import Clock
from rudra import records
from rudra.config import Job
from rudra.events import (
    Accumulate,
    Action,
    Copy,
    Fail,
    Halt,
    Hash,
    Hashed,
    Receive,
    Received,
    Send,
    Sent,
    Started,
    Update,
)
from rudra.messages import Kind, Message, Rows
from rudra.roles.machine import Machine, Outbox
from topologies import Plan

WEIGHTS = "weights"
SNAPSHOT = "snapshot"
POOL = ("gradient 0", "gradient 1")
CREDITS = 2
"""Snapshots that the statistics server can hold: one in work and one waiting."""


class Account(NamedTuple):
    """One gradient, as a row of `records.GRADIENT`."""

    update: int
    learner: int
    samples: int
    step: int
    timestamp: int
    staleness: int
    scale: float
    loss: float
    errors: int
    pad: int


class State(Enum):
    INITIALISING = auto()
    TRAINING = auto()
    DRAINING = auto()
    CLOSING = auto()
    DONE = auto()


class ParameterServer(Machine):
    """The owner of the weights.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[Enum, Any], str]] = {
        (State.INITIALISING, Started): "_start",
        (State.INITIALISING, Hashed): "_send_first_weights",
        (State.INITIALISING, Sent): "_returned",
        (State.INITIALISING, Kind.READY): "_learner_ready",
        (State.TRAINING, Kind.GRADIENT): "_gradient",
        (State.TRAINING, Kind.PULL): "_pull",
        (State.TRAINING, Kind.CREDIT): "_credit",
        (State.TRAINING, Sent): "_returned",
        (State.DRAINING, Kind.GRADIENT): "_late_gradient",
        (State.DRAINING, Kind.PULL): "_late_pull",
        (State.DRAINING, Kind.BYE): "_bye",
        (State.DRAINING, Kind.CREDIT): "_credit",
        (State.DRAINING, Sent): "_returned",
        (State.CLOSING, Kind.CREDIT): "_credit",
        (State.CLOSING, Sent): "_returned",
        (State.CLOSING, Kind.DONE): "_finish",
    }

    def __init__(self, role: int, plan: Plan, job: Job, training_samples: int) -> None:
        super().__init__(role, plan)
        self.state = State.INITIALISING
        self.protocol = job.make_protocol()
        self.optimizer = job.optimizer
        self.epochs = job.training.epochs
        self.training_samples = training_samples
        self.timestamp = 0
        self.epoch = 0
        self.samples = 0
        self.applied = self.discarded = self.lost = 0
        self.pushed = [0] * len(plan.learners)
        self._evaluates = job.training.evaluate
        self._outbox = Outbox(role, plan.statistics, job.results.report_s)
        self._learner_ids = plan.learners
        self._index = {id_: index for index, id_ in enumerate(plan.learners)}
        self._digest: int | None = None
        self._ready: set[int] = set()
        self._lent = 0  # transfers of the weights under way
        self._free = deque(POOL)
        self._posted: set[str] = set()
        self._arrived: deque[tuple[str, Rows]] = deque()
        self._accumulator: str | None = None
        self._pending: list[Account] = []
        self._pending_samples = 0
        self._next_source = 0
        self._pulls: dict[int, tuple[int, int]] = {}  # learner -> its timestamp and pushed count
        self._credits = CREDITS
        self._snapshot_lent = False
        self._final: Rows | None = None
        self._left: dict[int, int] = {}
        self._began = self._ended = 0.0
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0

    @property
    def received(self) -> int:
        return sum(self.pushed)

    @property
    def pending(self) -> int:
        """Gradients that are here but not applied."""
        return len(self._pending) + len(self._arrived)

    @property
    def waiting_for(self) -> str:
        if self.state is State.INITIALISING:
            missing = [self.plan.roles[i].name for i in self._learner_ids if i not in self._ready]
        elif self.state is State.DRAINING:
            missing = [self.plan.roles[i].name for i in self._learner_ids if i not in self._left]
        elif self.state is State.TRAINING:
            here = {account.learner for account in self._pending} if self.protocol.ordered else set()
            missing = [self.plan.roles[i].name for i in self._learner_ids if self._index[i] not in here]
            return f"a gradient from {_listed(missing)}"
        else:
            return "the statistics server to finish"
        return _listed(missing)

    def validate(self) -> None:
        places = [*self._free, *self._posted, *(buffer for buffer, _ in self._arrived)]
        places += [self._accumulator] if self._accumulator else []
        assert sorted(places) == sorted(POOL), places
        assert self.received == self.applied + self.pending + self.discarded + self.lost
        assert self._lent >= 0
        assert 0 <= self._credits <= CREDITS
        assert bool(self._pending) == (self._accumulator is not None)
        assert len(self._pending) <= self.protocol.gradients_per_update

    # Start: everybody holds the same weights.

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Hash(WEIGHTS)]

    def _send_first_weights(self, event: Hashed, now: float) -> list[Action]:
        self._digest = event.digest
        return [self._weights_to(learner) for learner in self._learner_ids]

    def _learner_ready(self, event: Received, now: float) -> list[Action]:
        if event.message.value != self._digest:
            name = self.plan.roles[event.message.sender].name
            return [Fail(f"{name} received other initial weights than were sent (digests differ)")]
        self._ready.add(event.message.sender)
        return self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        if len(self._ready) < len(self._learner_ids) or self._lent:
            return []
        self.state = State.TRAINING
        self._began = self._ended = now
        start = Message(Kind.START, self.id)
        everybody = (self.plan.statistics, *self._learner_ids)
        return [*(Send(to, start) for to in everybody), *self._post()]

    # Gradients in.

    def _post(self) -> list[Action]:
        """Lets gradients into the free buffers; in learner order if the protocol asks for it."""
        actions: list[Action] = []
        while self._free:
            buffer = self._free.popleft()
            source = None
            if self.protocol.ordered and self.state is State.TRAINING:
                source = self._learner_ids[self._next_source]
                self._next_source = (self._next_source + 1) % len(self._learner_ids)
            self._posted.add(buffer)
            actions.append(Receive(buffer, source))
        return actions

    def _gradient(self, event: Received, now: float) -> list[Action]:
        buffer, rows = _tensor(event)
        self._posted.discard(buffer)
        self._arrived.append((buffer, rows))
        for learner in rows["learner"]:
            self.pushed[learner] += 1
        actions = self._work(now)
        asked = list(self._pulls) if self.protocol.grants_on_push else rows["learner"].tolist()
        for learner in asked:
            actions += self._answer(learner)
        return actions + self._outbox.due(now)

    def _work(self, now: float) -> list[Action]:
        """Handles what has arrived, one gradient after the other, as far as the leases allow."""
        actions: list[Action] = []
        updates = self.timestamp
        while self.state is State.TRAINING:
            if self.protocol.update_due(len(self._pending)):
                if self._lent:
                    return actions
                actions += self._update(now)
            elif (following := self._following()) is not None:
                self._arrived.remove(following)
                actions += self._add(*following)
            else:
                break
        if self.timestamp > updates:
            actions += self._answer_all()
        return actions + self._post()

    def _following(self) -> tuple[str, Rows] | None:
        """The next gradient to add among those that have arrived."""
        if not self.protocol.ordered:
            return self._arrived[0] if self._arrived else None
        return next((a for a in self._arrived if a[1][0]["learner"] == len(self._pending)), None)

    def _add(self, buffer: str, rows: Rows) -> list[Action]:
        accounts = [Account._make(row) for row in rows.tolist()]  # plain numbers: NumPy is slow on one row
        samples = sum(account.samples for account in accounts)
        scale = self.protocol.modulation.gradient_weight(self.timestamp - accounts[0].timestamp)
        self._pending += [a._replace(staleness=self.timestamp - a.timestamp, scale=scale) for a in accounts]
        self._pending_samples += samples
        if self._accumulator is None:
            self._accumulator = buffer
            return [] if scale == 1.0 else [Accumulate(buffer, buffer, 1.0, scale)]
        self._free.append(buffer)
        return [Accumulate(self._accumulator, buffer, samples / self._pending_samples, scale)]

    # Updates out.

    def _update(self, now: float) -> list[Action]:
        assert self._accumulator is not None
        accounts, samples = self._pending, self._pending_samples
        count = len(accounts)
        staleness = sum(account.staleness for account in accounts)
        mean_staleness = staleness / count
        rate = self.optimizer.scheduled(self.epoch) * self.protocol.modulation.rate_factor(mean_staleness)
        actions: list[Action] = [Update(self._accumulator, WEIGHTS, rate)]
        self.timestamp += 1
        self.samples += samples
        self.applied += count
        for account in accounts:
            self._outbox.add(Kind.GRADIENTS, (self.timestamp, *account[1:]))
        self._epoch_staleness += staleness
        self._epoch_loss += sum(account.loss * account.samples for account in accounts)
        self._epoch_errors += sum(account.errors for account in accounts)
        self._epoch_gradients += count
        self._epoch_samples += samples
        self._ended = now
        time_s = now - self._began
        self._outbox.add(Kind.UPDATES, (self.timestamp, self.epoch, count, samples, rate, mean_staleness, time_s))
        self._free.append(self._accumulator)
        self._accumulator, self._pending, self._pending_samples = None, [], 0
        while self.state is State.TRAINING and self.samples >= (self.epoch + 1) * self.training_samples:
            actions += self._end_epoch(now, rate)
        return actions

    def _end_epoch(self, now: float, rate: float) -> list[Action]:
        self.epoch += 1
        gradients, samples = max(1, self._epoch_gradients), max(1, self._epoch_samples)
        means = (self._epoch_staleness / gradients, rate, self._epoch_loss / samples, self._epoch_errors / samples)
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0
        measured = (now - self._began, *means)
        untested = (math.nan,) * 4
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = self._outbox.flush(now)
        if self.epoch == self.epochs:
            self._final = row
            return actions + self._send_final() + self._drain()
        if not self._evaluates or not self._credits or self._snapshot_lent:
            return [*actions, Send(self.plan.statistics, Message(Kind.EPOCHS, self.id, self.timestamp, rows=row))]
        self._credits -= 1
        self._snapshot_lent = True
        message = Message(Kind.SNAPSHOT, self.id, self.timestamp, rows=row)
        return [*actions, Copy(WEIGHTS, SNAPSHOT), Send(self.plan.statistics, message, SNAPSHOT)]

    def _send_final(self) -> list[Action]:
        """Sends the last weights as soon as the statistics server has room; they change no more."""
        if self._final is None or not self._credits:
            return []
        self._credits -= 1
        self._lent += 1
        message = Message(Kind.SNAPSHOT, self.id, self.timestamp, rows=self._final)
        self._final = None
        return [Send(self.plan.statistics, message, WEIGHTS)]

    # Weights to learners.

    def _weights_to(self, role: int) -> Action:
        self._lent += 1
        return Send(role, Message(Kind.WEIGHTS, self.id, self.timestamp), WEIGHTS)

    def _pull(self, event: Received, now: float) -> list[Action]:
        learner = self._index[event.message.sender]
        self._pulls[learner] = (event.message.timestamp, event.message.value)
        return self._answer(learner)

    def _answer(self, learner: int) -> list[Action]:
        """Answers a learner's pull if there is one, its gradient is here, no update is due, and the protocol agrees."""
        if learner not in self._pulls or self.state is not State.TRAINING:
            return []
        timestamp, pushed = self._pulls[learner]
        blocked = self.protocol.update_due(len(self._pending))
        if self.pushed[learner] < pushed or blocked:
            return []
        if not self.protocol.pull_granted(learner, timestamp, Clock(self.timestamp, self.pushed)):
            return []
        del self._pulls[learner]
        role = self._learner_ids[learner]
        answer = Send(role, Message(Kind.TIMESTAMP, self.id, self.timestamp))
        return [answer] if timestamp == self.timestamp else [answer, self._weights_to(role)]

    def _answer_all(self) -> list[Action]:
        return [action for learner in list(self._pulls) for action in self._answer(learner)]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == SNAPSHOT:
            self._snapshot_lent = False
            return []
        self._lent -= 1
        if self.state is State.INITIALISING:
            return self._begin(now)
        if self.state is not State.TRAINING or self._lent:
            return []
        return self._work(now) + self._answer_all()

    def _credit(self, event: Received, now: float) -> list[Action]:
        self._credits += 1
        return self._send_final()

    # The end: what is under way is let in, counted and dropped.

    def _drain(self) -> list[Action]:
        self.state = State.DRAINING
        self.discarded += len(self._arrived)
        self._free.extend(buffer for buffer, _ in self._arrived)
        self._arrived.clear()
        self._pulls.clear()
        return [Send(learner, Message(Kind.STOP, self.id)) for learner in self._learner_ids]

    def _late_gradient(self, event: Received, now: float) -> list[Action]:
        buffer, rows = _tensor(event)
        self._posted.discard(buffer)
        self._free.append(buffer)
        for learner in rows["learner"]:
            self.pushed[learner] += 1
        self.discarded += len(rows)
        return self._post() + self._close(now)

    def _late_pull(self, event: Received, now: float) -> list[Action]:
        return []

    def _bye(self, event: Received, now: float) -> list[Action]:
        self._left[event.message.sender] = event.message.value
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        if len(self._left) < len(self._learner_ids) or self.received < sum(self._left.values()):
            return []
        self.state = State.CLOSING
        counts = (self.received, self.applied, self.pending, self.discarded, self.lost)
        self._outbox.add(Kind.TOTALS, (self.timestamp, self.samples, *counts, self._ended - self._began))
        return self._outbox.flush(now)

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = State.DONE
        return [Halt()]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _tensor(event: Received) -> tuple[str, Rows]:
    assert event.buffer is not None
    assert event.message.rows is not None
    return event.buffer, event.message.rows
