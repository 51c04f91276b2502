"""A learner that exchanges its replica only with a server: asynchronous elastic averaging.

Source: Zhang et al. 2015, Algorithm 1. Once per period the learner sends its replica to the server, and receives the
weights. It computes the next mini-batch in parallel, so the replica that it sends does not include that mini-batch.
The server moves the weights by α towards the replica before it returns them. So the replica moves by α/(1 - α) of the
remaining distance.

    COMPUTING  gradient ready               -> STEPPING, or EXCHANGING if the exchange is not over
    EXCHANGING weights received             -> STEPPING
    STEPPING   stepped and corrected        -> COMPUTING
    any        stop                         -> STOPPED    when no transfer is under way
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar

from protocols import Averaging
from rudra.core.actions import Action, ResetReplica, Send, StepReplica
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import Computed, Received, ReplicaStepped, Sent
from rudra.core.messages import MessageKind, PushedGradient, Stop, Weights
from rudra.core.records import Gradient
from rudra.roles.learner import DROPPED, Learner, LearnerState
from rudra.roles.machine import Setup, States, Transition, self_loops
from rudra.roles.optimizer_settings import changed_settings
from rudra.roles.periods import joined

COMPUTING, EXCHANGING, STEPPING = LearnerState.COMPUTING, LearnerState.EXCHANGING, LearnerState.STEPPING
STOPPED = LearnerState.STOPPED


class ReplicaSteps:
    """Steps of a replica that only a server corrects.

    Args:
        setup: arguments of the role.

    Attributes:
        rule: averaging rule of the protocol.
    """

    def __init__(self, setup: Setup) -> None:
        self.rule = Averaging.of(setup.job.make_protocol(setup.plan))
        self._samples = setup.job.training.minibatch_size
        self._schedule, self._training_samples = setup.schedule, setup.training_samples
        self._timestamp, self._samples_before = setup.position.timestamp, setup.position.samples

    def step(self, timestamp: int, made: int, *, corrects: bool) -> StepReplica:
        """Returns the action that steps the replica.

        Args:
            timestamp: timestamp of the weights that corrected the replica last, or that correct it with this step.
            made: number of mini-batches since then, including this one.
            corrects: whether the step also corrects the replica.
        """
        updates = timestamp - self._timestamp  # as if all of them had the same size
        before = self._samples_before + updates * self.rule.period * self._samples
        epoch, progress = before // self._training_samples, (before + made * self._samples) / self._training_samples
        rate = self._schedule.rate(epoch, progress, timestamp)
        if not corrects:
            return StepReplica(GRADIENT, REPLICA, rate)
        return StepReplica(GRADIENT, REPLICA, rate, WEIGHTS, DIFFERENCE, self.rule.answered_elasticity)


class ElasticLearner(Learner):
    """Learner that steps its own replica, with the arguments of `Learner`."""

    __slots__ = ("_exchanging", "_made", "_moved", "_period", "_settings", "_step_began_at", "_steps")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **Learner.TRANSITIONS,
        (COMPUTING, Computed): Transition("_push", EXCHANGING, STEPPING, STOPPED),
        **self_loops(
            [COMPUTING], {Sent: "_delivered", MessageKind.TIMESTAMP: "_answered", MessageKind.WEIGHTS: "_pulled"}
        ),
        (EXCHANGING, Sent): Transition("_delivered", EXCHANGING, STEPPING, STOPPED),
        (EXCHANGING, MessageKind.TIMESTAMP): Transition("_answered", EXCHANGING),
        (EXCHANGING, MessageKind.WEIGHTS): Transition("_pulled", EXCHANGING, STEPPING, STOPPED),
        (STEPPING, ReplicaStepped): Transition("_stepped", COMPUTING, STOPPED),
        (STEPPING, MessageKind.STOP): Transition("_stop_soon", STEPPING),
        (STEPPING, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._steps = ReplicaSteps(setup)
        self._settings = changed_settings(role, setup.phases_in_effect, setup.job, setup.plan)
        self._period = self._steps.rule.period
        self._made: list[Gradient] = []  # one for each step since the last exchange
        self._exchanging = self._moved = False

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        return [*self._settings, ResetReplica(REPLICA, WEIGHTS), *super()._first_weights(event, now)]

    def _next(self, now: float) -> list[Action]:
        self.state = COMPUTING
        compute = self.log.begin(REPLICA, GRADIENT, self.timestamp, now)
        if len(self._made) < self._period:
            return [compute]
        gradient, self._made = joined(self._made, self.timestamp), []
        self.pushed += 1
        self._pushed_at, self._delivered_at, self._answered_at = now, None, None
        self._exchanging, self._moved = True, True
        message = PushedGradient(self.id, self.timestamp, self.timestamp, (gradient,))
        return [Send(self.server, message, REPLICA), compute]

    def _push(self, event: Computed, now: float) -> list[Action]:
        self._computed_at = now
        actions, fails = self.log.enter(event, self.timestamp, now)
        if fails:
            return actions
        if self._stopping:
            self.state = EXCHANGING
            return [*actions, *self._advance(now)]
        self._made.append(self.log.describe(event, self.timestamp))
        if self._exchanging:
            self.state = EXCHANGING
            return actions
        return [self._step(now), *actions]

    def _step(self, now: float) -> Action:
        self.state, self._step_began_at = STEPPING, now
        moved, self._moved = self._moved, False
        return self._steps.step(self.timestamp, len(self._made), corrects=moved)

    def _stepped(self, event: ReplicaStepped, now: float) -> list[Action]:
        if isfinite(event.distance):
            distance = event.distance / (1 - self._steps.rule.elasticity)  # before the server moved the weights
            about = (self.timestamp, self.log.learner, 0)
            self.log.diary.add(MessageKind.AVERAGES, *about, distance, self._steps.rule.elasticity * distance)
        self.log.spend(0.0, 0.0, self._step_began_at - self._computed_at, 0.0, now - self._step_began_at)
        due = self.log.due(now)
        return due + (self._leave(now) if self._stopping else self._next(now))

    def _advance(self, now: float) -> list[Action]:
        """Continues when the exchange is over."""
        under_way = self._delivered_at is None or self._expects_weights
        if self._exchanging and (under_way or (self._answered_at is None and not self._stopping)):
            return []
        self._exchanging = False
        if self.state is not EXCHANGING:
            return []
        return self._leave(now) if self._stopping else [self._step(now)]

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        self._stopping = True
        if event.message.pushed == DROPPED and self.state is EXCHANGING:
            return self._leave(now)
        return self._advance(now)

    def _leave(self, now: float) -> list[Action]:
        if self.state is EXCHANGING:  # its gradient makes no step
            self.log.report_unused()
        for _ in self._made:  # these are not pushed any more
            self.log.take_back()
        return super()._leave(now)
