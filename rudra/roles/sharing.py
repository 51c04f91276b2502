"""Sharing of learners that average: a compute group shares nothing, one replica, or a reference that corrects replicas.

`rudra.roles.averaging` says what learners do with all others. With sharing there is a reduction inside the group for
each mini-batch. All members compute what they share by the same operations on the same numbers, so that they agree bit
for bit. Only sums of groups leave the group (`Plan.partial_sums`).
"""

from protocols import Averaging
from rudra.core.events import (
    CORRECTION,
    DIFFERENCE,
    GRADIENT,
    REFERENCE,
    REPLICA,
    WEIGHTS,
    Action,
    PullReplica,
    Reduce,
    ResetReplica,
    StepReplica,
)
from rudra.core.records import Gradient
from topologies import Plan
from topologies.kinds import EVERYBODY


class OwnReplica:
    """Sharing of nothing: each learner has a replica of its own.

    Args:
        rule: of averaging.

    Attributes:
        everybody: number by which reductions over all learners are called.
        pools: whether gradients are averaged over the group before a step.
        busy: whether a correction is under way that the next step needs.
    """

    everybody = 0
    pools = False
    busy = False

    def __init__(self, rule: Averaging) -> None:
        self._rule = rule

    @property
    def waiting_for(self) -> str:
        """What a learner waits for inside its group, for people; empty if it does not wait."""
        return ""

    def restart(self, *, keeps_momentum: bool) -> list[Action]:
        """Sets the replica to the weights."""
        return [ResetReplica(REPLICA, WEIGHTS, keeps_momentum)]

    def pool(self, gradient: Gradient) -> Action:
        """Averages the gradient of a mini-batch over the group."""
        raise NotImplementedError

    def step(self, rate: float, *, ends_period: bool) -> StepReplica:
        """Steps the replica at a rate."""
        if not ends_period:
            return StepReplica(GRADIENT, REPLICA, rate)
        return StepReplica(
            GRADIENT, REPLICA, rate, WEIGHTS, DIFFERENCE, self._rule.elasticity if self._rule.early else None
        )

    def correct(self, gradient: Gradient, *, ends_period: bool) -> Action | None:
        """Begins to correct what the group shares after a step; None: nothing is corrected."""
        return None

    def reduced(self) -> list[Action]:
        """Takes note that the reduction over the group is over; corrects what the group shares."""
        return []

    def corrected(self) -> bool:
        """The correction is made; returns whether a period ends with it."""
        return False


class _Group:
    """Reductions over the compute group of a learner."""

    def __init__(self, plan: Plan, role: int) -> None:
        group = plan.roles[role].group
        assert group is not None
        self.number, self.size = group, len(plan.group_of(role))
        self._added = 0  # mini-batches, since all began

    def reduce(self, buffer: str, gradient: Gradient) -> Action:
        """Averages a buffer over the group, weighted by the samples of this mini-batch."""
        self._added += 1
        return Reduce(buffer, self.number, self._added, gradient, True)


class GroupReplica(OwnReplica):
    """Sharing of one replica: each member steps its own copy by the mean of the group's gradients.

        COMPUTING  gradient ready   -> POOLING   average over the group
        POOLING    averaged         -> STEPPING, or HOLDING

    Source: the groups are those of omnivore.txt §IV-A; in the average each group is one learner of batch kμ.

    Args:
        rule: of averaging.
        plan: who is who.
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
    """Sharing of a reference, of which each member of a block has a copy.

    The reference corrects a replica in every step, which waits for the last step's correction of the reference. At the
    end of a period the average takes the difference between the weights and the reference. The reference then has this
    period's corrections of its block, and is corrected itself.

    Source: crossbow.txt §3.3. There a learner manages the reference. The paper does not say whether the reference
    gets what its replicas give up, as z does, and whether it is a replica itself. Here it gets that, and is none.

    Args:
        rule: of averaging.
        plan: who is who.
        role: id of the learner.
    """

    everybody = EVERYBODY

    def __init__(self, rule: Averaging, plan: Plan, role: int) -> None:
        super().__init__(rule)
        self._group = _Group(plan, role)
        self._elasticity = rule.local_elasticity(self._group.size)
        self.busy = self._ends = False

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
        rate = self._elasticity * self._group.size
        if not self._ends:
            return [StepReplica(CORRECTION, REFERENCE, rate)]
        move = StepReplica(CORRECTION, REFERENCE, rate, WEIGHTS, DIFFERENCE)
        return [move, PullReplica(REFERENCE, WEIGHTS, self._rule.elasticity)]

    def corrected(self) -> bool:
        self.busy = False
        return self._ends


def sharing_of(rule: Averaging, plan: Plan, role: int) -> OwnReplica:
    """Returns the sharing of a learner by its plan."""
    if plan.sharing == "nothing":
        return OwnReplica(rule)
    return GroupReplica(rule, plan, role) if plan.sharing == "replica" else SharedReference(rule, plan, role)
