"""One rank's MPI, whose requests end as a test says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_mpi import ANYBODY, FAILED, IN_STATUS, PENDING, Error, Status

from rudra.compute.device.streams import Stream
from rudra.mpi.arena import LEASES


class Request:
    """Open, until the test says how it ends."""

    def __init__(self, source: int = ANYBODY, wire: Any = None) -> None:
        self.source, self.wire = source, wire
        self.state = "open"  # done, failed, pending, or matched: with a tensor that may never come
        self.cancelled = self.void = False

    def Test(self, status: Status | None = None) -> bool:
        assert not self.void, "a request that has failed or ended is not to be tested again"
        if self.state == "pending":
            raise Error(PENDING)
        if self.state == "failed":
            self.void = True
            raise Error(FAILED)
        self.void = self.state == "done"
        if status is not None:
            status.cancelled, status.source = self.cancelled, self.source
        return self.void

    def Get_status(self, status: Status | None = None) -> bool:
        if status is not None:
            status.cancelled, status.source = self.cancelled, self.source
        return self.state == "done"

    def Cancel(self) -> None:
        if self.state in {"open", "pending"}:
            self.cancelled, self.state = True, "done"

    def Wait(self) -> None:
        assert self.state == "done", "would wait for ever"


def which_are_over(requests: list[Any]) -> list[int]:
    """Hides which ones failed, and makes them void like those that are done."""
    over = [i for i, r in enumerate(requests) if r.state in {"done", "failed"}]
    failed = any(requests[i].state == "failed" for i in over)
    for i in over:
        requests[i] = None
    if failed:
        raise Error(IN_STATUS)
    return over


class Comm:
    """Keeps what was posted; `announced` are tensors that a probe finds."""

    def __init__(self) -> None:
        self.posted: list[Request] = []
        self.announced: list[int] = []

    def Irecv(self, wire: Any, source: int, tag: int) -> Request:
        self.posted.append(Request(source, wire))
        return self.posted[-1]

    def Isend(self, data: bytes, to: int, tag: int) -> Request:
        self.posted.append(Request(to, data))
        self.posted[-1].state = "done"
        return self.posted[-1]

    def Improbe(self, source: int, tag: int) -> Any:
        if not self.announced:
            return None
        sender = self.announced.pop(0)
        return SimpleNamespace(Irecv=lambda wire: self.Irecv(wire, sender, tag))


class Arena:
    """Memory of this rank (0) and of others, of which one is a neighbour; what they say of each other's leases."""

    copies, stream = False, Stream()

    def intact(self, rank: int) -> bool:
        return True

    def __init__(self, *neighbours: int) -> None:
        self.neighbours = frozenset(neighbours)
        self.own: list[Any] = []
        self.there: dict[int, Any] = {}
        self.words: dict[tuple[int, int], int] = {}  # owner or reader, place -> what was said
        self.said_to: dict[tuple[int, int], int] = {}

    def allocate(self, length: int) -> Any:
        self.own.append(np.zeros(length, np.uint8))
        return self.own[-1]

    def offset(self, array: Any) -> int:
        return next(
            1000 * number + array.ctypes.data - memory.ctypes.data
            for number, memory in enumerate(self.own)
            if 0 <= array.ctypes.data - memory.ctypes.data < len(memory)
        )

    def bytes_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        return torch.from_numpy(self.there[rank][offset : offset + length])

    def floats_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        return self.bytes_at(rank, offset, length).view(torch.float32)

    def said(self, reader: int, number: int) -> int:
        return self.words.get((reader, number % LEASES), 0)

    def say(self, owner: int, number: int, *, done: bool) -> None:
        self.said_to[owner, number % LEASES] = 2 * number + done
