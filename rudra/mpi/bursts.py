"""Bursts of a rank: updates if it hosts all learners of the run, otherwise local steps (`rudra.roles.bursts`).

The learners ask for their mini-batches as usual. The rank holds these requests back until all its learners have made
one. Then it makes a burst (`rudra.compute.bank.bursts`), as long as no learner gets an event. An event for a learner
ends the burst after the round under way, and wakes all of them up.

Mini-batches whose average needs other ranks are not in a burst. The learners make them in lockstep
(`rudra.mpi.lockstep`).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from rudra.compute.bank.bursts import BankBursts, bursts_of
from rudra.compute.bank.recorded import Made
from rudra.compute.bank.recording import AHEAD
from rudra.compute.executor import Executor
from rudra.compute.learners import OwningLearnerExecutor, ReplicaExecutor
from rudra.compute.replicas import AveragerExecutor, ReferrerExecutor
from rudra.core.actions import Action, Compute, Reduce
from rudra.core.bursts import BankDone, BurstMade
from rudra.core.events import Event
from rudra.job.job import Job
from rudra.mpi.lockstep import DriverHands, Lockstep
from rudra.probe import probed
from rudra.roles.bursts import BankRecords
from rudra.roles.replica import Replica
from topologies import Plan

LONGEST_S = 0.05
"""Time that a burst should take at most, because events for its learners wait."""

FEWEST_STEPS = 2
"""Fewest local steps of a burst. It takes less time to ask learners for a single one."""


class Bursts:
    """Bursts of a rank.

    Args:
        learners: Roles of this rank that take part in the run, in learner order.
        making: Maker of the bursts.
        hands: The driver.
        alone: Whether all learners of the run are here, so that bursts may make updates (`makes_updates`).
        apart: Whether learners do not wait for each other in each mini-batch. Otherwise there is only lockstep.
        lockstep: Lockstep of the learners. None: they are asked for each mini-batch that is not in a burst.

    Attributes:
        learners: Roles of this rank that take part in the run.
    """

    def __init__(
        self,
        learners: Iterable[int],
        making: BankBursts,
        hands: DriverHands,
        *,
        alone: bool,
        apart: bool,
        lockstep: Lockstep | None,
    ) -> None:
        self.learners, self._making, self._hands = tuple(learners), making, hands
        self._alone, self._fewest_steps, self._lockstep = alone and apart, FEWEST_STEPS if apart else inf, lockstep
        self._held: dict[int, Compute] = {}
        self._records: BankRecords | None = None  # while the learners sleep
        self._under_way: deque[Made] = deque()
        self._postponed: list[tuple[int, Event]] = []
        self._most = 1  # mini-batches of each learner in the next burst
        self._asks = False  # whether the learners must compute the next mini-batch by themselves

    @probed
    def holds(self, role: int, action: Action) -> bool:
        """Returns whether a learner's request is held back, because a burst may begin with it."""
        lockstep = self._lockstep
        if (
            lockstep is not None
            and lockstep.is_on
            and role == self.learners[0]
            and lockstep.takes(action, self._fewest_steps)
        ):
            return True
        machine = self._hands.machines.get(role)
        if not isinstance(action, Compute) or not isinstance(machine, Replica):
            return False
        if lockstep is None and not self._begins_burst(machine):
            return False
        self._held[role] = action
        return True

    def reduces(self, role: int, action: Reduce) -> bool:
        """Returns whether a reduction was begun for all learners, because their rank is in lockstep."""
        return self._lockstep is not None and self._lockstep.reduces(role, action)

    def _begins_burst(self, learner: Replica) -> bool:
        """Returns whether a burst may begin with the next mini-batch of the learners."""
        return learner.local_steps >= self._fewest_steps or (self._alone and not learner.made.count)

    def proceed(self) -> bool:
        """Begins a burst, or lets the learners continue, if all of them wait. Returns whether it did."""
        if self._lockstep is not None and self._lockstep.proceed():
            return True
        if self._under_way:
            return not self._postponed and self._under_way[-1].queued and len(self._under_way) < AHEAD and self._go()
        if self._records is None:
            if len(self._held) < len(self.learners):
                return False
            learners = [self._hands.machines[role] for role in self.learners]
            waiting = [each for each in learners if isinstance(each, Replica) and each.is_computing]
            asks, self._asks = self._asks, False
            if asks or len(waiting) < len(learners) or len({each.place for each in waiting}) > 1:
                return self.release()
            if not self._begins_burst(waiting[0]):
                return self._start_lockstep(waiting)
            self._records = BankRecords(waiting, alone=self._alone)
        if self._go():
            self._held.clear()
            return True
        if not self._held:
            return self._wake_up()
        self._records = None
        return self.release()

    def _start_lockstep(self, learners: Sequence[Replica]) -> bool:
        """Lets the learners proceed in lockstep, if all have done the same. Returns whether there was something.

        Each of them may still make the update of an average that came in a burst. Then they are asked once more.
        """
        settling = any(each.is_settling for each in learners)
        if self._lockstep is None or settling or len({each.stands_with for each in learners}) > 1:
            return self.release()
        held, self._held = self._held, {}
        self._lockstep.start(learners, held)
        return True

    def _go(self) -> bool:
        """Begins the next burst. Returns whether there is one."""
        assert self._records is not None
        begun = sum(made.rounds for made in self._under_way)
        averages = any(made.averages for made in self._under_way)
        burst = self._records.burst(self._most, self._hands.clock(), begun, begun_averages=averages)
        if burst is None:
            return False
        self._under_way.append(made := self._making.begin(burst))
        self._hands.begin(self.learners[0], made.work)
        return True

    def take(self, event: BurstMade | BankDone) -> None:
        """Records a burst, or what the learners did in lockstep."""
        if isinstance(event, BankDone):
            assert self._lockstep is not None
            self._lockstep.take(event)
            return
        assert self._records is not None
        self._under_way.popleft()
        for role, actions in self._records.enter(event, self._hands.clock()):
            for action in actions:
                self._hands.do(role, action)
        steps = len(event.losses) * event.burst.period
        self._most = max(1, min(2 * max(self._most, steps), int(LONGEST_S * steps / max(event.seconds, 1e-6))))
        if self._under_way:
            return
        self._asks = not steps
        if self._postponed or self._asks or (not self._hands.events and not self._go()):
            self._wake_up()

    def postpones(self, role: int, event: Event) -> bool:
        """Returns whether an event has to wait, or is known already. Otherwise its learner is awake."""
        if self.keeps(role, event):
            return True
        if self._records is None or role not in self.learners:
            return False
        if not self._under_way:
            self._wake_up()
            return False
        self._making.hurries = True
        self._postponed.append((role, event))
        return True

    def keeps(self, role: int, event: Event) -> bool:
        """Returns whether an event of long work does not reach its role, because its rank is in lockstep."""
        return self._lockstep is not None and self._lockstep.is_on and self._lockstep.keeps(role, event)

    def release(self) -> bool:
        """Computes what was held back. Returns whether there was something."""
        held, self._held = self._held, {}
        for role, action in held.items():
            self._hands.perform(role, action)
        return bool(held)

    def abandon(self) -> None:
        """Tells sleeping learners what has been recorded, before all roles regroup."""
        if self._records is not None:
            self._records.wake_up()
        if self._lockstep is not None:
            self._lockstep.end(averages=False)

    def _wake_up(self) -> bool:
        """Lets the learners continue after the last update, beginning with the events that waited for them."""
        records, self._records = self._records, None
        assert records is not None
        records.wake_up()
        self._making.settle()
        self._hands.events.extendleft(reversed(self._postponed))
        self._postponed.clear()
        for role, actions in records.resume(self._hands.clock()):
            for action in actions:
                self._hands.do(role, action)
        return True


def bursts_of_rank(
    job: Job, plan: Plan, executors: Mapping[int, Executor], hands: DriverHands, *, buckets: bool
) -> Bursts | None:
    """Returns the bursts of a rank. None: its roles are asked for each step.

    Args:
        job: Resolved job.
        plan: Role assignment.
        executors: Executor of each role of this rank.
        hands: The driver.
        buckets: Whether some vectors travel while they are computed.
    """
    if not makes_bursts(job, plan, executors):
        return None
    roles = [role for role in plan.learners if role in executors]
    learners = [each for role in roles if isinstance(each := executors[role], OwningLearnerExecutor)]
    alone, apart, making = makes_updates(plan, len(roles)), plan.sharing == "nothing", bursts_of(job, plan, learners)
    together, lockstep = len({plan.roles[role].group for role in roles}) == 1, None
    if len(roles) > 1 and together and not (alone and apart) and not buckets:
        lockstep = Lockstep(roles, making, hands)
    if lockstep is None and not (apart and (alone or plan.averaging)):  # neither updates nor local steps
        return None
    return Bursts(roles, making, hands, alone=alone, apart=apart, lockstep=lockstep)


def makes_updates(plan: Plan, learners: int) -> bool:
    """Returns whether the learners of a rank are all learners of the run, and a burst adds in the same order as they.

    Args:
        plan: Role assignment.
        learners: Number of learners of the rank that take part.
    """
    return learners == len(plan.learners) and plan.reduction != "mpi"


def makes_bursts(job: Job, plan: Plan, executors: Mapping[int, Executor]) -> bool:
    """Returns whether the learners of a rank may be asked once for several mini-batches, or only one of them is asked.

    Each learner must have weights of its own, no parameter server takes part, and nothing may watch single steps.

    Args:
        job: Resolved job.
        plan: Role assignment.
        executors: Executor of each role of this rank.
    """
    here = [executors[role] for role in plan.learners if role in executors]
    if not here or plan.served or plan.sharing == "replica" or job.training.evaluate == "workers":
        return False
    kind: type[OwningLearnerExecutor] = AveragerExecutor if plan.averaging else ReplicaExecutor
    kind = ReferrerExecutor if plan.sharing == "reference" else kind
    return all(type(each) is kind and each.steps_unwatched for each in here)
