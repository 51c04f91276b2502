"""Runs of a job in virtual time that check every invariant, and keep what would be written and saved."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.executor import Executor
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.core.actions import Finish, Record, Save, StoreEpochWeights
from rudra.core.events import Event
from rudra.core.records import joined_rows
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.data.load import load
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.roles import Machine
from rudra.roles.machine import States
from rudra.simulation.assembly import assemble
from rudra.simulation.driver import Check
from rudra.simulation.tensors import RealTensors
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan

SIZE_BYTES = 350_000
"""Size of a tensor on the wire in runs without tensors."""


@dataclass
class TrialRows:
    """Recorder that keeps a statistics server's rows."""

    tables: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    learners: npt.NDArray[Any] | None = None
    warnings: list[str] = field(default_factory=list)
    time_s: float = 0.0
    code: int = -1

    def record(self, action: Record) -> None:
        self.tables.setdefault(action.table, []).append(action.rows)

    def keep(self, role: int, action: StoreEpochWeights) -> None: ...

    def finish(self, role: int, action: Finish) -> None:
        names = action.totals.dtype.names or ()
        self.totals = dict(zip(names, action.totals[0].item(), strict=True))
        self.learners = action.learners

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(f"{name}: {text}")

    def __getitem__(self, table: str) -> npt.NDArray[Any]:
        return joined_rows(self.tables[table])


def validate(machine: Machine, before: States, event: Event) -> None:
    machine.validate()
    machine.validate_step(before, event)


def timing(
    job_: Job,
    training_samples: int,
    after: Check = validate,
    *,
    position: TrainingState = BEGINNING,
    save: Callable[[int, Save], None] | None = None,
) -> TrialRows:
    """Runs a job without tensors and checks every invariant after every event.

    Args:
        job_: Job to run.
        training_samples: Number of training samples per epoch.
        after: Function called with a machine after each of its events.
        position: State at the start of training.
        save: Function called when a role saves its part of a checkpoint.
    """
    plan = job_.plan(nodes_of(job_))
    rows, tensors = TrialRows(), TimingOnly()
    about: dict[str, Any] = {"training_samples": training_samples, "size_bytes": SIZE_BYTES, "check": after}
    simulation = assemble(job_, plan, tensors, rows, position=position, save=save, **about)
    rows.time_s = simulation.run()
    rows.code = simulation.code
    return rows


class TrialCheckpoint(NamedTuple):
    """Content of a checkpoint."""

    position: TrainingState
    tensors: dict[str, npt.NDArray[np.float32]]


@dataclass
class TrialResult:
    """Results of a simulated training."""

    job: Job
    rows: TrialRows
    executors: dict[int, Executor]
    plan: Plan
    tensors: RealTensors
    saved: list[TrialCheckpoint] = field(default_factory=list)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([self.executors[owner].buffer("weights").vector for owner in self.plan.owners])


def train(
    job_: Job,
    kind: Callable[[dict[int, Executor]], RealTensors] = RealTensors,
    *,
    resumed: TrialCheckpoint | None = None,
    stop_at: float | None = None,
) -> TrialResult:
    """Runs a job with real gradients, and checks every invariant after every event.

    Args:
        job_: Job to run.
        kind: Type of the tensors.
        resumed: Checkpoint to start from.
        stop_at: Virtual time in seconds of a request to stop.
    """
    plan = job_.plan(nodes_of(job_))
    loaded = load(job_.data)
    info = loaded.info
    torch.set_num_threads(job_.cluster.torch_threads)
    roles_ = tuple(range(len(plan.roles)))
    executors = make_executors(job_, plan, roles_, loaded, prefetch=False)
    position = BEGINNING if resumed is None else resumed.position
    if resumed is not None:
        for executor in executors.values():
            if isinstance(executor, OwnerExecutor):
                executor.restore(resumed.tensors)
    rows, tensors = TrialRows(), kind(executors)
    positions: list[TrainingState] = []
    kept: list[dict[int, dict[str, npt.NDArray[np.float32]]]] = []  # one dict by role for each checkpoint
    begun: list[int] = [0] * len(plan.roles)

    def save(role: int, action: Save) -> None:
        executor = executors[role]
        assert isinstance(executor, OwnerExecutor)
        if role not in plan.owners:  # perhaps it did not take part before
            last = positions[-1].timestamp if positions else -1
            begun[role] = len(positions) - (last == action.position.timestamp)
        kept.extend({} for _ in range(begun[role] + 1 - len(kept)))
        kept[begun[role]][role] = {name: copy.copy() for name, copy in executor.state(alone=action.alone).items()}
        begun[role] += 1
        if action.alone:
            begun[:] = [len(kept)] * len(begun)
        if role == plan.server:
            positions.append(action.position)

    simulation = assemble(
        job_,
        plan,
        tensors,
        rows,
        training_samples=info.training_samples,
        size_bytes=1_000_000,
        position=position,
        save=save,
        check=validate,
    )
    if stop_at is not None:
        simulation.stop_at(stop_at)
    rows.time_s = simulation.run()
    rows.code = simulation.code
    states = ([by_role[role] for role in sorted(by_role)] for by_role in kept)
    saved = [TrialCheckpoint(position, joined(parts)) for position, parts in zip(positions, states, strict=True)]
    return TrialResult(job_, rows, executors, plan, tensors, saved)
