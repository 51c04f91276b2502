"""Weights that come in buckets: complete ones of one timestamp, and the gradients of whole ones, whoever dies."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_mpi import Error, fake_mpi
from fuzzing import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_mpi import Group, RankOfMpi, World, which_are_over
from torch import nn
from torch.utils.data import TensorDataset

from rudra.compute.executor import Executor
from rudra.compute.making import make_executors
from rudra.compute.pulled_pass import PullingExecutor
from rudra.core.actions import Compute
from rudra.core.buckets import ABREAST, MOST
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.messages import Weights
from rudra.data.load import load
from rudra.job.job import Job
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.failures import outcome
from rudra.mpi.pull_buckets import PartReceives, WeightBuckets

SERVER, FIRST, LEARNERS, STEPS = 0, 2, 2, 5  # roles of topology base have the ids of their ranks
FEATURES, CLASSES = 12, 5


def tag(role: int, channel: int, sender: int) -> int:
    return (10 * role + sender) * 2 * MOST + channel


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, CLASSES, (64,), generator=generator)
    split = TensorDataset(torch.randn(64, FEATURES, generator=generator), labels)
    return split, split


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Dropout(0.4), nn.Linear(40, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, CLASSES))


class Counting(nn.Linear):
    """Counts its passes, so that no pass may be dropped."""

    passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(inputs)


MODELS: dict[str, dict[str, Any]] = {
    "chain": {"model": {"name": "mlp", "options": {"hidden": [30, 20]}}, "training": {"gradients": "direct"}},
    "autograd": {"model": {"name": dropping}},
    "buffers": {"model": {"name": normed}},
}


def job_of(tables: dict[str, Any]) -> Job:
    return Job(
        data={"name": data, "classes": CLASSES},
        training={"minibatch_size": 4, "gradients": "autograd"},
        protocol={"name": "async"},
        cluster={"learners": LEARNERS, "buckets": 0.001},
    ).with_(**tables)


def executor(job: Job) -> PullingExecutor:
    plan = job.plan()
    (made,) = make_executors(job, plan, plan.learners[:1], load(job.data, test=False), prefetch=False).values()
    assert isinstance(made, PullingExecutor)
    made.prepare()
    return made


class Server:
    """Sends newer weights to all learners as soon as it has sent the last ones."""

    def __init__(self, world: World, rule: BucketRule, size: int, parameters: int) -> None:
        self.world, self.comm = world, RankOfMpi(world, SERVER)
        self.executor = Executor((), size, parameters, 1)
        self.buckets = WeightBuckets(self.comm, tag, {SERVER: self.executor}, lambda: False)  # type: ignore[arg-type]
        self.buckets.renew(rule)
        self.timestamp, self.sends = 0, list[Any]()

    def step(self) -> None:
        self.comm.progress()
        self.sends = [request for request in self.sends if outcome(request) == "no"]
        if self.sends or self.timestamp == STEPS:
            return
        self.timestamp += 1
        buffer = self.executor.buffer(WEIGHTS)
        buffer.vector.copy_(weights_of(self.timestamp, self.executor.size))
        wire = buffer.write(Weights(SERVER, self.timestamp))
        for learner in range(FIRST, FIRST + LEARNERS):
            pieces = self.buckets.pieces(SERVER, learner, wire)
            assert len(pieces) > ABREAST
            self.sends += [self.comm.Isend(piece, learner, its) for piece, its in pieces]


def weights_of(timestamp: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(timestamp))


class Learner:
    """Computes a gradient at all weights that it gets.

    While its pass waits, `meanwhile` lets others work, but not compute: on ranks they have random generators of their
    own.
    """

    computes = False  # any learner

    def __init__(self, world: World, rank: int, rule: BucketRule, meanwhile: Callable[[], None]) -> None:
        self.world, self.rank, self.comm = world, rank, RankOfMpi(world, rank)
        self.executor, self.usual = executor(rule.job), executor(rule.job)
        hurries = self._hurries
        self.buckets = WeightBuckets(self.comm, tag, {rank: self.executor}, hurries)  # type: ignore[arg-type]
        self.buckets.renew(rule)
        self.meanwhile, self.posted = meanwhile, list[Callable[[], None]]()
        self.request: Any = None
        self.timestamp = self.number = self.early = 0

    def _hurries(self) -> bool:
        for _ in range(60):
            self.meanwhile()
            self.poll()
        return self.rank in self.world.dead

    def poll(self) -> None:
        """Does what the thread does that receives."""
        self.comm.progress()
        if self.request is not None and self.request != "failed":
            assert len(self.request._open) <= ABREAST
            what = outcome(self.request)
            if what == "done":
                self.posted.append(self.take)
                self.request = None
            elif what == "failed":
                self.request = "failed"

    def step(self) -> None:
        self.poll()
        if self.request is None and not self.posted:
            buffer = self.executor.renew(WEIGHTS)
            buffer.vector.fill_(torch.nan)
            assert self.buckets.come(self.rank, SERVER)
            self.request = self.buckets.receive(self.rank, SERVER, buffer.wire, buffer, self.posted.append)()
        while self.posted and not Learner.computes:
            Learner.computes = True
            try:
                self.posted.pop(0)()
            finally:
                Learner.computes = False

    def take(self) -> None:
        buffer = self.executor.buffer(WEIGHTS)
        message = buffer.read()
        assert isinstance(message, Weights)
        assert message.timestamp == self.timestamp + 1
        self.timestamp = message.timestamp
        assert torch.equal(buffer.vector, weights_of(self.timestamp, len(buffer.vector)))
        self.usual.buffer(WEIGHTS).vector.copy_(buffer.vector)
        self.early += self.executor._pulled is not None and self.executor._pulled.passed is not None
        self.number += self.world.chance.random() < 0.2  # not the next mini-batch
        action = Compute(self.number, self.executor.source.work.after(self.number), WEIGHTS, GRADIENT)
        found, expected = (list(each.perform(action)) for each in (self.executor, self.usual))
        assert found == expected
        assert torch.equal(*(each.buffer(GRADIENT).vector for each in (self.executor, self.usual)))
        self.number += 1


@pytest.fixture
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, which_are_over, Group=Group)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("model", MODELS)
@settings(parent=cases(8), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.sampled_from([None, None, SERVER, FIRST]), st.integers(0, 300))
def test_gradients_are_of_complete_weights_whoever_dies(model: str, seed: int, dies: int | None, soon: int) -> None:
    world = World(random.Random(seed), False, FIRST + LEARNERS)
    job = job_of(MODELS[model])
    rule = BucketRule(job, job.plan(), [0, 0, 1, 2], 0, True)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if dies is not None and steps > soon:
            world.dead.add(dies)
        living = [each for each in everybody if each.comm.rank not in world.dead]
        world.chance.choice(living).step()

    learners = [Learner(world, rank, rule, step) for rank in range(FIRST, FIRST + LEARNERS)]
    server = Server(world, rule, learners[0].executor.size, learners[0].executor.parameters)
    everybody = [server, *learners]
    living = [learner for learner in learners if learner.rank != dies]

    def is_over() -> bool:
        if dies == SERVER:
            return all(learner.timestamp == STEPS or learner.request == "failed" for learner in living)
        return all(learner.timestamp == STEPS for learner in living)

    while not is_over():
        step()
        assert steps < 20_000, "somebody waits for ever"
    if dies is None:
        assert sum(learner.early for learner in learners) > 0


@pytest.mark.usefixtures("_mpi")
def test_receives_are_cancelled_together_and_a_loss_ends_all() -> None:
    world = World(random.Random(3), False, 2)
    sender, receiver = RankOfMpi(world, 0), RankOfMpi(world, 1)
    memory, told = torch.zeros(8).numpy(), list[Any]()
    pieces = [(memory[number : number + 1], number) for number in range(8)]
    about: Any = receiver, 0, pieces, told.append, lambda: told.append("failed")
    receives = PartReceives(*about)
    for number in range(8):
        sender.Isend(torch.ones(1).numpy(), 1, number)
    while not receiver.landing:
        assert not receives.Test()
        receiver.progress()
    receives.Cancel()
    assert told[-1] == "failed"
    before = [*told]
    while not receives.Test():
        receiver.progress()
    assert not receiver.landing
    assert not receiver.posted
    assert told == before
    later = PartReceives(*about)
    world.dead.add(0)
    receiver.failed.append(0)
    with pytest.raises(Error):
        later.Test()
    assert not receiver.posted


@pytest.mark.parametrize(
    ("tables", "may"),
    [
        (MODELS["chain"], True),
        (MODELS["autograd"], True),
        ({"model": {"name": dropping}, "training": {"precision": "bfloat16"}}, True),
        ({"model": {"name": dropping}, "training": {"precision": "float16"}}, False),
        ({"model": {"name": dropping}, "training": {"microbatches": 2}}, False),
        ({"model": {"name": normed}}, True),
        ({"model": {"name": Counting, "options": {"in_features": FEATURES, "out_features": CLASSES}}}, False),
    ],
)
def test_where_it_is_not_safe_no_weights_come_in_buckets(tables: dict[str, Any], may: bool) -> None:
    assert executor(job_of(tables)).can_pass_early == may


def test_servers_of_which_one_gives_its_part_whole_let_no_pass_begin() -> None:
    job = job_of({"topology": {"name": "sharded", "options": {"shards": 2}}, **MODELS["chain"]})
    plan, learner = job.plan(), executor(job)
    role, passes = plan.learners[0], list[Any]()
    learner.prepare_pass = lambda *about: passes.append(about)  # type: ignore[method-assign]
    for sizes in ((300, 300), (300, 200)):
        ends = sizes[0], sum(sizes)
        learner.slices_by_owner = dict(zip(plan.front_owners, (slice(0, ends[0]), slice(*ends)), strict=True))
        learner.size = learner.parameters = ends[1]
        buckets: Any = WeightBuckets(None, tag, {role: learner}, lambda: False)  # type: ignore[arg-type]
        buckets.renew(BucketRule(job, plan, range(len(plan.roles)), 0, True))
        wires = [torch.zeros(size).numpy() for size in sizes]
        for owner, wire in zip(plan.front_owners, wires, strict=True):
            assert buckets.come(role, owner) == (len(wire) != 200)
            if buckets.come(role, owner):
                buckets.receive(role, owner, wire, learner.buffer(WEIGHTS), lambda work: None)
        assert len(passes) == 1, "one pass for all parts, but only if all come in buckets"
