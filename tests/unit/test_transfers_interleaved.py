"""Learners push to a server, and one of them dies: under random interleavings no living learner's tensor is lost.

`RankOfMpi` behaves as Open MPI with ULFM was seen to: any call of a rank may bring messages and news of the dead, and a
receive from anybody keeps the error with which it has reported a loss.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_mpi import ANYBODY, FAILED, PENDING, Error, Status, fake_mpi
from fuzzing import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rudra.compute.executor import Executor
from rudra.core.messages import MESSAGES, Message, MessageKind, PushedGradient
from rudra.core.records import Gradient
from rudra.mpi.arena import LEASES
from rudra.mpi.failures import Losses
from rudra.mpi.leases import Going
from rudra.mpi.transfers import Transfers, Wanted

SERVER, LEARNERS, PUSHES, SIZE = 0, 4, 5, 3
UP, DOWN = 7, 8  # tags
GIVEN = Gradient(-1, 0, 1, 0, 0, 0, -1, 1.0, 0.5, 1.0, 0)


@dataclass(eq=False)
class Sent:
    """A message. A small one is complete when it is sent; a large one when a receive has it, if both live then."""

    source: int
    tag: int
    data: Any
    large: bool
    done: bool


@dataclass(eq=False)
class Request:
    """Of one rank; `sent` is what a receive has matched, or what a send sends."""

    rank: "RankOfMpi"
    receives: bool
    peer: int
    tag: int
    memory: Any = None
    sent: Sent | None = None
    complete: bool = False
    cancelled: bool = False
    error: int = 0

    def Test(self, status: Status | None = None) -> bool:
        for _ in range(2):
            if self._over(status):
                if self.error:
                    raise Error(self.error)
                return True
            self.error = 0
            if self.receives and self.peer == ANYBODY and self.rank.unacknowledged:
                self.error = PENDING
                raise Error(PENDING)
            if self.peer in self.rank.failed:
                self.complete, self.error = True, FAILED
                self.rank.posted = [other for other in self.rank.posted if other is not self]
                raise Error(FAILED)
            self.rank.progress()
        return False

    def Get_status(self, status: Status | None = None) -> bool:
        if not self.complete:
            self.rank.progress()
        return self._over(status)

    def _over(self, status: Status | None) -> bool:
        over = self.complete if self.receives or self.sent is None else self.sent.done
        if over and status is not None:
            status.source, status.cancelled = self.sent.source if self.sent else ANYBODY, self.cancelled
        return over

    def Cancel(self) -> None:
        if self.receives and self.sent is None and not self.complete:
            self.cancelled = self.complete = True
            self.rank.posted.remove(self)


class RankOfMpi:
    """What one rank sees of MPI: the communicator that `Transfers` and `Losses` get."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.posted: list[Request] = []  # receives without a message, in order
        self.unexpected: list[Sent] = []
        self.landing: list[Request] = []  # receives of large messages
        self.failed: list[int] = []
        self.acknowledged = 0

    @property
    def unacknowledged(self) -> bool:
        return self.acknowledged < len(self.failed)

    def progress(self) -> None:
        """Some of what is on its way arrives, and news of the dead."""
        chance = self.world.chance
        for (_, to), queue in self.world.wires.items():
            while to == self.rank and queue and chance.random() < 0.5:
                self._arrive(queue.pop(0))
        for request in list(self.landing):
            assert request.sent is not None
            if request.sent.source not in self.world.dead and chance.random() < 0.5:
                self._fill(request)
        for dead in sorted(self.world.dead - set(self.failed)):
            if chance.random() < 0.3:
                self.failed.append(dead)

    def _arrive(self, sent: Sent) -> None:
        for request in self.posted:
            if request.tag == sent.tag and request.peer in (ANYBODY, sent.source):
                self.posted.remove(request)
                self._match(request, sent)
                return
        self.unexpected.append(sent)

    def _match(self, request: Request, sent: Sent) -> None:
        request.sent = sent
        if sent.large:
            self.landing.append(request)
        else:
            self._fill(request)

    def _fill(self, request: Request) -> None:
        assert request.sent is not None
        data = bytes(request.sent.data)
        memoryview(request.memory)[: len(data)] = data
        request.complete = request.sent.done = True
        self.landing = [other for other in self.landing if other is not request]

    def Irecv(self, memory: Any, source: int, tag: int) -> Request:
        request = Request(self, True, source, tag, memory)
        for sent in self.unexpected:
            if sent.tag == tag and source in (ANYBODY, sent.source):
                self.unexpected.remove(sent)
                self._match(request, sent)
                return request
        self.posted.append(request)
        return request

    def Isend(self, data: Any, to: int, tag: int) -> Request:
        large = not isinstance(data, bytes)
        sent = Sent(self.rank, tag, data if large else bytes(data), large, not large)
        self.world.wires[self.rank, to].append(sent)
        return Request(self, False, to, tag, sent=sent)

    def Improbe(self, source: int, tag: int) -> Any:
        if self.unacknowledged:
            raise Error(PENDING)
        self.progress()
        for sent in self.unexpected:
            if sent.tag == tag:
                self.unexpected.remove(sent)
                return SimpleNamespace(Irecv=partial(self._matched, sent))
        return None

    def _matched(self, sent: Sent, memory: Any) -> Request:
        request = Request(self, True, sent.source, sent.tag, memory)
        self._match(request, sent)
        return request

    def Get_failed(self) -> Any:
        return Group(self.failed)

    def Get_group(self) -> Any:
        return Group(list(range(LEARNERS + 1)))

    def Ack_failed(self, count: int) -> None:
        self.acknowledged = count


@dataclass
class Group:
    ranks: list[int]

    def Get_size(self) -> int:
        return len(self.ranks)

    def Free(self) -> None:
        pass

    @staticmethod
    def Translate_ranks(group: "Group", ranks: list[int], _: Any) -> list[int]:
        return [group.ranks[i] for i in ranks]


def _testsome(requests: list[Any]) -> list[int]:
    over = []
    for i, request in enumerate(requests):
        try:
            done = request.Test()
        except Error:
            done = True
        if done:
            requests[i] = None
            over.append(i)
    return over


@dataclass
class World:
    """All ranks' memory, and what is between them.

    Attributes:
        near: ranks are neighbours, and lend each other their tensors.
    """

    chance: random.Random
    near: bool
    dead: set[int] = field(default_factory=set)
    wires: dict[tuple[int, int], list[Sent]] = field(default_factory=lambda: defaultdict(list))
    pieces: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    words: dict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))


class Arena:
    """As `rudra.mpi.arena.Arena`, of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.neighbours = frozenset(range(LEARNERS + 1) if world.near else ())

    def allocate(self, length: int) -> Any:
        self._world.pieces[self._rank].append(np.zeros(length, np.uint8))
        return self._world.pieces[self._rank][-1]

    def offset(self, array: Any) -> int:
        return next(
            1000 * number + array.ctypes.data - memory.ctypes.data
            for number, memory in enumerate(self._world.pieces[self._rank])
            if 0 <= array.ctypes.data - memory.ctypes.data < len(memory)
        )

    def floats_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        piece = self._world.pieces[rank][offset // 1000]
        return torch.from_numpy(piece[offset % 1000 : offset % 1000 + length]).view(torch.float32)

    def said(self, reader: int, number: int) -> int:
        return self._world.words[self._rank, reader, number % LEASES]

    def say(self, owner: int, number: int, *, done: bool) -> None:
        self._world.words[owner, self._rank, number % LEASES] = 2 * number + done


class Rank:
    """One rank's transfers, polled as the driver does."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.comm: Any = RankOfMpi(world, rank)
        arena: Any = Arena(world, rank)
        self.executor = Executor((), SIZE, SIZE, 1, memory=arena.allocate if world.near else None)
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
    fake_mpi(monkeypatch, _testsome, Group=Group)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize("near", [True, False], ids=["lent", "sent"])
@settings(parent=cases(60), phases=[Phase.generate])
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(20, 300))
def test_what_the_living_push_arrives_once_whoever_dies(near: bool, seed: int, deaths: int, soon: int) -> None:
    chance = random.Random(seed)
    world = World(chance, near)
    ranks: list[Rank] = [Server(world), *(Learner(world, rank) for rank in range(1, LEARNERS + 1))]
    fates = {chance.randrange(1, LEARNERS + 1): chance.randrange(soon) for _ in range(deaths)}
    for step in range(20_000):
        world.dead |= {rank for rank, at in fates.items() if at <= step}
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
