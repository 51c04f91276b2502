"""Gradients of several learners computed together: as one big batch, or by torch.func.vmap."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from rudra.compute.bank.gathering import ReadyLearner, bank_gradients, gradients_are_summed, throughout
from rudra.compute.executor import Executor
from rudra.compute.gradients import BatchResult
from rudra.compute.learners import LearnerExecutor
from rudra.compute.together import joint_gradient, mapped_gradients
from rudra.compute.vectors import Buffer
from rudra.core.actions import Accumulate, Compute, ExecutorAction, Reduce
from rudra.core.events import Computed, Event
from rudra.core.work import Work
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.tensors import RealTensors
from rudra.simulation.timing_only import NextMinibatch
from topologies import Plan

_MAPPED_SAMPLES = 1024
"""Number of samples per call of vmap. More samples are no faster and need much memory."""


_WEIGHTS_OF_STEP, _GRADIENT_OF_STEP = "team weights", "team gradient"
"""Buffers of a team's first member with the weights and the gradient of the latest step."""


class _Team:
    """Learners that compute each of their gradients at the same weights.

    Attributes:
        members: Roles of the learners.
        minibatches: Step and samples of each member in the latest batch.
        outcomes: Result of each member, until the member has taken it.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.minibatches: dict[int, tuple[int, Work]] = {}
        self.outcomes: dict[int, BatchResult] = {}


class BigBatchTensors(RealTensors):
    """One gradient for all learners of a team: the gradient of the mean over all their samples.

    Each compute group is a team. Without groups it is all learners, and an update must take one gradient from each of
    them. All members of a team compute a gradient at the same weights, each the next one of its own samples.

    Args:
        executors: Executors by role id.
        halves: Whether gradients are sent as float16.
        groups: Roles of each compute group. Empty: there are no groups.
    """

    def __init__(
        self, executors: dict[int, Executor], *, halves: bool = False, groups: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__(executors, halves=halves)
        learners = [role for role, executor in executors.items() if isinstance(executor, LearnerExecutor)]
        teams = [_Team(members) for members in groups or [learners]]
        self._team_of = {role: team for team in teams for role in team.members}

    def watch(self, next_minibatch: NextMinibatch) -> None:
        self._next_minibatch = next_minibatch

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        weights, team = self._held((role, action.weights)), self._team_of[role]
        of_weights, of_gradient = ((team.members[0], name) for name in (_WEIGHTS_OF_STEP, _GRADIENT_OF_STEP))
        if not team.outcomes:
            self._hold(of_weights, weights)
            self._hold(of_gradient, self._new(role))
            sources = [self._learner(learner).source for learner in team.members]
            team.minibatches = {learner: self._next_minibatch(learner) for learner in team.members}
            vectors = (weights.vector, self._held(of_gradient).vector)
            results = joint_gradient(sources, list(team.minibatches.values()), *vectors)
            team.outcomes = dict(zip(team.members, results, strict=True))
        # Members with a replica of their own have equal replicas in buffers of their own.
        used, mine = self._held(of_weights), team.outcomes.pop(role, None)
        same = weights is used or torch.equal(weights.vector, used.vector)
        if mine is None or not same or team.minibatches[role] != (action.step, action.work):
            raise ConfigError(
                f"[simulation] batching = 'big-batch': with this protocol learners compute step {action.step} at "
                "different weights; valid here: none, vmap"
            )
        self._hold((role, action.gradient), self._held(of_gradient))
        return self._learner(role).computed(action, mine)

    def regroup(self, role: int, owner: int, keepers: Sequence[int] = ()) -> None:
        super().regroup(role, owner, keepers)
        self._team_of[role].outcomes.clear()

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        if isinstance(action, Accumulate) and action.into != action.gradient:
            into, gradient = (self._held((role, name)) for name in (action.into, action.gradient))
            if into is gradient:  # the mean of equal gradients is bitwise identical to each
                return None
        return super().perform(role, action, seconds)

    def reduce(self, reductions: Mapping[int, Reduce], sums: Sequence[Sequence[int]]) -> None:
        places = [(role, action.buffer) for role, action in reductions.items()]
        if len({self._held(place) for place in places}) > 1:
            super().reduce(reductions, sums)
            return
        for place, action in list(zip(places, reductions.values(), strict=True))[1:]:
            if not action.to_all:
                self.posted(*place)


class VmapTensors(RealTensors):
    """Gradients of all computing learners, computed together by `torch.func.vmap` when the first one is due."""

    def __init__(self, executors: dict[int, Executor], *, halves: bool = False) -> None:
        super().__init__(executors, halves=halves)
        self._planned: dict[int, Compute] = {}
        self._ready: dict[int, tuple[Buffer, BatchResult]] = {}

    def planned(self, role: int, action: ExecutorAction) -> None:
        if isinstance(action, Compute) and role not in self._ready:
            self._planned[role] = action

    def lost(self, role: int) -> None:
        super().lost(role)
        self._forget(role)

    def regroup(self, role: int, owner: int, keepers: Sequence[int] = ()) -> None:
        super().regroup(role, owner, keepers)
        self._forget(role)

    def _forget(self, role: int) -> None:
        self._planned.pop(role, None)
        if role in self._ready:
            self._release(self._ready.pop(role)[0])

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        if role not in self._ready:
            for roles in self._teams(role, action):
                self._compute_together(roles)
        buffer, outcome = self._ready.pop(role)
        self._hold((role, action.gradient), buffer)
        computed = self._learner(role).computed(action, outcome)
        self._forget_stale((role, action.weights))
        return computed

    def _teams(self, role: int, action: Compute) -> Iterator[Sequence[int]]:
        """Yields the learners that compute together, now that an action of a role is due."""
        roles = list(self._planned)
        at_a_time = max(1, _MAPPED_SAMPLES // action.work.count)
        for first in range(0, len(roles), at_a_time):
            yield roles[first : first + at_a_time]

    def _compute_together(self, roles: Sequence[int]) -> None:
        actions = [self._planned.pop(role) for role in roles]
        sources = [self._learner(role).source for role in roles]
        held = [self._held((role, action.weights)) for role, action in zip(roles, actions, strict=True)]
        weights = [buffer.vector for buffer in (held[:1] if len(set(held)) == 1 else held)]
        gradients = [self._new(role) for role in roles]
        minibatches = [(action.step, action.work) for action in actions]
        outcomes = mapped_gradients(sources, minibatches, weights, [gradient.vector for gradient in gradients])
        self._ready.update(zip(roles, zip(gradients, outcomes, strict=True), strict=True))


class BankTensors(VmapTensors):
    """Gradients of the learners of each bank, computed as on ranks (`rudra.compute.bank.gathering`).

    Args:
        executors: Executors by role id.
        halves: Whether gradients are sent as float16.
        banks: Roles of each bank, in learner order.
        joint: As for `Bank`.
    """

    def __init__(
        self, executors: dict[int, Executor], *, halves: bool = False, banks: Sequence[Sequence[int]], joint: bool
    ) -> None:
        super().__init__(executors, halves=halves)
        self._bank_of = {role: bank for bank in banks for role in bank}
        self._joint = joint

    def _teams(self, role: int, action: Compute) -> Iterator[Sequence[int]]:
        """Yields the learners of the same bank that are ready."""
        self._planned.setdefault(role, action)  # a replay plans nothing
        yield [member for member in self._bank_of[role] if member in self._planned]

    def _compute_together(self, roles: Sequence[int]) -> None:
        ready, gradients = [], [self._new(role) for role in roles]
        for role, gradient in zip(roles, gradients, strict=True):
            action = self._planned.pop(role)
            vectors = partial(_vectors, self._held((role, action.weights)), gradient)
            ready.append(ReadyLearner(self._learner(role).source, action, vectors))
        found = bank_gradients(ready, joint=self._joint)
        outcomes = [each.source.checked(figures) for each, figures in zip(ready, found, strict=True)]
        self._ready.update(zip(roles, zip(gradients, outcomes, strict=True), strict=True))


def _vectors(weights: Buffer, gradient: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    return weights.vector, gradient.vector


def bank_tensors(job: Job, plan: Plan, executors: dict[int, Executor]) -> RealTensors:
    """Returns the tensors of all roles for gradients that are computed one by one, or by banks whose form is fused."""
    halves = job.cluster.gradient_format == "float16"
    if not job.cluster.fused:
        return RealTensors(executors, halves=halves)
    learners = plan.whole.learners
    banks = [[i for i in learners if plan.roles[i].world_rank == rank] for rank in range(plan.ranks)]
    joint = throughout(job, plan, gradients_are_summed)
    return BankTensors(executors, halves=halves, banks=banks, joint=joint)
