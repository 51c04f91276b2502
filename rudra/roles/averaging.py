"""Learners that average: each trains its own replica, and the replicas are averaged after each period.

Source: crossbow.txt §3.2 (Algorithm 1) and §4.2, figure 8: a learner's next mini-batch waits only for the correction of
its own replica. The average of all replicas is made in parallel. `protocols.averaging` defines the rules.

    COMPUTING  gradient ready   -> STEPPING, or HOLDING if the correction needs weights that are still being updated
    COMPUTING  gradient ready   -> POOLING, if a compute group shares a replica: average over the group
    POOLING    averaged         -> STEPPING, or HOLDING
    HOLDING    weights updated  -> STEPPING
    STEPPING   stepped          -> COMPUTING; after a period the replica's difference is averaged in the background
                                -> REDUCING, if training pauses until that average has updated the weights
    REDUCING   weights updated  -> COMPUTING, or after the last epoch -> STOPPED

Training pauses for an average if the replica must move towards the new weights. The last mini-batch of the period then
names the step that follows, so that step and average can begin while its gradient is computed. Under early rules,
which need no such move, training pauses at the end of an epoch, and if the job changes then. In a pause replicas
restart if necessary, and requests are served. A request asks for the end of training, or for a checkpoint, which has
all replicas after the same mini-batch. A learner sends its request with an average. If that average is made in the
background, training pauses for the next one.

A compute group may share a replica, or a reference that corrects its replicas (`rudra.roles.sharing`).

The difference of a replica counts as one gradient. It covers all mini-batches since the last average.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from msgspec import structs

from protocols import Averaging
from rudra.core import records
from rudra.core.actions import Action, PullReplica, Reduce, Save, StepReplica
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import Computed, Reduced, ReplicaStepped, Started, Updated
from rudra.core.messages import GroupFlags, MessageKind
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import portion
from rudra.roles.correcting import correct
from rudra.roles.learner import THROUGH_STAGE
from rudra.roles.machine import Setup, States, Transition, self_loops
from rudra.roles.periods import AveragingPeriods, MadeMinibatches
from rudra.roles.replica import ALWAYS, AVERAGING, ENDING, Followed, Replica, ReplicaState
from rudra.roles.sharing import sharing_of
from topologies import Plan

COMPUTING, STEPPING, HOLDING = ReplicaState.COMPUTING, ReplicaState.STEPPING, ReplicaState.HOLDING
POOLING = ReplicaState.POOLING
REDUCING, STOPPED, REGROUPING = ReplicaState.REDUCING, ReplicaState.STOPPED, ReplicaState.REGROUPING
_NOT_HERE = {ReplicaState.WAITING, ReplicaState.UPDATING, MessageKind.STEPPED, *THROUGH_STAGE}


class Averager(Replica):
    """Learner that averages. Arguments, start, end and the handling of lost roles are the same as for `Replica`."""

    NOTICE = 1
    IN_LOCKSTEP = (
        *Replica.IN_LOCKSTEP,
        *("_under_way", "_quiet", "_quiet_next", "_saves", "_drops", "_held_s", "_stepped_at", "_step_s"),
    )

    rule: Averaging

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **{key: to for key, to in Replica.TRANSITIONS.items() if not {*key} & _NOT_HERE},
        **self_loops((*AVERAGING, POOLING), ALWAYS),
        **{
            (state, what): Transition(method, state, REGROUPING)
            for state in (*AVERAGING, POOLING)
            for what, method in ENDING.items()
        },
        **self_loops((COMPUTING, STEPPING, HOLDING, REDUCING), {Reduced: "_reduced"}),
        (COMPUTING, Computed): Transition("_step", STEPPING, HOLDING, POOLING),
        (POOLING, Reduced): Transition("_reduced", POOLING, STEPPING, HOLDING),
        (STEPPING, ReplicaStepped): Transition("_stepped", COMPUTING, REDUCING),
        **self_loops([COMPUTING, REDUCING], {ReplicaStepped: "_corrected"}),
        (HOLDING, ReplicaStepped): Transition("_corrected", HOLDING, STEPPING),
        **self_loops([COMPUTING, POOLING, STEPPING], {Updated: "_updated"}),
        (HOLDING, Updated): Transition("_updated", HOLDING, STEPPING),
        (REDUCING, Updated): Transition("_updated", COMPUTING, STOPPED, REGROUPING),
        (REGROUPING, ReplicaStepped): Transition("_ignore", REGROUPING),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        self._training_samples = setup.training_samples
        self._restarting = False
        super().__init__(role, setup)

    def _reset_for_plan(self, plan: Plan) -> None:
        super()._reset_for_plan(plan)
        self.rule = Averaging.of(self.ledger.rules.protocol)
        self._sharing = sharing_of(self.rule, plan, self.id)
        self._periods = self._new_periods()
        self._brings: Gradient | None = None  # for the average of the period that has ended
        self._pooled: tuple[Gradient, ...] = ()  # of the mean that steps a shared replica next
        self._under_way = self._quiet = self._quiet_next = False
        self._waits = self._saves = self._stops = self._drops = False
        reported = plan.learners if self._leads else ()  # others report no averages
        self._averages = np.zeros(len(reported), records.AVERAGE)  # rows of the average that is ready
        self._averages["learner"] = [plan.roles[role].index for role in reported]
        self._held_s = self._stepped_at = self._step_s = 0.0

    def _new_periods(self) -> AveragingPeriods:
        """Returns the periods that begin now, by the present job."""
        ledger, plan, job = self.ledger, self.plan, self.ledger.rules.job
        size, parts = job.training.minibatch_size, job.cluster.parts
        together = sum(portion(plan, i, size, parts).count for i in plan.learners)
        return AveragingPeriods(self.rule, together, self._training_samples, ledger.timestamp, ledger.samples)

    @property
    def waiting_for(self) -> str:
        if self.state in {POOLING, HOLDING, REDUCING} and self._sharing.waiting_for:
            return self._sharing.waiting_for
        if self.state in {REDUCING, HOLDING} and self._waits:
            return self.duties.waiting_for
        if self.state in {REDUCING, HOLDING}:
            return "the replicas of all learners"
        return super().waiting_for

    def validate(self) -> None:
        self.ledger.validate()
        assert self.ledger.timestamp <= self._periods.number <= self.ledger.timestamp + 1
        assert self._periods.made.count <= self.rule.period

    def _start(self, event: Started, now: float) -> list[Action]:
        restart = self._sharing.restart(keeps_momentum=False) if self._restarting else []
        self._restarting = False
        return [*restart, *super()._start(event, now)]

    # Mini-batches.

    def _next(self, now: float) -> list[Action]:
        self.state, self._held_s = COMPUTING, 0.0
        compute = self.log.begin(REPLICA, GRADIENT, self._periods.number, now)
        made = self._periods.made
        corrected = self.ledger.rules.job.protocol.correction is not None
        if corrected or self.rule.early or self._sharing.pools or not self._periods.is_last:
            return [compute]
        rate = self._periods.rate(self.ledger.rules.schedule, made.count + 1)
        samples = made.samples + compute.work.count
        return [structs.replace(compute, then=self._sharing.step(rate, ends_period=True), averaged=samples)]

    def _step(self, event: Computed, now: float) -> list[Action]:
        self._ready_at = now
        actions, fails = self.log.enter(event, self._periods.number, now)
        if fails:
            return actions
        gradient = self.log.describe(event, self._periods.number)
        self._periods.made.add(gradient)
        if self._sharing.pools:
            self.state = POOLING
            return [self._sharing.pool(gradient), *actions]
        return [*self._step_or_hold(now), *actions]

    def _step_or_hold(self, now: float) -> list[Action]:
        if self._holds:
            self.state = HOLDING
            return []
        return self._step_replica(now)

    @property
    def _holds(self) -> bool:
        """Whether the correction that is due with the step needs something that is not ready."""
        return self._sharing.busy or (self.rule.early and self._periods.is_complete and self._under_way)

    def _step_replica(self, now: float) -> list[Action]:
        self.state = STEPPING
        self._held_s = now - self._ready_at
        gradients = self._pooled if self._sharing.pools else (self._periods.made.last,)
        about = gradients, REPLICA, REPLICA, gradients[0].timestamp
        corrects = correct(self.ledger.rules.job, self.plan, GRADIENT, *about)
        return [*corrects, self._step_at(self._periods.rate(self.ledger.rules.schedule, self._periods.made.count))]

    def _step_at(self, rate: float) -> StepReplica:
        return self._sharing.step(rate, ends_period=self._periods.is_complete)

    def _stepped(self, event: ReplicaStepped, now: float) -> list[Action]:
        self._stepped_at, self._step_s = now, event.seconds
        ends = self._periods.is_complete
        reduce = self._sharing.correct(self._periods.made.last, ends_period=ends)
        if ends:
            self._end_period()
            reduce = reduce or self._bring(event.distance, now)
        if reduce is None:
            return self._go_on_computing(now)
        if ends and self._quiet:
            self.state = REDUCING
            return [reduce]
        return [reduce, *self._go_on_computing(now)]

    def _corrected(self, event: ReplicaStepped, now: float) -> list[Action]:
        """Handles the correction of what the group shares, and begins an average if a period ends with it."""
        average = [self._bring(event.distance, now)] if self._sharing.corrected() else []
        return [*average, *self._step_or_hold(now)] if self.state is HOLDING else average

    def _end_period(self) -> None:
        """Ends a period: its mini-batches go into an average."""
        periods, epoch = self._periods, self._periods.epoch
        self._brings = periods.end()
        changes = self.ledger.rules.until.is_reached(periods.epoch, periods.number)
        self._quiet = not self.rule.early or self._quiet_next or periods.epoch > epoch or changes
        self._quiet_next = False
        self._under_way = True

    def _bring(self, distance: float, now: float) -> Action:
        """Begins the average of the period that has ended."""
        assert self._brings is not None
        number, word = self._periods.number - 1, self._word(distance, now)
        return Reduce(DIFFERENCE, self._sharing.everybody, number, self._brings, True, word)

    @property
    def _ahead(self) -> int:
        return 1 if self._quiet else 2

    def _word(self, distance: float, now: float) -> GroupFlags:
        ledger, saves = self.ledger, False
        if self._leads:
            epoch = self._periods.epoch_after(ledger.samples, self._ahead)
            saves = ledger.stopped or self.duties.cycle.wanted(ledger.timestamp + self._ahead, epoch, now)
        told = (self._lr_drops_requested, self._target_reached, ledger.stopped)
        return GroupFlags(self._digest, *told, saves, self._decisions.new, distance)

    def _go_on_computing(self, now: float) -> list[Action]:
        waited_s = self._held_s + now - self._stepped_at
        self.log.spend(waited_s, 0.0, 0.0, 0.0, self._step_s)
        return self._next(now) + self.log.due(now)

    # Averages.

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        if event.group != self._sharing.everybody:
            corrects, self._pooled = self._sharing.reduced(), event.gradients
            return self._step_or_hold(now) if self._sharing.pools else corrects
        words = event.words
        if fails := self._take_in(event, now):
            return fails
        stops, saves = any(word.stopped for word in words), any(word.saves for word in words)
        self._stops, self._saves = self._quiet and stops, self._quiet and saves
        self._quiet_next = not self._quiet and (stops or saves)
        if self._leads:
            self._averages["distance"] = [word.distance for word in words]
        return self._update(now)

    def _update(self, now: float) -> list[Action]:
        ledger = self.ledger
        ends_phase = ledger.rules.learners_change(self._periods.epoch, self._periods.number)
        writes = (self._saves or ends_phase) and self.duties.cycle.saving is not None
        self._waits = self._leads and (self.duties.are_ahead or writes)
        if self._waits:
            return []
        epochs = ledger.epoch
        actions = ledger.update(DIFFERENCE, now)
        self._ended_training = ledger.over or self._stops
        self._drops = self.rule.restart and ledger.rules.schedule.drops(epochs, ledger.epoch)
        if self._leads:
            rows = self._averages
            rows["timestamp"], rows["correction"] = ledger.timestamp, self.rule.elasticity * rows["distance"]
            ledger.outbox.extend_by(MessageKind.AVERAGES, rows)
        return actions

    def _retry_update(self, now: float) -> list[Action]:
        return self._update(now) if self._waits else []

    def _updated(self, event: Updated, now: float) -> list[Action]:
        self._digest, self._under_way = event.digest, False
        actions = self.ledger.note(event, now)
        if self.state is HOLDING:
            return [*self._step_or_hold(now), *actions]
        if self.state is not REDUCING:
            return actions
        move: list[Action] = []
        if self._drops:  # also at the end of training, because it may be resumed from there
            move += self._sharing.restart(keeps_momentum=self.rule.keep_momentum)
            time_s = now - self.ledger.clock.start_time
            self.ledger.tell("averaging", self.ledger.timestamp, time_s, "the rate has dropped: all replicas restart")
        elif not self.rule.early:
            move.append(PullReplica(REPLICA, WEIGHTS, self.rule.elasticity))
        if self._saves and not self.ledger.over:
            move += self.duties.cycle.begin(now) if self._leads else self._save(now)
        if not self._ended_training and self.ledger.is_to_change and self.ledger.learners_change:
            return [*move, *actions, *self.log.due(now), *self._await_other_learners(now)]
        if not self._ended_training:
            changes = self._change(now) if self.ledger.is_to_change else []
            return [*move, *changes, *self._go_on_computing(now), *actions]
        self.state = STOPPED
        self.log.spend(self._held_s + now - self._stepped_at, 0.0, 0.0, 0.0, self._step_s)
        stopped = self._leads and not self.ledger.over
        account = self.duties.account(now, pushed=self.ledger.applied, stopped=stopped)
        pushed = self.ledger.position(now).updates_with(self.log.learner)
        return [*move, *actions, *self.log.close(now, pushed), *account]

    def _change(self, now: float) -> list[Action]:
        actions = super()._change(now)
        self.rule = Averaging.of(self.ledger.rules.protocol)
        self._sharing.follow(self.rule)
        self._periods = self._new_periods()
        return actions

    def _save(self, now: float) -> list[Action]:
        """Saves the part of a checkpoint that this learner keeps."""
        return [Save(WEIGHTS, self.ledger.position(now))] if self.id in self.plan.keepers else []

    def _await_other_learners(self, now: float) -> list[Action]:
        """Waits for the checkpoint that all learners continue from, with their replicas."""
        self.state = REGROUPING
        self.log.spend(self._held_s + now - self._stepped_at, 0.0, 0.0, 0.0, self._step_s)
        if self._saves:  # it is begun
            return []
        return self.duties.cycle.save(now) if self._leads else self._save(now)

    def _regroup(self, position: TrainingState, now: float) -> list[Action]:
        self._restarting = not self._replicas_stay(position)
        return super()._regroup(position, now)

    # Bursts (`rudra.roles.bursts`).

    @property
    def place(self) -> tuple[int, int]:
        return self._periods.number, self._periods.made.count

    @property
    def made(self) -> MadeMinibatches:
        return self._periods.made

    @property
    def local_steps(self) -> int:
        return self._periods.local_steps

    @property
    def may_sleep(self) -> bool:
        return super().may_sleep and not (self._under_way or self._quiet_next or self.made.count)

    def rates_ahead(self, steps: int, after: int) -> list[float]:
        return self._periods.rates(self.ledger.rules.schedule, steps, after)

    @property
    def step_ahead(self) -> StepReplica:
        return self._sharing.step(0.0, ends_period=True)

    def enter_burst(self, updates: int, digest: int) -> None:
        super().enter_burst(updates, digest)
        self._periods.skip(updates)

    # Lockstep (`rudra.mpi.lockstep`): others of its rank follow the first learner, which is asked for all of them.

    @property
    def stands_with(self) -> tuple[Any, ...]:
        return *super().stands_with, self._under_way, self._quiet, self._quiet_next, self._sharing.busy

    @property
    def is_settling(self) -> bool:
        return super().is_settling or self._sharing.correcting

    def only_updates(self, event: Reduced) -> bool:
        return event.group != self._sharing.everybody or super().only_updates(event)

    def _changes_with(self, epoch: int) -> bool:
        return self.rule.restart and self.ledger.rules.schedule.drops(self.ledger.epoch, epoch)

    @property
    def completes_period(self) -> bool:
        return self._periods.is_complete

    @property
    def brings(self) -> Gradient | None:
        return self._brings

    def catch_up(self, leader: Self, own: Followed) -> None:
        super().catch_up(leader, own)
        self._periods.follow(leader._periods, own.made if own.steps else self._periods.made)
        self._sharing.catch_up(leader._sharing)
        self._brings = own.brings
