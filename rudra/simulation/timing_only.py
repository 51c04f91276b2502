"""What the simulator needs done with tensors, and what it does where there are none."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from rudra.compute.executor import Executor
from rudra.core import records
from rudra.core.events import (
    Accumulate,
    ActivationsReady,
    AverageGroup,
    BackpropFirstStage,
    Compute,
    Computed,
    ComputeEvaluationPart,
    ComputeNorms,
    Copy,
    Evaluate,
    Evaluated,
    EvaluationPartComputed,
    Event,
    ExecutorAction,
    Hash,
    Hashed,
    MergeEvaluation,
    NormsComputed,
    PullReplica,
    Reduce,
    ReplicaStepped,
    ResetReplica,
    RunFirstStage,
    RunLastStage,
    StepReplica,
    Update,
    Updated,
)


class Tensors(Protocol):
    """What the simulator needs done with tensors; the first eight may be None, where there is nothing to do.

    `lent` and `sent` frame the time in which a buffer must not change; `posted` says that its content is void;
    `planned` that what a long action reads is fixed from now on; `lost` that a role is no more, `regroup` that it
    drops what it was about, and takes over the weights of their owner if it updates some itself. `perform` does a
    local action, and gives what comes of it, which has taken so many seconds; nothing comes of those that are `idle`.
    `executors` are those of the roles, where there are any.
    """

    @property
    def idle(self) -> Collection[type[ExecutorAction]]: ...
    @property
    def lent(self) -> Callable[[int, str], None] | None: ...
    @property
    def transfer(self) -> Callable[[int, str, int, str], None] | None: ...
    @property
    def sent(self) -> Callable[[int, str], None] | None: ...
    @property
    def posted(self) -> Callable[[int, str], None] | None: ...
    @property
    def planned(self) -> Callable[[int, ExecutorAction], None] | None: ...
    @property
    def reduce(self) -> Callable[[Mapping[int, Reduce], Sequence[Sequence[int]]], None] | None: ...
    @property
    def lost(self) -> Callable[[int], None] | None: ...
    @property
    def regroup(self) -> Callable[[int, int], None] | None: ...

    @property
    def executors(self) -> Mapping[int, Executor]: ...

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None: ...


class TimingOnly:
    """No tensors: what a cluster would do, at any scale."""

    lent: Callable[[int, str], None] | None = None
    transfer: Callable[[int, str, int, str], None] | None = None
    sent: Callable[[int, str], None] | None = None
    posted: Callable[[int, str], None] | None = None
    planned: Callable[[int, ExecutorAction], None] | None = None
    reduce: Callable[[Mapping[int, Reduce], Sequence[Sequence[int]]], None] | None = None
    lost: Callable[[int], None] | None = None
    regroup: Callable[[int, int], None] | None = None

    executors: Mapping[int, Executor] = {}

    idle: Collection[type[ExecutorAction]] = (Accumulate, PullReplica, AverageGroup, Copy, ResetReplica)

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        match action:
            case Compute():
                return Computed(action.step, 0.0, 0.0, action.work.count)
            case RunFirstStage():
                return ActivationsReady(action.step)
            case BackpropFirstStage():
                return Computed(action.step, action.loss, action.errors, action.samples)
            case RunLastStage():
                return Computed(action.step, 0.0, 0.0, action.work.count)
            case Update():
                return Updated(action.timestamp, 0, seconds)
            case ComputeNorms():
                return NormsComputed(bytes(4))
            case StepReplica():
                return ReplicaStepped(seconds)
            case ComputeEvaluationPart():
                return EvaluationPartComputed(action.part, np.empty(0, records.SUM))
            case Evaluate() | MergeEvaluation():
                return Evaluated(action.buffer, (), seconds)
            case Hash():
                return Hashed("")  # of nothing
        return None
