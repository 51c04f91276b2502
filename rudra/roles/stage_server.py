"""Layers placed on ranks: learners hold the first layers, and one stage server the last ones.

A learner computes what its layers make of a mini-batch, ships these activations to the stage server, and gets their
gradient back, with loss and errors; then it computes the gradient of its own layers (`rudra.roles.gradient_requests`).
The stage server takes one mini-batch at a time, never interleaved: forward, loss and backward with the same weights.
When it takes the gradient of its own layers in, a rule says:

`synchronous`: as those of the first layers are taken in. Who decides about these has it add the same gradients, in
the same order, at the same scales, and update at the same rate, by a log as between shards
(`rudra.roles.multi_owner`). It computes a mini-batch only with weights of the timestamp that the activations are of.
So both have one clock, and all layers the weights, bit for bit, of a run in which learners have them all.

`merged`: at once, one batch after the other. Its weights have a clock of their own and no staleness, however stale
those of the first layers are. A batch is that of a compute group, of which each learner has a part: it begins when all
parts are here, each is computed with the same weights, and one update takes in their mean, added in group_rank order.
A learner without a group is one by itself.

A snapshot, or a checkpoint, has both parts: that of the first layers at their update, and the stage server's when it
hears of that.

Source: omnivore.txt §V-A and appendix D (merged fully-connected server); ralp.txt §4.2 (synchronous).
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from rudra.core.digest import digest_of
from rudra.core.events import (
    ACTIVATIONS,
    GRADIENT,
    RETURNED,
    SNAPSHOT,
    WEIGHTS,
    Accumulate,
    Action,
    Combine,
    Computed,
    Conclude,
    Copy,
    Lost,
    Measured,
    Receive,
    Received,
    Regroup,
    Save,
    Send,
    Sent,
    Started,
    Update,
    Updated,
)
from rudra.core.messages import (
    ActivationGradient,
    Activations,
    ChildDone,
    GradientNorms,
    LearnersLeft,
    LogEntries,
    MessageKind,
    PartialSum,
    StageReported,
    TrainingStarted,
)
from rudra.core.records import Gradient
from rudra.core.work import Work, portion
from rudra.roles.ledger import Ledger
from rudra.roles.machine import Setup, States, Transition, self_loops
from rudra.roles.multi_owner import LOGGED
from rudra.roles.norms import Norms, told
from rudra.roles.outbox import Outbox
from rudra.roles.relay import SumRelay
from rudra.roles.sharded import Shard, ShardState
from rudra.roles.stage_log import gradient_of


class _Shipped(NamedTuple):
    """A mini-batch whose activations are here."""

    message: Activations
    buffer: str
    at: float


class _Concluded(NamedTuple):
    """A mini-batch whose gradient waits for the update that takes it in.

    Attributes:
        gradient: what it came to.
        timestamp: of the weights that it was computed with.
        began: seconds on the driver's clock.
        wait_s: of its activations by then.
        compute_s: that it took.
    """

    gradient: Gradient
    timestamp: int
    began: float
    wait_s: float
    compute_s: float


class StageServer(Shard):
    """The owner of the last layers.

        FOLLOWING  activations, an entry of the log, or what either waits for -> FOLLOWING  do what can be done
        FOLLOWING  everything is recorded                                     -> DONE

    Args:
        role: id in the plan.
        setup: what it is made from.

    Attributes:
        timestamp: of its weights.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **{key: to for key, to in Shard.TRANSITIONS.items() if key[1] is not MessageKind.GRADIENT_PART},
        **self_loops(
            [ShardState.FOLLOWING],
            {
                Started: "_start",
                MessageKind.START: "_begin",
                MessageKind.ACTIVATIONS: "_arrived",
                Computed: "_concluded",
                MessageKind.LEARNERS_LEFT: "_end",
                Measured: "_measured",
                MessageKind.NORMS: "_heard_norms",
                MessageKind.SUM: "_sum_here",
            },
        ),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        job, plan = setup.job, setup.plan
        self._merged = job.placement.rule == "merged"
        self._clips = not self._merged and job.optimizer.clip_norm is not None
        self._norms = Norms()
        self._leads = role == plan.stage
        self._learners = [learner for learner in plan.learners if plan.stage_of(learner) == role]
        self._relay = SumRelay(role, plan)
        self._factor = job.placement.rate_factor(job.optimizer)
        self._ledger = Ledger(role, setup, reports=False)
        self._ledger.per_update = self._ledger.rules.protocol.gradients_per_update if self._merged else 1
        self._ledger.rules.protocol = job.make_protocol(plan, plan.workers - 1)  # as if one learner were all there are
        # Of merged mini-batches that the parameter server had not applied, nobody knows how many there were.
        position, batches = setup.position, setup.position.applied * plan.workers // plan.learner_numbers
        self.timestamp = self._ledger.timestamp = batches if self._merged else position.timestamp
        self._outbox = Outbox(role, plan.statistics, job.results.report_s)
        self._strides = {
            learner: portion(plan, learner, job.training.minibatch_size, job.cluster.parts).batch
            for learner in plan.learners
        }
        self._began = self._now = 0.0
        self._shipped: deque[_Shipped] = deque()
        self._open: set[int] = set()  # learners of the group whose batch is at hand, whose parts are to be concluded
        self._alone = plan.workers == 1
        self._plans = [plan]  # of before all regrouped, and since
        self._followed = 0  # how often the log has said that they did
        self._under_way: tuple[_Shipped, float] | None = None  # and since when
        self._waiting: dict[int, _Concluded] = {}  # by learner, of an update to come
        self._counted: list[int] = []  # learners whose gradients are in the next update
        self._updating: deque[tuple[list[_Concluded], float]] = deque()  # and their rate
        self._update: Update | None = None  # waits until the weights are back
        self._saved: deque[tuple[int, int]] = deque()  # checkpoints to report on, and of which of its updates they are
        self._final = self._ending = False

    def validate(self) -> None:
        super().validate()
        assert self._merged or self._update is None

    @property
    def waiting_for(self) -> str:
        if self._log:
            return super().waiting_for
        return "activations of the learners"

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Receive(_activations_of(learner), learner, gradient=True) for learner in self._learners]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self._began = self._ledger.clock.began = event.message.began_ns * 1e-9
        return []

    # Mini-batches, one at a time.

    def _arrived(self, event: Received[Activations], now: float) -> list[Action]:
        assert event.buffer is not None
        self._shipped.append(_Shipped(event.message, event.buffer, now))
        return self._work(now)

    def _work(self, now: float) -> list[Action]:
        """Begins with the first mini-batch whose turn it is."""
        if self._under_way is not None or self._update is not None or self._followed < len(self._plans) - 1:
            return []
        for shipped in self._shipped:
            learner = shipped.message.sender
            lent = self._lent[_returned_of(learner)] or self._lent[self._gradient_for(learner)]
            if not lent and self._has_turn(shipped.message):
                self._shipped.remove(shipped)
                self._under_way = shipped, now
                (row,) = shipped.message.gradients
                work = Work(row.stream, row.first, row.samples, self._strides[learner])
                about = (shipped.buffer, WEIGHTS, self._gradient_for(learner), _returned_of(learner))
                return [Conclude(row.learner, row.step, work, *about)]
        return []

    def _gradient_for(self, learner: int) -> str:
        single = self._merged and len(self.plan.group_of(learner)) == 1
        return GRADIENT if single else gradient_of(learner)

    def _has_turn(self, message: Activations) -> bool:
        """Whether the weights are those that activations are to be concluded with, now and until all of a batch are."""
        if not self._merged:
            return message.timestamp == self.timestamp
        if not self._open:
            members = {*self.plan.group_of(message.sender)}
            if self._alone or members <= {shipped.message.sender for shipped in self._shipped}:
                self._open = members
        return message.sender in self._open

    def _concluded(self, event: Computed, now: float) -> list[Action]:
        assert self._under_way is not None
        (shipped, began), self._under_way = self._under_way, None
        learner = shipped.message.sender
        if learner in self._dead:
            self._open.discard(learner)
            return self._go_on_at(now)
        (row,) = shipped.message.gradients
        about = (row.learner, row.samples, row.step, row.first, row.timestamp)
        gradient = Gradient(-1, *about, 0, 1.0, event.loss, event.errors, row.stream)
        times = (began, began - shipped.at, now - began)
        self._waiting[learner] = _Concluded(gradient, self.timestamp, *times)
        self._lent[_returned_of(learner)] += 1
        message = ActivationGradient(self.id, self.timestamp, (gradient,))
        actions: list[Action] = [
            Send(learner, message, _returned_of(learner)),
            Receive(shipped.buffer, learner, gradient=True),
        ]
        if self._merged:
            actions += self._take_in(learner, now)
        return actions + self._go_on_at(now)

    def _take_in(self, learner: int, now: float) -> list[Action]:
        """Updates the weights by a batch, once all its parts are concluded, unless these are the final weights."""
        self._open.discard(learner)
        if self._open:
            return []
        members = self.plan.group_of(learner)
        if not self._dead.isdisjoint(members):  # all are about to begin anew
            return []
        parts = [self._waiting.pop(member) for member in members]
        if self._final:
            return []
        self._ledger.count(tuple(part.gradient for part in parts), 1.0)
        gradient = self._gradient_for(members[0])
        (update,) = self._ledger.update(gradient, now)
        assert isinstance(update, Update)
        self._waiting |= zip(members, parts, strict=True)
        self._counted = [*members]
        self._update = update
        combined = [self._combined(gradient)] if len(members) > 1 else []
        return [*combined, *self._make_update()]

    def _combined(self, into: str) -> Combine:
        """Has the parts of a compute group's batch averaged, in the group's order."""
        plan = self._plans[self._followed]
        members = plan.group_of(_learner_of(into))
        samples = tuple(self._waiting[member].gradient.samples for member in members)
        return Combine(into, tuple(map(gradient_of, members)), samples, plan.partial_sums(members))

    def _make_update(self) -> list[Action]:
        """Makes the update that is due, once the weights are back from those to whom they are being sent."""
        if self._update is None or self._lent[WEIGHTS]:
            return []
        update, self._update = self._update, None
        return [self._stepping(update)]

    def _stepping(self, update: Update) -> Action:
        rate = update.learning_rate if self._factor is None else update.learning_rate * self._factor
        taken = [self._waiting.pop(learner) for learner in self._counted if learner in self._waiting]
        self._counted = []
        self._updating.append((taken, rate))
        self.timestamp = update.timestamp
        norms, self._norms = (self._norms.theirs, b""), Norms()
        return structs.replace(update, learning_rate=rate, norms=norms)

    # The log of the parameter server.

    def _due(self, what: int, role: int, buffer: bytes, other: bytes, number: int, *more: Any) -> list[Action] | None:
        kind, name = LOGGED[what], buffer.decode()
        if kind is Receive and (self._lent[name] or name in self._coming):
            return None
        if kind is not Receive and not self._coming.keys().isdisjoint((name, other.decode())):  # the sum is on its way
            return None
        if not self._leads and (kind is Save or role == self.plan.statistics or other.decode() == SNAPSHOT):
            if kind is Save:
                self._saved.append((number, self.timestamp))
            return []
        actions = super()._due(what, role, buffer, other, number, *more)
        for place, action in enumerate(actions or ()):
            match action:
                case Accumulate():
                    self._count(action.into)
                    self._count(action.gradient)
                case Combine():
                    assert actions is not None
                    actions[place] = combined = self._combined(action.into)
                    for gradient in combined.gradients:
                        self._count(gradient)
                case Regroup():
                    self._followed += 1
                    self._counted = []
                    return []
                case Update():
                    if self._under_way is not None or (self._clips and not self._norms.complete):
                        return None
                    self._count(action.gradient)
                    assert actions is not None
                    actions[place] = self._stepping(action)
                case Copy():
                    self._count(action.source)
                    self._tell(number)
                case Send() if action.to in self.plan.stages:
                    assert actions is not None
                    self._count(name)
                    actions[place] = Send(action.to, PartialSum(self.id), name)
                case Save():
                    self._saved.append((number, self.timestamp))
                case Send() if action.buffer == WEIGHTS:
                    self._final = True
                    self._tell(number)
                    assert actions is not None
                    actions = [*self._outbox.flush(self._now), *actions]  # perhaps all learners have left already
                case _:
                    pass
        return actions

    def _measured(self, event: Measured, now: float) -> list[Action]:
        self._norms.measured = True
        norms = told(self.id, event) if self._leads else []
        return [*(Send(self._first, message) for message in norms), *self._go_on_at(now)]

    def _heard_norms(self, event: Received[GradientNorms], now: float) -> list[Action]:
        self._norms.hear(event.message)
        return self._go_on_at(now)

    def _tell(self, front: int) -> None:
        """Enters into the table of events which of its weights go with those of the parameter server."""
        if self._merged:
            text = f"a snapshot has the first layers of update {front}, and the last ones of {self.timestamp}"
            self._outbox.add(
                MessageKind.EVENTS,
                b"stages",
                self.id,
                0,
                front,
                self.timestamp,
                self._now - self._began,
                0.0,
                text.encode(),
            )

    def _count(self, gradient: str) -> None:
        """The gradient in that buffer is part of the next update."""
        if not gradient.startswith(f"{GRADIENT} "):
            return
        learner = _learner_of(gradient)
        if learner not in self._counted:
            self._counted.append(learner)

    def _read(self, event: Received[LogEntries], now: float) -> list[Action]:
        self._log.extend(mine for entry in event.message.rows.tolist() for mine in self._relay.mine(entry))
        return self._go_on_at(now)

    def _let_in(self) -> list[Action]:
        return []  # sums come in their turn

    def _sum_here(self, event: Received[PartialSum], now: float) -> list[Action]:
        assert event.buffer is not None
        del self._coming[event.buffer]
        return self._go_on_at(now)

    def _returned(self, event: Sent, now: float) -> list[Action]:
        self._now = now
        return super()._returned(event, now) + self._go_on_at(now)

    def _go_on_at(self, now: float) -> list[Action]:
        """Whatever can be done now."""
        self._now = now
        return [*self._go_on(), *self._make_update(), *self._work(now), *self._report(now), *self._leave(now)]

    def _report(self, now: float) -> list[Action]:
        """Sends the rows that belong to a checkpoint, once the updates are made that it has."""
        actions: list[Action] = []
        done = self.timestamp - len(self._updating)
        while self._saved and self._saved[0][1] <= done:
            front, _ = self._saved.popleft()
            reported = StageReported(self.id, front)
            actions += [*self._outbox.flush(now), Send(self.plan.statistics, reported)]
        return actions

    def _stepped(self, event: Updated, now: float) -> list[Action]:
        taken, rate = self._updating.popleft()
        digest = digest_of(b"".join(event.sampled)) if event.sampled else 0
        for concluded in taken:
            gradient = concluded.gradient
            about = (gradient.learner, gradient.samples, gradient.step, gradient.timestamp)
            staleness = event.timestamp - 1 - concluded.timestamp
            times = (concluded.began - self._began, concluded.wait_s, concluded.compute_s, event.seconds)
            self._outbox.add(MessageKind.STAGES, event.timestamp, *about, staleness, rate, *times, digest)
        tells: list[Action] = []
        if self._leads:  # the others have made the same
            tells = self._ledger.note(event, now) if self._merged else super()._stepped(event, now)
        return [*tells, *self._outbox.due(now), *self._report(now), *self._leave(now)]

    # Beginning anew: what is in the log counts, and what is under way with learners does not.

    def inherit(self, before: "StageServer") -> None:
        ledger, self._ledger = self._ledger, before._ledger
        self._ledger.rules.protocol, self._ledger.rules.plan = ledger.rules.protocol, self.plan
        self.timestamp = before.timestamp
        self._log, self._waiting, self._updating = before._log, before._waiting, before._updating
        self._counted, self._update, self._saved = before._counted, before._update, before._saved
        self._lent.update({name: before._lent[name] for name in (WEIGHTS, SNAPSHOT)})
        self._outbox, self._began, self._now = before._outbox, before._began, before._now
        self._final, self._ending = before._final, before._ending
        self._plans, self._followed = [*before._plans, self.plan], before._followed

    # The end, of learners and of all.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        self._shipped = deque(shipped for shipped in self._shipped if shipped.message.sender != event.role)
        return self._go_on_at(now)

    def _end(self, event: Received[LearnersLeft], now: float) -> list[Action]:
        self._ending = True
        return self._leave(now)

    def _leave(self, now: float) -> list[Action]:
        """Reports the last rows once no learner is left and nothing is under way."""
        busy = self._log or self._under_way is not None or self._update is not None or self._updating
        if not self._ending or busy:
            return []
        self._ending = False
        return [*self._outbox.flush(now), Send(self.plan.statistics, ChildDone(self.id))]


def _activations_of(learner: int) -> str:
    return f"{ACTIVATIONS} {learner}"


def _returned_of(learner: int) -> str:
    return f"{RETURNED} {learner}"


def _learner_of(gradient: str) -> int:
    """Whose mini-batch the gradient in a buffer is of."""
    return int(gradient.rpartition(" ")[2])
