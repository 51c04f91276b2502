"""Learners and owners of the first layers, where a stage server has the last ones (`rudra.roles.stage_server`).

A front is any learner, with any server or none, that knows one thing more. What a learner does between asking for a
gradient and having it is a crossing: it computes what its layers make of the mini-batch, ships these activations, gets
their gradient back, with loss and errors, and computes that of its own layers. All else, such as what it pushes, to
whom, and when it goes on, is as ever.

And who decides about the weights, be it a parameter server, the first of several, or the first of all learners where
there is none, has a log for the stage server of what concerns all layers: snapshots and checkpoints, and with rule
`synchronous` which gradients are added, in which order, and at which rate the update is made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rudra.core.digest import digest_of
from rudra.core.events import (
    ACTIVATIONS,
    GRADIENT,
    RETURNED,
    SNAPSHOT,
    WEIGHTS,
    Accumulate,
    Action,
    Backward,
    Combine,
    Compute,
    Copy,
    Drop,
    Event,
    Forward,
    Forwarded,
    Measure,
    Measured,
    Receive,
    Received,
    Reduced,
    Regroup,
    Save,
    Send,
    Sent,
    Update,
    Updated,
)
from rudra.core.messages import (
    ActivationGradient,
    Activations,
    GradientNorms,
    LearnersLeft,
    MessageKind,
    OwnerStepped,
    PushedGradient,
    WeightsPart,
)
from rudra.core.records import Gradient
from rudra.roles.group_learner import GroupLearner
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.machine import Machine, Setup, States, Transition, self_loops
from rudra.roles.multi_owner import Log, MultiOwnerServer, OwnerSteps
from rudra.roles.norms import Clipping, told
from rudra.roles.overlapped import OverlappedLearner
from rudra.roles.replica import ALIVE, Replica, ReplicaState
from rudra.roles.server import ALIVE as SERVER_ALIVE
from rudra.roles.server import ServerState
from rudra.roles.sharded import FirstShard, ShardedLearner
from topologies import Plan

NAN = float("nan")


def gradient_of(learner: int) -> str:
    """The stage server's buffer for its gradient of a learner's mini-batch."""
    return f"{GRADIENT} {learner}"


class StageCrossing:
    """The way of one learner's mini-batch through the stage server, between `Compute` and `Computed`.

    Args:
        role: id of the learner.
        plan: who is who.
    """

    def __init__(self, role: int, plan: Plan) -> None:
        self._role, self._learner = role, plan.roles[role].index
        self._stage = plan.stage_of(role)
        self._name = plan.roles[self._stage].name
        self._wanted: Compute | None = None
        self._forwarded = self._shipped = False
        self._outcome: Gradient | None = None

    @property
    def waiting_for(self) -> str:
        return f"the {self._name} to return the gradient of its activations" if self._forwarded else ""

    def begin(self, action: Compute) -> Action:
        """What to do in place of computing the gradient of all layers."""
        self._wanted, self._outcome = action, None
        self._forwarded = self._shipped = False
        return Forward(action.step, action.work, action.weights, ACTIVATIONS)

    def take(self, event: Forwarded | Sent | Received[ActivationGradient]) -> list[Action]:
        """What follows from it."""
        assert self._wanted is not None
        if isinstance(event, Forwarded):
            return self._ship(self._wanted)
        if isinstance(event, Sent):
            self._shipped = True
        else:
            (self._outcome,) = event.message.gradients
        return self._go_back(self._wanted)

    def _ship(self, wanted: Compute) -> list[Action]:
        self._forwarded = True
        work = wanted.work
        about = (self._learner, work.count, wanted.step, work.first, wanted.timestamp)
        gradient = Gradient(-1, *about, -1, 1.0, NAN, NAN, work.stream)
        message = Activations(self._role, wanted.timestamp, (gradient,))
        return [Receive(RETURNED, self._stage), Send(self._stage, message, ACTIVATIONS)]

    def _go_back(self, wanted: Compute) -> list[Action]:
        """Computes the gradient of its own layers, once that of the activations is here, which may be overwritten."""
        found = self._outcome
        if found is None or not self._shipped:
            return []
        self._wanted, self._forwarded = None, False
        outcome = (found.loss, found.errors, found.samples)
        return [
            Backward(wanted.step, wanted.weights, RETURNED, wanted.gradient, *outcome, wanted.timestamp, wanted.time_s)
        ]


def crossing(table: Mapping[tuple[States, Any], Transition], computing: States) -> dict[tuple[States, Any], Transition]:
    """The table of a learner whose gradients cross: what happens to one before `Computed`, while it computes.

    Args:
        table: of the learner.
        computing: its state meanwhile.
    """
    sent = table.get((computing, Sent))
    rows = self_loops([computing], {Forwarded: "_cross", MessageKind.ACTIVATION_GRADIENT: "_cross"})
    return {**table, **rows, (computing, Sent): Transition("_sent", *(sent.states if sent else (computing,)))}


if TYPE_CHECKING:
    _Learner = Machine
else:
    _Learner = object


class _Crosses(_Learner):
    """What is different in a learner that has the first layers only: its gradients cross."""

    __slots__ = ()
    _crossing: StageCrossing

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        return [self._crossing.begin(action) if type(action) is Compute else action for action in actions]

    @property
    def waiting_for(self) -> str:
        return self._crossing.waiting_for or super().waiting_for

    def _cross(self, event: Any, now: float) -> list[Action]:
        return self._crossing.take(event)

    def _sent(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == ACTIVATIONS:
            return self._crossing.take(event)
        handle: Callable[[Sent, float], list[Action]] = getattr(self, self._RETURNED)
        return handle(event, now)

    _RETURNED = "_in_vain"
    """The method for other tensors that are back while it computes."""


class FirstStageLearner(_Crosses, Learner):
    """A learner that has the first layers only; arguments as for `Learner`, as of the next three.

    While COMPUTING, in this order: activations ready -> ship them; delivered, and their gradient is here -> compute
    that of its own layers. So the time to compute its gradient has all of that in it.
    """

    __slots__ = ("_crossing",)

    TRANSITIONS = crossing(Learner.TRANSITIONS, LearnerState.COMPUTING)

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._crossing = StageCrossing(role, setup.plan)


class FirstStageGroupLearner(_Crosses, GroupLearner):
    """A member of a compute group that has the first layers only."""

    __slots__ = ("_crossing",)

    TRANSITIONS = crossing(GroupLearner.TRANSITIONS, LearnerState.COMPUTING)
    _RETURNED = "_handed_on"

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._crossing = StageCrossing(role, setup.plan)


class FirstStageShardedLearner(_Crosses, ShardedLearner):
    """A learner that has the first layers only, and exchanges them part by part."""

    __slots__ = ("_crossing",)

    TRANSITIONS = crossing(ShardedLearner.TRANSITIONS, LearnerState.COMPUTING)

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._crossing = StageCrossing(role, setup.plan)


class FirstStageOverlappedLearner(_Crosses, OverlappedLearner):
    """A learner that has the first layers only, and pushes and pulls beside computing."""

    __slots__ = ("_crossing",)

    TRANSITIONS = crossing(OverlappedLearner.TRANSITIONS, LearnerState.COMPUTING)
    _RETURNED = "_returned"

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._crossing = StageCrossing(role, setup.plan)


class StageLog:
    """What the stage server has to do, in the order in which who decides about the first layers does it.

    Args:
        role: id of who decides.
        setup: what it is made from.

    Attributes:
        synchronous: the stage server updates as this one does.
    """

    def __init__(self, role: int, setup: Setup) -> None:
        self.stages = setup.plan.stages
        self._log = Log(role, self.stages)
        self._id, self._statistics = role, setup.plan.statistics
        self.synchronous = setup.job.placement.rule == "synchronous"
        self.clips = self.synchronous and setup.job.optimizer.clip_norm is not None
        self._average: str | None = None  # the stage server's buffer that the next update takes
        self._samples = 0
        self._timestamp = setup.position.timestamp
        self.follow(setup.plan)

    def follow(self, plan: Plan) -> None:
        """Everybody begins by this plan; nothing is under way."""
        self._plan = plan
        self._role_of = {plan.roles[role].index: role for role in plan.learners}
        self._forget()

    def _forget(self) -> None:
        self._average, self._samples = None, 0

    def told(self) -> list[Action]:
        return self._log.told()

    def take_in(self, gradients: Sequence[Gradient], scale: float) -> None:
        """Gradients of the first layers are in the next update, which were averaged already if they are several.

        Those of a compute group were so in its order, and the stage server does that likewise; others, which servers of
        a tree have averaged, it adds one by one.
        """
        if not self.synchronous:
            return
        by_group: dict[tuple[int, ...], int] = {}
        for gradient in gradients:
            members = self._plan.group_of(self._role_of[gradient.learner])
            by_group[members] = by_group.get(members, 0) + gradient.samples
        for members, samples in by_group.items():
            buffer = gradient_of(members[0])
            if len(members) > 1:
                self._log.add(Combine(buffer))
            self._samples += samples
            if self._average is not None:
                self._log.add(Accumulate(self._average, buffer, samples / self._samples, scale))
                continue
            self._average = buffer
            if scale != 1.0:
                self._log.add(Accumulate(buffer, buffer, 1.0, scale))

    def of(self, action: Action) -> list[Action]:
        """What who decides does of what it wants done; what concerns the stage server, too, is in the log then."""
        if isinstance(action, Update):
            self._timestamp = action.timestamp
        match action:
            case Send(buffer=str(buffer)) if action.to == self._statistics:
                part = Send(action.to, WeightsPart(self._id), buffer)
                self._log.add(part, self._timestamp)
                bare = action.message.kind is MessageKind.SNAPSHOT
                return [Send(action.to, action.message), part] if bare else [part]
            case Send() if action.to == self._statistics and action.message.kind is MessageKind.START:
                return [action, *(Send(stage, action.message) for stage in self.stages)]
            case Save():
                action = Save(action.weights, action.position)  # of the last layers, too, whoever else is lost
                self._log.add(action, self._timestamp)
            case Copy() if action.target == SNAPSHOT:
                self._log.add(action, self._timestamp)
            case Drop():
                self._log.add(action)
            case Regroup():
                self._log.add(action)
                self.follow(action.plan)
            case Update() if self.synchronous:
                assert self._average is not None
                about = (action.timestamp, action.epoch, action.samples, action.time_s)
                if self.clips:
                    self._log.add(Measure(self._average))
                self._log.add(Update(self._average, WEIGHTS, action.learning_rate, *about))
                self._forget()
        return [action]

    def end(self) -> list[Action]:
        """What tells stage servers that no learner is left."""
        return [Send(stage, LearnersLeft(self._id)) for stage in self.stages]


class FirstStageParameterServer(MultiOwnerServer):
    """The parameter server of the first layers; arguments as for `ParameterServer`.

    It takes gradients as any parameter server does.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **MultiOwnerServer.TRANSITIONS,
        **self_loops(SERVER_ALIVE, {Measured: "_measured", MessageKind.NORMS: "_heard_norms"}),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._stage_log = StageLog(role, setup)
        if self._stage_log.synchronous:
            self.steps = OwnerSteps(setup.plan.owners)
        self._clipping = Clipping()

    def handle(self, event: Any, now: float) -> list[Action]:
        wanted = super().handle(event, now)
        actions = [each for action in wanted for each in self._stage_log.of(action)]
        actions = [*self._stage_log.told(), *actions]
        return self._clipping.in_turn(actions) if self._stage_log.clips else actions

    def _measured(self, event: Measured, now: float) -> list[Action]:
        self._clipping.norms.measured = True
        return [Send(stage, message) for stage in self._stage_log.stages for message in told(self.id, event)]

    def _heard_norms(self, event: Received[GradientNorms], now: float) -> list[Action]:
        self._clipping.norms.hear(event.message)
        return []

    def _add(self, buffer: str, message: PushedGradient) -> list[Action]:
        scale = self._gradient_weight(self.ledger.timestamp - message.gradients[0].timestamp)
        self._stage_log.take_in(message.gradients, scale)
        return super()._add(buffer, message)

    def _close(self, now: float) -> list[Action]:
        draining = self.state is ServerState.DRAINING
        actions = super()._close(now)
        return [*actions, *self._stage_log.end()] if draining and self.state is ServerState.CLOSING else actions


class FirstStageFirstShard(FirstStageParameterServer, FirstShard):
    """The first of several parameter servers of the first layers; arguments as for `ParameterServer`."""

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = FirstShard.TRANSITIONS


class FirstStageReplica(_Crosses, Replica):
    """A learner of the only group that has the first layers only; arguments as for `Replica`.

    The first one decides. The row of an update is complete when the stage server has made it, too, and so is the
    account of the training; learners do not wait for that.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **crossing(Replica.TRANSITIONS, ReplicaState.COMPUTING),
        **self_loops(
            [ReplicaState.REGROUPING], dict.fromkeys((Forwarded, MessageKind.ACTIVATION_GRADIENT), "_in_vain")
        ),
        (ReplicaState.REGROUPING, Sent): Transition("_sent_before", ReplicaState.REGROUPING),
        **self_loops(ALIVE, {MessageKind.STEPPED: "_stepped_there"}),
    }
    _RETURNED = "_returned"

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._crossing = StageCrossing(role, setup.plan)
        self._stage_log = StageLog(role, setup) if self._leads else None
        joint = self._stage_log is not None and self._stage_log.synchronous
        self._steps = OwnerSteps(setup.plan.owners if joint else (role,))

    def handle(self, event: Event, now: float) -> list[Action]:
        wanted, log = super().handle(event, now), self._stage_log
        if log is None:
            return wanted
        actions = [each for action in wanted for each in log.of(action)]
        return [*log.told(), *actions]

    def _take_in(self, event: Reduced, now: float) -> list[Action]:
        fails = super()._take_in(event, now)
        if self._stage_log is not None and not fails:
            self._stage_log.take_in(event.gradients, 1.0)
        return fails

    def _note(self, event: Updated, now: float) -> list[Action]:
        self._digest = digest_of(b"".join(event.sampled)) if event.sampled else 0
        return self._noted(self._steps.here(event), now)

    def _sent_before(self, event: Sent, now: float) -> list[Action]:
        return [] if event.buffer == ACTIVATIONS else self._returned(event, now)

    def _stepped_there(self, event: Received[OwnerStepped], now: float) -> list[Action]:
        actions = self._noted(self._steps.there(event.message), now)
        return actions + self._account(now) if self.state is ReplicaState.STOPPED else actions

    def _noted(self, made: Updated | None, now: float) -> list[Action]:
        return [] if made is None else self.ledger.note(made, now)

    def _account(self, now: float) -> list[Action]:
        if self.ledger.updating:
            return []
        actions = super()._account(now)
        return actions if self._stage_log is None else [*actions, *self._stage_log.end()]
