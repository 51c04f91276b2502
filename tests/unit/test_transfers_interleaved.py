"""Learners push to a server, and one of them dies: under random interleavings no living learner's tensor is lost."""

import random
import sys
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import pytest
from fake_mpi import fake_mpi
from fuzzing import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_mpi import Arena, DeviceMemory, Group, RankOfMpi, World, which_are_over

from rudra.compute.device.adverse import AdverseDevice, AdverseWork
from rudra.compute.executor import Executor
from rudra.core.messages import MESSAGES, Message, MessageKind, PushedGradient
from rudra.core.records import Gradient
from rudra.mpi.failures import Losses
from rudra.mpi.leases import Going
from rudra.mpi.transfers import Transfers, Wanted
from tests.selection import CAMPAIGN

SERVER, LEARNERS, PUSHES, SIZE = 0, 4, 5, 3
UP, DOWN = 7, 8  # tags
GIVEN = Gradient(-1, 0, 1, 0, 0, 0, -1, 1.0, 0.5, 1.0, 0)


class Rank:
    """One rank's transfers, polled as the driver does."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.comm: Any = RankOfMpi(world, rank)
        arena: Any = Arena(world, rank)
        if world.device is not None:
            arena = DeviceMemory(world, rank, world.device, 4 * SIZE)
        self.executor = Executor((), SIZE, SIZE, 1, memory=arena.allocate if world.near and not arena.copies else None)
        self.losses = Losses(self.comm)
        self.transfers = Transfers(self.comm, self.losses, {rank: self.executor}, self._received, self._sent, arena)

    def send(self, name: str, value: float, to: int, tag: int, kind: MessageKind) -> None:
        self.executor.renew(name).vector.fill_(value)
        message = (
            PushedGradient(self.rank, 0, 0, (GIVEN,)) if kind is MessageKind.GRADIENT else MESSAGES[kind](self.rank, 0)
        )
        going = Going(self.rank, name, to)
        if self.world.near:
            self.transfers.lend(going, message, to, tag, halves=False, most=2)
        else:
            self.transfers.send(self.comm.Isend(self.executor.send(name, message, to), to, tag), going)

    def receive(self, name: str, source: int | None, tag: int) -> None:
        near = self.world.near
        self.transfers.receive(Wanted(self.rank, name, source, tag, False, near=near, reads=near and tag == UP))

    def step(self) -> None:
        self.comm.progress()  # as the driver looks for control messages
        self.transfers.poll()
        if ranks := self.losses.look():
            self.transfers.lose(ranks)
        self.act()

    def act(self) -> None:
        raise NotImplementedError

    def took(self, name: str, value: float, sender: int) -> None:
        raise NotImplementedError

    def _received(self, wanted: Wanted, message: Message | None) -> None:
        buffer = self.executor.buffer(wanted.name)
        values = set(buffer.vector.tolist())
        assert len(values) == 1, "a tensor is whole"
        self.took(wanted.name, values.pop(), (message or buffer.read()).sender)

    def _sent(self, going: Going) -> None:
        self.executor.sent(going.name)


class Server(Rank):
    """Receives from anybody into two buffers, and answers everybody."""

    def __init__(self, world: World) -> None:
        super().__init__(world, SERVER)
        self.pushed: dict[int, list[float]] = defaultdict(list)
        self._todo: list[tuple[str, int, float]] = []
        for name in ("gradient 0", "gradient 1"):
            self.receive(name, None, UP)

    def took(self, name: str, value: float, sender: int) -> None:
        self.pushed[sender].append(value)
        self._todo.append((name, sender, value))

    def act(self) -> None:
        while self._todo and not self.executor.lent["weights"]:
            name, sender, value = self._todo.pop(0)
            self.send("weights", -value, sender, DOWN, MessageKind.WEIGHTS)
            self.receive(name, None, UP)


class Learner(Rank):
    """Pushes, and waits for the answer."""

    pushes = 0
    waits = False

    def took(self, name: str, value: float, sender: int) -> None:
        assert (sender, value) == (SERVER, -float(100 * self.rank + self.pushes))
        self.waits = False

    def act(self) -> None:
        if not self.waits and not self.executor.lent["gradient"] and self.pushes < PUSHES:
            self.pushes += 1
            self.waits = True
            self.receive("weights", SERVER, DOWN)
            self.send("gradient", 100 * self.rank + self.pushes, SERVER, UP, MessageKind.GRADIENT)

    @property
    def is_done(self) -> bool:
        return self.pushes == PUSHES and not self.waits and not self.executor.lent["gradient"]


@pytest.fixture
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, which_are_over, Group=Group)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("how", ["lent", "sent", "copied"])
@settings(parent=cases(60), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(20, 300))
def test_what_the_living_push_arrives_once_whoever_dies(how: str, seed: int, deaths: int, soon: int) -> None:
    """If tensors are copied by devices, nobody takes one of a rank whose memory is void."""
    push_until_all_is_done(how, seed, deaths, soon)


def push_until_all_is_done(how: str, seed: int, deaths: int, soon: int) -> None:
    chance = random.Random(seed)
    world = World(chance, how != "sent", LEARNERS + 1)
    world.device = AdverseDevice(seed) if how == "copied" else None
    ranks: list[Rank] = [Server(world), *(Learner(world, rank) for rank in range(1, LEARNERS + 1))]
    fates = {chance.randrange(1, LEARNERS + 1): chance.randrange(soon) for _ in range(deaths)}
    for step in range(20_000):
        for rank in {rank for rank, at in fates.items() if at <= step} - world.dead:
            world.dead.add(rank)
            if rank in world.regions:
                world.regions[rank].fill_(255)
        living = [rank for rank in ranks if rank.rank not in world.dead]
        chance.choice(living).step()
        if world.dead == fates.keys() and all(rank.is_done for rank in living if isinstance(rank, Learner)):
            break
    server = ranks[SERVER]
    assert isinstance(server, Server)
    for learner in (rank for rank in living if isinstance(rank, Learner)):
        assert learner.is_done, f"learner {learner.rank} waits for ever"
        assert server.pushed[learner.rank] == [100 * learner.rank + number for number in range(1, PUSHES + 1)]
    for rank in world.dead:
        found = server.pushed[rank]
        assert found == [100 * rank + number for number in range(1, len(found) + 1)]


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("orders", [150, pytest.param(1000, marks=CAMPAIGN)])
def test_tensors_that_devices_copy_are_the_same_in_any_order(orders: int) -> None:
    for seed in range(orders):
        push_until_all_is_done("copied", seed, 0, 1)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("broken", ["sender for its copy", "receiver for its copy", "receiver for a dead sender"])
def test_a_missing_wait_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(functions: Collection[str]) -> bool:
        return sys._getframe(2).f_code.co_name in functions

    done = AdverseWork.done
    asks = {"sender for its copy": ["poll"], "receiver for its copy": ["_poll_landings", "<listcomp>"]}
    if broken in asks:
        monkeypatch.setattr(AdverseWork, "done", lambda work: done(work) or hasty(asks[broken]))
    else:
        monkeypatch.setattr(DeviceMemory, "intact", lambda arena, rank: True)
    deaths, noticed = int(broken not in asks), 0
    for seed in range(60):
        try:
            push_until_all_is_done("copied", seed, deaths, 40)
        except AssertionError:
            noticed += 1
    assert noticed > (45 if broken in asks else 5)
