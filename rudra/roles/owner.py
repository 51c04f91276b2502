"""What whoever owns weights does beside updating them: count samples and epochs, set rates, report, send snapshots.

A parameter server owns them; where there is none, each learner owns a replica, and the first one reports.
"""

import math
from collections import deque

import numpy as np

from rudra import records
from rudra.config import Job
from rudra.events import Action, Copy, Received, Send, Update, Updated
from rudra.messages import PACK, Kind, Message, Rows
from rudra.records import Gradient
from rudra.roles.machine import Machine, Outbox, Silent
from topologies import Plan

WEIGHTS = "weights"
SNAPSHOT = "snapshot"
CREDITS = 2
"""Snapshots that the statistics server can hold: one in work and one waiting."""

ROW = PACK[Kind.GRADIENTS]


class Owner(Machine):
    """The clock and the books of the weights.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
        reports: whether the statistics server hears of it.
    """

    def __init__(self, role: int, plan: Plan, job: Job, training_samples: int, *, reports: bool = True) -> None:
        super().__init__(role, plan)
        self.protocol = job.make_protocol(plan)
        self._gradient_weight = self.protocol.modulation.gradient_weight
        self.optimizer = job.optimizer
        self.epochs = job.training.epochs
        self.training_samples = training_samples
        self.timestamp = self.epoch = self.samples = self.applied = 0
        self._reports = reports
        self._outbox = (Outbox if reports else Silent)(role, plan.statistics, job.results.report_s)
        self._pending: list[bytes] = []  # rows of `records.GRADIENT`
        self._pending_samples = self._pending_staleness = 0
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates whose end is not known yet
        self._credits = CREDITS
        self._snapshot_lent = False
        self._final: Rows | None = None
        self._began = self._ended = 0.0
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0

    def validate(self) -> None:
        assert 0 <= self._credits <= CREDITS
        assert self.epoch <= self.epochs

    def _count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Takes gradients into the books of the next update; returns their samples."""
        timestamp, pending = self.timestamp, self._pending
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
        return samples

    def _update_by(self, gradient: str, now: float) -> tuple[list[Action], bool]:
        """Updates the weights by an average of all that was counted; also whether that ended the training."""
        gradients, samples, staleness = self._pending, self._pending_samples, self._pending_staleness
        count = len(gradients)
        mean_staleness = staleness / count
        rate = self.optimizer.scheduled(self.epoch) * self.protocol.modulation.rate_factor(mean_staleness)
        self.timestamp += 1
        actions: list[Action] = [Update(gradient, WEIGHTS, rate, self.timestamp)]
        self.samples += samples
        self.applied += count
        self._outbox.extend(Kind.GRADIENTS, gradients)
        self._epoch_staleness += staleness
        self._epoch_gradients += count
        self._epoch_samples += samples
        self._ended = now
        self._update_rows.append((self.timestamp, self.epoch, count, samples, rate, mean_staleness, now - self._began))
        self._pending, self._pending_samples, self._pending_staleness = [], 0, 0
        while self.epoch < self.epochs and self.samples >= (self.epoch + 1) * self.training_samples:
            actions += self._end_epoch(now, rate)
        return actions, self.epoch == self.epochs

    def _note(self, event: Updated, now: float) -> list[Action]:
        """The row of an update, whose end is known now."""
        self._outbox.add(Kind.UPDATES, *self._update_rows.popleft(), event.seconds, event.digest)
        return self._outbox.due(now)

    def _end_epoch(self, now: float, rate: float) -> list[Action]:
        self.epoch += 1
        gradients, samples = max(1, self._epoch_gradients), max(1, self._epoch_samples)
        means = (self._epoch_staleness / gradients, rate, self._epoch_loss / samples, self._epoch_errors / samples)
        self._epoch_loss = 0.0
        self._epoch_staleness = self._epoch_errors = self._epoch_gradients = self._epoch_samples = 0
        if not self._reports:
            return []
        measured = (now - self._began, *means)
        untested = (*(math.nan,) * 5, b"")
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = self._outbox.flush(now)
        if self.epoch == self.epochs:
            self._final = row
            return actions + self._send_final()
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
        message = Message(Kind.SNAPSHOT, self.id, self.timestamp, rows=self._final)
        self._final = None
        return [Send(self.plan.statistics, message, WEIGHTS)]

    def _snapshot_returned(self, buffer: str) -> None:
        """The statistics server has a snapshot."""
        if buffer == SNAPSHOT:
            self._snapshot_lent = False

    def _credit(self, event: Received, now: float) -> list[Action]:
        self._credits += 1
        return self._send_final()

    def _totals(self, now: float, pushed: int, pending: int, discarded: int, lost: int) -> list[Action]:
        """The closing account."""
        counts = (pushed, self.applied, pending, discarded, lost)
        self._outbox.add(Kind.TOTALS, self.timestamp, self.samples, *counts, self._ended - self._began)
        return self._outbox.flush(now)
