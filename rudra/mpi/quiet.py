"""Collective operations that sleep while they wait, so that working ranks get the core. MPI itself waits by polling."""

import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from mpi4py import MPI

SHORTEST_S, LONGEST_S = 1e-4, 5e-3
"""Interval of polls while a rank waits for others. It grows with the wait, so that waiting costs little of a core."""


def pause(waited_s: float) -> None:
    """Sleeps until the next poll of a wait.

    Args:
        waited_s: Seconds of the wait until now.
    """
    time.sleep(min(LONGEST_S, max(SHORTEST_S, waited_s / 8)))


def rest(comm: MPI.Comm) -> None:
    """Waits for all ranks of a communicator."""
    _complete(comm.Ibarrier())


def _complete(request: MPI.Request) -> None:
    began = time.perf_counter()
    while not request.Test():
        pause(time.perf_counter() - began)


class QuietComm(MPI.Intracomm):
    """Communicator whose operations on objects sleep while they wait. Those on memory are MPI's own.

    They serve where ranks wait for each other's work, as they do before training. They take longer than MPI's if all
    ranks call them at the same time.
    """

    def Barrier(self) -> None:
        rest(self)

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        content = MPI.pickle.dumps(obj) if self.rank == root else b""
        length = np.array([len(content)], np.int64)
        _complete(self.Ibcast(length, root))
        memory = np.frombuffer(bytearray(content or int(length[0])), np.uint8)
        _complete(self.Ibcast(memory, root))
        return obj if self.rank == root else MPI.pickle.loads(memory.data)

    def allgather(self, sendobj: Any) -> list[Any]:
        content = np.frombuffer(MPI.pickle.dumps(sendobj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        _complete(self.Iallgather(np.array([len(content)], np.int64), lengths))
        ends = lengths.cumsum()
        memory = np.empty(ends[-1], np.uint8)
        _complete(self.Iallgatherv(content, [memory, lengths]))
        return [MPI.pickle.loads(part.data) for part in np.split(memory, ends[:-1])]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = MPI.SUM) -> Any:
        return reduce(op, self.allgather(sendobj))

    def Split(self, color: int = 0, key: int = 0) -> "QuietComm":
        rest(self)
        return QuietComm(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "QuietComm":
        rest(self)
        return QuietComm(super().Split_type(split_type, key, info))
