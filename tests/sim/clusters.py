"""Small clusters in virtual time, for tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rudra.compute.executor import Executor
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.core.events import GRADIENT, Backward, Compute, Computed, Event, Finish, Keep, Local, Record, Reduce, Save
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.data.load import load
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.roles.machine import States
from rudra.simulation.assembly import assemble
from rudra.simulation.costs import places
from rudra.simulation.driver import Check
from rudra.simulation.tensors import RealTensors
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan
from topologies.kinds import LEARNER

SIZE_BYTES = 350_000
"""Of a tensor on the wire."""
SAMPLES = 4


@dataclass
class Rows:
    """Keeps what a statistics server records."""

    tables: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    learners: npt.NDArray[Any] | None = None
    warnings: list[str] = field(default_factory=list)
    time_s: float = 0.0
    code: int = -1

    def record(self, action: Record) -> None:
        self.tables.setdefault(action.table, []).append(action.rows)

    def keep(self, role: int, action: Keep) -> None: ...

    def finish(self, role: int, action: Finish) -> None:
        names = action.totals.dtype.names or ()
        self.totals = dict(zip(names, action.totals[0].item(), strict=True))
        self.learners = action.learners

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(f"{name}: {text}")

    def __getitem__(self, table: str) -> npt.NDArray[Any]:
        return np.concatenate(self.tables[table])


def job(protocol: str, learners: int, *, n: int | None = None, epochs: int = 3, seed: int = 0, **tables: Any) -> Job:
    named = {"name": protocol} | ({} if n is None else {"n": n})
    training = {"epochs": epochs, "minibatch_size": SAMPLES, "seed": seed, **tables.pop("training", {})}
    return Job(protocol=named, cluster={"learners": learners}, training=training, **tables).resolved()


def check_updates(run: Job, rows: Rows) -> None:
    """Of how many gradients an update is made, and in which order they stand there.

    With one server it is exactly c of them. A tree brings several at a time, so it may be more, but by less than what
    one message carries. With compute groups it is exactly c gradients of whole groups, each in group_rank order.
    """
    plan = run.plan(places(run))
    rule, gradients, sizes = run.make_protocol(plan), rows["gradients"], rows["updates"]["gradients"]
    c = rule.gradients_per_update
    assert len(gradients) == sizes.sum()
    assert np.array_equal(gradients["update"], np.repeat(np.arange(1, len(sizes) + 1), sizes))
    if plan.groups:
        members = [[plan.roles[role].index for role in group] for group in plan.groups]
        group_of = {learner: group for group in members for learner in group}
        units, place = np.zeros(len(sizes), int), 0
        while place < len(gradients):
            group = group_of[gradients["learner"][place]]
            unit = gradients[place : place + len(group)]
            assert list(unit["learner"]) == group
            assert all(len(set(unit[name])) == 1 for name in ("update", "step", "timestamp"))
            units[unit["update"][0] - 1] += 1
            place += len(group)
        assert (units == (len(plan.groups) if plan.averaging else c)).all()
    else:
        assert (sizes >= c).all()
        assert (sizes < c + max(carried(plan, child, c) for child in plan.children[plan.server])).all()
    if rule.ordered:
        assert np.array_equal(gradients["learner"], np.tile(np.arange(run.learners), len(sizes)))


def check_epochs(rows: Rows) -> None:
    """An epoch's means are over the gradients of its updates; it has none where an update ended several epochs."""
    gradients, updates = rows["gradients"], rows["updates"]
    of = updates["epoch"][gradients["update"] - 1]
    assert 1 <= updates["epoch"].min() <= updates["epoch"].max() <= len(rows["epochs"])
    for epoch in rows["epochs"]:
        mine = gradients[of == epoch["epoch"]]
        names = ("mean_staleness", "train_loss", "train_error")
        if not len(mine):
            assert all(np.isnan(epoch[name]) for name in names)
            continue
        total = mine["samples"].sum()
        means = mine["staleness"].mean(), (mine["loss"] @ mine["samples"]) / total, mine["errors"].sum() / total
        assert [epoch[name] for name in names] == pytest.approx(means, rel=1e-6)


def carried(plan: Plan, role: int, c: int) -> int:
    """For how many gradients one message of a role may stand: it waits until it has enough, and then has a few more."""
    if plan.roles[role].kind == LEARNER:
        return 1
    return min(plan.learners_below(role), c) - 1 + max(carried(plan, child, c) for child in plan.children[role])


def validate(machine: Machine, before: States, event: Event) -> None:
    machine.validate()
    machine.validate_step(before, event)


def timing(job_: Job, training_samples: int, after: Check = validate) -> Rows:
    """Runs a job without tensors and checks every invariant after every event.

    Args:
        job_: what to run.
        training_samples: of one epoch.
        after: what to do with a machine after each of its events.
    """
    plan = job_.plan(places(job_))
    rows, tensors = Rows(), TimingOnly()
    simulation = assemble(
        job_, plan, tensors, rows, training_samples=training_samples, size_bytes=SIZE_BYTES, check=after
    )
    rows.time_s = simulation.run()
    rows.code = simulation.code
    return rows


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
