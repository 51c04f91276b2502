"""Averages in buckets under random interleavings and deaths: what living members get is the average, bit for bit.

Members average gradients, or replicas that they step while they compute their gradients.
"""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_mpi import fake_mpi
from fuzzing import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_mpi import Group, RankOfMpi, World, which_are_over

from rudra.compute.arrivals import Arrivals
from rudra.compute.averaging import average
from rudra.compute.device.streams import finished
from rudra.compute.executor import Executor
from rudra.compute.optim import UpdateRule
from rudra.compute.replicas import AveragerExecutor
from rudra.compute.vectors import Buffer
from rudra.compute.waiting import NotInTime
from rudra.core.actions import PullReplica, Reduce, StepReplica, Update
from rudra.core.buckets import MOST, parts
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.messages import GroupFlags
from rudra.core.records import Gradient
from rudra.job.tables import OptimizerTable
from rudra.mpi.group_reduction import GroupReduction, WaitShare

RANKS, STEPS, PARAMETERS, SIZE, BUCKET = 4, 3, 150, 166, 48
SAMPLES = (4, 4, 7, 4, 5)  # of the members

pytestmark = pytest.mark.usefixtures("_mpi")


@pytest.fixture
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, which_are_over, Group=Group)
    monkeypatch.setattr("rudra.mpi.group_reduction.MPI", SimpleNamespace(Query_thread=lambda: 0, THREAD_MULTIPLE=3))
    monkeypatch.setattr("rudra.mpi.group_reduction.MEASURED_STEPS", 1)
    monkeypatch.setattr(WaitShare, "is_large", True)


def gradient_of(role: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(97 * step + role))


def mean_of(members: dict[int, int], step: int, sums: list[list[int]]) -> torch.Tensor:
    found = torch.empty(SIZE)
    average(found, [gradient_of(role, step) for role in members], [SAMPLES[role] for role in members], sums=sums)
    return found


class Rank:
    """A rank with one or two members, which compute gradients piece by piece, in any order."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.comm: Any = RankOfMpi(world, rank)
        self.executors: dict[int, Executor] = {}
        self.reduction: GroupReduction
        self.step = 0

    def join(self, members: dict[int, int], generation: int, sums: list[list[int]], step: int) -> None:
        """Begins to reduce with these members, from a step on."""
        self.members, self.sums, self.step = members, sums, step
        tag = generation * MOST
        its = parts(SIZE, PARAMETERS, BUCKET)
        self.reduction = GroupReduction(self.comm, members, tag, its, lambda: None, None, None, sums, early=True)
        self.executors = {
            role: self.executors.get(role) or self.make_executor()
            for role, rank in members.items()
            if rank == self.rank
        }
        self._begin_step()

    def make_executor(self) -> Executor:
        return Executor((), SIZE, PARAMETERS, 1)

    def _begin_step(self) -> None:
        self.pieces: dict[int, list[slice]] = {}
        self.ready: dict[int, Any] = {}
        for role, executor in self.executors.items():
            executor.renew(GRADIENT).vector.fill_(torch.nan)
            cuts = sorted(self.world.chance.sample(range(1, PARAMETERS), 4))
            self.pieces[role] = [slice(*ends) for ends in pairwise([0, *cuts, PARAMETERS])]
            self.world.chance.shuffle(self.pieces[role])

    def act(self) -> None:
        """Computes a piece, begins a reduction, or advances one."""
        self.comm.progress()
        if self.step == STEPS or (self.pieces and self.world.chance.random() < 0.3):
            self._advance()
        elif self.pieces:
            self._compute(self.world.chance.choice(sorted(self.pieces)))
        else:
            self._advance()

    def _compute(self, role: int) -> None:
        executor, place = self.executors[role], list(self.members).index(role)
        buffer, own = executor.buffer(GRADIENT), gradient_of(role, self.step)
        if role not in self.ready:
            self.ready[role] = self.reduction.expect(role, buffer, GRADIENT, SAMPLES[role])
        elif self.pieces[role]:
            piece = self.pieces[role].pop()
            buffer.vector[piece] = own[piece]
            if self.ready[role] is not None:
                self.ready[role](piece)
        else:
            buffer.vector[PARAMETERS:] = own[PARAMETERS:]
            made = Gradient(-1, place, SAMPLES[role], self.step, 0, 0, 0, 1.0, 0.0, 0.0, 0)
            self.reduction.begin(role, Reduce(GRADIENT, 0, self.step, made, True, GroupFlags(role)), executor)
            del self.pieces[role]

    def leave(self) -> None:
        self.reduction.abandon()

    def _advance(self) -> None:
        if not self.reduction.busy or (reduced := self.reduction.test()) is None:
            return
        assert [word.digest for word in reduced.words] == list(self.members)
        expected = mean_of(self.members, self.step, self.sums)
        assert all(torch.equal(each.buffer(GRADIENT).vector, expected) for each in self.executors.values())
        self.step += 1
        if self.step < STEPS:
            self._begin_step()


class EarlyRank(Rank):
    """A rank with one member, which reads parts of the average before the others have arrived.

    `drive` is called at random: it is what the thread calls.
    """

    def _begin_step(self) -> None:
        self.arrivals: Arrivals | None = None
        super()._begin_step()

    def _compute(self, role: int) -> None:
        super()._compute(role)
        if role not in self.pieces:
            self.arrivals = self.reduction.arrivals(lambda: False, lambda: None)

    def _advance(self) -> None:
        (role,) = self.executors
        self.reduction.drive(role)
        if self.arrivals is not None and self.reduction.busy:
            self._read(self.arrivals)
        super()._advance()

    def _read(self, arrivals: Arrivals) -> None:
        expected = mean_of(self.members, self.step, self.sums)
        here = [part for part in parts(SIZE, PARAMETERS, BUCKET) if arrivals.have(part)]
        assert all(torch.equal(arrivals.take(part), expected[part]) for part in here)

    def leave(self) -> None:
        """Abandons the reduction. Nothing more arrives."""
        self.reduction.abandon()
        if self.arrivals is not None and not self.arrivals.have(slice(0, SIZE)):
            with pytest.raises(NotInTime):
                self.arrivals.wait(slice(0, SIZE))


class Replica(AveragerExecutor):
    """A replica with momentum, whose weights are the mean of all replicas."""

    def __init__(self) -> None:
        super().__init__((), SIZE, PARAMETERS, 1)
        self._of, self._counters, self._prefix = SIZE, 0, REPLICA
        self._rule = UpdateRule(OptimizerTable(momentum=0.0), self.buffer(WEIGHTS).vector[:PARAMETERS])
        self._inner = UpdateRule(OptimizerTable(momentum=0.9), self.buffer(REPLICA).vector[:PARAMETERS])
        self._inner.prepare()

    def average(self, step: int) -> None:
        self.update(Update(DIFFERENCE, WEIGHTS, 1.0, step + 1))
        self.approach(PullReplica(REPLICA, WEIGHTS, 1.0))


STEP = StepReplica(GRADIENT, REPLICA, 0.1, WEIGHTS, DIFFERENCE)


class AveragingRank(Rank):
    """A rank whose members step replicas. After a death they begin again from the weights that all have reached."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.reached = [torch.zeros(SIZE)]  # weights after each step

    def make_executor(self) -> Executor:
        return Replica()

    def join(self, members: dict[int, int], generation: int, sums: list[list[int]], step: int) -> None:
        super().join(members, generation, sums, step)
        del self.reached[step + 1 :]
        self.usual = {role: Replica() for role in members}  # replicas that step after the pass
        for executor in (*self.executors.values(), *self.usual.values()):
            assert isinstance(executor, Replica)
            executor.restore({WEIGHTS: self.reached[step].numpy()})

    def _compute(self, role: int) -> None:
        executor, own = self.executors[role], gradient_of(role, self.step)
        assert isinstance(executor, Replica)
        if role not in self.ready:
            final = self.reduction.expect(role, executor.renew(DIFFERENCE), DIFFERENCE, SAMPLES[role])
            self.ready[role] = None if final is None else executor.step_ahead(STEP, final)
        elif self.pieces[role]:
            piece = self.pieces[role].pop()
            executor.buffer(GRADIENT).vector[piece] = own[piece]
            if self.ready[role] is not None:
                self.ready[role](piece)
        else:
            executor.buffer(GRADIENT).vector[PARAMETERS:] = own[PARAMETERS:]
            finished(executor.perform(STEP))
            made = Gradient(-1, list(self.members).index(role), SAMPLES[role], self.step, 0, 0, 0, 1.0, 0.0, 0.0, 0)
            self.reduction.begin(role, Reduce(DIFFERENCE, 0, self.step, made, True, GroupFlags(role)), executor)
            del self.pieces[role]

    def _advance(self) -> None:
        if not self.reduction.busy or self.reduction.test() is None:
            return
        for role, executor in self.usual.items():
            executor.buffer(GRADIENT).vector.copy_(gradient_of(role, self.step))
            finished(executor.perform(STEP))
        differences = [executor.buffer(DIFFERENCE).vector.clone() for executor in self.usual.values()]
        for executor in self.usual.values():
            samples = [SAMPLES[role] for role in self.members]
            average(executor.buffer(DIFFERENCE).vector, differences, samples, sums=self.sums)
        for role, executor in self.executors.items():
            assert isinstance(executor, Replica)
            for each in (executor, self.usual[role]):
                each.average(self.step)
            for name in (WEIGHTS, REPLICA):
                assert torch.equal(*(each.buffer(name).vector for each in (executor, self.usual[role])))
        for role in self.usual.keys() - self.executors.keys():
            self.usual[role].average(self.step)
        self.step += 1
        self.reached.append(executor.buffer(WEIGHTS).vector.clone())
        if self.step < STEPS:
            self._begin_step()


@settings(parent=cases(40), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(5, 200), st.booleans())
def test_replicas_are_those_of_usual_steps_whoever_dies_between_buckets(
    seed: int, deaths: int, soon: int, nodes: bool
) -> None:
    members = {0: 0, 1: 1, 4: 1, 2: 2, 3: 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rudra.compute.step_ahead.STEPPED", 32)
        reduce(random.Random(seed), members, deaths, soon, nodes=nodes, kind=AveragingRank)


@settings(parent=cases(200), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(5, 200), st.booleans())
def test_parts_that_are_read_early_are_those_of_the_average(seed: int, deaths: int, soon: int, nodes: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rudra.mpi.group_reduction.MPI", SimpleNamespace(Query_thread=lambda: 3, THREAD_MULTIPLE=3))
        idle = SimpleNamespace(submit=lambda work: None, close=lambda: None)
        patch.setattr("rudra.mpi.group_reduction.WorkerThread", lambda name, post: idle)
        reduce(random.Random(seed), {role: role for role in range(RANKS)}, deaths, soon, nodes=nodes, kind=EarlyRank)


@settings(parent=cases(200), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(5, 200), st.booleans())
def test_averages_are_those_of_the_living_whoever_dies_between_buckets(
    seed: int, deaths: int, soon: int, nodes: bool
) -> None:
    members = {role: role % RANKS for role in range(len(SAMPLES))}
    members = dict(sorted(members.items(), key=lambda pair: pair[1]))
    reduce(random.Random(seed), members, deaths, soon, nodes=nodes, kind=Rank)


def reduce(
    chance: random.Random, members: dict[int, int], deaths: int, soon: int, *, nodes: bool, kind: type[Rank]
) -> None:
    """Lets members reduce, some of which die. The others continue without them."""
    world = World(chance, False, RANKS)
    fates = {chance.randrange(RANKS): chance.randrange(soon) for _ in range(deaths)}
    ranks = [kind(world, rank) for rank in range(RANKS)]
    known = set[int]()
    for generation in range(1 + deaths):
        members = {role: rank for role, rank in members.items() if rank not in known}
        living = [rank for rank in ranks if rank.rank not in known]
        places = [[i for i, rank in enumerate(members.values()) if rank % 2 == node] for node in (0, 1)]
        sums = [each for each in places if each] if nodes else []
        for rank in living:
            rank.join(members, generation, sums, min(each.step for each in living))
        for time in range(20_000):
            world.dead |= {rank for rank, at in fates.items() if at <= time}
            left = [rank for rank in living if rank.rank not in world.dead]
            chance.choice(left).act()
            learnt = {dead for rank in left for dead in rank.comm.failed} - known
            if learnt or all(rank.step == STEPS for rank in left):
                break
        assert learnt or all(rank.step == STEPS for rank in left), "members wait for ever"
        if not learnt:
            break
        known = set(world.dead)
        for rank in left:
            rank.leave()
        for rank in 1_000 * left:
            rank.comm.progress()
        assert all(rank.reduction.quiet for rank in left)
    assert all(rank.step == STEPS for rank in ranks if rank.rank not in world.dead)


def test_a_death_while_the_thread_advances_leaves_nothing_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is final, and another member's death is noticed, between two looks of the thread."""
    world = World(random.Random(1), False, RANKS)
    monkeypatch.setattr("rudra.mpi.group_reduction.MPI", SimpleNamespace(Query_thread=lambda: 3, THREAD_MULTIPLE=3))
    idle = SimpleNamespace(submit=lambda work: None, close=lambda: None)
    monkeypatch.setattr("rudra.mpi.group_reduction.WorkerThread", lambda name, post: idle)
    rank = Rank(world, 0)
    rank.join({role: role for role in range(RANKS)}, 0, [], 0)
    reduction, (role,) = rank.reduction, rank.reduction.roles
    begun: list[int] = []
    ready = reduction.expect(role, rank.executors[role].buffer(GRADIENT), GRADIENT, SAMPLES[role])
    assert ready is not None

    def advance() -> None:
        ready(parts(SIZE, PARAMETERS, BUCKET)[0])
        reduction._fail()

    monkeypatch.setattr(reduction, "_advance", advance)
    monkeypatch.setattr(reduction, "_begin_part", lambda number, *about: begun.append(number))
    assert not reduction.drive(role)
    assert not begun


def test_gradients_on_one_rank_are_added_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing copies them to main memory, so they may be on a device."""

    def copied(buffer: Buffer) -> None:
        raise AssertionError("a vector is copied to main memory")

    monkeypatch.setattr(Buffer, "array", property(copied))
    rank = Rank(World(random.Random(3), False, 1), 0)
    rank.join(dict.fromkeys(range(3), 0), 0, [], 0)
    for _ in range(2_000):
        rank.act()
    assert rank.step == STEPS
