"""Counters and records of weights: updates, samples and epochs, rows of what was applied, snapshots and losses.

Each owner of weights has a ledger: a parameter server, or each learner with a replica if there is no server. Of the
learners only the first one reports.
"""

import math
from collections import deque
from collections.abc import Set
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import structs

from protocols import Hogbatch
from rudra.core import records
from rudra.core.events import (
    WEIGHTS,
    Action,
    Committed,
    Event,
    Fail,
    Lost,
    Received,
    Reconfigure,
    Saved,
    Send,
    Sent,
    Stopped,
    Update,
    Updated,
    Warn,
)
from rudra.core.messages import BETWEEN_OWNERS, EpochRows, MessageKind, Snapshot, TrainingStarted
from rudra.core.records import TIMES, Gradient
from rudra.core.training_state import TrainingState
from rudra.core.wire import PACK
from rudra.roles.machine import Setup, listed
from rudra.roles.outbox import NullOutbox, Outbox
from rudra.roles.rules import TrainingClock, TrainingRules
from rudra.roles.sample_allocator import SampleAllocator
from rudra.roles.snapshots import SnapshotQueue
from rudra.roles.sums import EpochSums, LearnerCounts, PendingUpdate

UPDATE = PACK[MessageKind.UPDATES]

EVALUATES_ALL = ("always", "workers")
"""Values of `training.evaluate` with which the weights of every epoch are evaluated."""


def left_over(learners: int) -> str:
    """Who is left, for people."""
    return f"{learners} learner{'s are' if learners > 1 else ' is'} left"


def outlasts(event: Event, statistics: int) -> bool:
    """Whether an event is for an owner of the weights even if everybody else regroups."""
    if isinstance(event, Received):
        return event.message.sender == statistics or event.message.kind in BETWEEN_OWNERS
    if isinstance(event, Sent):
        return event.to == statistics
    return isinstance(event, Updated | Saved | Committed | Stopped | Lost)


@runtime_checkable
class Owner(Protocol):
    """A role that owns weights."""

    ledger: "Ledger"


class Ledger:
    """Counters and records of the owner of some weights.

    Args:
        role: id of the owner.
        setup: what the owner is made from.
        reports: whether the statistics server receives them.

    Attributes:
        id: of the owner.
        rules: job, plan, protocol and learning rates at this epoch.
        clock: of the training.
        timestamp: of the weights: number of updates.
        epoch, epochs: number of completed epochs, and of epochs in all.
        samples, applied: number of samples and gradients applied.
        counts: of each learner and of each stream of samples.
        dealer: assigns samples, if a coordinator does.
        stopped: training ends before its time.
        outbox: rows on their way to the statistics server.
        recorded_losses: roles whose end is recorded.
        per_update: number of its updates that count as one for the schedule.
    """

    per_update = 1

    def __init__(self, role: int, setup: Setup, *, reports: bool = True) -> None:
        job, position = setup.job, setup.position
        self.id = role
        self._training_samples, self._reports = setup.training_samples, reports
        self.rules = TrainingRules(setup)
        self._reset_counts(position)
        self.clock = TrainingClock(position.time_s)
        self.epochs = job.training.epochs
        self.timestamp, self.epoch = position.timestamp, position.epoch
        self.samples, self.applied = position.samples, position.applied
        self.stopped = False
        self.outbox = (Outbox if reports else NullOutbox)(role, setup.plan.statistics, job.results.report_s)
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates whose end is not known yet
        self._snapshots = SnapshotQueue(setup.plan.statistics, all_epochs=job.training.evaluate in EVALUATES_ALL)
        self.recorded_losses: set[int] = set()
        self._sums = EpochSums.of(position)
        self._warned = False  # of stale gradients

    def _reset_counts(self, position: TrainingState) -> None:
        """Everybody begins at this position; nothing is under way."""
        rules = self.rules
        self.counts = LearnerCounts(rules.job, rules.plan, rules.protocol.period, position)
        self.dealer: SampleAllocator | None = None
        if rules.plan.scheduled:
            self.dealer = SampleAllocator(Hogbatch.of(rules.protocol), rules.plan, self._training_samples, position)
        self._pending = PendingUpdate()

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold."""
        self._snapshots.validate()
        assert self.epoch <= self.epochs
        if self.dealer is not None:
            self.dealer.validate(self.samples - self.epoch * self._training_samples)

    # Training as a whole.

    @property
    def over(self) -> bool:
        """Whether the last epoch is complete."""
        return self.epoch == self.epochs

    def start(self, now: float) -> TrainingStarted:
        """Training begins; after a resume, the time between the two parts of the run does not count."""
        return TrainingStarted(self.id, self.clock.start(now))

    def pause(self, seconds: float, text: str, now: float) -> None:
        """The clock of the training has stood still for these seconds, until now."""
        self.clock.pause(seconds)
        self.tell("pause", self.timestamp, now - self.clock.start_time, text)

    def enough(self) -> None:
        """The target is reached: the epoch under way is the last one."""
        self.epochs = min(self.epochs, self.epoch + 1)

    def lower(self, count: int, now: float) -> None:
        """Evaluations got no better: the rate falls for the `count`-th time in all."""
        for text in self.rules.lower(count, self.epoch):
            if self._reports:
                self.tell("plateau", self.timestamp, now - self.clock.start_time, text)

    # Updates.

    @property
    def updating(self) -> bool:
        """Whether the end of an update is not known yet."""
        return bool(self._update_rows)

    @property
    def pending(self) -> int:
        """Number of gradients that the next update has so far."""
        return len(self._pending.rows)

    def count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Counts gradients for the next update; returns the number of their samples."""
        pending, dealer = self._pending, self.dealer
        before = pending.samples
        self.counts.add(gradients, scale, self.timestamp + 1, pending)
        if dealer is not None:
            for gradient in gradients:
                dealer.count(gradient)
        return pending.samples - before

    @property
    def is_ahead(self) -> bool:
        """Whether the next update would end an epoch whose weights could not be evaluated, although all must be."""
        snapshots = self._snapshots
        return snapshots.all_epochs and not snapshots.free and self.ends_epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether the next update would end an epoch."""
        return self.samples + self._pending.samples >= (self.epoch + 1) * self._training_samples

    def update(self, gradient: str, now: float) -> list[Action]:
        """Updates the weights by an average of all gradients that were counted.

        If learners step replicas, these have the rate of the schedule, and the weights have another one.
        """
        count, samples = len(self._pending.rows), self._pending.samples
        mean_staleness = self._pending.staleness / count
        progress = (self.samples + samples) / self._training_samples
        protocol = self.rules.protocol
        factor = protocol.modulation.rate_factor(mean_staleness) * protocol.rate_scale(samples)
        rate = self.rules.schedule.rate(self.epoch, progress, self.timestamp // self.per_update) * factor
        self.timestamp += 1
        own_rate = protocol.outer_rate
        about = (self.timestamp, self.epoch + 1, samples, now - self.clock.start_time)
        update = Update(gradient, WEIGHTS, rate if own_rate is None else own_rate, *about)
        return [update, *self._applied(rate, now)]

    def enter(self, rate: float, now: float) -> list[Action]:
        """Enters an update by all gradients that were counted, which was made elsewhere at such a rate."""
        self.timestamp += 1
        return self._applied(rate, now)

    def enter_each(self, gradients: tuple[Gradient, ...], seconds: float, now: float) -> list[Action]:
        """Enters updates of one gradient each, which were made elsewhere; no epoch may end with them.

        Args:
            gradients: `scale` is the rate, `timestamp` the staleness.
            seconds: that each update took.
            now: seconds on the driver's clock.
        """
        assert self.dealer is not None
        time_s, epoch, before = now - self.clock.start_time, self.epoch + 1, self.timestamp
        made, updates = PendingUpdate(), []
        self.counts.add(gradients, 1.0, before + 1, made, each=True)
        for timestamp, g in enumerate(gradients, before + 1):
            staleness = min(timestamp - 1, g.timestamp)
            updates.append(UPDATE(timestamp, epoch, 1, g.samples, g.scale, staleness, time_s, seconds, 0))
            self.dealer.take(g)
        self.timestamp += len(gradients)
        self.counts.samples_drawn = [
            max(end, made.drawn.get(stream, 0)) for stream, end in enumerate(self.counts.samples_drawn)
        ]
        self._sum_up(made, len(gradients), now)
        self.outbox.extend(MessageKind.UPDATES, updates)
        return self.outbox.due(now)

    @property
    def left_of_epoch(self) -> int:
        """Number of samples of the epoch that are not applied yet."""
        return (self.epoch + 1) * self._training_samples - self.samples

    def rate_for(self, samples: int) -> float:
        """Returns the present rate of the schedule for an update that applies so many samples."""
        progress = (self.samples + self._pending.samples + samples) / self._training_samples
        return self.rules.schedule.rate(self.epoch, progress, self.timestamp)

    def _applied(self, rate: float, now: float) -> list[Action]:
        """Enters the update that led to this timestamp; returns what follows if an epoch ends with it."""
        pending, self._pending = self._pending, PendingUpdate()
        count, samples = len(pending.rows), pending.samples
        row = (self.timestamp, self.epoch + 1, count, samples, rate, pending.staleness / count)
        self._update_rows.append((*row, now - self.clock.start_time))
        self._sum_up(pending, count, now)
        for stream, end in pending.drawn.items():
            self.counts.samples_drawn[stream] = end
        self.rules.keep_state()
        if self.dealer is not None:
            self.dealer.applied()
        actions: list[Action] = []
        while self.epoch < self.epochs and self.samples >= (self.epoch + 1) * self._training_samples:
            actions += self._end_epoch(now, rate)
        return actions

    def _sum_up(self, made: PendingUpdate, count: int, now: float) -> None:
        """Adds gradients that are applied to the totals of the run and of the epoch, and reports their rows."""
        self.samples += made.samples
        self.applied += count
        self._sums.add(made.loss, made.errors, made.staleness, count, made.samples)
        self.clock.ended = now
        self.outbox.extend(MessageKind.GRADIENTS, made.rows)

    def note(self, event: Updated, now: float) -> list[Action]:
        """Completes the row of an update, whose end is known now."""
        self.outbox.add(MessageKind.UPDATES, *self._update_rows.popleft(), event.seconds, event.digest)
        return self.outbox.due(now)

    def _end_epoch(self, now: float, rate: float) -> list[Action]:
        self.epoch += 1
        if self.dealer is not None:
            self.dealer.end_epoch()
        sums, self._sums = self._sums, EpochSums()
        means = (sums.mean_staleness, rate, sums.mean_loss, sums.error)
        if not self._reports:
            return []
        measured = (now - self.clock.start_time, *means)
        untested = (*(math.nan,) * 6, b"")
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = [*self.outbox.flush(now), *self._warn_of_staleness(means[0])]
        if self.epoch == self.epochs:
            return actions + self._snapshots.send_final(Snapshot(self.id, self.timestamp, self.epochs, row))
        if not self._snapshots.free:
            return [*actions, Send(self.rules.plan.statistics, EpochRows(self.id, row))]
        return [*actions, *self._snapshots.send(Snapshot(self.id, self.timestamp, self.epochs, row))]

    def _warn_of_staleness(self, mean_staleness: float) -> list[Action]:
        """Warns once of an epoch whose gradients were so stale that the rate is too high for them."""
        text = "" if self._warned else self.rules.staleness_warning(self.epoch, mean_staleness)
        self._warned = self._warned or bool(text)
        return [Warn(text)] if text else []

    @property
    def final_lent(self) -> bool:
        """Whether the weights of the last epoch are not all sent yet."""
        return self._snapshots.final_lent

    def returned(self, buffer: str) -> None:
        """The statistics server has a snapshot."""
        self._snapshots.returned(buffer)

    def credit(self) -> list[Action]:
        """The statistics server has room for one more snapshot."""
        return self._snapshots.credit()

    # Changes of the job, and regrouping without roles that have died.

    @property
    def is_to_change(self) -> bool:
        """Whether an epoch is complete after which the job changes, and training continues."""
        return self.epoch >= self.rules.until and not self.over

    def change(self, dead: Set[int], position: TrainingState, now: float) -> None:
        """Continues by the present job, at a position, without the dead."""
        begun = self.rules.change(dead, position)
        self._reset_counts(position)
        for phase in begun if not self.over else ():
            self.tell("change", self.timestamp, position.time_s, f"after epoch {phase.at_epoch}: {phase.text}")

    def regroup(self, dead: Set[int], position: TrainingState, now: float) -> list[Action]:
        """Has all roles that are left begin again by the present job, with the weights of a position.

        What is under way is dropped. It is computed again, with these weights.
        """
        plan = self.rules.plan
        lost = sorted(dead - self.recorded_losses)
        dying = map(plan.roles.__getitem__, lost or sorted(dead))
        names = listed([role.title for role in dying])
        try:
            self.change(dead, position, now)
        except ValueError as error:
            return [Fail(f"{names} died, and the run cannot continue: {error}", lost=True)]
        plan = self.rules.plan
        for role in lost:
            learner = plan.roles[role].kind_traits.trains
            pushed = position.step(plan.roles[role].index) if learner else 0
            what = f"when {pushed} of its gradients had been applied" if learner else "and those below it moved up"
            self.record_loss(role, f"died {what}; work in flight is computed again", pushed, now)
        trained = any(plan.roles[i].kind_traits.trains for i in lost)
        if self.rules.job.fault_tolerance.on_learner_loss == "stop" and trained:
            self.stopped = True
        text = f"{names} died; {left_over(len(plan.learners))}, which continue from update {self.timestamp}"
        warnings = [Warn(text)] if lost else []
        return [*self.outbox.flush(now), *warnings, Reconfigure(plan, position)]

    # Reports.

    def record_loss(self, role: int, text: str, pushed: int, now: float, kind: str = "lost") -> None:
        """Reports a role that is lost, and closes the account of a learner."""
        self.recorded_losses.add(role)
        self.tell(kind, self.timestamp, now - self.clock.start_time, text, role)
        if self.rules.plan.roles[role].kind_traits.trains:
            self._account_for(role, pushed)

    def record_late_loss(self, role: int, now: float) -> list[Action]:
        """Closes the accounts of a learner that is lost after training, and of its group: theirs may never come."""
        roles = self.rules.plan.roles
        if roles[role].kind_traits.trains:
            for learner in self.rules.plan.group_of(role):
                self._account_for(learner, self.counts.steps[roles[learner].index])
        return self.outbox.flush(now)

    def _account_for(self, role: int, pushed: int) -> None:
        learner = self.rules.plan.roles[role]
        counts = (pushed, self.counts.samples_applied[learner.index], 0, 0)
        self.outbox.add(MessageKind.LEARNERS, learner.index, learner.world_rank, *counts, *(0.0 for _ in TIMES))

    def totals(self, now: float, pushed: int, pending: int, discarded: int, lost: int) -> list[Action]:
        """Reports the closing account."""
        counts = (pushed, self.applied, pending, discarded, lost)
        training_s = self.clock.ended - self.clock.start_time
        self.outbox.add(MessageKind.TOTALS, self.timestamp, self.samples, *counts, training_s)
        return self.outbox.flush(now)

    def position(self, now: float) -> TrainingState:
        """Returns where training is, without pending gradients."""
        steps, learned = self.counts.without(self._pending, self.rules.protocol.period)
        sums = self._sums
        totals, counts = (sums.loss, sums.errors), (sums.staleness, sums.gradients, sums.samples)
        books = (self.timestamp, self.epoch, self.samples, self.applied)
        begun = (steps, learned, tuple(self.counts.samples_drawn))
        dealt = () if self.dealer is None else self.dealer.about()
        time_s = now - self.clock.start_time
        found = TrainingState(*books, time_s, *begun, *totals, *counts, self.rules.lr_drops, *dealt)
        name, state = self.rules.protocol_state
        return structs.replace(found, protocol=name, protocol_state=state) if state else found

    @property
    def last_position(self) -> TrainingState:
        """Where training was when it ended."""
        return self.position(self.clock.ended)

    def tell(self, kind: str, timestamp: int, time_s: float, text: str, role: int = -1) -> None:
        """Adds a row to the table of events."""
        gradients = self.applied + len(self._pending.rows)
        self.outbox.add(
            MessageKind.EVENTS, kind.encode(), role, 0, timestamp, gradients, time_s, 0.0, text.encode()[:512]
        )
