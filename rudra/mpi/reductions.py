"""A rank's part in the reductions of the groups that its roles are in."""

from collections.abc import Callable, Collection, Iterator, Mapping

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.core.events import Event, Reduce
from rudra.mpi.arena import Arena
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.reduction import GroupReduction, make_reduction
from rudra.mpi.tags import AVERAGES, REDUCTIONS
from topologies import Plan
from topologies.kinds import EVERYBODY


class Reductions:
    """This rank's part in the reductions of compute groups, and in that of all learners where groups average.

    Args:
        comm: of all ranks.
        executors: by role; hold the vectors.
        tag: of what a role gets on a channel.
        doorbell: of this rank.
        arena: memory that neighbours read.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        executors: Mapping[int, Executor],
        tag: Callable[[int, int], int],
        doorbell: Doorbell,
        arena: Arena,
    ) -> None:
        self._comm, self._executors, self._tag = comm, executors, tag
        self._doorbell, self._arena = doorbell, arena
        self._of_groups: dict[int, GroupReduction] = {}

    def renew(self, plan: Plan, roles: Collection[int], library: MPI.Comm | None = None) -> None:
        """Makes the reductions of the groups of some roles, by a plan.

        Args:
            plan: who is who.
            roles: that live here.
            library: communicator, where the MPI library reduces.
        """
        made = self._of_groups = {}
        for role in roles:
            for group in (plan.roles[role].group, *((EVERYBODY,) if plan.sharing != "nothing" else ())):
                if group is None or group in made or not plan.traits(role).trains:
                    continue
                members, channel = plan.together(role, group), AVERAGES if group == EVERYBODY else REDUCTIONS
                tag, size = self._tag(members[0], channel), self._executors[role].size
                about = (self._doorbell, library, self._arena)
                made[group] = make_reduction(self._comm, plan, members, tag, size, *about)

    def begin(self, role: int, action: Reduce) -> None:
        """Begins a reduction for a role."""
        self._of_groups[action.group].begin(role, action, self._executors[role])

    def poll(self) -> Iterator[tuple[int, Event]]:
        """Carries reductions on; gives each role of one that is over its event."""
        for reduction in self._of_groups.values():
            if reduction.busy and (event := reduction.test()) is not None:
                yield from ((role, event) for role in reduction.roles)

    def abandon(self) -> None:
        """Forgets reductions that are under way."""
        for reduction in self._of_groups.values():
            reduction.abandon()

    @property
    def quiet(self) -> bool:
        """Whether nothing that was abandoned can write any more."""
        return all(reduction.quiet for reduction in self._of_groups.values())

    def close(self) -> None:
        """Leaves nothing posted."""
        for reduction in self._of_groups.values():
            reduction.close()
