"""Small clusters in virtual time, for tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protocols import Protocol
from rudra.compute.executor import Executor
from rudra.core.actions import BackpropFirstStage, Compute, ExecutorAction, Reduce
from rudra.core.buffer_names import GRADIENT
from rudra.core.events import Computed, Event
from rudra.job.job import Job
from rudra.simulation import checked_run
from rudra.simulation.checked_run import SIZE_BYTES, TrialCheckpoint, TrialResult, TrialRows, timing, validate
from rudra.simulation.conformance import SAMPLES, check_epochs, check_updates
from rudra.simulation.tensors import RealTensors


def job(protocol: str, learners: int, *, n: int | None = None, epochs: int = 3, seed: int = 0, **tables: Any) -> Job:
    named = {"name": protocol} | ({} if n is None else {"n": n})
    training = {"epochs": epochs, "minibatch_size": SAMPLES, "seed": seed, **tables.pop("training", {})}
    return Job(protocol=named, cluster={"learners": learners}, training=training, **tables).resolved()


def check_accounts(rows: TrialRows) -> None:
    """Every gradient is accounted for; what is applied is applied once, in each learner's order, as stale as told."""
    totals, gradients, updates = rows.totals, rows["gradients"], rows["updates"]
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    assert totals["applied"] == len(gradients) == updates["gradients"].sum()
    assert np.array_equal(updates["timestamp"], np.arange(1, len(updates) + 1))
    assert (gradients["staleness"] == gradients["update"] - 1 - gradients["timestamp"]).all()
    assert (gradients["staleness"] >= 0).all()
    for learner in set(gradients["learner"]):
        mine = gradients[gradients["learner"] == learner]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "applied once, in order, without holes"


class Ramp(Protocol):
    """c falls from λ to 1 over the first updates: it has a state."""

    default_modulation = "none"

    def __init__(self, learners: int, updates: int = 20) -> None:
        super().__init__(learners)
        self.updates, self.done = updates, 0

    def update_due(self, pending: int) -> bool:
        due = pending >= max(1, round(self.learners * (1 - self.done / self.updates)))
        self.done += due
        return due

    def state(self) -> dict[str, Any]:
        return {"done": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


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
            sent, got = (
                self._executors[source].slice_for(source_buffer, to),
                self._executors[to].slice_for(to_buffer, source),
            )
            assert torch.equal(sent.view(torch.int32), got.view(torch.int32))
            return
        assert digest == self._digest(to, to_buffer)
        self._transfers += 1
        if self._transfers % 64 == 1:  # a hash takes longer than all the rest
            assert self.sha256(to, to_buffer) == self._executors[source].sha256(source_buffer)

    def sent(self, role: int, buffer: str) -> None:
        assert self._lent[role, buffer].pop(0) == self._digest(role, buffer), f"{buffer} of role {role} changed"
        super().sent(role, buffer)

    def planned(self, role: int, action: ExecutorAction) -> None:
        super().planned(role, action)
        if isinstance(action, Compute):
            self._weights[role] = self._digest(role, action.weights)

    def compute(self, role: int, action: Compute) -> Computed:
        assert self._weights.pop(role) == self._digest(role, action.weights), f"weights of role {role} changed"
        computed = super().compute(role, action)
        self._computed[role] = self._digest(role, action.gradient)
        return computed

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        event = super().perform(role, action, seconds)
        if isinstance(action, BackpropFirstStage):
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


class Apart(Guarded):
    """Every role has buffers of its own, and what arrives there is new: as on real ranks."""

    def _share(self, source: Any, target: Any) -> None:
        buffer = self._new(target[0])
        buffer.vector.copy_(self._held(source).vector)
        buffer.version += 1
        self._hold(target, buffer)

    def _forget_stale(self, weights: Any) -> None:
        """Nobody shares with the server, so that says nothing."""


__all__ = [
    "SAMPLES",
    "SIZE_BYTES",
    "TrialCheckpoint",
    "TrialResult",
    "TrialRows",
    "check_epochs",
    "check_updates",
    "timing",
    "validate",
]


def train(
    job_: Job,
    kind: Callable[[dict[int, Executor]], RealTensors] = Guarded,
    *,
    resumed: TrialCheckpoint | None = None,
    stop_at: float | None = None,
) -> TrialResult:
    """`rudra.simulation.checked_run.train`, with poisoned buffers unless another kind is given."""
    return checked_run.train(job_, kind, resumed=resumed, stop_at=stop_at)
