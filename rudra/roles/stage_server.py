"""Stage server: owner of the last layers, while learners hold the first layers.

A learner computes its layers' output for a mini-batch, and sends these activations to the stage server. The stage
server returns the gradient of the activations, with loss and errors. Then the learner computes the gradient of its own
layers (`rudra.roles.gradient_requests`). The stage server handles one mini-batch at a time: forward, loss and backward
pass with the same weights. The placement rule decides when the stage server applies the gradient of its own layers:

`synchronous`: together with the gradients of the first layers. The owner of the first layers decides. It writes a log,
as between shards (`rudra.roles.multi_owner`). By this log the stage server adds the same gradients, in the same order
and at the same scales, and updates at the same rate. The stage server computes a mini-batch only with weights of the
activations' timestamp. So both have one timestamp, and all weights are bitwise identical to a run whose learners hold
all layers.

`merged`: immediately, one batch after the other. The stage server's weights have their own timestamp. They have no
staleness, even if the first layers are stale. A batch belongs to a compute group, and each learner of the group has one
part. The batch begins when all parts have arrived. All parts are computed with the same weights. One update applies
their mean, added in group_rank order. A learner without a group is treated as a group of one.

A snapshot or checkpoint has both parts. It has the first layers as of their update, and the last layers as of the time
when the stage server is notified.

Source: omnivore.txt §V-A and appendix D (merged fully-connected server); ralp.txt §4.2 (synchronous).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import structs

from rudra.core.actions import (
    Accumulate,
    Action,
    AverageGroup,
    Copy,
    FollowJob,
    Receive,
    Reconfigure,
    RunLastStage,
    Save,
    Send,
    Update,
)
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS, AVERAGE, GRADIENT, SNAPSHOT, WEIGHTS
from rudra.core.events import Computed, Lost, NormsComputed, Received, Sent, Started, Updated
from rudra.core.messages import (
    ActivationGradient,
    Activations,
    ChildDone,
    GradientNorms,
    LearnersLeft,
    LogEntries,
    MessageKind,
    PartialSum,
    Shutdown,
    TrainingStarted,
)
from rudra.core.phases import phase_at
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import Work, portion
from rudra.roles.ledger import Ledger
from rudra.roles.log_follower import Entry, LogFollower
from rudra.roles.machine import Machine, Setup, States, Transition, halt, self_loops
from rudra.roles.multi_owner import LOGGED, stepped
from rudra.roles.norms import Norms, told
from rudra.roles.optimizer_settings import changed_settings
from rudra.roles.outbox import Outbox
from rudra.roles.relay import SumRelay
from rudra.roles.sharded import FOLLOWING, ShardState
from rudra.roles.stage_batches import BatchQueue, ConcludedBatch, ShippedBatch, StageReports, StageUpdates, learner_of
from rudra.roles.stage_log import gradient_of


class StageServer(Machine):
    """Owner of the last layers.

        FOLLOWING  activations, a log entry, or an event that either waits for -> FOLLOWING  do all possible work
        FOLLOWING  everything is recorded                                      -> DONE

    Args:
        role: id of the stage server in the plan.
        setup: arguments of the role.

    Attributes:
        timestamp: timestamp of the stage server's weights.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(
            [FOLLOWING],
            {
                Started: "_start",
                MessageKind.START: "_begin",
                MessageKind.ACTIVATIONS: "_arrived",
                Computed: "_concluded",
                MessageKind.LOG: "_read",
                MessageKind.SUM: "_sum_here",
                NormsComputed: "_measured",
                MessageKind.NORMS: "_hear_norms",
                Sent: "_returned",
                Updated: "_stepped",
                MessageKind.LEARNERS_LEFT: "_end",
                Lost: "_lose",
            },
        ),
        (FOLLOWING, MessageKind.SHUTDOWN): Transition("_finish", ShardState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        job, plan = setup.job, setup.plan
        super().__init__(role, plan)
        self.state: States = FOLLOWING
        self._merged = job.placement.rule == "merged"
        self._clips = not self._merged and job.optimizer.clip_norm is not None
        self._norms = Norms()
        self._relay = SumRelay(role, plan)
        self._phases, self._factor = setup.phases_in_effect, job.placement.rate_factor(job.optimizer)
        self._settings = changed_settings(role, self._phases, job, plan)
        per_update = job.make_protocol(plan).gradients_per_update if self._merged else 1
        averaged = setup.position.averaged * per_update  # an estimate, as the timestamp below
        started = setup._replace(position=structs.replace(setup.position, averaged=averaged))
        self._ledger = Ledger(role, started, reports=False)
        self._ledger.per_update = per_update
        self._ledger.rules.protocol = job.make_protocol(plan, plan.workers - 1)  # as for a single learner
        # An estimate: the number of merged mini-batches that the parameter server had not applied is unknown.
        position, batches = setup.position, setup.position.applied * plan.workers // plan.learner_numbers
        self.timestamp = self._ledger.timestamp = batches if self._merged else position.timestamp
        outbox = Outbox(role, plan, job.results.report_s)
        self._reports = StageReports(outbox, plan.statistics, merged=self._merged)
        self._strides = {
            learner: portion(plan, learner, job.training.minibatch_size, job.cluster.parts).batch
            for learner in plan.learners
        }
        self._follower = LogFollower(role, plan, self._dead)
        self._queue = BatchQueue(plan, merged=self._merged)
        self._updates = StageUpdates()
        self._plans = [plan]  # plans before and after each regrouping
        self._followed = 0  # number of regroupings that the log has reported
        self._under_way: tuple[ShippedBatch, float] | None = None  # mini-batch and start of its computation
        self._update: Update | None = None  # update that waits for transfers of the weights
        self._final = self._ending = False

    @property
    def _leads(self) -> bool:
        """Whether this is the first stage server, which reports for all stage servers."""
        return self.id == self.plan.stage

    def validate(self) -> None:
        self._follower.validate()
        assert self._merged or self._update is None

    @property
    def waiting_for(self) -> str:
        return self._follower.waiting_for if self._follower.entries else "activations of the learners"

    def _start(self, event: Started, now: float) -> list[Action]:
        mine = [learner for learner in self.plan.learners if self.plan.stage_of(learner) == self.id]
        follows = self._followed < len(self._plans) - 1  # updates by an earlier job, which the log has not reported
        settings = [] if follows else self._settings
        return [*settings, *(Receive(_activations_of(learner), learner, gradient=True) for learner in mine)]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self._reports.began = self._ledger.clock.start_time = event.message.began_ns * 1e-9
        return []

    # Mini-batches, one at a time.

    def _arrived(self, event: Received[Activations], now: float) -> list[Action]:
        assert event.buffer is not None
        self._queue.enter(ShippedBatch(event.message, event.buffer, now))
        return self._conclude_next(now)

    def _conclude_next(self, now: float) -> list[Action]:
        """Begins the first mini-batch that can be computed now."""
        if self._under_way is not None or self._update is not None or self._followed < len(self._plans) - 1:
            return []
        shipped = self._queue.next(self.timestamp, self._are_buffers_free)
        if shipped is None:
            return []
        self._under_way = shipped, now
        learner = shipped.message.sender
        (row,) = shipped.message.gradients
        work = Work(row.stream, row.first, row.samples, self._strides[learner])
        about = (shipped.buffer, WEIGHTS, self._gradient_for(learner), _returned_of(learner))
        return [RunLastStage(row.learner, row.step, work, *about)]

    def _are_buffers_free(self, learner: int) -> bool:
        lent = self._follower.lent
        return not (lent[_returned_of(learner)] or lent[self._gradient_for(learner)])

    def _gradient_for(self, learner: int) -> str:
        single = self._merged and len(self.plan.group_of(learner)) == 1
        return GRADIENT if single else gradient_of(learner)

    def _concluded(self, event: Computed, now: float) -> list[Action]:
        assert self._under_way is not None
        (shipped, began), self._under_way = self._under_way, None
        learner = shipped.message.sender
        if learner in self._dead:
            self._queue.conclude(learner)
            return self._advance(now)
        (row,) = shipped.message.gradients
        about = (row.learner, row.samples, row.step, row.first, row.timestamp)
        gradient = Gradient(-1, *about, 0, 1.0, event.loss, event.errors, row.stream)
        times = (began, began - shipped.at, now - began)
        self._updates.waiting[learner] = ConcludedBatch(gradient, self.timestamp, *times)
        self._follower.lent[_returned_of(learner)] += 1
        message = ActivationGradient(self.id, self.timestamp, (gradient,))
        actions: list[Action] = [
            Send(learner, message, _returned_of(learner)),
            Receive(shipped.buffer, learner, gradient=True),
        ]
        if self._merged:
            actions += self._update_by_batch(learner, now)
        return actions + self._advance(now)

    def _update_by_batch(self, learner: int, now: float) -> list[Action]:
        """Updates the weights by a batch if all its parts are done, unless the weights are final."""
        if not self._queue.conclude(learner):
            return []
        members = self.plan.group_of(learner)
        if not self._dead.isdisjoint(members):  # all roles are about to restart
            return []
        updates = self._updates
        parts = [updates.waiting.pop(member) for member in members]
        if self._final:
            return []
        self._ledger.count(tuple(part.gradient for part in parts), 1.0)
        gradient = self._gradient_for(members[0])
        (update,) = self._ledger.update(gradient, now)
        assert isinstance(update, Update)
        updates.waiting |= zip(members, parts, strict=True)
        updates.counted = [*members]
        self._update = update
        combined = [self._combined(gradient)] if len(members) > 1 else []
        return [*combined, *self._make_update()]

    def _combined(self, into: str) -> AverageGroup:
        """Returns the action that averages the parts of a compute group's batch, in the group's order."""
        plan = self._plans[self._followed]
        members = plan.group_of(learner_of(into))
        samples = tuple(self._updates.waiting[member].gradient.samples for member in members)
        return AverageGroup(into, tuple(map(gradient_of, members)), samples, plan.partial_sums(members))

    def _make_update(self) -> list[Action]:
        """Makes a due update if all transfers of the weights have ended."""
        if self._update is None or self._follower.lends_weights:
            return []
        update, self._update = self._update, None
        return [self._begin_update(update)]

    def _begin_update(self, update: Update) -> Action:
        rate = update.learning_rate if self._factor is None else update.learning_rate * self._factor
        self._updates.begin(rate)
        self.timestamp = update.timestamp
        norms, self._norms = (self._norms.theirs, b""), Norms()
        average = update.average if self._leads else ""  # the others' weights are not evaluated
        return structs.replace(update, learning_rate=rate, norms=norms, average=average)

    # The log of the parameter server.

    def _due(self, entry: Entry) -> list[Action] | None:
        """Returns the actions for an entry of the log, or None if the entry must wait."""
        what, role, buffer, other, number, *_, epoch, _ = entry
        kind, name, into = LOGGED[what], buffer.decode(), other.decode()
        follower, updates = self._follower, self._updates
        if kind is Receive:
            return None if follower.lent[name] or name in follower.coming else follower.due(entry)
        if not follower.coming.keys().isdisjoint((name, into)):  # the sum is on its way
            return None
        if kind is Save:
            self._reports.save(number, self.timestamp)
        if not self._leads and (kind is Save or role == self.plan.statistics or into == SNAPSHOT):
            return []
        if kind is Reconfigure:
            self._followed += 1
            updates.counted = []
        if kind in (Reconfigure, FollowJob):
            return self._follow_job(TrainingState(number, epoch))
        if kind is Update and (self._under_way is not None or (self._clips and not self._norms.complete)):
            return None
        actions = follower.due(entry)
        if actions is None:
            return None
        if kind is AverageGroup:
            combined = self._combined(name)
            for gradient in combined.gradients:
                updates.count(gradient)
            return [combined]
        if kind is Accumulate:
            updates.count(into)
        to_stage = kind is Send and role in self.plan.stages
        if kind in (Accumulate, Update, Copy) or to_stage:
            updates.count(name)
        if kind is Update:
            (update,) = actions
            assert isinstance(update, Update)
            return [self._begin_update(update)]
        if to_stage:
            return [Send(role, PartialSum(self.id), name)]
        final = kind is Send and name in (WEIGHTS, AVERAGE)
        if kind is Copy or final:
            self._reports.tell_snapshot(number, self.timestamp)
        if final:
            self._final = True
            return [*self._reports.flush(self._reports.now), *actions]  # all learners may have left already
        return actions

    def _follow_job(self, position: TrainingState) -> list[Action]:
        """Uses the settings of the job at a position."""
        job = phase_at(self._phases, position).job
        self._factor = job.placement.rate_factor(job.optimizer)
        return [*changed_settings(self.id, self._phases, job, self.plan)]

    def _measured(self, event: NormsComputed, now: float) -> list[Action]:
        self._norms.measured = True
        norms = told(self.id, event) if self._leads else []
        return [*(Send(self.plan.server, message) for message in norms), *self._advance(now)]

    def _hear_norms(self, event: Received[GradientNorms], now: float) -> list[Action]:
        self._norms.hear(event.message)
        return self._advance(now)

    def _read(self, event: Received[LogEntries], now: float) -> list[Action]:
        self._follower.read(mine for entry in event.message.rows.tolist() for mine in self._relay.mine(entry))
        return self._advance(now)

    def _sum_here(self, event: Received[PartialSum], now: float) -> list[Action]:
        assert event.buffer is not None
        self._follower.arrived(event.buffer)
        return self._advance(now)

    def _returned(self, event: Sent, now: float) -> list[Action]:
        self._follower.lent[event.buffer] -= 1
        return self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Performs all log entries, updates, mini-batches and reports that are possible now."""
        self._reports.now = now
        actions = [*self._follower.carry_out(self._due), *self._make_update(), *self._conclude_next(now)]
        return [*actions, *self._report(now), *self._leave(now)]

    def _report(self, now: float) -> list[Action]:
        return self._reports.report(self.timestamp - self._updates.making, now)

    def _stepped(self, event: Updated, now: float) -> list[Action]:
        self._reports.enter(event, *self._updates.end())
        tells: list[Action] = []
        if self._leads:  # the other stage servers have made the same update
            steps = (Send(self.plan.server, message) for message in stepped(self.id, event))
            tells = self._ledger.note(event, now) if self._merged else [*steps]
        return [*tells, *self._reports.due(now), *self._report(now), *self._leave(now)]

    # Restart: entries of the log count, and mini-batches under way with learners do not.

    def inherit(self, before: "StageServer") -> None:
        ledger, self._ledger = self._ledger, before._ledger
        self._ledger.rules.protocol, self._ledger.rules.plan = ledger.rules.protocol, self.plan
        self.timestamp = before.timestamp
        self._follower.read(before._follower.entries)
        self._follower.lent.update({name: before._follower.lent[name] for name in (WEIGHTS, AVERAGE, SNAPSHOT)})
        self._updates, self._update, self._reports = before._updates, before._update, before._reports
        self._factor = before._factor  # until the log reports the regrouping
        self._final, self._ending = before._final, before._ending
        self._plans, self._followed = [*before._plans, self.plan], before._followed

    # Losses of learners, and the end of the run.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        self._queue.lose(event.role)
        return self._advance(now)

    def _end(self, event: Received[LearnersLeft], now: float) -> list[Action]:
        self._ending = True
        return self._leave(now)

    def _leave(self, now: float) -> list[Action]:
        """Reports the last rows if no learner is left and nothing is under way."""
        busy = self._follower.entries or self._under_way is not None or self._update is not None or self._updates.making
        if not self._ending or busy:
            return []
        self._ending = False
        return [*self._reports.flush(now), Send(self.plan.statistics, ChildDone(self.id))]

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = ShardState.DONE
        return [halt(event)]


def _activations_of(learner: int) -> str:
    return f"{ACTIVATIONS} {learner}"


def _returned_of(learner: int) -> str:
    return f"{ACTIVATION_GRADIENT} {learner}"
