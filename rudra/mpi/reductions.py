"""A rank's part in the reductions of its roles' groups."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.final_gradients import Ready
from rudra.compute.learners import ReplicaExecutor
from rudra.compute.replicas import AveragerExecutor
from rudra.core.actions import BackpropFirstStage, Compute, Reduce
from rudra.core.bucket_rules import group_parts, passes_early
from rudra.core.events import Event
from rudra.core.messages import Rows
from rudra.job.job import Job
from rudra.mpi.arena import Arena
from rudra.mpi.device_arena import DeviceArena
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.exchange import Exchange
from rudra.mpi.group_reduction import GroupReduction, ringing
from rudra.mpi.libraries import Library
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
        post: lets this rank's own thread call a function later. Any thread may call it. None: forward passes must not
            begin while a reduction is under way.
        hurries: whether this rank must end its work as soon as possible.

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
        post: Callable[[Callable[[], None]], None] | None = None,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        self._post, self._hurries = post, hurries
        self._comm, self._executors, self._tag = comm, executors, tag
        self._doorbell, self._arena, self._job, self._auto = doorbell, arena, job, auto
        self.of_groups: dict[int, GroupReduction] = {}

    def renew(self, plan: Plan, roles: Collection[int], library: Library | None = None) -> None:
        """Creates the reductions for the groups of some roles, from a plan.

        Args:
            plan: role assignment.
            roles: ids of this rank's roles.
            library: library that adds. None: the ranks do.
        """
        for before in self.of_groups.values():
            before.free()
        made = self.of_groups = {}
        for role in roles:
            for group in (plan.roles[role].group, *((EVERYBODY,) if plan.sharing != "nothing" else ())):
                if group is None or group in made or role not in plan.learners:
                    continue
                members, channel = plan.together(role, group), AVERAGES if group == EVERYBODY else REDUCTIONS
                tag, executor = self._tag(members[0], channel), self._executors[role]
                made[group] = self._made(plan, members, tag, executor, library)

    def _made(
        self, plan: Plan, members: Sequence[int], tag: int, executor: Executor, library: Library | None
    ) -> GroupReduction:
        ranks = {i: plan.roles[i].world_rank for i in members}
        may_pass_early = passes_early(self._job, plan, members)
        tensors = [entry.offset for entry in executor.layout]
        sums, arena = plan.partial_sums(members), self._arena
        exchange: Exchange | None = None
        if isinstance(arena, DeviceArena) and library is None and len({*ranks.values()}) > 1:
            near = len(sums) == 1 and arena.neighbours.issuperset(ranks.values())
            exchange = Exchange(arena, executor.size, executor.device, near=near)
            arena = arena if near else Arena()
        return GroupReduction(
            self._comm,
            ranks,
            tag,
            group_parts(self._job, plan, executor.size, executor.parameters, self._auto, members, tensors),
            ringing(self._doorbell, self._comm, ranks.values()),
            library,
            arena,
            sums,
            to_all=not plan.served,
            early=self._post is not None and may_pass_early and _can_pass_early(executor),
            exchange=exchange,
        )

    def expect(self, role: int, action: Compute | BackpropFirstStage) -> Ready | None:
        """Prepares for the gradient that a role now computes.

        Args:
            role: id of the role.
            action: action that computes the gradient.

        Returns:
            Function to call with each part of the gradient that is final. None: neither the gradient, nor the
            difference of a replica that it steps, is reduced in buckets.
        """
        executor = self._executors[role]
        for reduction in self.of_groups.values():
            if role not in reduction.roles or not reduction.buckets:
                continue
            if isinstance(executor, AveragerExecutor):
                return _step_ahead(reduction, role, executor, action)
            samples = action.work.count if isinstance(action, Compute) else action.samples
            return reduction.expect(role, executor.buffer(action.gradient), action.gradient, samples)
        return None

    def begin(self, role: int, action: Reduce) -> None:
        """Begins a reduction for a role."""
        reduction, executor, post = self.of_groups[action.group], self._executors[role], self._post
        reduction.begin(role, action, executor)
        if not reduction.early or post is None or not isinstance(executor, ReplicaExecutor):
            return
        arrivals = reduction.arrivals(self._hurries, lambda: post(executor.pass_early))
        if arrivals is not None:
            executor.prepare_early(action, arrivals)

    def begin_all(self, action: Reduce, rows: Rows) -> None:
        """Begins a reduction for all its members here at once. Only the first of them gets the result (`give_all`).

        Args:
            action: what the first member brings.
            rows: (members,) `MEMBER` of each, without offsets.
        """
        reduction = self.of_groups[action.group]
        reduction.begin_all(action, [self._executors[role] for role in reduction.roles], rows)

    def give_all(self, group: int) -> bool:
        """Lets all members here get the result of a reduction, if it is under way. Returns whether it is."""
        return self.of_groups[group].give_all()

    def poll(self) -> Iterator[tuple[int, Event]]:
        """Advances reductions, and yields the event of each complete reduction for each of its roles here."""
        for reduction in self.of_groups.values():
            if reduction.busy and (event := reduction.test()) is not None:
                yield from ((role, event) for role in reduction.roles)

    @property
    def buckets(self) -> bool:
        """Whether some vectors are reduced in buckets while they are computed."""
        return any(reduction.buckets for reduction in self.of_groups.values())

    @property
    def driven(self) -> bool:
        """Whether other threads advance reductions that this rank waits for."""
        return any(reduction.driven for reduction in self.of_groups.values())

    def lose(self, ranks: Collection[int]) -> None:
        """Handles dead ranks."""
        for reduction in self.of_groups.values():
            reduction.lose(ranks)

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


def _step_ahead(
    reduction: GroupReduction, role: int, executor: AveragerExecutor, action: Compute | BackpropFirstStage
) -> Ready | None:
    """Prepares for the step of a replica by the gradient that it now computes, if replicas are then averaged."""
    if not isinstance(action, Compute) or action.then is None:
        return None
    name = action.then.difference
    final = reduction.expect(role, executor.renew(name), name, action.averaged)
    return None if final is None else executor.step_ahead(action.then, final)


def _can_pass_early(executor: Executor) -> bool:
    return isinstance(executor, ReplicaExecutor) and executor.can_pass_early
