"""The books of the weights: their clock, samples and epochs, rates, rows of what was applied, and snapshots.

Whoever owns weights keeps them: a parameter server, or, where there is none, each learner of its replica, of which the
first one reports. What the owner is told of training as a whole stands here, too: when it ends, and who is no more.
"""

import math
from collections import deque
from collections.abc import Set
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import structs

import protocols
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
    Regroup,
    Saved,
    Send,
    Sent,
    Stopped,
    Update,
    Updated,
    Warn,
)
from rudra.core.messages import BETWEEN_OWNERS, EpochRows, MessageKind, Snapshot, TrainingStarted
from rudra.core.phases import phase_at
from rudra.core.records import TIMES, Gradient
from rudra.core.schedule import Schedule
from rudra.core.training_state import TrainingState
from rudra.core.wire import PACK
from rudra.core.work import portion
from rudra.errors import ProtocolError
from rudra.job.table import named
from rudra.roles.machine import Setup, listed
from rudra.roles.outbox import NullOutbox, Outbox
from rudra.roles.sample_allocator import SampleAllocator
from rudra.roles.snapshots import SnapshotQueue
from rudra.roles.sums import EpochSums, PendingUpdate
from topologies import Plan

ROW, UPDATE = PACK[MessageKind.GRADIENTS], PACK[MessageKind.UPDATES]


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
    """A role that holds the books of weights."""

    ledger: "Ledger"


class Ledger:
    """The clock and the books of some weights.

    Args:
        role: id of the owner.
        setup: what the owner is made from.
        reports: whether the statistics server hears of it.

    Attributes:
        id: of the owner.
        job: of the part of the run that training is in.
        plan: who is who.
        protocol: the rule that everybody follows, and by how much a rate suffers from staleness.
        schedule: the learning rates, before modulation.
        timestamp: of the weights: updates so far.
        epoch, epochs: completed ones, and how many there are to be.
        samples, applied: samples and gradients applied.
        steps: for each learner, one more than the last mini-batch that is counted.
        learned: for each learner, the samples that are counted.
        drawn: for each stream, the end of what was applied.
        dealer: of the samples, where a coordinator deals them out.
        lowered: completed epochs after which the rate falls, because tests got no better.
        stopped: training ends before its time.
        began: seconds on the driver's clock.
        outbox: rows on their way.
        recorded_losses: roles whose end is told.
        per_update: so many of its updates count as one for the schedule.
    """

    per_update = 1

    def __init__(self, role: int, setup: Setup, *, reports: bool = True) -> None:
        job, position = setup.job, setup.position
        self.id = role
        self._phases, self._training_samples = setup.all_phases, setup.training_samples
        self._follow(setup.plan, position)
        self.epochs = job.training.epochs
        self.timestamp, self.epoch = position.timestamp, position.epoch
        self.samples, self.applied = position.samples, position.applied
        self.stopped = False
        self._reports = reports
        self.outbox = (Outbox if reports else NullOutbox)(role, setup.plan.statistics, job.results.report_s)
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates whose end is not known yet
        self._evaluates_all = job.training.evaluate in ("always", "workers")
        self._snapshots = SnapshotQueue(setup.plan.statistics)
        self.recorded_losses: set[int] = set()
        self._start_message: TrainingStarted | None = None
        self._spent_s = position.time_s  # before this start
        self.began = self._ended = 0.0
        self._sums = EpochSums.of(position)
        self._told_stale = False

    def _follow(self, plan: Plan, position: TrainingState) -> None:
        """Everybody begins by this plan, from here; nothing is under way."""
        self._phase = phase_at(self._phases, position.epoch)
        later = (phase.at_epoch for phase in self._phases if phase.at_epoch > position.epoch)
        self._until = next(later, math.inf)  # how many epochs are complete when the job changes
        self.job, self.schedule = self._phase.job, self._phase.schedule
        self.protocol = self.job.make_protocol(plan)
        self._protocol_name = str(named(self.job.protocol.name))
        if position.protocol_state and position.protocol == self._protocol_name:
            protocols.restored(self.protocol, position.protocol_state)
        self._keep_state()
        self.plan = plan
        self.lowered = position.lowered
        if self.job.optimizer.plateau is not None:
            self.schedule = Schedule.stepped(self.job.optimizer, self.lowered)
        learners = range(plan.learner_numbers)
        self.steps = [position.step(i) for i in learners]
        self.learned = [position.learned_by(i) for i in learners]
        self.drawn = [position.drawn_from(i) for i in learners]
        self.dealer: SampleAllocator | None = None
        if plan.scheduled:
            self.dealer = SampleAllocator(Hogbatch.of(self.protocol), plan, self._training_samples, position)
        size, parts, between = self.job.training.minibatch_size, self.job.cluster.parts, self.protocol.period - 1
        mine = {plan.roles[i].index: portion(plan, i, size, parts) for i in plan.learners} if between and parts else {}
        # With shares, samples of others lie between the mini-batches of a period.
        self._others = {learner: between * (own.batch - own.count) for learner, own in mine.items()}
        self._pending = PendingUpdate()

    def _keep_state(self) -> None:
        """Keeps the protocol's state of now, from which everybody would go on."""
        try:
            self._protocol_state = protocols.saved(self.protocol)
        except ValueError as error:
            raise ProtocolError(f"protocol {self._protocol_name}: {error}") from None

    def go_on_by(self, protocol: protocols.Protocol) -> None:
        """Follows the protocol as it is for fewer learners from now on, in the state of the one so far.

        Raises:
            ValueError: it does not take that state.
        """
        if state := protocols.saved(self.protocol):
            protocols.restored(protocol, state)
        self.protocol = protocol

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold."""
        self._snapshots.validate()
        assert self.epoch <= self.epochs
        if self.dealer is not None:
            self.dealer.validate(self.samples - self.epoch * self._training_samples)

    # Training as a whole.

    @property
    def started(self) -> bool:
        """Whether training has begun, with whomever."""
        return self._start_message is not None

    @property
    def over(self) -> bool:
        """Whether the last epoch is complete."""
        return self.epoch == self.epochs

    def start(self, now: float) -> TrainingStarted:
        """Training begins; where it goes on after a resume, the time in between does not count."""
        if self._start_message is None:
            start = self._start_message = TrainingStarted(self.id, round((now - self._spent_s) * 1e9))
            self.began = start.began_ns * 1e-9  # the same number everywhere
            self._ended = self.began + self._spent_s
        return self._start_message

    def pause(self, seconds: float, text: str, now: float) -> None:
        """For so long, until now, the clock of the training has stood still."""
        began = round((self.began + seconds) * 1e9) * 1e-9  # the same number everywhere, as at the start
        self._ended += began - self.began
        self.began = began
        self.tell("pause", self.timestamp, now - began, text)

    def enough(self) -> None:
        """The target is reached: the epoch under way is the last one."""
        self.epochs = min(self.epochs, self.epoch + 1)

    def lower(self, count: int, now: float) -> None:
        """Tests got no better: the rate falls so often in all; what was told before counts once.

        It falls with the epoch under way, or with the next if it falls there already.
        """
        while len(self.lowered) < count:
            self.lowered = (*self.lowered, max(self.epoch, *self.lowered, 0) + 1)
            self.schedule = Schedule.stepped(self.job.optimizer, self.lowered)
            if self._reports:
                text = f"tests got no better: the rate is multiplied by {self.job.optimizer.decay_factor:g}"
                self.tell("plateau", self.timestamp, now - self.began, f"{text} after epoch {self.lowered[-1]}")

    # Updates.

    @property
    def updating(self) -> bool:
        """Whether the end of an update is not known yet."""
        return bool(self._update_rows)

    @property
    def pending(self) -> int:
        """Gradients that are in the books of the next update."""
        return len(self._pending.rows)

    def count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Takes gradients into the books of the next update; returns their samples."""
        timestamp, pending = self.timestamp, self._pending
        samples = staleness_sum = 0
        loss_sum, error_sum = pending.loss, pending.errors
        steps, learned, drawn, rows = self.steps, self.learned, pending.drawn, pending.rows
        for g in gradients:
            learner, count, step, first, stream = g.learner, g.samples, g.step, g.first, g.stream
            loss, errors, staleness = g.loss, g.errors, timestamp - g.timestamp
            row = ROW(timestamp + 1, learner, count, step, first, g.timestamp, staleness, scale, loss, errors, stream)
            rows.append(row)
            steps[learner] = step + 1
            learned[learner] += count
            end = first + count + self._others.get(learner, 0)
            if end > drawn.get(stream, 0):
                drawn[stream] = end
            samples += count
            staleness_sum += staleness
            loss_sum += loss * count
            error_sum += errors
            if self.dealer is not None:
                self.dealer.count(g)
        pending.samples += samples
        pending.staleness += staleness_sum
        pending.loss, pending.errors = loss_sum, error_sum
        return samples

    @property
    def is_ahead(self) -> bool:
        """Whether the next update would end an epoch whose weights could not be tested, although all are to be."""
        if not self._evaluates_all or self._snapshots.free:
            return False
        return self.ends_epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether the next update would end an epoch."""
        return self.samples + self._pending.samples >= (self.epoch + 1) * self._training_samples

    def update(self, gradient: str, now: float) -> list[Action]:
        """Updates the weights by an average of all that was counted.

        Where learners have stepped replicas, that was at the rate of the schedule, and the weights have another one.
        """
        count, samples = len(self._pending.rows), self._pending.samples
        mean_staleness = self._pending.staleness / count
        progress = (self.samples + samples) / self._training_samples
        protocol = self.protocol
        factor = protocol.modulation.rate_factor(mean_staleness) * protocol.rate_scale(samples)
        rate = self.schedule.rate(self.epoch, progress, self.timestamp // self.per_update) * factor
        self.timestamp += 1
        time_s = now - self.began
        own_rate = protocol.outer_rate
        about = (self.timestamp, self.epoch + 1, samples, time_s)
        update = Update(gradient, WEIGHTS, rate if own_rate is None else own_rate, *about)
        return [update, *self._applied(rate, now)]

    def enter(self, rate: float, now: float) -> list[Action]:
        """Enters an update by all that was counted, which somebody has made already, at such a rate."""
        self.timestamp += 1
        return self._applied(rate, now)

    def enter_each(self, gradients: tuple[Gradient, ...], seconds: float, now: float) -> list[Action]:
        """Enters updates of one gradient each, which somebody has made already; an epoch does not end with them.

        Args:
            gradients: `scale` is the rate, `timestamp` how stale it is.
            seconds: that each update took.
            now: seconds on the driver's clock.
        """
        dealer, timestamp, time_s, epoch = self.dealer, self.timestamp, now - self.began, self.epoch + 1
        assert dealer is not None
        rows, updates = [], []
        samples = staleness = 0
        loss = errors = 0.0
        for g in gradients:
            learner, count, step, first, of = g.learner, g.samples, g.step, g.first, max(0, timestamp - g.timestamp)
            stale = timestamp - of
            timestamp += 1
            rows.append(ROW(timestamp, learner, count, step, first, of, stale, 1.0, g.loss, g.errors, g.stream))
            updates.append(UPDATE(timestamp, epoch, 1, count, g.scale, stale, time_s, seconds, 0))
            self.steps[learner] = step + 1
            self.learned[learner] += count
            end = first + count
            if end > self.drawn[g.stream]:
                self.drawn[g.stream] = end
            samples, staleness = samples + count, staleness + stale
            loss, errors = loss + g.loss * count, errors + g.errors
            dealer.take(g)
        self.timestamp = timestamp
        self.samples += samples
        self.applied += len(gradients)
        self._sums.add(loss, errors, staleness, len(gradients), samples)
        self._ended = now
        self.outbox.extend(MessageKind.GRADIENTS, rows)
        self.outbox.extend(MessageKind.UPDATES, updates)
        return self.outbox.due(now)

    @property
    def left_of_epoch(self) -> int:
        """Samples that are not applied yet."""
        return (self.epoch + 1) * self._training_samples - self.samples

    def rate_for(self, samples: int) -> float:
        """The rate of the schedule for somebody who will apply so many samples, as it is now."""
        progress = (self.samples + self._pending.samples + samples) / self._training_samples
        return self.schedule.rate(self.epoch, progress, self.timestamp)

    def _applied(self, rate: float, now: float) -> list[Action]:
        """Enters the update that led to this timestamp; what is to be done if an epoch ends with it."""
        pending, self._pending = self._pending, PendingUpdate()
        count, samples, staleness = len(pending.rows), pending.samples, pending.staleness
        mean_staleness, time_s = staleness / count, now - self.began
        actions: list[Action] = []
        self.samples += samples
        self.applied += count
        self.outbox.extend(MessageKind.GRADIENTS, pending.rows)
        self._sums.add(pending.loss, pending.errors, staleness, count, samples)
        self._ended = now
        self._update_rows.append((self.timestamp, self.epoch + 1, count, samples, rate, mean_staleness, time_s))
        for stream, end in pending.drawn.items():
            self.drawn[stream] = end
        self._keep_state()
        if self.dealer is not None:
            self.dealer.applied()
        while self.epoch < self.epochs and self.samples >= (self.epoch + 1) * self._training_samples:
            actions += self._end_epoch(now, rate)
        return actions

    def note(self, event: Updated, now: float) -> list[Action]:
        """The row of an update, whose end is known now."""
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
        measured = (now - self.began, *means)
        untested = (*(math.nan,) * 6, b"")
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = [*self.outbox.flush(now), *self._judge_staleness(means[0])]
        if self.epoch == self.epochs:
            return actions + self._snapshots.send_final(Snapshot(self.id, self.timestamp, self.epochs, row))
        if not self._snapshots.free:
            return [*actions, Send(self.plan.statistics, EpochRows(self.id, row))]
        return [*actions, *self._snapshots.send(Snapshot(self.id, self.timestamp, self.epochs, row))]

    def _judge_staleness(self, mean_staleness: float) -> list[Action]:
        """Says once where an epoch's gradients were so stale that the rate is too high for them (rudra.txt §5.1)."""
        n = self.protocol.modulation.assumed_staleness
        if n is None or self._told_stale or not mean_staleness > 2 * n:  # it may be NaN
            return []
        self._told_stale = True
        remedy = "modulation = 'mean_staleness' divides it by what is measured"
        if self.plan.overlapped:
            remedy += ", [topology] options.outstanding bounds that"
        text = (
            f"the gradients of epoch {self.epoch} were stale by {mean_staleness:.1f} updates on average, more than 2n"
        )
        return [Warn(f"{text} = {2 * n}, but modulation 'n' divides the rate by {n} alone; {remedy}")]

    @property
    def final_lent(self) -> bool:
        """Whether the weights of the last epoch are not all sent yet."""
        return self._snapshots.final_lent

    def returned(self, buffer: str) -> None:
        """The statistics server has a snapshot."""
        self._snapshots.returned(buffer)

    def credit(self) -> list[Action]:
        """The statistics server has room for one snapshot more."""
        return self._snapshots.credit()

    # Beginning anew: by another job, or without roles that have died.

    @property
    def is_to_change(self) -> bool:
        """Whether an epoch is complete after which the job changes, and training goes on."""
        return self.epoch >= self._until and not self.over

    def change(self, dead: Set[int], position: TrainingState, now: float) -> None:
        """Goes on by the job of now, from a position, without the dead."""
        before, gone = self._phase.at_epoch, self.plan.gone | dead
        plan = phase_at(self._phases, position.epoch).plan
        self._follow(plan.without(gone) if gone else plan, position)
        for phase in self._phases:
            if before < phase.at_epoch <= self._phase.at_epoch and not self.over:
                self.tell("change", self.timestamp, position.time_s, f"after epoch {phase.at_epoch}: {phase.text}")

    def regroup(self, dead: Set[int], position: TrainingState, now: float) -> list[Action]:
        """Has everybody who is left begin anew by the job of now, with the weights that are here, those of a position.

        What is under way is dropped. It is computed again, of these weights.
        """
        lost = sorted(dead - self.recorded_losses)
        dying = map(self.plan.roles.__getitem__, lost or sorted(dead))
        names = listed([role.title for role in dying])
        try:
            self.change(dead, position, now)
        except ValueError as error:
            return [Fail(f"{names} died, and the run cannot go on: {error}", lost=True)]
        for role in lost:
            learner = self.plan.roles[role].kind_traits.trains
            pushed = position.step(self.plan.roles[role].index) if learner else 0
            what = f"when {pushed} of its gradients had been applied" if learner else "and those below it moved up"
            self.record_loss(role, f"died {what}; what was under way is computed again", pushed, now)
        trained = any(self.plan.roles[i].kind_traits.trains for i in lost)
        if self.job.fault_tolerance.on_learner_loss == "stop" and trained:
            self.stopped = True
        text = f"{names} died; {left_over(len(self.plan.learners))}, who go on from update {self.timestamp}"
        warnings = [Warn(text)] if lost else []
        return [*self.outbox.flush(now), *warnings, Regroup(self.plan, position)]

    def record_loss(self, role: int, text: str, pushed: int, now: float, kind: str = "lost") -> None:
        """Reports a role that is no more, and closes a learner's books."""
        self.recorded_losses.add(role)
        self.tell(kind, self.timestamp, now - self.began, text, role)
        if self.plan.roles[role].kind_traits.trains:
            self._account_for(role, pushed)

    def record_late_loss(self, role: int, now: float) -> list[Action]:
        """All is counted, and nobody is missed; but accounts of a learner and its group may never come."""
        if self.plan.roles[role].kind_traits.trains:
            for learner in self.plan.group_of(role):
                self._account_for(learner, self.steps[self.plan.roles[learner].index])
        return self.outbox.flush(now)

    def _account_for(self, role: int, pushed: int) -> None:
        learner = self.plan.roles[role]
        counts = (pushed, self.learned[learner.index], 0, 0)
        self.outbox.add(MessageKind.LEARNERS, learner.index, learner.world_rank, *counts, *(0.0 for _ in TIMES))

    def totals(self, now: float, pushed: int, pending: int, discarded: int, lost: int) -> list[Action]:
        """The closing account."""
        counts = (pushed, self.applied, pending, discarded, lost)
        self.outbox.add(MessageKind.TOTALS, self.timestamp, self.samples, *counts, self._ended - self.began)
        return self.outbox.flush(now)

    def position(self, now: float) -> TrainingState:
        """Where training stands, without what is pending."""
        steps, learned = list(self.steps), list(self.learned)
        for row in np.frombuffer(b"".join(self._pending.rows), records.GRADIENT)[::-1]:
            steps[row["learner"]] = int(row["step"]) + 1 - self.protocol.period
            learned[row["learner"]] -= int(row["samples"])
        sums = self._sums
        totals, counts = (sums.loss, sums.errors), (sums.staleness, sums.gradients, sums.samples)
        books = (self.timestamp, self.epoch, self.samples, self.applied)
        begun = (tuple(steps), tuple(learned), tuple(self.drawn))
        dealt = () if self.dealer is None else self.dealer.about()
        found = TrainingState(*books, now - self.began, *begun, *totals, *counts, self.lowered, *dealt)
        if not self._protocol_state:
            return found
        return structs.replace(found, protocol=self._protocol_name, protocol_state=self._protocol_state)

    @property
    def last_position(self) -> TrainingState:
        """Where training stood when it ended."""
        return self.position(self._ended)

    def tell(self, kind: str, timestamp: int, time_s: float, text: str, role: int = -1) -> None:
        """Enters something into the table of events."""
        gradients = self.applied + len(self._pending.rows)
        self.outbox.add(
            MessageKind.EVENTS, kind.encode(), role, 0, timestamp, gradients, time_s, 0.0, text.encode()[:512]
        )
