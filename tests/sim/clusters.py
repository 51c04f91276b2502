"""Small clusters in virtual time, for tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.executor import Executor
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.core.events import GRADIENT, Backward, Compute, Computed, Event, Local, Reduce, Save
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.data.load import load
from rudra.job.job import Job
from rudra.simulation.assembly import assemble
from rudra.simulation.conformance import SAMPLES, SIZE_BYTES, Rows, check_epochs, check_updates, timing, validate
from rudra.simulation.costs import places
from rudra.simulation.tensors import RealTensors
from topologies import Plan


def job(protocol: str, learners: int, *, n: int | None = None, epochs: int = 3, seed: int = 0, **tables: Any) -> Job:
    named = {"name": protocol} | ({} if n is None else {"n": n})
    training = {"epochs": epochs, "minibatch_size": SAMPLES, "seed": seed, **tables.pop("training", {})}
    return Job(protocol=named, cluster={"learners": learners}, training=training, **tables).resolved()


class Guarded(RealTensors):
    """Real tensors; buffers that nobody may read hold NaN, and one that is lent or computed with must not change."""

    def __init__(self, executors: dict[int, Executor]) -> None:
        super().__init__(executors, poison=True)
        self._lent: dict[tuple[int, str], list[int]] = {}
        self._weights: dict[int, int] = {}
        self._computed: dict[int, int] = {}  # gradients that a group has not added up yet
        self._transfers = 0

    def lent(self, role: int, buffer: str) -> None:
        super().lent(role, buffer)
        self._lent.setdefault((role, buffer), []).append(self._digest(role, buffer))

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        digest = self._lent[source, source_buffer][0]
        assert digest == self._digest(source, source_buffer), f"{source_buffer} of role {source} changed in flight"
        super().transfer(source, source_buffer, to, to_buffer)
        if self._parted:
            sent, got = self._executors[source].part(source_buffer, to), self._executors[to].part(to_buffer, source)
            assert torch.equal(sent.view(torch.int32), got.view(torch.int32))
            return
        assert digest == self._digest(to, to_buffer)
        self._transfers += 1
        if self._transfers % 64 == 1:  # a hash takes longer than all the rest
            assert self.sha256(to, to_buffer) == self._executors[source].sha256(source_buffer)

    def sent(self, role: int, buffer: str) -> None:
        assert self._lent[role, buffer].pop(0) == self._digest(role, buffer), f"{buffer} of role {role} changed"
        super().sent(role, buffer)

    def planned(self, role: int, action: Local) -> None:
        super().planned(role, action)
        if isinstance(action, Compute):
            self._weights[role] = self._digest(role, action.weights)

    def compute(self, role: int, action: Compute) -> Computed:
        assert self._weights.pop(role) == self._digest(role, action.weights), f"weights of role {role} changed"
        computed = super().compute(role, action)
        self._computed[role] = self._digest(role, action.gradient)
        return computed

    def perform(self, role: int, action: Local, seconds: float) -> Event | None:
        event = super().perform(role, action, seconds)
        if isinstance(action, Backward):
            self._computed[role] = self._digest(role, action.gradient)
        return event

    def reduce(self, reductions: Mapping[int, Reduce], sums: Sequence[Sequence[int]]) -> None:
        for role, action in reductions.items() if next(iter(reductions.values())).buffer == GRADIENT else ():
            assert self._computed[role] == self._digest(role, action.buffer), f"gradient of role {role} changed"
        super().reduce(reductions, sums)
        first, *others = [
            self._digest(role, action.buffer) for role, action in reductions.items() if action.to_all
        ] or [0]
        assert set(others) <= {first}

    def _digest(self, role: int, buffer: str) -> int:
        """Of all bits; enough to tell whether something was written."""
        return int(np.bitwise_xor.reduce(self._executors[role].buffer(buffer).vector.numpy().view(np.uint32)))


class Saved(NamedTuple):
    """What a checkpoint would hold."""

    position: TrainingState
    tensors: dict[str, npt.NDArray[np.float32]]


__all__ = ["SAMPLES", "SIZE_BYTES", "Rows", "check_epochs", "check_updates", "timing", "validate"]


@dataclass
class Trained:
    """What a simulated training leaves."""

    job: Job
    rows: Rows
    executors: dict[int, Executor]
    plan: Plan
    tensors: RealTensors
    saved: list[Saved] = field(default_factory=list)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([self.executors[owner].buffer("weights").vector for owner in self.plan.owners])


def train(
    job_: Job,
    kind: Callable[[dict[int, Executor]], RealTensors] = Guarded,
    *,
    resumed: Saved | None = None,
    stop_at: float | None = None,
) -> Trained:
    """Runs a job with real gradients, poisoned buffers (unless another kind is given) and every invariant checked.

    Args:
        job_: what to run.
        kind: of tensors.
        resumed: where to begin.
        stop_at: when somebody asks the run to stop, in virtual seconds.
    """
    plan = job_.plan(places(job_))
    loaded = load(job_.data)
    info = loaded.info
    torch.set_num_threads(job_.cluster.threads_per_rank or 1)
    roles_ = tuple(range(len(plan.roles)))
    executors = make_executors(job_, plan, roles_, loaded, prefetch=False)
    position = BEGINNING if resumed is None else resumed.position
    if resumed is not None:
        for executor in executors.values():
            if isinstance(executor, OwnerExecutor):
                executor.restore(resumed.tensors)
    rows, tensors = Rows(), kind(executors)
    positions: list[TrainingState] = []
    kept: list[dict[int, dict[str, npt.NDArray[np.float32]]]] = []  # by role, of each checkpoint
    begun: list[int] = [0] * len(plan.roles)

    def save(role: int, action: Save) -> None:
        executor = executors[role]
        assert isinstance(executor, OwnerExecutor)
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
    saved = [Saved(position, joined(parts)) for position, parts in zip(positions, states, strict=True)]
    return Trained(job_, rows, executors, plan, tensors, saved)
