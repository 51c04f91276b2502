"""What whoever owns weights does beside updating them: count samples and epochs, set rates, report, send snapshots,
and have checkpoints made.

A parameter server owns them; where there is none, each learner owns a replica, and the first one reports.

A checkpoint is made in three steps, one after the other, while training goes on: weights and optimiser state are
copied and written to a file beside the last one; the statistics server brings the rows up to there to the disk; the
new file takes the last one's place. So whatever a checkpoint needs of the result file is there.
"""

import math
from collections import deque

import numpy as np

from rudra.core import records
from rudra.core.events import (
    Action,
    Commit,
    Committed,
    Copy,
    Event,
    Fail,
    Lost,
    Received,
    Regroup,
    Save,
    Saved,
    Send,
    Sent,
    Stopped,
    Update,
    Updated,
    Warn,
)
from rudra.core.messages import PACK, Kind, Message, Rows
from rudra.core.records import Gradient
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles.machine import Machine, Outbox, Silent, listed
from topologies import Plan
from topologies.plan import LEARNER

WEIGHTS = "weights"
SNAPSHOT = "snapshot"
CREDITS = 2
"""Snapshots that the statistics server can hold: one in work and one waiting."""

ROW = PACK[Kind.GRADIENTS]


def left_over(learners: int) -> str:
    """Who is left, for people."""
    return f"{learners} learner{'s are' if learners > 1 else ' is'} left"


def _mean(total: float, count: int) -> float:
    """Of an epoch's gradients; it has none where the update that ended it ended the one before, too."""
    return total / count if count else math.nan


def outlasts(event: Event, statistics: int) -> bool:
    """Whether an event is for the owner of the weights even if everybody else has begun anew."""
    if isinstance(event, Received):
        return event.message.sender == statistics
    if isinstance(event, Sent):
        return event.to == statistics
    return isinstance(event, Updated | Saved | Committed | Stopped | Lost)


class Owner(Machine):
    """The clock and the books of the weights.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
        schedule: the learning rates, before modulation.
        position: where training begins.
        reports: whether the statistics server hears of it.
    """

    def __init__(
        self,
        role: int,
        plan: Plan,
        job: Job,
        training_samples: int,
        schedule: Schedule,
        position: TrainingState = BEGINNING,
        *,
        reports: bool = True,
    ) -> None:
        super().__init__(role, plan)
        self._job = job
        self.schedule = schedule
        self._follow(plan, position)
        self.epochs = job.training.epochs
        self.training_samples = training_samples
        self.timestamp, self.epoch = position.timestamp, position.epoch
        self.samples, self.applied = position.samples, position.applied
        self._reports = reports
        self._outbox = (Outbox if reports else Silent)(role, plan.statistics, job.results.report_s)
        self._update_rows: deque[tuple[float, ...]] = deque()  # of updates whose end is not known yet
        self._credits = CREDITS
        self._tests_all = job.training.evaluate == "always"
        self._snapshot_lent = False
        self._final_lent = False  # the weights of the last epoch, which are not all sent yet
        self._buried: set[int] = set()  # roles whose end is told
        self._start_message: Message | None = None
        self._final: Rows | None = None
        self._spent_s = position.time_s  # before this start
        self._began = self._ended = 0.0
        self._epoch_loss, self._epoch_errors = position.epoch_loss, position.epoch_errors
        self._epoch_staleness, self._epoch_gradients = position.epoch_staleness, position.epoch_gradients
        self._epoch_samples = position.epoch_samples
        self._every = job.results.checkpoint_interval if reports else None
        self._last_checkpoint = position
        self._saving: TrainingState | None = None  # on its way to the disk
        self._stopped = False  # before its time
        self._closing = False  # of a run that was stopped, all is counted
        self._told_stale = False
        self._kept = position.timestamp if position.steps else -1  # timestamp of the last checkpoint

    def _follow(self, plan: Plan, position: TrainingState) -> None:
        """Everybody begins by this plan, from here; nothing is under way."""
        self.plan = plan
        self.protocol = self._job.make_protocol(plan)
        self._lowered = position.lowered
        if self._job.optimizer.plateau is not None:
            self.schedule = Schedule.stepped(self._job.optimizer, self._lowered)
        self._gradient_weight = self.protocol.modulation.gradient_weight
        self._steps = [position.step(i) for i in range(plan.learner_numbers)]
        self._pending: list[bytes] = []  # rows of `records.GRADIENT`
        self._pending_samples = self._pending_staleness = 0
        self._pending_loss = self._pending_errors = 0.0

    def validate(self) -> None:
        assert 0 <= self._credits <= CREDITS
        assert self.epoch <= self.epochs

    def _start_clock(self, now: float) -> Message:
        """Training begins; where it goes on after a resume, the time in between does not count."""
        if self._start_message is None:
            start = self._start_message = Message(Kind.START, self.id, value=round((now - self._spent_s) * 1e9))
            self._began = start.value * 1e-9  # the same number everywhere
            self._ended = self._began + self._spent_s
        return self._start_message

    def _count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Takes gradients into the books of the next update; returns their samples."""
        timestamp, pending = self.timestamp, self._pending
        samples = 0
        steps = self._steps
        for g in gradients:
            steps[g.learner] = g.step + 1
            count, loss, errors, staleness = g.samples, g.loss, g.errors, timestamp - g.timestamp
            row = ROW(timestamp + 1, g.learner, count, g.step, g.timestamp, staleness, scale, loss, errors, 0)
            pending.append(row)
            samples += count
            self._pending_staleness += staleness
            self._pending_loss += loss * count
            self._pending_errors += errors
        self._pending_samples += samples
        return samples

    @property
    def _is_ahead(self) -> bool:
        """Whether the next update would end an epoch whose weights could not be tested, although all are to be."""
        if not self._tests_all or (self._credits and not self._snapshot_lent):
            return False
        return self.samples + self._pending_samples >= (self.epoch + 1) * self.training_samples

    def _update_by(self, gradient: str, now: float) -> tuple[list[Action], bool]:
        """Updates the weights by an average of all that was counted; also whether that ended the training."""
        gradients, samples, staleness = self._pending, self._pending_samples, self._pending_staleness
        count = len(gradients)
        mean_staleness = staleness / count
        progress = (self.samples + samples) / self.training_samples
        rate = self.schedule.rate(self.epoch, progress, self.timestamp) * self.protocol.modulation.rate_factor(
            mean_staleness
        )
        self.timestamp += 1
        time_s = now - self._began
        update = Update(gradient, WEIGHTS, rate, self.timestamp, self.epoch + 1, samples, time_s)
        actions: list[Action] = [update]
        self.samples += samples
        self.applied += count
        self._outbox.extend(Kind.GRADIENTS, gradients)
        self._epoch_loss += self._pending_loss
        self._epoch_errors += self._pending_errors
        self._epoch_staleness += staleness
        self._epoch_gradients += count
        self._epoch_samples += samples
        self._ended = now
        self._update_rows.append((self.timestamp, self.epoch + 1, count, samples, rate, mean_staleness, time_s))
        self._pending, self._pending_samples, self._pending_staleness = [], 0, 0
        self._pending_loss = self._pending_errors = 0.0
        while self.epoch < self.epochs and self.samples >= (self.epoch + 1) * self.training_samples:
            actions += self._end_epoch(now, rate)
        if self._every is not None and self._saving is None and self._checkpoint_due(now):
            actions += self._save(now)
        return actions, self.epoch == self.epochs

    def _note(self, event: Updated, now: float) -> list[Action]:
        """The row of an update, whose end is known now."""
        self._outbox.add(Kind.UPDATES, *self._update_rows.popleft(), event.seconds, event.digest)
        return self._outbox.due(now)

    def _end_epoch(self, now: float, rate: float) -> list[Action]:
        self.epoch += 1
        gradients, samples = self._epoch_gradients, self._epoch_samples
        trained = (_mean(self._epoch_loss, samples), _mean(self._epoch_errors, samples))
        means = (_mean(self._epoch_staleness, gradients), rate, *trained)
        self._epoch_loss = self._epoch_errors = 0.0
        self._epoch_staleness = self._epoch_gradients = self._epoch_samples = 0
        if not self._reports:
            return []
        measured = (now - self._began, *means)
        untested = (*(math.nan,) * 6, b"")
        row = np.array([(self.epoch, 0, self.timestamp, self.samples, *measured, *untested)], records.EPOCH)
        actions = [*self._outbox.flush(now), *self._judge_staleness(means[0])]
        if self.epoch == self.epochs:
            self._final, self._final_lent = row, True
            return actions + self._send_final()
        if not self._credits or self._snapshot_lent:
            return [*actions, Send(self.plan.statistics, Message(Kind.EPOCHS, self.id, self.timestamp, rows=row))]
        self._credits -= 1
        self._snapshot_lent = True
        message = Message(Kind.SNAPSHOT, self.id, self.timestamp, self.epochs, row)
        return [*actions, Copy(WEIGHTS, SNAPSHOT), Send(self.plan.statistics, message, SNAPSHOT)]

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

    def _send_final(self) -> list[Action]:
        """Sends the last weights as soon as the statistics server has room; they change no more."""
        if self._final is None or not self._credits:
            return []
        self._credits -= 1
        message = Message(Kind.SNAPSHOT, self.id, self.timestamp, self.epochs, self._final)
        self._final = None
        return [Send(self.plan.statistics, message, WEIGHTS)]

    def _snapshot_returned(self, buffer: str) -> None:
        """The statistics server has a snapshot."""
        if buffer == SNAPSHOT:
            self._snapshot_lent = False
        else:
            self._final_lent = False

    def _credit(self, event: Received, now: float) -> list[Action]:
        self._credits += 1
        return self._send_final() + self._go_on(now)

    def _go_on(self, now: float) -> list[Action]:
        """Makes the update that waited for a test (`_is_ahead`)."""
        raise NotImplementedError

    def _enough(self, event: Received, now: float) -> list[Action]:
        """The target is reached: the epoch under way is the last one."""
        self.epochs = min(self.epochs, self.epoch + 1)
        return []

    def _plateau(self, event: Received, now: float) -> list[Action]:
        """Tests got no better: the rate falls with the epoch under way, or with the next if it falls there already."""
        return self._lower(event.message.value, now)

    def _lower(self, count: int, now: float) -> list[Action]:
        """Has the rate fall so often in all; what was told before counts once."""
        while len(self._lowered) < count:
            self._lowered = (*self._lowered, max(self.epoch, *self._lowered, 0) + 1)
            self.schedule = Schedule.stepped(self._job.optimizer, self._lowered)
            if self._reports:
                text = f"tests got no better: the rate is multiplied by {self._job.optimizer.decay_factor:g}"
                self._tell("plateau", self.timestamp, now - self._began, f"{text} after epoch {self._lowered[-1]}")
        return []

    # Roles that die.

    def _regroup(self, position: TrainingState, now: float) -> list[Action]:
        """Has everybody who is left begin anew from the weights that are here, which are those of a position."""
        lost = sorted(self._dead - self._buried)
        names = listed([f"{role.name} (rank {role.world_rank})" for role in map(self.plan.roles.__getitem__, lost)])
        try:
            self._follow(self.plan.without(self._dead), position)
        except ValueError as error:
            return [Fail(f"{names} died, and the run cannot go on: {error}", lost=True)]
        for role in lost:
            learner = self.plan.roles[role].kind == LEARNER
            pushed = position.step(self.plan.roles[role].index) if learner else 0
            what = f"when {pushed} of its gradients had been applied" if learner else "and those below it moved up"
            self._record_loss(role, f"died {what}; what was under way is computed again", pushed, now)
        if self._job.fault_tolerance.on_learner_loss == "stop" and any(
            self.plan.roles[i].kind == LEARNER for i in lost
        ):
            self._stopped = True
        text = f"{names} died; {left_over(len(self.plan.learners))}, who go on from update {self.timestamp}"
        return [*self._outbox.flush(now), Warn(text), Regroup(self.plan, position)]

    def _record_loss(self, role: int, text: str, pushed: int, now: float, kind: str = "lost") -> None:
        """Reports a role that is no more, and closes a learner's books."""
        self._buried.add(role)
        self._tell(kind, self.timestamp, now - self._began, text, role)
        if self.plan.roles[role].kind == LEARNER:
            self._account_for(role, pushed)

    def _lose_late(self, role: int, now: float) -> list[Action]:
        """All is counted, and nobody is missed; but accounts of a learner and its group may never come."""
        if self.plan.roles[role].kind == LEARNER:
            for learner in self.plan.group_of(role):
                self._account_for(learner, self._steps[self.plan.roles[learner].index])
        return self._outbox.flush(now)

    def _account_for(self, role: int, pushed: int) -> None:
        learner, samples = self.plan.roles[role], pushed * self._job.training.minibatch_size
        self._outbox.add(Kind.LEARNERS, learner.index, learner.world_rank, pushed, samples, 0, 0, 0.0, 0.0, 0.0, 0.0)

    def _totals(self, now: float, pushed: int, pending: int, discarded: int, lost: int) -> list[Action]:
        """The closing account."""
        counts = (pushed, self.applied, pending, discarded, lost)
        self._outbox.add(Kind.TOTALS, self.timestamp, self.samples, *counts, self._ended - self._began)
        return self._outbox.flush(now)

    # Checkpoints.

    def _position(self, now: float) -> TrainingState:
        """Where training stands, without what is pending."""
        steps = list(self._steps)
        for row in np.frombuffer(b"".join(self._pending), records.GRADIENT)[::-1]:
            steps[row["learner"]] = int(row["step"])
        sums = (self._epoch_loss, self._epoch_errors)
        counts = (self._epoch_staleness, self._epoch_gradients, self._epoch_samples)
        books = (self.timestamp, self.epoch, self.samples, self.applied)
        return TrainingState(*books, now - self._began, tuple(steps), *sums, *counts, self._lowered)

    @property
    def last_position(self) -> TrainingState:
        """Where training stood when it ended."""
        return self._position(self._ended)

    def _checkpoint_due(self, now: float) -> bool:
        assert self._every is not None
        if self.epoch == self.epochs:
            return False
        count, unit = self._every
        last = self._last_checkpoint
        if unit == "s":
            return now - self._began - last.time_s >= count
        done = self.timestamp - last.timestamp if unit == "update" else self.epoch - last.epoch
        return done >= count

    def _save(self, now: float) -> list[Action]:
        self._saving = self._last_checkpoint = self._position(now)
        return [Save(WEIGHTS, self._saving)]

    def _saved(self, event: Saved, now: float) -> list[Action]:
        """The checkpoint is written, and waits for its rows."""
        if event.error:
            return self._not_saved(event.error, now)
        assert self._saving is not None
        message = Message(Kind.CHECKPOINT, self.id, self._saving.timestamp, self._saving.epoch)
        return [*self._outbox.flush(now), Send(self.plan.statistics, message)]

    def _safe(self, event: Received, now: float) -> list[Action]:
        return [Commit(event.message.timestamp)]

    def _committed(self, event: Committed, now: float) -> list[Action]:
        if event.error:
            return self._not_saved(event.error, now)
        position, self._saving = self._saving, None
        assert position is not None
        self._kept = position.timestamp
        text = f"written in {now - self._began - position.time_s:.2f} s, beside training"
        self._tell("checkpoint", position.timestamp, position.time_s, text)
        return self._outbox.due(now) + self._end(now)

    def _not_saved(self, why: str, now: float) -> list[Action]:
        position, self._saving = self._saving, None
        assert position is not None
        text = f"no checkpoint at update {position.timestamp}: {why}; training goes on without"
        return [Warn(text), *self._end(now, failed=True)]

    def _end(self, now: float, *, failed: bool = False) -> list[Action]:
        """Ends a run that was stopped and is accounted for, once its last checkpoint is made, or cannot be."""
        if not self._closing or self._saving is not None:
            return []
        if self._kept < self.timestamp and not failed:
            return self._save(now)
        end = Message(Kind.END, self.id, self._kept, self.epoch)
        return [*self._outbox.flush(now), Send(self.plan.statistics, end)]

    def _tell(self, kind: str, timestamp: int, time_s: float, text: str, role: int = -1) -> None:
        """Enters something into the table of events."""
        gradients = self.applied + len(self._pending)
        self._outbox.add(Kind.EVENTS, kind.encode(), role, 0, timestamp, gradients, time_s, 0.0, text.encode()[:512])
