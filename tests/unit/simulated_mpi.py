"""MPI of several ranks in one process, which behaves as Open MPI with ULFM was seen to.

Any call of a rank may bring messages and news of the dead, and a receive from anybody keeps the error with which it has
reported a loss. `tests/mpi/test_fake_mpi.py` compares it with Open MPI.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_mpi import ANYBODY, FAILED, PENDING, VOID, Error, Status

from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.streams import Stream
from rudra.mpi.arena import LEASES
from rudra.mpi.device_arena import DeviceArena


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
        if self.error == FAILED:
            raise Error(VOID)
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
        data = bytes(request.sent.data)
        memoryview(request.memory).cast("B")[: len(data)] = data
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
            raise Error(FAILED)
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
        return Group(list(range(self.world.size)))

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


def which_are_over(requests: list[Any]) -> list[int]:
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
        size: how many ranks there are.
        device: device that copies their tensors. None: they are read where they are.
        regions: memory that others read on the device, by rank.
    """

    chance: random.Random
    near: bool
    size: int
    dead: set[int] = field(default_factory=set)
    wires: dict[tuple[int, int], list[Sent]] = field(default_factory=lambda: defaultdict(list))
    pieces: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    words: dict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    device: DeviceKind | None = None
    regions: dict[int, torch.Tensor] = field(default_factory=dict)


class Arena:
    """As `rudra.mpi.arena.Arena`, of one rank."""

    copies, stream = False, Stream()

    def intact(self, rank: int) -> bool:
        return True

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.neighbours = frozenset(range(world.size) if world.near else ())

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


class DeviceMemory(DeviceArena):
    """As `rudra.mpi.device_arena.DeviceArena`, of one rank. The memory of the dead is void."""

    def __init__(self, world: World, rank: int, device: DeviceKind, length: int) -> None:
        super().__init__(CPU)
        self.stream = device.stream()
        self._world, self._rank = world, rank
        self.make_slots(2, length)
        assert self._region is not None
        self._region.close()
        world.regions[rank] = self._region.memory
        self._regions = world.regions
        self.neighbours = frozenset(range(world.size))

    def intact(self, rank: int) -> bool:
        return rank not in self._world.dead

    def said(self, reader: int, number: int) -> int:
        return self._world.words[self._rank, reader, number % LEASES]

    def say(self, owner: int, number: int, *, done: bool) -> None:
        self._world.words[owner, self._rank, number % LEASES] = 2 * number + done
