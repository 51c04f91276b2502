"""Gradients that come in buckets: a server gets whole ones, in the order of their completion or in its own order."""

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_mpi import fake_mpi
from fuzzing import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_mpi import Arena, Group, RankOfMpi, World, which_are_over

from rudra.compute.executor import Executor
from rudra.core.buckets import MOST
from rudra.core.messages import Message, PushedGradient
from rudra.core.records import Gradient
from rudra.job.job import Job
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.failures import Losses, outcome
from rudra.mpi.leases import Going
from rudra.mpi.push_buckets import IncomingPushes, OutgoingPushes
from rudra.mpi.transfers import Transfers, Wanted

SERVER, FIRST, LEARNERS, PUSHES = 0, 2, 4, 4  # roles of topology base have the ids of their ranks
PARAMETERS, SIZE = 1500, 1540
JOB = Job(protocol={"name": "hardsync"}, cluster={"learners": LEARNERS, "buckets": 0.001})
RULE = BucketRule(JOB, JOB.plan(), [0, 0, 1, 1, 2, 2], 0, False)


def tag(role: int, channel: int, sender: int) -> int:
    return (10 * role + sender) * 2 * MOST + channel


class Rank:
    """What all ranks have."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.comm: Any = RankOfMpi(world, rank)
        self.executor = Executor((), SIZE, PARAMETERS, 1)
        self.losses = Losses(self.comm)

    def step(self) -> None:
        raise NotImplementedError


class Server(Rank):
    """Receives gradients into two buffers: of anybody, or of the learners in turn."""

    def __init__(self, world: World, *, ordered: bool) -> None:
        super().__init__(world, SERVER)
        self.incoming = IncomingPushes(self.comm, tag, self.losses, {SERVER: self.executor})
        arena: Any = Arena(world, SERVER)
        more = (self._received, lambda going: None, arena, self.incoming.take)
        self.transfers = Transfers(self.comm, self.losses, {SERVER: self.executor}, *more)
        self.incoming.renew(RULE)
        self.ordered, self.turns = ordered, [*range(FIRST, FIRST + LEARNERS)]
        self.taken: dict[int, list[float]] = defaultdict(list)
        self.wanted: dict[str, int | None] = {}
        self.want("gradient 0")
        self.want("gradient 1")

    def want(self, name: str) -> None:
        source = None
        if self.ordered:
            if not self.turns:
                return
            source = self.turns.pop(0)
            self.turns.append(source)
        self.wanted[name] = source
        senders = [sender for sender in self.incoming.senders(SERVER) if source in {None, sender}]
        self.transfers.receive(Wanted(SERVER, name, source, tag(SERVER, 1, FIRST), False, in_buckets_of=senders))

    def _received(self, wanted: Wanted, message: Message | None) -> None:
        assert isinstance(message, PushedGradient)
        (value,) = set(self.executor.buffer(wanted.name).vector.tolist())
        assert value == 100 * message.sender + message.gradients[0].step
        self.taken[message.sender].append(message.gradients[0].step)
        self.executor.buffer(wanted.name).vector.fill_(-1)
        assert self.wanted.pop(wanted.name) in {None, message.sender}
        self.want(wanted.name)

    def step(self) -> None:
        self.comm.progress()
        self.incoming.poll()
        self.transfers.poll()
        if ranks := self.losses.look():
            self.transfers.lose(ranks)
            self.incoming.lose(ranks)
            self.turns = [turn for turn in self.turns if turn not in ranks]
            for name in [name for name, source in self.wanted.items() if source in ranks]:
                del self.wanted[name]
                self.want(name)


class Learner(Rank):
    """Computes gradients piece by piece, in any order, and pushes them, but perhaps not the last one."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.sends: list[tuple[Any, Going]] = []
        self.outgoing = OutgoingPushes(self.comm, tag, lambda start, going: self.sends.append((start(), going)))
        self.outgoing.renew(RULE, {rank: self.executor})
        self.pushed = 0
        self.uses_last = world.chance.random() < 0.5
        self.pieces: list[slice] | None = None
        self.done = False

    def step(self) -> None:
        self.comm.progress()
        pending = []
        for request, going in self.sends:
            if outcome(request) == "no":
                pending.append((request, going))
            else:
                going.left -= 1
        waits, self.sends = bool(pending), pending
        if self.done or (waits and self.pieces is None):
            return
        chance, vector = self.world.chance, self.executor.buffer("gradient").vector
        value = float(100 * self.rank + self.pushed)
        if self.pieces is None:
            vector.fill_(np.nan)
            cuts = sorted(chance.sample(range(1, PARAMETERS), chance.randint(0, 6)))
            self.pieces = [slice(*ends) for ends in pairwise([0, *cuts, PARAMETERS])]
            chance.shuffle(self.pieces)
            ready = self.outgoing.expect(self.rank, "gradient", self.executor.buffer("gradient").array)
            assert ready is not None
            self.ready = ready
        elif len(self.pieces) > 1:
            vector[piece := self.pieces.pop()] = value
            self.ready(piece)
        elif self.pushed < PUSHES or self.uses_last:
            vector[self.pieces.pop()] = value
            vector[PARAMETERS:] = value
            self.pieces, self.pushed = None, self.pushed + 1
            given = Gradient(-1, 0, 1, self.pushed - 1, 0, 0, -1, 1.0, 0.5, 1.0, 0)
            self.outgoing.push(self.rank, "gradient", PushedGradient(self.rank, 0, 0, (given,)), SERVER)
            if self.pushed > PUSHES:
                self.done = True
                self.outgoing.close()
        else:
            self.done = True
            self.outgoing.close()


@pytest.fixture
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, which_are_over, Group=Group)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("ordered", [False, True], ids=["anybody", "in turn"])
@settings(parent=cases(40), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(20, 600))
def test_every_gradient_comes_whole_and_once_whoever_dies(ordered: bool, seed: int, deaths: int, soon: int) -> None:
    chance = random.Random(seed)
    world = World(chance, False, FIRST + LEARNERS)
    server = Server(world, ordered=ordered)
    learners = [Learner(world, rank) for rank in range(FIRST, FIRST + LEARNERS)]
    if ordered:
        for learner in learners:
            learner.uses_last = False  # a server that waits for a turn takes no more
    fates = {chance.randrange(FIRST, FIRST + LEARNERS): chance.randrange(soon) for _ in range(deaths)}
    for step in range(20_000):
        world.dead |= {rank for rank, at in fates.items() if at <= step}
        living = [learner for learner in learners if learner.rank not in world.dead]
        chance.choice([server, *living]).step()
        taken = all(len(server.taken[learner.rank]) == learner.pushed for learner in living)
        if world.dead == fates.keys() and taken and all(learner.done for learner in living):
            break
    for learner in living:
        assert learner.done, f"learner {learner.rank} waits for ever"
        assert server.taken[learner.rank] == [*range(PUSHES + learner.uses_last)]
    for rank in world.dead:
        assert server.taken[rank] == [*range(len(server.taken[rank]))]
    for _ in range(5_000):
        chance.choice(living).step()
        server.comm.progress()
        if server.incoming.end():
            break
    assert server.incoming.end(), "the server waits for ever"
    assert len(server.executor.names) == 2, "buffers of learners are spare again"


@pytest.mark.usefixtures("_mpi")
def test_abandoned_receives_end_before_their_memory_is_used_again() -> None:
    world = World(random.Random(1), False, FIRST + LEARNERS)
    server, learner = Server(world, ordered=False), Learner(world, FIRST)
    while not server.comm.landing:  # until a part is matched, but not written
        learner.step()
        server.comm.progress()
    server.incoming.abandon()
    assert not server.incoming.quiet
    while not server.incoming.quiet:
        server.comm.progress()
        server.incoming.poll()
    assert not server.comm.landing
    server.incoming.renew(RULE)
    assert len(server.incoming.senders(SERVER)) == LEARNERS


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("complete", [False, True])
def test_what_a_dropped_learner_sent_is_void_and_its_memory_not_used_again_while_it_may_be_written(
    complete: bool,
) -> None:
    world = World(random.Random(2), False, FIRST + LEARNERS)
    server, learner = Server(world, ordered=True), Learner(world, FIRST)
    server.transfers.drop(FIRST, FIRST)
    memory = server.executor.buffer(f"gradient of {FIRST}")
    while not (learner.pushed and complete) and not (server.comm.landing and not complete):
        learner.step()
        server.comm.progress()
    for _ in range(500):
        learner.comm.progress()
        if complete:
            server.incoming.poll()
            server.comm.progress()
    server.incoming.drop(FIRST)
    assert FIRST not in server.incoming.senders(SERVER)
    assert (server.executor.spare("gradient") is memory) == complete


def test_without_buckets_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, which_are_over, Group=Group)
    whole = BucketRule(JOB.with_(cluster={"buckets": "off"}), RULE.plan, RULE.node, 0, False)
    executor = Executor((), SIZE, PARAMETERS, 1)
    outgoing = OutgoingPushes(None, tag, lambda start, going: None)  # type: ignore[arg-type]
    outgoing.renew(whole, {FIRST: executor})
    assert not outgoing
    assert outgoing.expect(FIRST, "gradient", executor.buffer("gradient").array) is None
    assert not outgoing.takes(FIRST, SERVER)
    server = IncomingPushes(None, tag, Losses(None), {SERVER: executor})  # type: ignore[arg-type]
    server.renew(whole)
    assert server.senders(SERVER) == ()
    assert server.end()
