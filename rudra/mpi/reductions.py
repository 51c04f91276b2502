"""A rank's part in the reductions of its roles' groups."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.final_gradients import Ready
from rudra.core.buckets import group_parts
from rudra.core.events import Event, Reduce
from rudra.job.job import Job
from rudra.mpi.arena import Arena
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.group_reduction import GroupReduction, ringing
from rudra.mpi.tags import AVERAGES, REDUCTIONS
from topologies import Plan
from topologies.kinds import EVERYBODY


class Reductions:
    """This rank's part in the reductions of compute groups, and in the reductions of all learners if groups average.

    Args:
        comm: communicator of all ranks.
        executors: role -> executor that holds the vectors.
        tag: returns the tag of a role and channel.
        doorbell: doorbell of this rank.
        arena: memory that neighbours read.
        job: job that determines the buckets.
        auto: number of elements of a bucket that the ranks chose, if the job does not determine it.

    Attributes:
        of_groups: group -> part of this rank in the group's reductions.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        executors: Mapping[int, Executor],
        tag: Callable[[int, int], int],
        doorbell: Doorbell,
        arena: Arena,
        job: Job,
        auto: int,
    ) -> None:
        self._comm, self._executors, self._tag = comm, executors, tag
        self._doorbell, self._arena, self._job, self._auto = doorbell, arena, job, auto
        self.of_groups: dict[int, GroupReduction] = {}

    def renew(self, plan: Plan, roles: Collection[int], library: MPI.Comm | None = None) -> None:
        """Creates the reductions for the groups of some roles, from a plan.

        Args:
            plan: role assignment.
            roles: ids of this rank's roles.
            library: communicator if the MPI library reduces, else None.
        """
        made = self.of_groups = {}
        for role in roles:
            for group in (plan.roles[role].group, *((EVERYBODY,) if plan.sharing != "nothing" else ())):
                if group is None or group in made or not plan.traits(role).trains:
                    continue
                members, channel = plan.together(role, group), AVERAGES if group == EVERYBODY else REDUCTIONS
                tag, executor = self._tag(members[0], channel), self._executors[role]
                made[group] = self._made(plan, members, tag, executor, library)

    def _made(
        self, plan: Plan, members: Sequence[int], tag: int, executor: Executor, library: MPI.Comm | None
    ) -> GroupReduction:
        ranks = {i: plan.roles[i].world_rank for i in members}
        return GroupReduction(
            self._comm,
            ranks,
            tag,
            group_parts(self._job, plan, executor.size, executor.parameters, self._auto, members),
            ringing(self._doorbell, self._comm, ranks.values()),
            library,
            self._arena,
            plan.partial_sums(members),
            to_all=not plan.served,
        )

    def expect(self, role: int, gradient: str, samples: int) -> Ready | None:
        """Prepares for the gradient that a role now computes.

        Args:
            role: id of the role.
            gradient: name of the gradient's buffer.
            samples: number of samples of the gradient.

        Returns:
            Function to call with each part of the gradient that is final, or None if it is not reduced in buckets.
        """
        for reduction in self.of_groups.values():
            if role in reduction.roles and reduction.buckets:
                return reduction.expect(role, self._executors[role].buffer(gradient), gradient, samples)
        return None

    def begin(self, role: int, action: Reduce) -> None:
        """Begins a reduction for a role."""
        self.of_groups[action.group].begin(role, action, self._executors[role])

    def poll(self) -> Iterator[tuple[int, Event]]:
        """Advances reductions, and yields the event of each complete reduction for each of its roles here."""
        for reduction in self.of_groups.values():
            if reduction.busy and (event := reduction.test()) is not None:
                yield from ((role, event) for role in reduction.roles)

    def abandon(self) -> None:
        """Abandons pending reductions."""
        for reduction in self.of_groups.values():
            reduction.abandon()

    @property
    def quiet(self) -> bool:
        """Whether no abandoned reduction can write any more."""
        return all(reduction.quiet for reduction in self.of_groups.values())

    def close(self) -> None:
        """Frees the communicators of the reductions."""
        for reduction in self.of_groups.values():
            reduction.close()
