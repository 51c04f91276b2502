"""Interface of the simulator's tensors, and its implementation for simulations without tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from rudra.compute.executor import Executor
from rudra.core import records
from rudra.core.actions import (
    Accumulate,
    AverageGroup,
    BackpropFirstStage,
    Compute,
    ComputeEvaluationPart,
    ComputeNorms,
    Copy,
    Correct,
    Evaluate,
    ExecutorAction,
    Hash,
    MergeEvaluation,
    PullReplica,
    Reduce,
    ResetReplica,
    RunFirstStage,
    RunLastStage,
    SetOptimizer,
    StepReplica,
    Update,
)
from rudra.core.events import (
    ActivationsReady,
    Computed,
    Evaluated,
    EvaluationPartComputed,
    Event,
    Hashed,
    NormsComputed,
    ReplicaStepped,
    Updated,
)


class Tensors(Protocol):
    """Operations on tensors that the simulator needs. The first eight may be None if they have nothing to do.

    `lent` and `sent` mark start and end of a transfer, while a buffer must not change. `posted` marks its content as
    undefined. `planned` freezes the inputs of a long action. `lost` removes a role. `regroup` drops a role's work. A
    role that updates weights itself then takes over their owner's weights. `perform` carries out a local action that
    took `seconds`, and returns its result. Kinds of actions in `idle` have no result. `executors` are the roles'
    executors, if any.
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
    def regroup(self) -> Callable[[int, int, Sequence[int]], None] | None: ...

    @property
    def executors(self) -> Mapping[int, Executor]: ...

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None: ...


class TimingOnly:
    """No tensors: the timing of a cluster of any size."""

    lent: Callable[[int, str], None] | None = None
    transfer: Callable[[int, str, int, str], None] | None = None
    sent: Callable[[int, str], None] | None = None
    posted: Callable[[int, str], None] | None = None
    planned: Callable[[int, ExecutorAction], None] | None = None
    reduce: Callable[[Mapping[int, Reduce], Sequence[Sequence[int]]], None] | None = None
    lost: Callable[[int], None] | None = None
    regroup: Callable[[int, int, Sequence[int]], None] | None = None

    executors: Mapping[int, Executor] = {}

    idle: Collection[type[ExecutorAction]] = (
        Accumulate,
        Correct,
        PullReplica,
        AverageGroup,
        Copy,
        ResetReplica,
        SetOptimizer,
    )

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
                return Hashed("")  # of no data
        return None
