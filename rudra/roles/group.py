"""Learners of compute groups: synchronous inside a group, which acts as one learner of batch kμ.

Source: omnivore.txt §IV-A and appendix D-A3. Members average their gradients on the group's communicator. Where there
is a parameter server, the first member pushes the average and pulls for all (`GroupLearner`), and weights go down a
tree of the group. With one group there is none: every learner updates a replica of its own (`Replica`), which is
hardsync by allreduce; the first one keeps the books.
"""

from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar

from msgspec.structs import replace

from rudra.core.events import (
    Action,
    Committed,
    Compute,
    Computed,
    Event,
    Fail,
    Hash,
    Hashed,
    Received,
    Reduce,
    Reduced,
    Saved,
    Send,
    Sent,
    Started,
    Stopped,
    Updated,
)
from rudra.core.messages import Kind, Message
from rudra.core.records import Gradient
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.job.tables import FaultToleranceTable, ResultsTable
from rudra.roles.learner import GRADIENT, WEIGHTS, Learner, State
from rudra.roles.machine import States, halt, listed, short
from rudra.roles.minibatch_log import MinibatchLog
from rudra.roles.owner import Owner
from topologies import Plan
from topologies.plan import STATISTICS_SERVER


class GroupLearner(Learner):
    """One member of one of several groups; arguments as for `Learner`.

    As `Learner`, with this between: a gradient that is ready is reduced first; then the first member exchanges it for
    newer weights, and the others wait in the same state for what it hands on. Each goes on when it has handed on all.
    """

    __slots__ = (
        "_digest",
        "_early",
        "_group",
        "_handing_on",
        "_leads",
        "_members",
        "_receivers",
        "_reducing",
    )

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {
        **Learner.TRANSITIONS,
        (State.HASHING, Sent): "_handed_on",
        (State.HASHING, Kind.READY): "_member_ready",
        (State.READY, Sent): "_handed_on",
        (State.READY, Kind.READY): "_member_ready",
        (State.COMPUTING, Sent): "_handed_on",
        (State.COMPUTING, Reduced): "_reduced",
        (State.COMPUTING, Kind.TIMESTAMP): "_answered_early",
        (State.EXCHANGING, Sent): "_returned",
    }

    def __init__(
        self,
        role: int,
        plan: Plan,
        tolerance: FaultToleranceTable,
        results: ResultsTable,
        position: TrainingState = BEGINNING,
    ) -> None:
        super().__init__(role, plan, tolerance, results, position)
        group = plan.roles[role].group
        assert group is not None
        self._group = group
        self._leads = plan.group_of(role)[0] == role
        self._members = plan.children[role]
        self._receivers = plan.receivers[role]
        self._handing_on = 0
        self._reducing = False
        self._early: Received | None = None  # what the others are told, before the reduction has ended here
        self._digest: list[int] = []  # of the first weights, here and at the members

    @property
    def waiting_for(self) -> str:
        if self._reducing:
            return f"the gradients of compute group {self._group}"
        if self.state is State.EXCHANGING and self._handing_on:
            return f"{listed([self.plan.roles[i].name for i in self._receivers])} to take weights"
        if self.state is State.EXCHANGING and not self._leads:
            return f"{self.plan.roles[self._source].name} to hand on weights"
        return super().waiting_for

    def validate(self) -> None:
        assert 0 <= self._handing_on <= len(self._receivers)

    # Start: the first member reports for all.

    def _first_weights(self, event: Received, now: float) -> list[Action]:
        return [*super()._first_weights(event, now), *self._hand_on(event)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = State.READY
        return self._ready(short(event.digest))

    def _member_ready(self, event: Received, now: float) -> list[Action]:
        return self._ready(event.message.value)

    def _ready(self, digest: int) -> list[Action]:
        self._digest.append(digest)
        if len(self._digest) <= len(self._members):
            return []
        if len(set(self._digest)) > 1:
            return [Fail(f"learners of compute group {self._group} received different initial weights")]
        return [Send(self.server, Message(Kind.READY, self.id, value=digest))]

    def _begin(self, event: Received, now: float) -> list[Action]:
        return [*(Send(to, event.message) for to in self._receivers), *super()._begin(event, now)]

    # Gradients: to the group, and from its first member to the server.

    def _push(self, event: Computed, now: float) -> list[Action]:
        # Who is to stop goes on for once: the others do not know yet, and will reduce.
        stopping, self._stopping = self._stopping, False
        actions, ends = self._computed(event, now)
        if ends:
            return actions
        self._stopping, self._reducing = stopping, True
        return [Reduce(GRADIENT, self._group, event.step, self._gradient(event, now), to_all=False), *actions]

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        self._reducing = False
        if self._stopping:
            if self._leads:  # nobody's gradient of this step is pushed
                self._uncount()
            self._report(0.0, 0.0, 0.0)
            return self._leave(now)
        self.state = State.EXCHANGING
        if not self._leads:
            self._delivered_at = now
            early, self._early = self._early, None
            return [] if early is None else self._answered(early, now)
        message = Message(Kind.GRADIENT, self.id, self.timestamp, self.timestamp, None, event.gradients)
        return [Send(self.server, message, GRADIENT)]

    def _uncount(self) -> None:
        self.pushed -= 1
        self._samples -= self._last_samples

    # Weights: from the server to the first member, and down the group.

    def _answered_early(self, event: Received, now: float) -> list[Action]:
        self._early = event
        return []

    def _answered(self, event: Received, now: float) -> list[Action]:
        return [*(Send(to, event.message) for to in self._receivers), *super()._answered(event, now)]

    def _pulled(self, event: Received, now: float) -> list[Action]:
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._hand_on(event) or self._advance(now)

    def _hand_on(self, event: Received) -> list[Action]:
        self._handing_on = len(self._receivers)
        return [Send(to, event.message, WEIGHTS) for to in self._receivers]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == GRADIENT:
            return self._delivered(event, now)
        self._handing_on -= 1
        return self._advance(now)

    def _handed_on(self, event: Sent, now: float) -> list[Action]:
        self._handing_on -= 1
        return []

    def _advance(self, now: float) -> list[Action]:
        if self._handing_on:
            return []
        # A first member that has told the others to go on has to go with them.
        stopping = self._stopping
        self._stopping = stopping and not (self._leads and self._answered_at is not None)
        actions = super()._advance(now)
        self._stopping = stopping
        return actions

    # The end: the first member tells the others, and how many gradients were pushed.

    def _stop_soon(self, event: Received, now: float) -> list[Action]:
        if not self._leads and self.pushed > event.message.value:
            self._uncount()
        return super()._stop_soon(event, now)

    def _leave(self, now: float) -> list[Action]:
        stop = Message(Kind.STOP, self.id, value=self.pushed)
        actions: list[Action] = [Send(to, stop) for to in self._receivers]
        *report, _ = super()._leave(now)
        if not self._leads:
            return actions + report
        in_all = self.pushed * (1 + len(self._members))
        return [*actions, *report, Send(self.server, Message(Kind.BYE, self.id, value=in_all))]


_LAST, _ENOUGH, _LOWERED = -2, -3, -3
"""In place of a gradient's update, which is not known yet: training stops after it, or with its epoch; or, less than
the last by so many, how often the rate has fallen with its epoch."""


class Replicas(States):
    HASHING = auto()
    READY = auto()
    COMPUTING = auto()
    REDUCING = auto()
    WAITING = auto()
    UPDATING = auto()
    REGROUPING = auto()
    STOPPED = auto()
    DONE = auto()


class Replica(MinibatchLog, Owner):
    """A learner of the only group: it updates weights of its own.

        HASHING    digest of the initial weights -> READY      tell the first learner, which compares
        READY      training starts               -> COMPUTING
        COMPUTING  gradient ready                -> REDUCING   average over all learners
        REDUCING   averaged                      -> UPDATING   every learner by the same sum, or
                                                 -> WAITING    the first, if it is ahead of tests that are to be made
        WAITING    the test before is over       -> UPDATING
        UPDATING   updated                       -> COMPUTING, or after the last epoch -> STOPPED
        STOPPED    everything is recorded        -> DONE
        any        a learner died                -> REGROUPING until a checkpoint is made, from which all go on

    Where a learner dies in the middle of a reduction, some replicas may have made the update and others not; so all
    take over what the first learner holds, by way of a checkpoint.

    If somebody asks the run to stop, the first learner says so in the record of its next gradient, and all stop after
    the update by that; or with the epoch, if its target is reached.

    A gradient carries a digest of the weights that it was computed from: should replicas differ, the run ends.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
        schedule: the learning rates, before modulation.
        position: where training begins.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {
        (Replicas.HASHING, Hashed): "_report_digest",
        (Replicas.HASHING, Kind.READY): "_member_ready",
        (Replicas.READY, Kind.READY): "_member_ready",
        (Replicas.READY, Kind.START): "_begin",
        (Replicas.COMPUTING, Computed): "_reduce",
        (Replicas.REDUCING, Reduced): "_reduced",
        (Replicas.UPDATING, Updated): "_updated",
        **{(state, Kind.ENOUGH): "_enough" for state in Replicas if state is not Replicas.DONE},
        **{(state, Kind.PLATEAU): "_plateau" for state in Replicas if state is not Replicas.DONE},
        **{(state, Kind.CREDIT): "_credit" for state in Replicas if state is not Replicas.DONE},
        **{(state, Sent): "_returned" for state in Replicas if state is not Replicas.DONE},
        **{(state, Saved): "_saved" for state in Replicas if state is not Replicas.DONE},
        **{(state, Kind.SAFE): "_safe" for state in Replicas if state is not Replicas.DONE},
        **{(state, Committed): "_committed" for state in Replicas if state is not Replicas.DONE},
        **{(state, Stopped): "_stop" for state in Replicas if state is not Replicas.DONE},
        (Replicas.HASHING, Started): "_start",
        **{(Replicas.REGROUPING, event): "_in_vain" for event in (Started, Hashed, Kind.READY, Computed, Reduced)},
        (Replicas.REGROUPING, Updated): "_updated_before",
        (Replicas.STOPPED, Kind.DONE): "_finish",
    }

    def __init__(
        self,
        role: int,
        plan: Plan,
        job: Job,
        training_samples: int,
        schedule: Schedule,
        position: TrainingState = BEGINNING,
    ) -> None:
        self._leads = plan.server == role
        Owner.__init__(self, role, plan, job, training_samples, schedule, position, reports=self._leads)
        self._open_books(job.fault_tolerance, job.results, position)
        self._ended_training = self._told_enough = False
        self._told_lowered = len(position.lowered)
        self._ready_at = self._reduced_at = 0.0

    def _follow(self, plan: Plan, position: TrainingState) -> None:
        super()._follow(plan, position)
        self.state: States = Replicas.HASHING
        self._made_of: tuple[Gradient, ...] = ()
        self._members = plan.children[self.id]
        self._to_members = plan.receivers[self.id]
        self._digests: list[int] = []
        self._digest = 0  # of the weights, as much as goes into a gradient's record; since everybody began

    @property
    def waiting_for(self) -> str:
        if self.state is Replicas.REDUCING:
            return "the gradients of all learners"
        if self.state is Replicas.WAITING:
            return "the statistics server to test the weights"
        if self.state is Replicas.REGROUPING:
            return "a checkpoint to go on from without those that died"
        if self.state is Replicas.READY:
            return "other learners to get ready"
        return "the statistics server to finish" if self.state is Replicas.STOPPED else ""

    def validate(self) -> None:
        super().validate()
        assert self.timestamp <= self.step

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Hash(WEIGHTS)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = Replicas.READY
        digest = short(event.digest)
        if self._leads:
            return self._ready(digest, now)
        return [Send(self.plan.server, Message(Kind.READY, self.id, value=digest))]

    def _member_ready(self, event: Received, now: float) -> list[Action]:
        return self._ready(event.message.value, now)

    def _ready(self, digest: int, now: float) -> list[Action]:
        self._digests.append(digest)
        if len(self._digests) <= len(self._members) or self.state is not Replicas.READY:
            return []
        if len(set(self._digests)) > 1:
            return [Fail("learners hold different initial weights (digests differ)")]
        start = self._start_clock(now)
        return [Send(self.plan.statistics, start), *self._start_training(start, now)]

    def _begin(self, event: Received, now: float) -> list[Action]:
        self._began = event.message.value * 1e-9
        return self._start_training(event.message, now)

    def _start_training(self, start: Message, now: float) -> list[Action]:
        return [*(Send(to, start) for to in self._to_members), *self._next(now)]

    def _next(self, now: float) -> list[Action]:
        self.state = Replicas.COMPUTING
        self._since = now
        return [Compute(self.step, WEIGHTS, GRADIENT, self.timestamp, now - self._began)]

    def _reduce(self, event: Computed, now: float) -> list[Action]:
        self.state = Replicas.REDUCING
        self._ready_at = now
        actions, fails = self._enter(event, now)
        if fails:
            return actions
        gradient = self._describe(event, self._digest)
        if self._stopped or self._told_enough:
            gradient = replace(gradient, update=_LAST if self._stopped else _ENOUGH)
        elif self._told_lowered > len(self._lowered):
            gradient = replace(gradient, update=_LOWERED - self._told_lowered)
        return [Reduce(GRADIENT, 0, event.step, gradient, to_all=True), *actions]

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        self._stopped = self._leads
        return []

    def _enough(self, event: Received, now: float) -> list[Action]:
        self._told_enough = True
        return []

    def _plateau(self, event: Received, now: float) -> list[Action]:
        """The first learner tells the others with its next gradient, so that the rate falls everywhere at once."""
        self._told_lowered = max(self._told_lowered, event.message.value)
        return []

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        self._reduced_at = now
        if any(gradient.update == _ENOUGH for gradient in event.gradients):
            self.epochs = min(self.epochs, self.epoch + 1)
        self._lower(max(_LOWERED - gradient.update for gradient in event.gradients), now)
        for gradient in event.gradients:
            if gradient.pad != self._digest:
                other = f"those of learner {gradient.learner}"
                return [Fail(f"its weights at timestamp {self.timestamp} differ from {other}, although they must not")]
        self._count(event.gradients, 1.0)
        self._made_of = event.gradients
        return self._update(now)

    def _update(self, now: float) -> list[Action]:
        """Updates the weights by what was added up, unless an epoch would go untested that is to be tested."""
        if self._leads and self._is_ahead:
            self.state = Replicas.WAITING
            return []
        self.state = Replicas.UPDATING
        gradients, self._made_of = self._made_of, ()
        actions, ended = self._update_by(GRADIENT, now)
        self._closing = not ended and any(gradient.update == _LAST for gradient in gradients)
        self._ended_training = ended or self._closing
        return actions

    def _updated(self, event: Updated, now: float) -> list[Action]:
        self._digest = event.digest & 0x7FFFFFFF
        self._spent(self._reduced_at - self._ready_at, 0.0, now - self._reduced_at)
        actions = self._note(event, now)
        if not self._ended_training:
            return self._next(now) + self._diary.due(now) + actions
        self.state = Replicas.STOPPED
        account = self._close_books(now, self.step, 0, 0) + self._totals(now, self.applied, 0, 0, 0)
        return actions + account + (self._end(now) if self._leads else [])

    def _returned(self, event: Sent, now: float) -> list[Action]:
        self._snapshot_returned(event.buffer)
        return self._go_on(now)

    def _go_on(self, now: float) -> list[Action]:
        return self._update(now) if self.state is Replicas.WAITING else []

    # Learners that die.

    def lose(self, role: int, now: float) -> list[Action]:
        lost = self.plan.roles[role]
        if not self._leads or self.state is Replicas.DONE or role in self._buried:
            return []
        if lost.kind == STATISTICS_SERVER:
            return [Fail(f"the {lost.name} (rank {lost.world_rank}) died", lost=True)]
        if self._start_message is None:
            return [Fail(f"{lost.name} (rank {lost.world_rank}) died before training began", lost=True)]
        if self._ended_training:
            return self._lose_late(role, now)
        regrouping, self.state = self.state is Replicas.REGROUPING, Replicas.REGROUPING
        return [] if regrouping or self._saving is not None else self._save(now)

    def _committed(self, event: Committed, now: float) -> list[Action]:
        position = self._saving
        actions = super()._committed(event, now)
        if event.error or self.state is not Replicas.REGROUPING:
            return actions
        assert position is not None
        if position.timestamp < self.timestamp:  # an earlier one, which was under way
            return actions + self._save(now)
        self.step = position.step(self.learner)
        return actions + self._regroup(position, now)

    def _not_saved(self, why: str, now: float) -> list[Action]:
        actions = super()._not_saved(why, now)
        if self.state is Replicas.REGROUPING:
            actions.append(Fail(f"learners died, and no checkpoint could be made to go on from: {why}", lost=True))
        return actions

    def _in_vain(self, event: Event, now: float) -> list[Action]:
        return []

    def _updated_before(self, event: Updated, now: float) -> list[Action]:
        self._digest = event.digest & 0x7FFFFFFF
        return self._note(event, now)

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = Replicas.DONE
        return [halt(event)]
