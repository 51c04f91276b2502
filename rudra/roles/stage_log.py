"""Log of the deciding owner for the stage servers, which own the last layers (`rudra.roles.stage_server`).

The deciding owner is a parameter server, the first of several, or the first learner if there is no server. The log
lists decisions about all layers: snapshots and checkpoints. With rule `synchronous` it also lists the added gradients,
in order, and the learning rate of each update.
"""

from collections.abc import Iterable, Sequence

from msgspec import structs

from rudra.core.actions import (
    Accumulate,
    Action,
    AverageGroup,
    ComputeNorms,
    Copy,
    DeclareLost,
    FollowJob,
    Reconfigure,
    Save,
    Send,
    Update,
)
from rudra.core.buffer_names import GRADIENT, SNAPSHOT, WEIGHTS
from rudra.core.events import NormsComputed
from rudra.core.messages import GradientNorms, LearnersLeft, MessageKind, WeightsPart
from rudra.core.records import Gradient
from rudra.roles.machine import Setup
from rudra.roles.multi_owner import Log
from rudra.roles.norms import Clipping, told
from topologies import Plan


def gradient_of(learner: int) -> str:
    """Returns the name of the stage server's buffer for its gradient of a learner's mini-batch."""
    return f"{GRADIENT} {learner}"


class StageLog:
    """Log of a deciding owner's actions, which the stage servers carry out.

    Args:
        role: id of the deciding owner.
        setup: arguments of the owner's role.
        stages: ids of the stage servers. If there are none, the log stays empty.

    Attributes:
        stages: ids of the stage servers.
        synchronous: whether the stage servers make the same updates as the owner.
    """

    def __init__(self, role: int, setup: Setup, stages: tuple[int, ...]) -> None:
        self.stages = stages
        self._log = Log(role, stages)
        self._id, self._statistics = role, setup.plan.statistics
        self.synchronous = bool(stages) and setup.job.placement.rule == "synchronous"
        self._clips = self.synchronous and setup.job.optimizer.clip_norm is not None
        self._clipping = Clipping()
        self._average: str | None = None  # the stage server's buffer for the next update
        self._samples = 0
        self._timestamp = setup.position.timestamp
        if stages:
            self._reset_for_plan(setup.plan)

    def _reset_for_plan(self, plan: Plan) -> None:
        """Resets the log's state. All roles begin with this plan, and nothing is under way."""
        self._plan = plan
        self._role_of = {plan.roles[role].index: role for role in plan.learners}
        self._forget()

    def _forget(self) -> None:
        self._average, self._samples = None, 0

    def add(self, gradients: Sequence[Gradient], scale: float) -> None:
        """Logs the gradients of these mini-batches for the next update, if the rule is `synchronous`.

        The stage server averages the gradients of a compute group in the group's order. Gradients that tree servers
        have averaged for the other layers are added one by one.
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
                self._log.add(AverageGroup(buffer))
            self._samples += samples
            if self._average is not None:
                self._log.add(Accumulate(self._average, buffer, samples / self._samples, scale))
                continue
            self._average = buffer
            if scale != 1.0:
                self._log.add(Accumulate(buffer, buffer, 1.0, scale))

    def share(self, actions: Iterable[Action]) -> list[Action]:
        """Returns the decided actions that the owner itself carries out. The stage servers do the rest by the log."""
        own = [each for action in actions for each in self._own(action)]
        own = [*self._log.told(), *own]
        return self._clipping.in_turn(own) if self._clips else own

    def _own(self, action: Action) -> list[Action]:
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
                action = Save(action.weights, action.position)  # the stage servers survive the loss of other roles
                self._log.add(action, self._timestamp)
            case Copy() if action.target == SNAPSHOT:
                self._log.add(action, self._timestamp)
            case DeclareLost() | FollowJob():
                self._log.add(action)
            case Reconfigure():
                self._log.add(action)
                self._reset_for_plan(action.plan)
            case Update() if self.synchronous:
                assert self._average is not None
                about = (action.timestamp, action.epoch, action.samples, action.time_s)
                if self._clips:
                    self._log.add(ComputeNorms(self._average))
                update = Update(self._average, WEIGHTS, action.learning_rate, *about)
                over_time = {"average": action.average, "average_weight": action.average_weight}
                self._log.add(structs.replace(update, **over_time))
                self._forget()
        return [action]

    def measured(self, event: NormsComputed) -> list[Action]:
        """Sends the norms of the owner's part of a gradient to the stage servers."""
        self._clipping.norms.measured = True
        return [Send(stage, message) for stage in self.stages for message in told(self._id, event)]

    def hear_norms(self, message: GradientNorms) -> None:
        """Records the norms of a stage server's part of a gradient."""
        self._clipping.norms.hear(message)

    def end(self) -> list[Action]:
        """Notifies the stage servers that no learner is left."""
        return [Send(stage, LearnersLeft(self._id)) for stage in self.stages]
