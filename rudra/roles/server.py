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
from enum import auto
from typing import Any, ClassVar

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
    Updated,
)
from rudra.messages import PACK, Kind, Message, Rows
from rudra.records import Gradient
from rudra.roles.machine import Machine, Outbox, States, short
from topologies import Plan

WEIGHTS = "weights"
SNAPSHOT = "snapshot"
POOL = ("gradient 0", "gradient 1")
CREDITS = 2
"""Snapshots that the statistics server can hold: one in work and one waiting."""


class State(States):
    INITIALISING = auto()
    TRAINING = auto()
    DRAINING = auto()
    CLOSING = auto()
    DONE = auto()


ROW = PACK[Kind.GRADIENTS]
TRAINING = State.TRAINING
"""A name for what is looked up all the time: an enum's attributes are slow."""


class ParameterServer(Machine):
    """The owner of the weights.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {
        (State.INITIALISING, Started): "_start",
        (State.INITIALISING, Hashed): "_send_first_weights",
        (State.INITIALISING, Sent): "_returned",
        (State.INITIALISING, Kind.READY): "_learner_ready",
        (State.TRAINING, Kind.GRADIENT): "_gradient",
        (State.TRAINING, Kind.CREDIT): "_credit",
        (State.TRAINING, Sent): "_returned",
        (State.TRAINING, Updated): "_updated",
        (State.DRAINING, Kind.GRADIENT): "_late_gradient",
        (State.DRAINING, Kind.BYE): "_bye",
        (State.DRAINING, Kind.CREDIT): "_credit",
        (State.DRAINING, Sent): "_returned",
        (State.DRAINING, Updated): "_updated",
        (State.CLOSING, Kind.CREDIT): "_credit",
        (State.CLOSING, Sent): "_returned",
        (State.CLOSING, Kind.DONE): "_finish",
    }

    def __init__(self, role: int, plan: Plan, job: Job, training_samples: int) -> None:
        super().__init__(role, plan)
        self.state = State.INITIALISING
        self.protocol = job.make_protocol()
        self._ordered, self._grants_on_push = self.protocol.ordered, self.protocol.grants_on_push
        self._gradient_weight = self.protocol.modulation.gradient_weight
        self.optimizer = job.optimizer
        self.epochs = job.training.epochs
        self.training_samples = training_samples
        self.timestamp = 0
        self.epoch = 0
        self.samples = 0
        self.applied = self.discarded = self.lost = 0
        self.received = 0
        self.pushed = [0] * len(plan.learners)
        self._outbox = Outbox(role, plan.statistics, job.results.report_s)
        self._learner_ids = plan.learners
        self._index = {id_: index for index, id_ in enumerate(plan.learners)}
        self._digest: int | None = None
        self._ready: set[int] = set()
        self._lent = 0  # transfers of the weights under way
        self._free = deque(POOL)
        self._posted: set[str] = set()
        self._arrived: deque[tuple[str, tuple[Gradient, ...]]] = deque()
        self._accumulator: str | None = None
        self._pending: list[bytes] = []  # rows of `records.GRADIENT`
        self._pending_samples = self._pending_staleness = 0
        self._update_due = False
        self._next_source = 0
        self._receives = {buffer: Receive(buffer) for buffer in POOL}
        self._weights_changed()
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates whose end is not known yet
        self._pulls: dict[int, int] = {}  # not answered yet: learner -> the timestamp that it holds
        self._credits = CREDITS
        self._snapshot_lent = False
        self._final: Rows | None = None
        self._left: dict[int, int] = {}
        self._began = self._ended = 0.0
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0

    @property
    def pending(self) -> int:
        """Gradients that are here but not applied."""
        return len(self._pending) + sum(len(gradients) for _, gradients in self._arrived)

    @property
    def waiting_for(self) -> str:
        if self.state is State.INITIALISING:
            missing = [self.plan.roles[i].name for i in self._learner_ids if i not in self._ready]
        elif self.state is State.DRAINING:
            missing = [self.plan.roles[i].name for i in self._learner_ids if i not in self._left]
        elif self.state is State.TRAINING:
            here = len(self._pending) if self._ordered else 0
            missing = [self.plan.roles[i].name for i in self._learner_ids[here:]]
            return f"a gradient from {_listed(missing)}"
        else:
            return "the statistics server to finish"
        return _listed(missing)

    def validate(self) -> None:
        places = [*self._free, *self._posted, *(buffer for buffer, _ in self._arrived)]
        places += [self._accumulator] if self._accumulator else []
        assert sorted(places) == sorted(POOL), places
        assert self.received == sum(self.pushed)
        assert self.received == self.applied + self.pending + self.discarded + self.lost
        assert self._lent >= 0
        assert 0 <= self._credits <= CREDITS
        assert bool(self._pending) == (self._accumulator is not None)
        assert len(self._pending) <= self.protocol.gradients_per_update

    # Start: everybody holds the same weights.

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Hash(WEIGHTS)]

    def _send_first_weights(self, event: Hashed, now: float) -> list[Action]:
        self._digest = short(event.digest)
        self._lent = len(self._learner_ids)
        return [Send(learner, self._weights, WEIGHTS) for learner in self._learner_ids]

    def _learner_ready(self, event: Received, now: float) -> list[Action]:
        if event.message.value != self._digest:
            name = self.plan.roles[event.message.sender].name
            return [Fail(f"{name} received other initial weights than were sent (digests differ)")]
        self._ready.add(event.message.sender)
        return self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        if self.state is not State.INITIALISING or len(self._ready) < len(self._learner_ids) or self._lent:
            return []
        self.state = State.TRAINING
        start = Message(Kind.START, self.id, value=round(now * 1e9))
        self._began = self._ended = start.value * 1e-9  # the same number everywhere
        everybody = (self.plan.statistics, *self._learner_ids)
        return [*(Send(to, start) for to in everybody), *self._post()]

    # Gradients in.

    def _post(self) -> list[Action]:
        """Lets gradients into the free buffers; in learner order if the protocol asks for it."""
        actions: list[Action] = []
        while self._free:
            buffer = self._free.popleft()
            receive = self._receives[buffer]
            if self._ordered and self.state is TRAINING:
                receive = Receive(buffer, self._learner_ids[self._next_source])
                self._next_source = (self._next_source + 1) % len(self._learner_ids)
            self._posted.add(buffer)
            actions.append(receive)
        return actions

    def _gradient(self, event: Received, now: float) -> list[Action]:
        self._take(event)
        actions = self._work(now)
        if self.state is TRAINING:
            learner, timestamp = self._index[event.message.sender], event.message.timestamp
            if self._grants_on_push:
                self._pulls[learner] = timestamp
                actions += self._answer_all()
            else:
                actions += self._answer(learner, timestamp)
        return actions

    def _take(self, event: Received) -> None:
        """Counts the gradients that arrived."""
        gradients, buffer, pushed = event.message.gradients, event.buffer or "", self.pushed
        self._posted.discard(buffer)
        self._arrived.append((buffer, gradients))
        self.received += len(gradients)
        for gradient in gradients:
            pushed[gradient.learner] += 1

    def _work(self, now: float) -> list[Action]:
        """Handles what has arrived, one gradient after the other, as far as the leases allow."""
        actions: list[Action] = []
        updates = self.timestamp
        while self.state is TRAINING:
            if self._update_due:
                if self._lent:
                    return actions
                actions += self._update(now)
            elif self._arrived and (not self._ordered or self._next_is_here()):
                actions += self._add(*self._arrived.popleft())
            else:
                break
        if self.timestamp > updates:
            actions += self._answer_all()
        if self._free:
            actions += self._post()
        return actions

    def _next_is_here(self) -> bool:
        """Brings the next gradient in learner order to the front, if it has arrived."""
        for place, (_, gradients) in enumerate(self._arrived):
            if gradients[0].learner == len(self._pending):
                self._arrived.rotate(-place)
                return True
        return False

    def _add(self, buffer: str, gradients: tuple[Gradient, ...]) -> list[Action]:
        timestamp, pending = self.timestamp, self._pending
        scale = self._gradient_weight(timestamp - gradients[0].timestamp)
        samples = 0
        for g in gradients:
            count, loss, errors, staleness = g.samples, g.loss, g.errors, timestamp - g.timestamp
            row = ROW(timestamp + 1, g.learner, count, g.step, g.timestamp, staleness, scale, loss, errors, 0)
            pending.append(row)
            samples += count
            self._pending_staleness += staleness
            self._epoch_loss += loss * count
            self._epoch_errors += errors
        self._pending_samples += samples
        self._update_due = self.protocol.update_due(len(pending))
        if self._accumulator is None:
            self._accumulator = buffer
            return [] if scale == 1.0 else [Accumulate(buffer, buffer, 1.0, scale)]
        self._free.append(buffer)
        return [Accumulate(self._accumulator, buffer, samples / self._pending_samples, scale)]

    # Updates out.

    def _update(self, now: float) -> list[Action]:
        assert self._accumulator is not None
        gradients, samples, staleness = self._pending, self._pending_samples, self._pending_staleness
        count = len(gradients)
        mean_staleness = staleness / count
        rate = self.optimizer.scheduled(self.epoch) * self.protocol.modulation.rate_factor(mean_staleness)
        self.timestamp += 1
        self._weights_changed()
        actions: list[Action] = [Update(self._accumulator, WEIGHTS, rate, self.timestamp)]
        self.samples += samples
        self.applied += count
        self._outbox.extend(Kind.GRADIENTS, gradients)
        self._epoch_staleness += staleness
        self._epoch_gradients += count
        self._epoch_samples += samples
        self._ended = now
        self._update_rows.append((self.timestamp, self.epoch, count, samples, rate, mean_staleness, now - self._began))
        self._free.append(self._accumulator)
        self._accumulator, self._pending, self._pending_samples, self._pending_staleness = None, [], 0, 0
        self._update_due = False
        while self.state is TRAINING and self.samples >= (self.epoch + 1) * self.training_samples:
            actions += self._end_epoch(now, rate)
        return actions

    def _updated(self, event: Updated, now: float) -> list[Action]:
        self._outbox.add(Kind.UPDATES, *self._update_rows.popleft(), event.seconds, event.digest)
        due = self._outbox.due(now)
        return due + self._close(now) if self.state is State.DRAINING else due

    def _end_epoch(self, now: float, rate: float) -> list[Action]:
        self.epoch += 1
        gradients, samples = max(1, self._epoch_gradients), max(1, self._epoch_samples)
        means = (self._epoch_staleness / gradients, rate, self._epoch_loss / samples, self._epoch_errors / samples)
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0
        measured = (now - self._began, *means)
        untested = (*(math.nan,) * 5, b"")
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = self._outbox.flush(now)
        if self.epoch == self.epochs:
            self._final = row
            return actions + self._send_final() + self._drain()
        if not self._credits or self._snapshot_lent:
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

    def _weights_changed(self) -> None:
        """Prepares what learners and the protocol are told at this timestamp."""
        self._clock = Clock(self.timestamp, self.pushed)
        self._stamp = Message(Kind.TIMESTAMP, self.id, self.timestamp)
        self._weights = Message(Kind.WEIGHTS, self.id, self.timestamp)

    def _answer(self, learner: int, timestamp: int) -> list[Action]:
        """Answers a learner that holds this timestamp if no update is due, and the protocol agrees; else it waits."""
        if self._update_due or not self.protocol.pull_granted(learner, timestamp, self._clock):
            self._pulls[learner] = timestamp
            return []
        role = self._learner_ids[learner]
        if timestamp == self.timestamp:
            return [Send(role, self._stamp)]
        self._lent += 1
        return [Send(role, self._stamp), Send(role, self._weights, WEIGHTS)]

    def _answer_all(self) -> list[Action]:
        """Answers those that wait, if training goes on."""
        if self.state is not TRAINING:
            return []
        waiting, self._pulls = self._pulls, {}
        return [action for learner, timestamp in waiting.items() for action in self._answer(learner, timestamp)]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == SNAPSHOT:
            self._snapshot_lent = False
            return []
        self._lent -= 1
        if self._update_due and not self._lent:
            return self._work(now)
        return [] if self.state is TRAINING else self._begin(now)

    def _credit(self, event: Received, now: float) -> list[Action]:
        self._credits += 1
        return self._send_final()

    # The end: what is under way is let in, counted and dropped.

    def _drain(self) -> list[Action]:
        self.state = State.DRAINING
        self._discard()
        self._pulls.clear()
        return [Send(learner, Message(Kind.STOP, self.id)) for learner in self._learner_ids]

    def _discard(self) -> None:
        for buffer, gradients in self._arrived:
            self.discarded += len(gradients)
            self._free.append(buffer)
        self._arrived.clear()

    def _late_gradient(self, event: Received, now: float) -> list[Action]:
        self._take(event)
        self._discard()
        return self._post() + self._close(now)

    def _bye(self, event: Received, now: float) -> list[Action]:
        self._left[event.message.sender] = event.message.value
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        here = len(self._left) == len(self._learner_ids) and self.received == sum(self._left.values())
        if not here or self._update_rows:
            return []
        self.state = State.CLOSING
        counts = (self.received, self.applied, self.pending, self.discarded, self.lost)
        self._outbox.add(Kind.TOTALS, self.timestamp, self.samples, *counts, self._ended - self._began)
        return self._outbox.flush(now)

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = State.DONE
        return [Halt()]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
