"""Counters and records of weights: updates, samples, epochs, rows of applied gradients, snapshots and lost roles.

Each owner of weights has a ledger. An owner is a parameter server, or each learner with a replica if there is no
server. Among these learners only the first one reports its records.
"""

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import structs

from protocols import Hogbatch
from rudra.core import records
from rudra.core.actions import Action, Fail, Reconfigure, Send, Update, Warn
from rudra.core.buffer_names import AVERAGE, WEIGHTS
from rudra.core.decisions import pieces, start_of, taken_effect
from rudra.core.events import Committed, Event, Lost, Received, Saved, Sent, Stopped, Updated
from rudra.core.messages import BETWEEN_OWNERS, EpochRows, MessageKind, Rows, Snapshot, TrainingStarted
from rudra.core.phases import Phase
from rudra.core.records import EVENT_KINDS, TIMES, Gradient
from rudra.core.training_state import DecidedChange, TrainingState
from rudra.core.wire import PACK
from rudra.roles.machine import Setup, listed
from rudra.roles.outbox import NullOutbox, Outbox
from rudra.roles.rules import TrainingClock, TrainingRules
from rudra.roles.sample_allocator import SampleAllocator
from rudra.roles.snapshots import SnapshotQueue
from rudra.roles.sums import EpochSums, LearnerCounts, PendingUpdate
from rudra.roles.weights_average import WeightsAverage

UPDATE = PACK[MessageKind.UPDATES]

EVALUATES_ALL = ("always", "workers")
"""Values of `training.evaluate` that evaluate the weights of every epoch."""


def left_over(learners: int) -> str:
    """Returns text for people: the number of learners that are left."""
    return f"{learners} learner{'s are' if learners > 1 else ' is'} left"


def outlasts(event: Event, statistics: int) -> bool:
    """Returns whether an owner of weights handles an event even while all other roles regroup."""
    if isinstance(event, Received):
        return event.message.sender == statistics or event.message.kind in BETWEEN_OWNERS
    if isinstance(event, Sent):
        return event.to == statistics
    return isinstance(event, Updated | Saved | Committed | Stopped | Lost)


@runtime_checkable
class Owner(Protocol):
    """Role that owns weights."""

    ledger: "Ledger"


class Ledger:
    """Counters and records of the owner of some weights.

    Args:
        role: id of the owner.
        setup: arguments of the owner's role.
        reports: whether the statistics server receives the records.

    Attributes:
        id: id of the owner.
        rules: job, plan, protocol and learning rates of the present epoch.
        clock: training clock.
        timestamp: timestamp of the weights, which is their number of updates.
        epoch: number of completed epochs.
        epochs: number of epochs of the whole training.
        samples: number of samples applied.
        applied: number of gradients applied.
        counts: counters of each learner and of each stream of samples.
        dealer: object that assigns samples to workers, or None without a coordinator.
        stopped: whether training ends early.
        outbox: rows on their way to the statistics server.
        recorded_losses: ids of roles whose loss is recorded.
        per_update: number of the owner's updates that the schedule counts as one.
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
        self.outbox = (Outbox if reports else NullOutbox)(role, setup.plan, job.results.report_s)
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates that have not ended yet
        self._average: WeightsAverage | None = None
        if job.optimizer.average.given and role in setup.plan.owners:
            self._average = WeightsAverage(job.optimizer.average, position.averaged)
        evaluated = WEIGHTS if self._average is None else AVERAGE
        every = job.training.evaluate in EVALUATES_ALL
        self._snapshots = SnapshotQueue(setup.plan.statistics, all_epochs=every, weights=evaluated)
        self.recorded_losses: set[int] = set()
        self._sums = EpochSums.of(position)
        self._warned = False  # whether stale gradients were reported

    def _reset_counts(self, position: TrainingState) -> None:
        """Resets the counters: all roles begin at this position, and nothing is under way."""
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
        """Begins training. After a resume, the time between the two parts of the run does not count."""
        return TrainingStarted(self.id, self.clock.start(now))

    def pause(self, seconds: float, text: str, now: float) -> None:
        """Records that the training clock has stood still for these seconds, until now."""
        self.clock.pause(seconds)
        self.tell("pause", self.timestamp, now - self.clock.start_time, text)

    def enough(self) -> None:
        """Makes the present epoch the last one, because the target is reached."""
        self.epochs = min(self.epochs, self.epoch + 1)

    def lower(self, count: int, now: float) -> None:
        """Lowers the rate for the `count`-th time in all, because evaluations got no better."""
        for text in self.rules.lower(count, self.epoch):
            if self._reports:
                self.tell("plateau", self.timestamp, now - self.clock.start_time, text)

    def decide(self, number: int, text: str, ahead: int = 1) -> None:
        """Takes in a change of the job that is decided during the run.

        Args:
            number: number of decided changes, including this one.
            text: JSON of the change.
            ahead: number of updates until the next one after which all roles can restart.
        """
        self.rules.decide(number, text, self.epoch, self.timestamp + ahead)

    # Updates.

    @property
    def updating(self) -> bool:
        """Whether an update has not ended yet."""
        return bool(self._update_rows)

    @property
    def noted(self) -> int:
        """Timestamp of the last update whose row is complete."""
        return self.timestamp - len(self._update_rows)

    @property
    def pending(self) -> int:
        """Number of gradients that are counted for the next update."""
        return len(self._pending.rows)

    def count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Counts gradients for the next update and returns the number of their samples."""
        samples = self.counts.add(gradients, scale, self.timestamp + 1, self._pending)
        if self.dealer is not None:
            for gradient in gradients:
                self.dealer.count(gradient)
        return samples

    def is_ahead_of(self, *, ends_epoch: bool) -> bool:
        """Whether the next update ends an epoch whose weights must be evaluated, but no snapshot is free."""
        return ends_epoch and self._snapshots.all_epochs and not self._snapshots.free

    @property
    def ends_epoch(self) -> bool:
        """Whether the next update would end an epoch."""
        return self.samples + self._pending.samples >= (self.epoch + 1) * self._training_samples

    def update(self, gradient: str, now: float) -> list[Action]:
        """Updates the weights by an average of all counted gradients.

        If learners step replicas, the replicas use the rate of the schedule, and the weights use the protocol's
        `outer_rate`.
        """
        count, samples = len(self._pending.rows), self._pending.samples
        rate = self._rate(samples, self._pending.staleness / count)
        self.timestamp += 1
        own_rate = self.rules.protocol.outer_rate
        about = (self.timestamp, self.epoch + 1, samples, now - self.clock.start_time)
        update = Update(gradient, WEIGHTS, rate if own_rate is None else own_rate, *about)
        average = self._average
        if average is None:
            return [update, *self._applied(rate, now)]
        update = structs.replace(update, average=AVERAGE, average_weight=average.enter())
        epoch, counted = self.epoch, self.timestamp // self.per_update
        actions = self._applied(rate, now)
        average.end_window(((self.timestamp - 1) // self.per_update, counted), (epoch, self.epoch))
        return [update, *actions]

    def _rate(self, samples: int, mean_staleness: float, after: int = 0) -> float:
        """Returns the rate of an update by gradients of `samples` samples, after others like it in the same epoch."""
        progress = (self.samples + samples * (1 + after)) / self._training_samples
        update, protocol = (self.timestamp + after) // self.per_update, self.rules.protocol
        factor = protocol.modulation.rate_factor(mean_staleness) * protocol.rate_scale(samples)
        return self.rules.schedule.rate(self.epoch, progress, update) * factor

    def predicted_rate(self, samples: int, after: int = 0) -> float | None:
        """Predicts the rate of an update if nothing else happens. None: it will be the last update.

        Args:
            samples: number of samples of the update, by gradients that are not stale.
            after: number of updates like it that come before, in the same epoch.
        """
        last = self.samples + samples * (1 + after) >= self.epochs * self._training_samples
        return None if last or self.rules.protocol.outer_rate is not None else self._rate(samples, 0.0, after)

    def enter(self, rate: float, now: float) -> list[Action]:
        """Enters an update that was made elsewhere, at this rate, by all counted gradients."""
        self.timestamp += 1
        return self._applied(rate, now)

    def enter_each(self, gradients: tuple[Gradient, ...], seconds: float, now: float) -> list[Action]:
        """Enters updates of one gradient each that were made elsewhere. No epoch may end with them.

        Args:
            gradients: gradients of the updates. Their `scale` is the rate, and `timestamp` the staleness.
            seconds: duration of each update.
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

    def rates_ahead(self, updates: int, samples: int, after: int) -> list[float]:
        """Returns rates of updates in this epoch, by `samples` samples that are not stale, after others like them."""
        if self.rules.schedule.is_flat((self.samples + samples * (1 + after)) / self._training_samples):
            return [self._rate(samples, 0.0, after)] * updates
        return [self._rate(samples, 0.0, place) for place in range(after, after + updates)]

    def enter_burst(self, gradients: Rows, updates: Rows) -> None:
        """Enters updates that were made elsewhere. No epoch may end with them.

        Args:
            gradients: `records.GRADIENT` of all of them, in order. Each learner has one in each update.
            updates: `records.UPDATE`.
        """
        learners = len(gradients) // len(updates)
        self.counts.enter(gradients[-learners:], len(updates))
        losses = (gradients["loss"] * gradients["samples"]).reshape(-1, learners).cumsum(1)[:, -1]
        errors = gradients["errors"].astype(float).reshape(-1, learners).cumsum(1)[:, -1]
        samples = int(updates["samples"][0])
        for loss, wrong in zip(losses.tolist(), errors.tolist(), strict=True):  # added as each update would do it
            self._sums.add(loss, wrong, 0, learners, samples)
        self.samples += samples * len(updates)
        self.timestamp += len(updates)
        self.applied += len(gradients)
        self.clock.ended = self.clock.start_time + float(updates["time_s"][-1])
        self.rules.keep_state()
        self.outbox.extend_by(MessageKind.GRADIENTS, gradients)
        self.outbox.extend_by(MessageKind.UPDATES, updates)

    def follow_burst(self, other: "Ledger") -> None:
        """Takes over what another owner of the same weights has entered."""
        self.counts.follow(other.counts)
        self.timestamp, self.samples, self.applied = other.timestamp, other.samples, other.applied
        self.epoch = other.epoch
        self._sums, self.clock.ended = replace(other._sums), other.clock.ended
        self.rules.keep_state()

    def epoch_after(self, samples: int) -> int:
        """Returns the number of complete epochs after an update by so many samples."""
        return min(self.epochs, max(self.epoch, (self.samples + samples) // self._training_samples))

    @property
    def left_of_epoch(self) -> int:
        """Number of samples of the present epoch that are not applied yet."""
        return (self.epoch + 1) * self._training_samples - self.samples

    def rate_for(self, samples: int) -> float:
        """Returns the present rate of the schedule for an update of `samples` samples."""
        progress = (self.samples + self._pending.samples + samples) / self._training_samples
        return self.rules.schedule.rate(self.epoch, progress, self.timestamp)

    def _applied(self, rate: float, now: float) -> list[Action]:
        """Enters the update that led to this timestamp and returns the actions if an epoch ends with it."""
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
        """Adds applied gradients to the totals of the run and of the epoch, and reports their rows."""
        self.samples += made.samples
        self.applied += count
        self._sums.add(made.loss, made.errors, made.staleness, count, made.samples)
        self.clock.ended = now
        self.outbox.extend(MessageKind.GRADIENTS, made.rows)

    def note(self, event: Updated, now: float) -> list[Action]:
        """Completes the row of an update that has ended."""
        self.outbox.add(MessageKind.UPDATES, *self._update_rows.popleft(), event.seconds, event.digest)
        if not math.isnan(event.norm):
            norms = (event.norm, event.clipped_norm, event.product)
            self.outbox.add(MessageKind.UPDATE_NORMS, event.timestamp, *norms)
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
        """Warns once if the gradients of an epoch were too stale for the learning rate."""
        text = "" if self._warned else self.rules.staleness_warning(self.epoch, mean_staleness)
        self._warned = self._warned or bool(text)
        return [Warn(text)] if text else []

    @property
    def final_lent(self) -> bool:
        """Whether the weights of the last epoch are still being sent."""
        return self._snapshots.final_lent

    def returned(self, buffer: str) -> None:
        """Takes back the buffer of a snapshot whose transfer to the statistics server has ended."""
        self._snapshots.returned(buffer)

    def credit(self) -> list[Action]:
        """Takes note that the statistics server has room for one more snapshot. Sends the final one if it waits."""
        return self._snapshots.credit()

    # Changes of the job, and regrouping without roles that have died.

    @property
    def is_to_change(self) -> bool:
        """Whether the job must change now, after this update, and training continues."""
        return self.rules.until.is_reached(self.epoch, self.timestamp) and not self.over

    @property
    def learners_change(self) -> bool:
        """Whether other learners take part after the change of the job that is due now."""
        return self.rules.learners_change(self.epoch, self.timestamp)

    def change(self, dead: Set[int], position: TrainingState, now: float) -> None:
        """Continues by the present job from a position, without the dead roles."""
        known, begun = set(self.rules.decided), self.rules.change(dead, position)
        self._reset_counts(position)
        self._tell_changes(known, begun, position)

    def follow(self, now: float) -> None:
        """Continues by the present job. No role restarts."""
        position, known = self.position(now), set(self.rules.decided)
        self._tell_changes(known, self.rules.change(frozenset(), position), position)

    def _tell_changes(self, known: Set[DecidedChange], begun: Sequence[Phase], position: TrainingState) -> None:
        """Reports the changes that take effect at a position.

        Args:
            known: decided changes before.
            begun: phases that begin.
            position: state of training.
        """
        if self.over:
            return
        decided = [each for each in position.in_effect if each not in known]
        for text in map(taken_effect, decided):
            for piece in pieces(text):
                self.tell("decided", self.timestamp, position.time_s, piece)
        starts = [start_of(each) for each in decided]
        for phase in begun:
            who = "decided " if phase.start in starts else ""
            self.tell("change", self.timestamp, position.time_s, f"{who}after {phase.start.text}: {phase.text}")

    def regroup(
        self, dead: Set[int], position: TrainingState, now: float, *, replicas_stay: bool = False
    ) -> list[Action]:
        """Restarts all remaining roles by the present job, with the weights of a position.

        Work under way is dropped, and computed again with these weights.

        Args:
            dead: ids of the dead roles.
            position: position of the weights.
            now: seconds on the driver's clock.
            replicas_stay: whether learners keep their replicas. Nothing may be under way then.
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
        left = left_over(len(plan.learners) + len(plan.dormant))
        left += f" ({len(plan.learners)} active)" if plan.dormant else ""
        text = f"{names} died; {left}, which continue from update {self.timestamp}"
        warnings = [Warn(text)] if lost else []
        return [*self.outbox.flush(now), *warnings, Reconfigure(plan, position, replicas_stay)]

    # Reports.

    def record_loss(self, role: int, text: str, pushed: int, now: float, kind: str = "lost") -> None:
        """Reports a role that is lost, and closes the account of a learner."""
        self.recorded_losses.add(role)
        self.tell(kind, self.timestamp, now - self.clock.start_time, text, role)
        if self.rules.plan.roles[role].kind_traits.trains:
            self._account_for(role, pushed)

    def record_late_loss(self, role: int, now: float) -> list[Action]:
        """Closes the accounts of a learner lost after training and of its group, because their own may never arrive."""
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
        """Returns the present state of training, without pending gradients."""
        steps, learned = self.counts.without(self._pending, self.rules.protocol.period)
        sums = self._sums
        totals, counts = (sums.loss, sums.errors), (sums.staleness, sums.gradients, sums.samples)
        books = (self.timestamp, self.epoch, self.samples, self.applied)
        begun = (steps, learned, tuple(self.counts.samples_drawn))
        dealt = () if self.dealer is None else self.dealer.about()
        time_s = now - self.clock.start_time
        found = TrainingState(*books, time_s, *begun, *totals, *counts, self.rules.lr_drops, *dealt)
        if self._average is not None:
            found = structs.replace(found, averaged=self._average.count)
        if self.rules.decided:
            found = structs.replace(found, decided=self.rules.decided_at(found))
        name, state = self.rules.protocol_state
        return structs.replace(found, protocol=name, protocol_state=state) if state else found

    @property
    def last_position(self) -> TrainingState:
        """State of training at its end."""
        return self.position(self.clock.ended)

    def tell(self, kind: str, timestamp: int, time_s: float, text: str, role: int = -1) -> None:
        """Adds a row to the table of events."""
        assert kind in EVENT_KINDS, kind
        gradients = self.applied + len(self._pending.rows)
        self.outbox.add(
            MessageKind.EVENTS, kind.encode(), role, 0, timestamp, gradients, time_s, 0.0, text.encode()[:512]
        )
