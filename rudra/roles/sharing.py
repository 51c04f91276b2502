"""Sharing among averaging learners: a compute group shares nothing, one replica, or a reference that corrects replicas.

`rudra.roles.averaging` describes the averages over all learners. With sharing, the group also performs one reduction
per mini-batch. All members compute the shared vector by the same operations on the same numbers, so their copies are
bitwise identical. Only sums of groups leave the group (`Plan.partial_sums`).
"""

from typing import Self

from protocols import Averaging
from rudra.core.actions import Action, PullReplica, Reduce, ResetReplica, StepReplica
from rudra.core.buffer_names import CORRECTION, DIFFERENCE, GRADIENT, REFERENCE, REPLICA, WEIGHTS
from rudra.core.records import Gradient
from topologies import Plan
from topologies.kinds import EVERYBODY


class OwnReplica:
    """No sharing: each learner has its own replica.

    Args:
        rule: rule for averaging.

    Attributes:
        everybody: number that identifies reductions over all learners.
        pools: whether gradients are averaged over the group before a step.
        busy: whether the next step must wait for a correction.
        correcting: whether this correction is being made, after its reduction.
    """

    everybody = 0
    pools = busy = correcting = False

    def __init__(self, rule: Averaging) -> None:
        self._rule = rule

    @property
    def waiting_for(self) -> str:
        """Description for people of the learner's wait for its group, or an empty string."""
        return ""

    def follow(self, rule: Averaging) -> None:
        """Continues with another rule. No reduction is under way."""
        self._rule = rule

    def restart(self, *, keeps_momentum: bool) -> list[Action]:
        """Sets the replica to the weights."""
        return [ResetReplica(REPLICA, WEIGHTS, keeps_momentum)]

    def pool(self, gradient: Gradient) -> Action:
        """Averages the gradient of a mini-batch over the group."""
        raise NotImplementedError

    def step(self, rate: float, *, ends_period: bool) -> StepReplica:
        """Steps the replica at a learning rate."""
        if not ends_period:
            return StepReplica(GRADIENT, REPLICA, rate)
        return StepReplica(
            GRADIENT, REPLICA, rate, WEIGHTS, DIFFERENCE, self._rule.elasticity if self._rule.early else None
        )

    def correct(self, gradient: Gradient, *, ends_period: bool) -> Action | None:
        """Begins to correct the shared vector after a step. Returns None if the group does not correct one."""
        return None

    def reduced(self) -> list[Action]:
        """Notes the end of the reduction over the group, and corrects the shared vector."""
        return []

    def corrected(self) -> bool:
        """Notes that the correction is made. Returns whether a period ends with it."""
        return False

    def catch_up(self, other: Self) -> None:
        """Takes over the state of a learner of the same group that did the same."""


class _Group:
    """Reductions over the compute group of a learner."""

    def __init__(self, plan: Plan, role: int) -> None:
        group = plan.roles[role].group
        assert group is not None
        self.number, self.size = group, len(plan.group_of(role))
        self.added = 0  # mini-batches since all learners began

    def reduce(self, buffer: str, gradient: Gradient) -> Action:
        """Averages a buffer over the group, weighted by the samples of this mini-batch."""
        self.added += 1
        return Reduce(buffer, self.number, self.added, gradient, True)


class GroupReplica(OwnReplica):
    """Sharing of one replica: each member steps its copy by the mean of the group's gradients.

        COMPUTING  gradient ready   -> POOLING   average over the group
        POOLING    averaged         -> STEPPING, or HOLDING

    Source: omnivore.txt §IV-A for the compute groups. In the average each group is one learner of batch kμ.

    Args:
        rule: rule for averaging.
        plan: roles of the run and their connections.
        role: id of the learner.
    """

    everybody = EVERYBODY
    pools = True

    def __init__(self, rule: Averaging, plan: Plan, role: int) -> None:
        super().__init__(rule)
        self._group = _Group(plan, role)
        self._pooling = False

    @property
    def waiting_for(self) -> str:
        return f"the gradients of compute group {self._group.number}" if self._pooling else ""

    def pool(self, gradient: Gradient) -> Action:
        self._pooling = True
        return self._group.reduce(GRADIENT, gradient)

    def reduced(self) -> list[Action]:
        self._pooling = False
        return []


class SharedReference(OwnReplica):
    """Sharing of a reference: each member of a block has a copy of it.

    The reference corrects a replica in every step. Each step waits until the previous step has corrected the reference.
    At the end of a period the average takes the difference between the weights and the reference. At that time the
    reference includes the period's corrections from its block. The weights then correct the reference.

    Source: crossbow.txt §3.3. There a learner manages the reference. The paper does not say whether the reference
    receives the corrections that its replicas subtract, as z does, or whether it is a replica itself. Here the
    reference receives these corrections, and it is not a replica.

    Args:
        rule: rule for averaging.
        plan: roles of the run and their connections.
        role: id of the learner.
    """

    everybody = EVERYBODY

    def __init__(self, rule: Averaging, plan: Plan, role: int) -> None:
        self._group = _Group(plan, role)
        self.follow(rule)
        self.busy = self.correcting = self._ends = False

    def follow(self, rule: Averaging) -> None:
        super().follow(rule)
        self._elasticity = rule.local_elasticity(self._group.size)

    @property
    def waiting_for(self) -> str:
        return f"the replicas of block {self._group.number}" if self.busy else ""

    def restart(self, *, keeps_momentum: bool) -> list[Action]:
        return [*super().restart(keeps_momentum=keeps_momentum), ResetReplica(REFERENCE, WEIGHTS)]

    def step(self, rate: float, *, ends_period: bool) -> StepReplica:
        return StepReplica(GRADIENT, REPLICA, rate, REFERENCE, CORRECTION, self._elasticity)

    def correct(self, gradient: Gradient, *, ends_period: bool) -> Action | None:
        self.busy, self._ends = True, ends_period
        return self._group.reduce(CORRECTION, gradient)

    def reduced(self) -> list[Action]:
        self.correcting = True
        rate = self._elasticity * self._group.size
        if not self._ends:
            return [StepReplica(CORRECTION, REFERENCE, rate)]
        move = StepReplica(CORRECTION, REFERENCE, rate, WEIGHTS, DIFFERENCE)
        return [move, PullReplica(REFERENCE, WEIGHTS, self._rule.elasticity)]

    def corrected(self) -> bool:
        self.busy = self.correcting = False
        return self._ends

    def catch_up(self, other: Self) -> None:
        self.busy, self.correcting, self._ends = other.busy, other.correcting, other._ends
        self._group.added = other._group.added


def sharing_of(rule: Averaging, plan: Plan, role: int) -> OwnReplica:
    """Returns the kind of sharing that the plan sets for a learner."""
    if plan.sharing == "nothing":
        return OwnReplica(rule)
    return GroupReplica(rule, plan, role) if plan.sharing == "replica" else SharedReference(rule, plan, role)
