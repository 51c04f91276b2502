"""Gradients of several learners computed together: as one big batch, or by torch.func.vmap."""

from rudra.compute.executor import Executor
from rudra.compute.gradients import BatchResult
from rudra.compute.learners import LearnerExecutor
from rudra.compute.together import joint_gradient, mapped_gradients
from rudra.compute.vectors import Buffer
from rudra.core.actions import Accumulate, Compute, ExecutorAction
from rudra.core.events import Computed, Event
from rudra.errors import ConfigError
from rudra.simulation.tensors import RealTensors

_MAPPED_SAMPLES = 1024
"""Number of samples per call of vmap. More samples are no faster and need much memory."""


class BigBatchTensors(RealTensors):
    """One gradient for all learners: the gradient of the mean over all their samples, as an update needs it.

    It requires that an update takes one gradient from every learner, all computed from the same weights.
    """

    def __init__(self, executors: dict[int, Executor], *, halves: bool = False) -> None:
        super().__init__(executors, halves=halves)
        self._learners = [role for role, executor in executors.items() if isinstance(executor, LearnerExecutor)]
        self._step = -1
        self._weights: Buffer | None = None
        self._gradient: Buffer | None = None
        self._outcomes: dict[int, BatchResult] = {}

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        weights = self._held((role, action.weights))
        if action.step > self._step:
            self._step, self._weights, self._gradient = action.step, weights, self._new(role)
            sources = [self._learner(learner).source for learner in self._learners]
            works = [source.work.after(action.step) for source in sources]
            outcomes = joint_gradient(sources, action.step, works, weights.vector, self._gradient.vector)
            self._outcomes = dict(zip(self._learners, outcomes, strict=True))
        if action.step < self._step or weights is not self._weights or self._gradient is None:
            raise ConfigError(
                f"[simulation] batching = 'big-batch': with this protocol learners compute step {action.step} at "
                "different weights; valid here: none, vmap"
            )
        self._hold((role, action.gradient), self._gradient)
        return self._learner(role).computed(action, self._outcomes[role])

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        if isinstance(action, Accumulate) and action.into != action.gradient:
            into, gradient = (self._held((role, name)) for name in (action.into, action.gradient))
            if into is gradient:  # the mean of equal gradients is bitwise identical to each
                return None
        return super().perform(role, action, seconds)


class VmapTensors(RealTensors):
    """Gradients of all computing learners, computed together by `torch.func.vmap` when the first one is due."""

    def __init__(self, executors: dict[int, Executor], *, halves: bool = False) -> None:
        super().__init__(executors, halves=halves)
        self._planned: dict[int, Compute] = {}
        self._ready: dict[int, tuple[Buffer, BatchResult]] = {}

    def planned(self, role: int, action: ExecutorAction) -> None:
        if isinstance(action, Compute):
            self._planned[role] = action

    def lost(self, role: int) -> None:
        super().lost(role)
        self._forget(role)

    def regroup(self, role: int, owner: int) -> None:
        super().regroup(role, owner)
        self._forget(role)

    def _forget(self, role: int) -> None:
        self._planned.pop(role, None)
        if role in self._ready:
            self._release(self._ready.pop(role)[0])

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        if role not in self._ready:
            roles = list(self._planned)
            at_a_time = max(1, _MAPPED_SAMPLES // action.work.count)
            for first in range(0, len(roles), at_a_time):
                self._compute_together(roles[first : first + at_a_time])
        buffer, outcome = self._ready.pop(role)
        self._hold((role, action.gradient), buffer)
        computed = self._learner(role).computed(action, outcome)
        self._forget_stale((role, action.weights))
        return computed

    def _compute_together(self, roles: list[int]) -> None:
        actions = [self._planned.pop(role) for role in roles]
        sources = [self._learner(role).source for role in roles]
        held = [self._held((role, action.weights)) for role, action in zip(roles, actions, strict=True)]
        weights = [buffer.vector for buffer in (held[:1] if len(set(held)) == 1 else held)]
        gradients = [self._new(role) for role in roles]
        minibatches = [(action.step, action.work) for action in actions]
        outcomes = mapped_gradients(sources, minibatches, weights, [gradient.vector for gradient in gradients])
        self._ready.update(zip(roles, zip(gradients, outcomes, strict=True), strict=True))
