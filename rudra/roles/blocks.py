"""Learners that average in blocks: those of a compute group share a replica, or a reference that corrects theirs.

What they do with all others is what `rudra.roles.averaging` says of replicas. Inside a group there is a reduction for
each mini-batch. What all members have of it, they have by the same operations on the same numbers: they agree to the
last bit without telling each other. Only sums of groups go further (`Plan.partial_sums`).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rudra.core.events import (
    CORRECTION,
    DIFFERENCE,
    GRADIENT,
    REFERENCE,
    REPLICA,
    WEIGHTS,
    Action,
    Approach,
    Computed,
    Lost,
    Reduce,
    Reduced,
    Restart,
    Step,
    Stepped,
    Updated,
)
from rudra.roles.averaging import COMPUTING, HOLDING, REDUCING, REGROUPING, STEPPING, Averager
from rudra.roles.machine import States, Transition, self_loops
from rudra.roles.replica import ALWAYS, ReplicaState
from topologies import Plan
from topologies.kinds import EVERYBODY

POOLING = ReplicaState.POOLING


class Sharer(Averager):
    """One learner of a group; arguments as for `Averager`."""

    def _follow(self, plan: Plan) -> None:
        super()._follow(plan)
        group = plan.roles[self.id].group
        assert group is not None
        self._group = group
        self._mates = plan.group_of(self.id)
        self._added = 0  # mini-batches, in the group since all began

    def _in_group(self, buffer: str) -> Action:
        """Averages a buffer over the group, weighted by the samples of this mini-batch."""
        self._added += 1
        return Reduce(buffer, self._group, self._added, self._made[-1], True)


class GroupReplicaAverager(Sharer):
    """One learner of a group that trains one replica: each member steps its own copy by the mean of their gradients.

    As `Averager`, with this between:

        COMPUTING  gradient ready   -> POOLING   average over the group
        POOLING    averaged         -> STEPPING, or HOLDING

    Source: the groups are those of omnivore.txt §IV-A; to the average each is one learner of batch kμ.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **Averager.TRANSITIONS,
        **self_loops([POOLING], {**ALWAYS, Updated: "_updated"}),
        (POOLING, Lost): Transition("_lose", POOLING, REGROUPING),
        (COMPUTING, Computed): Transition("_step", POOLING),
        (POOLING, Reduced): Transition("_reduced", POOLING, STEPPING, HOLDING),
    }

    @property
    def waiting_for(self) -> str:
        return f"the gradients of compute group {self._group}" if self.state is POOLING else super().waiting_for

    def _step_or_hold(self, now: float) -> list[Action]:
        if self.state is not COMPUTING:
            return super()._step_or_hold(now)
        self.state = POOLING
        return [self._in_group(GRADIENT)]

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        return super()._reduced(event, now) if event.group == EVERYBODY else self._step_or_hold(now)


class BlockAverager(Sharer):
    """One learner of a block with a reference, of which each member has a copy.

    As `Averager`, but what a replica is corrected by is the reference, in every step, and that waits for the last one's
    correction of the reference. Where a period ends, the average takes what lies between the weights and the reference,
    which has this period's corrections of its block and is corrected itself then.

    Source: crossbow.txt §3.3. A learner manages the reference there; that it gets what its replicas give up, as z does,
    and that it is no replica itself, the paper leaves open.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **Averager.TRANSITIONS,
        **self_loops([COMPUTING, REDUCING], {Stepped: "_stepped"}),
        (HOLDING, Stepped): Transition("_stepped", HOLDING, STEPPING),
    }

    def _follow(self, plan: Plan) -> None:
        super()._follow(plan)
        self._correcting = self._ends = False  # the reference; and with that, a period

    @property
    def waiting_for(self) -> str:
        if self.state in {HOLDING, REDUCING} and self._correcting:
            return f"the replicas of block {self._group}"
        return super().waiting_for

    def _restart(self, *, keeps_momentum: bool = False) -> list[Action]:
        return [*super()._restart(keeps_momentum=keeps_momentum), Restart(REFERENCE, WEIGHTS)]

    @property
    def _holds(self) -> bool:
        return self._correcting or super()._holds

    @property
    def _elasticity(self) -> float:
        return self.rule.local_elasticity(len(self._mates))

    def _step_at(self, rate: float) -> Step:
        return Step(GRADIENT, REPLICA, rate, REFERENCE, CORRECTION, self._elasticity)

    def _stepped(self, event: Stepped, now: float) -> list[Action]:
        if self.state is not STEPPING:
            return self._corrected(event, now)
        self._stepped_at, self._step_s = now, event.seconds
        reduce = self._in_group(CORRECTION)
        self._correcting, self._ends = True, self._completes_period
        if self._ends:
            self._end_period()
        return self._reduce_and_go_on(reduce, now, quiet=self._ends and self._quiet)

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        if event.group == EVERYBODY:
            return super()._reduced(event, now)
        rate = self._elasticity * len(self._mates)
        if not self._ends:
            return [Step(CORRECTION, REFERENCE, rate)]
        move = Step(CORRECTION, REFERENCE, rate, WEIGHTS, DIFFERENCE)
        return [move, Approach(REFERENCE, WEIGHTS, self.rule.elasticity)]

    def _corrected(self, event: Stepped, now: float) -> list[Action]:
        """The reference is; where that ends a period, it goes into an average."""
        self._correcting = False
        average = [self._bring(event.distance, now)] if self._ends else []
        return [*average, *self._step_or_hold(now)] if self.state is HOLDING else average
