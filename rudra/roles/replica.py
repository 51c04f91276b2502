"""Learners in a single compute group without a server: hardsync by allreduce.

Every learner updates its own copy of the weights by the average of all gradients. The first learner keeps the counters
and records.

Source: omnivore.txt §IV-A and appendix D-A3.
"""

from collections.abc import Mapping, Sequence
from enum import auto
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

from protocols import Averaging
from rudra.core.actions import Action, Fail, FollowJob, Hash, Reduce, Send, StepReplica
from rudra.core.buffer_names import ACTIVATIONS, GRADIENT, WEIGHTS
from rudra.core.digest import digest_of
from rudra.core.events import (
    Committed,
    Computed,
    Hashed,
    Lost,
    Received,
    Reduced,
    Saved,
    Sent,
    Started,
    Stopped,
    Updated,
)
from rudra.core.messages import (
    ChangeDecided,
    GroupFlags,
    MessageKind,
    OwnerStepped,
    PlateauReached,
    Ready,
    RoleExhausted,
    RowsFlushed,
    Shutdown,
    SnapshotCredit,
    TargetReached,
    TrainingStarted,
)
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.roles.correcting import correct
from rudra.roles.decisions import Deciding, ReceivedDecisions
from rudra.roles.gradient_requests import request_of
from rudra.roles.learner import THROUGH_STAGE
from rudra.roles.machine import Machine, Setup, States, Transition, halt, self_loops, short_digest
from rudra.roles.minibatch_log import MinibatchLog
from rudra.roles.owner_duties import MAINTENANCE, WISHES, OwnerDuties
from rudra.roles.periods import MadeMinibatches
from rudra.roles.readiness import Readiness
from topologies import Plan


class ReplicaState(States):
    HASHING = auto()
    READY = auto()
    COMPUTING = auto()
    STEPPING = auto()  # only averaging learners have this state and the next two
    HOLDING = auto()
    POOLING = auto()
    REDUCING = auto()
    WAITING = auto()
    UPDATING = auto()
    REGROUPING = auto()
    STOPPED = auto()
    DONE = auto()


AVERAGING = (ReplicaState.STEPPING, ReplicaState.HOLDING)


ALIVE = [state for state in ReplicaState if state not in {ReplicaState.DONE, ReplicaState.POOLING, *AVERAGING}]


TRAINING = [state for state in ALIVE if state not in {ReplicaState.REGROUPING, ReplicaState.STOPPED}]


ALWAYS: Mapping[Any, str] = {**MAINTENANCE, **WISHES, Stopped: "_stop", Sent: "_returned", Lost: "_lose"}
"""Events that learners of the only group handle in the same way in all states, except for losses while training."""

ENDING: Mapping[Any, str] = {Lost: "_lose", MessageKind.CHANGE_DECIDED: "_decide"}
"""Events that may end the work under way while training."""


class Followed(NamedTuple):
    """What is a learner's own, of what it did while it followed the first learner of its rank.

    Attributes:
        steps: number of mini-batches.
        spent: seconds of all of them together, for each of `TIMES`.
        last: the last mini-batch.
        made: mini-batches of the present period.
        brings: what it brings, or has brought, into the average of the last period.
    """

    steps: int
    spent: Sequence[float]
    last: Gradient
    made: MadeMinibatches
    brings: Gradient


class Replica(Machine):
    """Learner of the only group. It updates its own copy of the weights.

        HASHING    digest of the initial weights -> READY      send it to the first learner, which compares all
        READY      training starts               -> COMPUTING
        COMPUTING  activations ready, delivered, or their gradient received -> COMPUTING
        COMPUTING  gradient ready                -> REDUCING   average over all learners
        REDUCING   averaged                      -> UPDATING   every learner by the same average, or
                                                 -> WAITING    the first learner, if an earlier evaluation or
                                                               checkpoint must end first
        WAITING    evaluation or checkpoint over -> UPDATING
        UPDATING   updated                       -> COMPUTING, or after the last epoch -> STOPPED
        STOPPED    everything is recorded        -> DONE
        any        a learner died, or others take part next
                                                 -> REGROUPING until a checkpoint is made; all continue from it

    If the job changes, every replica continues with the next job immediately. All replicas have the same weights, and
    no message is under way between them. If the change begins or ends learners, all replicas take over the first
    learner's weights from a checkpoint.

    If a learner dies during a reduction, some replicas may have made the update and others not. Then they do the same.

    If the run is asked to stop, the first learner reports it with its next gradient. All learners stop after the update
    by that gradient. If the training target is reached, they stop at the end of the epoch.

    A stage server may own the last layers. Then the row of an update, and the totals of the training, are complete only
    when the stage server has also made the update. Learners do not wait for it.

    Each gradient carries a digest of the weights that it was computed from. If the digests differ, the run fails.

    Args:
        role: id of the learner in the plan.
        setup: arguments of the role.

    Attributes:
        duties: duties of an owner of weights. Only the first learner reports and makes checkpoints.
        ledger: counters and records of the learner's weights.
        log: record of the learner's mini-batches.
        rule: rule of averages. None: learners have no replicas.
    """

    NOTICE: ClassVar[int] = 0
    """Number of updates between the announcement of a checkpoint and its update."""

    IN_LOCKSTEP: ClassVar[tuple[str, ...]] = (
        *("state", "_digest", "_gradients", "_stops", "_ended_training", "_ready_at", "_reduced_at"),
    )
    """Attributes that are the same for all learners of a rank that do the same."""

    rule: Averaging | None = None

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(ALIVE, ALWAYS),
        (ReplicaState.HASHING, Started): Transition("_start", ReplicaState.HASHING),
        (ReplicaState.HASHING, Hashed): Transition("_report_digest", ReplicaState.READY, ReplicaState.COMPUTING),
        (ReplicaState.HASHING, MessageKind.READY): Transition("_member_ready", ReplicaState.HASHING),
        (ReplicaState.READY, MessageKind.READY): Transition(
            "_member_ready", ReplicaState.READY, ReplicaState.COMPUTING
        ),
        (ReplicaState.READY, MessageKind.START): Transition("_begin", ReplicaState.COMPUTING),
        **self_loops([ReplicaState.COMPUTING], THROUGH_STAGE),
        **self_loops(ALIVE, {MessageKind.STEPPED: "_updated_elsewhere"}),
        (ReplicaState.COMPUTING, Computed): Transition("_reduce", ReplicaState.REDUCING),
        (ReplicaState.REDUCING, Reduced): Transition(
            "_reduced", ReplicaState.REDUCING, ReplicaState.WAITING, ReplicaState.UPDATING
        ),
        **{
            (ReplicaState.WAITING, what): Transition(method, ReplicaState.WAITING, ReplicaState.UPDATING)
            for what, method in MAINTENANCE.items()
        },
        (ReplicaState.WAITING, Sent): Transition("_returned", ReplicaState.WAITING, ReplicaState.UPDATING),
        (ReplicaState.UPDATING, Updated): Transition(
            "_updated", ReplicaState.COMPUTING, ReplicaState.STOPPED, ReplicaState.REGROUPING
        ),
        **{
            (state, what): Transition(method, state, ReplicaState.REGROUPING)
            for state in TRAINING
            for what, method in ENDING.items()
        },
        **self_loops(
            [ReplicaState.REGROUPING],
            dict.fromkeys((Started, Hashed, MessageKind.READY, *THROUGH_STAGE, Computed, Reduced), "_ignore"),
        ),
        (ReplicaState.REGROUPING, Updated): Transition("_updated_before", ReplicaState.REGROUPING),
        (ReplicaState.REGROUPING, Saved): Transition("_save_before_regrouping", ReplicaState.REGROUPING),
        (ReplicaState.REGROUPING, Committed): Transition(
            "_save_before_regrouping", ReplicaState.REGROUPING, ReplicaState.HASHING
        ),
        (ReplicaState.STOPPED, MessageKind.SHUTDOWN): Transition("_finish", ReplicaState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup.plan)
        self._leads = setup.plan.server == role
        self.duties = OwnerDuties(role, setup, leads=self._leads)
        self.ledger = self.duties.ledger
        self._co_owned = (self.duties.stages,) if self.duties.stages.stages else ()
        self.log = MinibatchLog(role, setup)
        self._request = request_of(role, setup.plan)
        self._ended_training = self._target_reached = False
        self._lr_drops_requested = len(setup.position.lowered)
        self._decisions = ReceivedDecisions(self.ledger)
        self._ready_at = self._reduced_at = 0.0
        self._reset_for_plan(setup.plan)

    def _reset_for_plan(self, plan: Plan) -> None:
        """Resets the role's state. All roles begin with this plan, and nothing is under way."""
        self.plan = plan
        self.state: States = ReplicaState.HASHING
        self._more_steps = self.log.step - self.ledger.timestamp  # negative if this learner began later
        self._stops = False  # after the update under way
        self._members = plan.children[self.id]
        self._to_members = plan.receivers[self.id]
        self._readiness = Readiness()
        self._gradients: tuple[Gradient, ...] = ()  # of the average that updates the weights next
        self._digest = 0  # digest of the weights; 0 before the first update by this plan

    def inherit(self, before: Deciding) -> None:
        self.log.inherit(before.log)
        self._decisions.texts = before.received

    @property
    def received(self) -> dict[int, str]:
        """JSON of the decided changes that the learner has received, by number."""
        return self._decisions.texts

    @property
    def waiting_for(self) -> str:
        if self.state is ReplicaState.REDUCING:
            return "the gradients of all learners"
        if self.state is ReplicaState.WAITING:
            return self.duties.waiting_for
        if self.state is ReplicaState.REGROUPING:
            return "a checkpoint that all learners continue from"
        if self.state is ReplicaState.READY:
            return "other learners to get ready"
        if self.state is ReplicaState.COMPUTING:
            return self._request.waiting_for
        return "the statistics server to finish" if self.state is ReplicaState.STOPPED else ""

    def validate(self) -> None:
        self.ledger.validate()
        assert self.ledger.timestamp + self._more_steps <= self.log.step

    def _start(self, event: Started, now: float) -> list[Action]:
        return [*self.ledger.rules.settings(self.id), Hash(WEIGHTS)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = ReplicaState.READY
        digest = short_digest(event.digest)
        if self._leads:
            return self._ready(self.id, digest, now)
        return [Send(self.plan.server, Ready(self.id, digest))]

    def _member_ready(self, event: Received[Ready], now: float) -> list[Action]:
        return self._ready(event.message.sender, event.message.digest, now)

    def _ready(self, role: int, digest: int, now: float) -> list[Action]:
        self._readiness.enter(role, digest)
        if len(self._readiness.roles) <= len(self._members) or self.state is not ReplicaState.READY:
            return []
        if not self._readiness.agree:
            return [Fail("learners hold different initial weights (digests differ)")]
        start = self.ledger.start(now)
        return [Send(self.plan.statistics, start), *self._start_training(start, now)]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        return self._start_training(event.message, now)

    def _start_training(self, start: TrainingStarted, now: float) -> list[Action]:
        self.ledger.clock.start_time = self.log.began = start.began_ns * 1e-9
        return [*(Send(to, start) for to in self._to_members), *self._next(now)]

    def _next(self, now: float) -> list[Action]:
        self.state = ReplicaState.COMPUTING
        return [self._request.begin(self.log.begin(WEIGHTS, GRADIENT, self.ledger.timestamp, now))]

    def _through_stage(self, event: Any, now: float) -> list[Action]:
        return self._request.take(event)

    def _reduce(self, event: Computed, now: float) -> list[Action]:
        self.state = ReplicaState.REDUCING
        self._ready_at = now
        ledger = self.ledger
        actions, fails = self.log.enter(event, ledger.timestamp, now)
        if fails:
            return actions
        gradient = self.log.describe(event, ledger.timestamp)
        rate = ledger.predicted_rate(ledger.rules.job.training.minibatch_size * len(self.plan.learners))
        return [Reduce(GRADIENT, 0, ledger.timestamp, gradient, True, self.flags, rate), *actions]

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        self.ledger.stopped = self._leads
        return []

    def _end_with_epoch(self, event: Received[TargetReached], now: float) -> list[Action]:
        self._target_reached = True
        return []

    def _lower_rate(self, event: Received[PlateauReached], now: float) -> list[Action]:
        """Notes a lower rate. The next gradient carries it to all learners, so that all apply it at the same update."""
        self._lr_drops_requested = max(self._lr_drops_requested, event.message.times)
        return []

    @property
    def _ahead(self) -> int:
        """Number of updates until the next one after which the learners are quiet."""
        return 1

    def _decide(self, event: Received[ChangeDecided], now: float) -> list[Action]:
        """Notes a decided change of the job. All learners follow it once the flags show that all have received it.

        A change at once does not wait for them: some can make no other update. They learn it with the regrouping.
        """
        self._decisions.receive(event.message)
        if not event.message.at_once or not self._leads or self._ended_training:
            return []
        self._decisions.follow_at_once()
        return [] if self.state is ReplicaState.REGROUPING else self._await_regrouping(now)

    def _end_with_checkpoint(self, event: Received[RoleExhausted], now: float) -> list[Action]:
        if event.message.role == self.plan.statistics:  # all roles can stop in order
            return self._stop(Stopped(), now)
        return self.duties.cycle.fail(event.message, now, alone=True) if self._leads else []

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        self._reduced_at = now
        if fails := self._take_in(event, now):
            return fails
        self._stops = any(word.stopped for word in event.words)
        return self._update(now)

    def _take_in(self, event: Reduced, now: float) -> list[Action]:
        """Counts the gradients of all learners and applies their flags. Fails if the learners' weights differ."""
        if any(word.enough for word in event.words):
            self.ledger.enough()
        self.ledger.lower(max(word.lowered for word in event.words), now)
        if self._decisions.new:
            self._decisions.agree(min(word.decided for word in event.words), self._ahead)
        for gradient, word in zip(event.gradients, event.words, strict=True):
            if word.digest != self._digest:
                differ = f"differ from those of learner {gradient.learner}, although they must not"
                return [Fail(f"its weights at timestamp {self.ledger.timestamp} {differ}")]
        self._gradients = event.gradients
        self.duties.count(event.gradients, 1.0)
        return []

    def _update(self, now: float) -> list[Action]:
        """Updates the weights by the average, unless an earlier evaluation or checkpoint must end first."""
        if self._leads and self.duties.are_ahead:
            self.state = ReplicaState.WAITING
            return []
        self.state = ReplicaState.UPDATING
        about = self._gradients, WEIGHTS, WEIGHTS, self.ledger.timestamp
        actions = correct(self.ledger.rules.job, self.plan, GRADIENT, *about)
        actions += self.duties.update(GRADIENT, now)
        self._ended_training = self.ledger.over or self._stops
        return actions

    def _updated(self, event: Updated, now: float) -> list[Action]:
        self.log.spend(self._reduced_at - self._ready_at, 0.0, 0.0, 0.0, now - self._reduced_at)
        actions = self._note(event, now)
        if not self._ended_training:
            if self.ledger.is_to_change and self.ledger.learners_change:
                return actions + self.log.due(now) + self._await_regrouping(now)
            changes = self._change(now) if self.ledger.is_to_change else []
            return changes + self._next(now) + self.log.due(now) + actions
        self.state = ReplicaState.STOPPED
        return actions + self._account(now)

    def _note(self, event: Updated, now: float) -> list[Action]:
        """Notes an update that this learner has made."""
        self._digest = digest_of(b"".join(event.sampled)) if event.sampled else event.digest
        return self.duties.note(event, now) or []

    def _updated_elsewhere(self, event: Received[OwnerStepped], now: float) -> list[Action]:
        actions = self.duties.note(event.message, now) or []
        return actions + self._account(now) if self.state is ReplicaState.STOPPED else actions

    def _account(self, now: float) -> list[Action]:
        """Returns the final records of this learner, and the totals of the training."""
        if self.ledger.updating:
            return []
        stopped = self._leads and not self.ledger.over
        return self.log.close(now, self.log.step) + self.duties.account(
            now, pushed=self.ledger.applied, stopped=stopped
        )

    def _change(self, now: float) -> list[Action]:
        """Continues with the next job. All learners do so after the same update, and nothing is under way."""
        position = self.ledger.position(now)
        self.ledger.change(frozenset(), position, now)
        self.plan = self.ledger.rules.plan
        self.log.follow(self.ledger.rules.job, self.plan, position)
        return [*self.ledger.rules.settings(self.id), FollowJob(position)]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == ACTIVATIONS:
            return [] if self.state is ReplicaState.REGROUPING else self._request.take(event)
        self.ledger.returned(event.buffer)
        return self._retry_update(now)

    def _maintain(
        self, event: Saved | Received[RowsFlushed] | Committed | Received[SnapshotCredit], now: float
    ) -> list[Action]:
        return self.duties.maintain(event, now) + self._retry_update(now)

    def _retry_update(self, now: float) -> list[Action]:
        """Makes the waiting update, if there is one."""
        return self._update(now) if self.state is ReplicaState.WAITING else []

    # Learners that die.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        if not self._leads:
            return []
        follows = self.duties.lose(event.role, now, ended=self._ended_training)
        if follows is not None:
            return follows
        return [] if self.state is ReplicaState.REGROUPING else self._await_regrouping(now)

    def _await_regrouping(self, now: float) -> list[Action]:
        """Waits for the checkpoint that all learners continue from. The first learner makes it."""
        self.state, cycle = ReplicaState.REGROUPING, self.duties.cycle
        return cycle.save(now, alone=True) if self._leads and cycle.saving is None else []

    def _save_before_regrouping(self, event: Saved | Committed, now: float) -> list[Action]:
        cycle = self.duties.cycle
        position, actions = cycle.saving, cycle.take(event, now)
        if event.error and not cycle.alone:  # it needed state that the dead roles held
            return actions + cycle.save(now, alone=True)
        if event.error:
            why = "learners died" if self._dead else "the active learners change"
            text = f"{why}, and no checkpoint could be made to continue from: {event.error}"
            return [*actions, Fail(text, lost=True)]
        if isinstance(event, Saved):
            return actions
        assert position is not None
        known = len(position.decided) == len(self.ledger.rules.decided)
        if position.timestamp < self.ledger.timestamp or not known:  # an earlier checkpoint, which was under way
            return actions + cycle.save(now, alone=True)
        return actions + self._regroup(position, now)

    def _replicas_stay(self, position: TrainingState) -> bool:
        """Whether no learner has died since the last regrouping, and the checkpoint has all replicas.

        A replay has a checkpoint with all replicas even where the run had none.
        """
        restart = self.duties.cycle.alone or self.ledger.rules.replicas_restart(position)
        return not (restart or self._dead - self.ledger.recorded_losses)

    def _regroup(self, position: TrainingState, now: float) -> list[Action]:
        actions = self.ledger.regroup(self._dead, position, now, replicas_stay=self._replicas_stay(position))
        if self.ledger.rules.plan is not self.plan:
            self.log.follow(self.ledger.rules.job, self.ledger.rules.plan, position)
            self._reset_for_plan(self.ledger.rules.plan)
        return actions

    def _updated_before(self, event: Updated, now: float) -> list[Action]:
        return self._note(event, now)

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = ReplicaState.DONE
        return [halt(event)]

    # Bursts (`rudra.roles.bursts`).

    @property
    def place(self) -> tuple[int, int]:
        """Number of averages begun, and of mini-batches since the last one."""
        return self.ledger.timestamp, 0

    @property
    def made(self) -> MadeMinibatches:
        """Mini-batches of the present period. Each mini-batch is a period of its own, unless replicas are averaged."""
        return MadeMinibatches()

    @property
    def local_steps(self) -> int:
        """Number of mini-batches before the one that ends the period. No other role waits for them."""
        return 0

    @property
    def is_computing(self) -> bool:
        """Whether the learner waits only for its mini-batch."""
        return self.state is ReplicaState.COMPUTING

    @property
    def may_sleep(self) -> bool:
        """Whether only the next mini-batch is due, and nothing else is under way."""
        ledger = self.ledger
        told = self._lr_drops_requested > len(ledger.rules.lr_drops) or self._decisions.new or ledger.stopped
        ends = self._target_reached and ledger.epochs > ledger.epoch + 1
        return self.is_computing and not (told or ends or self.duties.cycle.saving)

    def quiet_updates(self, samples: int, most: int, now: float, after: int) -> int:
        """Returns how many updates end no epoch and have no checkpoint or change.

        Args:
            samples: number of samples of an update.
            most: largest number of updates.
            now: seconds on the driver's clock.
            after: number of updates before them.
        """
        ledger, cycle = self.ledger, self.duties.cycle
        left, until = (ledger.left_of_epoch - 1) // samples, ledger.rules.until.updates
        if until != inf:
            left = min(left, int(until) - 1 - ledger.timestamp)
        count = min(most, left - after)
        first = ledger.timestamp + after + 1 + self.NOTICE
        looks = range(count if cycle.counts_updates else min(count, 1))
        due = (each for each in looks if cycle.wanted(first + each, ledger.epoch, now))
        return max(0, next(due, count))

    def rates_ahead(self, steps: int, after: int) -> list[float]:
        """Returns the learning rate of some steps of the replica, after the next steps. Empty without a replica."""
        return []

    @property
    def step_ahead(self) -> StepReplica | None:
        """The last step of a period, without its rate. None: there is no replica."""
        return None

    def enter_burst(self, updates: int, digest: int) -> None:
        """Enters updates that were made while the learners slept."""
        self._digest = digest

    def follow_burst(self, leader: "Replica", updates: int) -> None:
        """Takes over the records of the learner that entered updates."""
        if leader is not self:
            self.ledger.follow_burst(leader.ledger)
            self.enter_burst(updates, leader._digest)

    def begin_minibatch(self, now: float) -> list[Action]:
        """Begins the next mini-batch after others that were made without this learner."""
        return self._next(now)

    # Lockstep (`rudra.mpi.lockstep`): others of its rank follow the first learner, which is asked for all of them.

    @property
    def stands_with(self) -> tuple[Any, ...]:
        """State that is the same for learners that wait for the same mini-batch after the same updates."""
        return self.state, self.place, self.ledger.timestamp, self._digest

    @property
    def is_settling(self) -> bool:
        """Whether an average has come, and what it changes is not complete."""
        return self.ledger.updating

    def only_updates(self, event: Reduced) -> bool:
        """Returns whether an average only updates the weights, and training continues in the same way.

        Otherwise a learner asks for more, the training or a job ends with it, or the update must wait.
        """
        ledger, words = self.ledger, event.words
        asks = any(word.enough or word.stopped or word.saves or word.decided for word in words)
        lowers = max(word.lowered for word in words) > len(ledger.rules.lr_drops)
        differs = any(word.digest != self._digest for word in words)
        epoch = ledger.epoch_after(sum(gradient.samples for gradient in event.gradients))
        changes = ledger.rules.until.is_reached(epoch, ledger.timestamp + 1) or self._changes_with(epoch)
        waits = self._leads and self.duties.are_ahead_of(ends_epoch=epoch > ledger.epoch)
        return not (asks or lowers or differs or epoch == ledger.epochs or changes or waits)

    def _changes_with(self, epoch: int) -> bool:
        """Returns whether replicas do something else if that number of epochs is complete."""
        return False

    @property
    def completes_period(self) -> bool:
        """Whether the last mini-batch ended a period, and its step is to come."""
        return False

    @property
    def flags(self) -> GroupFlags:
        """Flags that it brings into the next averages, except for what only the first learner asks for."""
        told = (self._lr_drops_requested, self._target_reached, self.ledger.stopped)
        return GroupFlags(self._digest, *told, decided=self._decisions.new)

    @property
    def brings(self) -> Gradient | None:
        """What it brings into the next average of a period that has ended. None: there is none yet."""
        return None

    def catch_up(self, leader: Self, own: Followed) -> None:
        """Ends following: continues from where the first learner is, with what is its own."""
        self.ledger.follow_burst(leader.ledger)
        self.log.catch_up(leader.log, own.steps, own.spent, own.last)
        for name in self.IN_LOCKSTEP:
            setattr(self, name, getattr(leader, name))
