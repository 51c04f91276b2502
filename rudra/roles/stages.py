"""Layers placed on ranks: learners hold the first layers, and one stage server the last ones.

A learner computes what its layers make of a mini-batch, ships these activations to the stage server, and gets their
gradient back, with loss and errors; then it computes the gradient of its own layers and pushes that to the parameter
server as ever. The stage server takes one mini-batch at a time, never interleaved: forward, loss and backward with the
same weights. When it takes the gradient of its own layers in, a rule says:

`synchronous`: as the parameter server takes in those of the first layers. That one has it add the same gradients, in
the same order, at the same scales, and update at the same rate, by a log as between shards (`rudra.roles.sharded`). It
computes a mini-batch only with weights of the timestamp that the activations are of. So both have one clock, and all
layers the weights, bit for bit, of a run in which learners have them all.

`merged`: at once, one mini-batch after the other. Its weights have a clock of their own and no staleness, however stale
those of the first layers are.

A snapshot, or a checkpoint, has both parts: the parameter server's at its update, and the stage server's when it hears
of that.

Source: omnivore.txt §V-A and appendix D (merged fully-connected server); ralp.txt §4.2 (synchronous).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import structs

from rudra.core import records
from rudra.core.digest import digest_of
from rudra.core.events import (
    ACTIVATIONS,
    GRADIENT,
    RETURNED,
    WEIGHTS,
    Accumulate,
    Action,
    Backward,
    Computed,
    Conclude,
    Copy,
    Drop,
    Fail,
    Forward,
    Forwarded,
    Lost,
    Measure,
    Measured,
    Receive,
    Received,
    Save,
    Send,
    Sent,
    Started,
    Update,
    Updated,
)
from rudra.core.messages import Kind, Message, split
from rudra.core.records import Gradient
from rudra.core.work import Work, portion
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.ledger import Ledger
from rudra.roles.machine import Outbox, Setup, States, To, staying
from rudra.roles.server import ALIVE, ParameterServer, ServerState
from rudra.roles.sharded import FirstShard, Shard, ShardState

NAN = float("nan")


class FrontLearner(Learner):
    """A learner that has the first layers only; arguments as for `Learner`.

        COMPUTING   activations ready                        -> SHIPPING   ship them
        SHIPPING    delivered, and their gradient is here    -> RETURNING  compute that of its own layers
        RETURNING   gradient ready                           -> EXCHANGING push

    The time to compute its gradient has all of that in it.
    """

    __slots__ = ("_outcome", "_shipped", "_stage", "_work")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], To]] = {
        **{key: to for key, to in Learner.TRANSITIONS.items() if key != (LearnerState.COMPUTING, Computed)},
        (LearnerState.COMPUTING, Forwarded): To("_ship", LearnerState.SHIPPING, LearnerState.STOPPED),
        **staying(
            [LearnerState.SHIPPING, LearnerState.RETURNING], {Kind.STOP: "_stop_soon"}
        ),  # what is under way ends first
        **{
            (LearnerState.SHIPPING, what): To(
                method, LearnerState.SHIPPING, LearnerState.RETURNING, LearnerState.STOPPED
            )
            for what, method in ((Sent, "_was_shipped"), (Kind.RETURNED, "_returned"))
        },
        (LearnerState.RETURNING, Computed): To("_push", LearnerState.EXCHANGING, LearnerState.STOPPED),
        **{
            (state, Kind.DONE): To("_finish", LearnerState.DONE)
            for state in (LearnerState.SHIPPING, LearnerState.RETURNING)
        },
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        assert setup.plan.stage is not None
        self._stage = setup.plan.stage
        self._shipped = False
        self._outcome: Gradient | None = None
        self._work: Work | None = None

    @property
    def waiting_for(self) -> str:
        if self.state is LearnerState.SHIPPING:
            return f"the {self.plan.roles[self._stage].name} to return the gradient of its activations"
        return super().waiting_for

    def _next(self, now: float) -> list[Action]:
        self.state = LearnerState.COMPUTING
        begun = self.log.begin(WEIGHTS, GRADIENT, self.timestamp, now)
        self._work = begun.work
        return [Forward(begun.step, begun.work, WEIGHTS, ACTIVATIONS)]

    def _ship(self, event: Forwarded, now: float) -> list[Action]:
        if self._stopping:
            return self._leave(now)
        self.state = LearnerState.SHIPPING
        self._shipped, self._outcome = False, None
        work = self._work
        assert work is not None
        about = (self.log.learner, work.count, event.step, work.first, self.timestamp)
        gradient = Gradient(-1, *about, -1, 1.0, NAN, NAN, work.stream)
        message = Message(Kind.ACTIVATIONS, self.id, self.timestamp, gradients=(gradient,))
        return [Receive(RETURNED, self._stage), Send(self._stage, message, ACTIVATIONS)]

    def _was_shipped(self, event: Sent, now: float) -> list[Action]:
        self._shipped = True
        return self._go_back(now)

    def _returned(self, event: Received, now: float) -> list[Action]:
        (self._outcome,) = event.message.gradients
        return self._go_back(now)

    def _go_back(self, now: float) -> list[Action]:
        """Computes the gradient of its own layers, unless training ends."""
        outcome = self._outcome
        if outcome is None or not self._shipped:
            return []
        found = (outcome.loss, outcome.errors, outcome.samples)
        if self._stopping:
            return self._computed(Computed(outcome.step, *found), now)[0]
        self.state = LearnerState.RETURNING
        since = (self.timestamp, now - self.log.began)
        return [Backward(outcome.step, WEIGHTS, RETURNED, GRADIENT, *found, *since)]

    def _stop_soon(self, event: Received, now: float) -> list[Action]:
        if self.state is LearnerState.EXCHANGING:
            return super()._stop_soon(event, now)
        self._stopping = True
        return []


class FrontServer(FirstShard):
    """The parameter server of the first layers, which has the stage server do what concerns all; as `ParameterServer`.

    It takes gradients as any parameter server does.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], To]] = {
        **{key: to for key, to in FirstShard.TRANSITIONS.items() if key[1] not in {Kind.GRADIENT_PART, Kind.TAKEN}},
        **{key: to for key, to in ParameterServer.TRANSITIONS.items() if key[1] is Kind.GRADIENT},
        **staying(ALIVE, {Measured: "_measured", Kind.NORMS: "_heard_norms"}),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._synchronous = setup.job.placement.rule == "synchronous"
        if not self._synchronous:
            self._stepping = ()
        self._whose: dict[str, int] = {}  # buffer -> the learner whose gradient it holds
        self._clips = self._synchronous and setup.job.optimizer.clip_norm is not None
        self._norms = _Norms()
        self._held: deque[Action] = deque()  # an update whose norm is not known yet, and all behind it

    def handle(self, event: Any, now: float) -> list[Action]:
        actions = super().handle(event, now)
        return self._in_turn(actions) if self._clips else actions

    def _in_turn(self, wanted: Iterable[Action]) -> list[Action]:
        """Lets an update, and all behind it, wait for the norm of the whole gradient."""
        actions: list[Action] = []
        for action in wanted:
            match action:
                case Fail() | Send(message=Message(kind=Kind.LOG | Kind.NORMS)):
                    actions.append(action)
                case Update() if not self._held:
                    actions.append(Measure(action.gradient))
                    self._held.append(action)
                case _:
                    (self._held if self._held else actions).append(action)
        if self._held and self._norms.complete:
            update, *behind = self._held
            assert isinstance(update, Update)
            actions.append(structs.replace(update, norms=(b"", self._norms.theirs)))
            self._norms, self._held = _Norms(), deque()
            actions += self._in_turn(behind)
        return actions

    def _measured(self, event: Measured, now: float) -> list[Action]:
        self._norms.measured = True
        return [Send(to, message) for to in self._others for message in _told(self.id, event)]

    def _heard_norms(self, event: Received, now: float) -> list[Action]:
        self._norms.hear(event.message)
        return []

    def _for_all(self, wanted: Sequence[Action], now: float) -> list[Action]:
        """What a parameter server wants done, of which that is logged which concerns the stage server, too."""
        actions: list[Action] = []
        for action in wanted:
            match action:
                case Send(buffer=str(buffer), message=message) if message.kind is Kind.SNAPSHOT:
                    actions.append(Send(action.to, message))
                    part = Send(action.to, Message(Kind.WEIGHTS_PART, self.id), buffer)
                    actions.append(self._all_do(part, self.ledger.timestamp))
                case Send() if action.message.kind is Kind.START and action.to == self.plan.statistics:
                    actions += [action, *(Send(to, action.message) for to in self._others)]
                case Copy() | Save() | Drop():
                    actions.append(self._all_do(action, self.ledger.timestamp))
                case Accumulate() | Update() if self._synchronous:
                    there = self._there(action)
                    if self._clips and isinstance(there, Update):
                        self._all_do(Measure(there.gradient))
                    self._all_do(there)
                    actions.append(action)
                case _:
                    actions.append(action)
        return actions

    def _there(self, action: Accumulate | Update) -> Action:
        """The same with the stage server's gradients of the same mini-batches."""
        gradient = gradient_of(self._whose[action.gradient])
        if isinstance(action, Accumulate):
            return Accumulate(gradient_of(self._whose[action.into]), gradient, action.fraction, action.scale)
        about = (action.timestamp, action.epoch, action.samples, action.time_s)
        return Update(gradient, action.weights, action.learning_rate, *about)

    def _add(self, buffer: str, message: Message) -> list[Action]:
        self._whose[buffer] = message.sender
        return super()._add(buffer, message)

    def _close(self, now: float) -> list[Action]:
        draining = self.state is ServerState.DRAINING
        actions = super()._close(now)
        if draining and self.state is ServerState.CLOSING:
            actions += [Send(to, Message(Kind.END, self.id)) for to in self._others]
        return actions


def gradient_of(learner: int) -> str:
    """The stage server's buffer for its gradient of a learner's mini-batch."""
    return f"{GRADIENT} {learner}"


@dataclass(slots=True)
class _Norms:
    """What is known of the norm of a whole gradient.

    Attributes:
        measured: that of one's own layers is.
        theirs: norms of the parameters of others, float32.
        count: of those.
    """

    measured: bool = False
    theirs: bytes = b""
    count: int = -1

    def hear(self, message: Message) -> None:
        assert message.rows is not None
        self.theirs += message.rows.tobytes()
        self.count = message.value

    @property
    def complete(self) -> bool:
        return self.measured and len(self.theirs) == self.count * records.FLOATS.itemsize


def _told(sender: int, event: Measured) -> list[Message]:
    """What others are told of norms."""
    rows = np.frombuffer(event.norms, records.FLOATS)
    return [structs.replace(message, value=len(rows)) for message in split(Kind.NORMS, sender, rows)]


class _Shipped(NamedTuple):
    """A mini-batch whose activations are here."""

    message: Message
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

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], To]] = {
        **{key: to for key, to in Shard.TRANSITIONS.items() if key[1] is not Kind.GRADIENT_PART},
        **staying(
            [ShardState.FOLLOWING],
            {
                Started: "_start",
                Kind.START: "_begin",
                Kind.ACTIVATIONS: "_arrived",
                Computed: "_concluded",
                Kind.END: "_end",
                Measured: "_measured",
                Kind.NORMS: "_heard_norms",
            },
        ),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        job, plan = setup.job, setup.plan
        self._merged = job.placement.rule == "merged"
        self._clips = not self._merged and job.optimizer.clip_norm is not None
        self._norms = _Norms()
        self._factor = job.placement.rate_factor(job.optimizer)
        self._ledger = Ledger(role, setup, reports=False)
        self._ledger.per_update = self._ledger.protocol.gradients_per_update if self._merged else 1
        self._ledger.protocol = job.make_protocol(plan, plan.workers - 1)  # as if one learner were all there are
        # Of merged mini-batches that the parameter server had not applied, nobody knows how many there were.
        position = setup.position
        self.timestamp = self._ledger.timestamp = position.applied if self._merged else position.timestamp
        self._outbox = Outbox(role, plan.statistics, job.results.report_s)
        self._strides = {
            learner: portion(plan, learner, job.training.minibatch_size, job.cluster.parts).batch
            for learner in plan.learners
        }
        self._began = self._now = 0.0
        self._shipped: deque[_Shipped] = deque()
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
        return [Receive(_activations_of(learner), learner, gradient=True) for learner in self.plan.learners]

    def _begin(self, event: Received, now: float) -> list[Action]:
        self._began = self._ledger.began = event.message.value * 1e-9
        return []

    # Mini-batches, one at a time.

    def _arrived(self, event: Received, now: float) -> list[Action]:
        assert event.buffer is not None
        self._shipped.append(_Shipped(event.message, event.buffer, now))
        return self._work(now)

    def _work(self, now: float) -> list[Action]:
        """Begins with the first mini-batch whose turn it is."""
        if self._under_way is not None or self._update is not None:
            return []
        for shipped in self._shipped:
            learner = shipped.message.sender
            is_current = self._merged or shipped.message.timestamp == self.timestamp
            if is_current and not self._lent[_returned_of(learner)]:
                self._shipped.remove(shipped)
                self._under_way = shipped, now
                (row,) = shipped.message.gradients
                work = Work(row.stream, row.first, row.samples, self._strides[learner])
                gradient = GRADIENT if self._merged else gradient_of(learner)
                about = (shipped.buffer, WEIGHTS, gradient, _returned_of(learner))
                return [Conclude(row.learner, row.step, work, *about)]
        return []

    def _concluded(self, event: Computed, now: float) -> list[Action]:
        assert self._under_way is not None
        (shipped, began), self._under_way = self._under_way, None
        learner = shipped.message.sender
        if learner in self._dead:
            return self._go_on_at(now)
        (row,) = shipped.message.gradients
        about = (row.learner, row.samples, row.step, row.first, row.timestamp)
        gradient = Gradient(-1, *about, 0, 1.0, event.loss, event.errors, row.stream)
        times = (began, began - shipped.at, now - began)
        self._waiting[learner] = _Concluded(gradient, self.timestamp, *times)
        self._lent[_returned_of(learner)] += 1
        message = Message(Kind.RETURNED, self.id, self.timestamp, gradients=(gradient,))
        actions: list[Action] = [
            Send(learner, message, _returned_of(learner)),
            Receive(shipped.buffer, learner, gradient=True),
        ]
        if self._merged:
            actions += self._take_in(learner, now)
        return actions + self._go_on_at(now)

    def _take_in(self, learner: int, now: float) -> list[Action]:
        """Updates the weights by one mini-batch, unless they are the final ones."""
        concluded = self._waiting.pop(learner)
        if self._final:
            return []
        self._ledger.count((concluded.gradient,), 1.0)
        (update,) = self._ledger.update(GRADIENT, now)
        assert isinstance(update, Update)
        self._counted, self._waiting[learner] = [learner], concluded
        self._update = update
        return self._make_update()

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
        norms, self._norms = (self._norms.theirs, b""), _Norms()
        return structs.replace(update, learning_rate=rate, norms=norms)

    # The log of the parameter server.

    def _due(self, what: int, role: int, buffer: bytes, other: bytes, number: int, *more: Any) -> list[Action] | None:
        actions = super()._due(what, role, buffer, other, number, *more)
        for place, action in enumerate(actions or ()):
            match action:
                case Accumulate():
                    self._count(action.into)
                    self._count(action.gradient)
                case Update():
                    if self._under_way is not None or (self._clips and not self._norms.complete):
                        return None
                    self._count(action.gradient)
                    assert actions is not None
                    actions[place] = self._stepping(action)
                case Copy():
                    self._tell(number)
                case Save():
                    self._saved.append((number, self.timestamp))
                case Send() if action.buffer == WEIGHTS:
                    self._final = True
                    self._tell(number)
                case _:
                    pass
        return actions

    def _measured(self, event: Measured, now: float) -> list[Action]:
        self._norms.measured = True
        return [*(Send(self._first, message) for message in _told(self.id, event)), *self._go_on_at(now)]

    def _heard_norms(self, event: Received, now: float) -> list[Action]:
        self._norms.hear(event.message)
        return self._go_on_at(now)

    def _tell(self, front: int) -> None:
        """Enters into the table of events which of its weights go with those of the parameter server."""
        if self._merged:
            text = f"a snapshot has the first layers of update {front}, and the last ones of {self.timestamp}"
            self._outbox.add(
                Kind.EVENTS, b"stages", self.id, 0, front, self.timestamp, self._now - self._began, 0.0, text.encode()
            )

    def _count(self, gradient: str) -> None:
        """The gradient in that buffer is part of the next update."""
        learner = int(gradient.rpartition(" ")[2])
        if learner not in self._counted:
            self._counted.append(learner)

    def _read(self, event: Received, now: float) -> list[Action]:
        self._now = now
        return super()._read(event, now) + self._go_on_at(now)

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
            reported = Message(Kind.REPORTED, self.id, front)
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
            self._outbox.add(Kind.STAGES, event.timestamp, *about, staleness, rate, *times, digest)
        told = self._ledger.note(event, now) if self._merged else super()._stepped(event, now)
        return [*told, *self._outbox.due(now), *self._report(now), *self._leave(now)]

    # The end, of learners and of all.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        self._shipped = deque(shipped for shipped in self._shipped if shipped.message.sender != event.role)
        return self._go_on_at(now)

    def _end(self, event: Received, now: float) -> list[Action]:
        self._ending = True
        return self._leave(now)

    def _leave(self, now: float) -> list[Action]:
        """Reports the last rows once no learner is left and nothing is under way."""
        if not self._ending or self._under_way is not None or self._update is not None or self._updating:
            return []
        self._ending = False
        return [*self._outbox.flush(now), Send(self.plan.statistics, Message(Kind.BYE, self.id))]


def _activations_of(learner: int) -> str:
    return f"{ACTIVATIONS} {learner}"


def _returned_of(learner: int) -> str:
    return f"{RETURNED} {learner}"
