"""Memory of one rank that the other ranks of its node read, so that gradients and weights travel without a copy.

The buffers of a rank's roles are in an anonymous file (`memfd_create`). The rank's neighbours map it read-only. MPI
carries only a `Place`: the tensor's position, and the message that belongs to it. A tensor that has been received
completely stays intact if its sender dies, because its memory exists until the last process unmaps it. MPI's own
windows end with the first rank that dies, and a file system for shared memory may be small or missing.

Sending the place of a buffer opens a lease. The reader has one word of shared memory per lease, which the owner polls.
In that word the reader first reports that it has received the place, and later that it has finished reading. A reader
that makes a copy reports the end at once. Until then the owner writes elsewhere. Leases of a dead reader end.
"""

import mmap
import os
import secrets
import warnings
from bisect import bisect_right, insort
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.device.streams import Stream
from rudra.compute.vectors import Buffer
from rudra.machine import memory_file

_ALIGNED = mmap.ALLOCATIONGRANULARITY
_TOKEN = 16
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
LEASES = 64
"""Largest number of open leases from one owner to one reader."""


class Arena:
    """The shared memory of this rank and its neighbours.

    Attributes:
        neighbours: world ranks on this node that share their memory with this rank, including this rank. Empty before
            `meet`, and if memory cannot be shared.
        failure: reason why this rank has no shared memory, or empty if it has.
        copies: class attribute. Whether tensors are copied to this memory before they are sent, and always copied from
            it.
        stream: stream of the copies.
    """

    copies = False
    stream = Stream()

    def __init__(self) -> None:
        self.neighbours: frozenset[int] = frozenset()
        self.failure = ""
        self._end = 0
        self._reserved = 0
        self._file = -1
        self._mine: list[tuple[int, int, int]] = []  # address, size and offset of each piece, by address
        self._regions: dict[int, torch.Tensor] = {}  # memory of each neighbour
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}  # tensors in that memory that were requested before
        self._words: dict[int, memoryview] = {}  # neighbour -> this rank's words about its leases
        self._said: dict[int, memoryview] = {}  # neighbour -> its words about this rank's leases

    def allocate(self, length: int) -> npt.NDArray[np.uint8] | None:
        """Allocates memory for a buffer, filled with zeros, or returns None if this rank has no shared memory.

        Raises:
            MemoryError: the memory is exhausted, and neighbours already map it.
        """
        if self.failure:
            return None
        size = -(-length // _ALIGNED) * _ALIGNED
        try:
            self._open()
            if self.neighbours and self._end + size > self._reserved:
                raise OSError(f"{self._reserved} bytes were reserved, but {self._end + size} are needed")
            if not self.neighbours:
                os.ftruncate(self._file, self._end + size)
            os.posix_fallocate(self._file, self._end, size)  # otherwise a lack of memory causes a fatal signal
            memory = np.frombuffer(mmap.mmap(self._file, size, offset=self._end), np.uint8)
        except (OSError, AttributeError) as error:  # or the system is not Linux
            if self.neighbours:
                raise MemoryError(f"no memory to share with the ranks of this node: {error}") from None
            self.failure = str(error)
            return None
        memory[:] = 0
        insort(self._mine, (memory.ctypes.data, size, self._end))
        self._end += size
        return memory[:length]

    def _open(self) -> None:
        if self._file < 0:
            self._file = memory_file("rudra-buffers")

    def meet(self, node: MPI.Comm, me: int, reserved: int = 0) -> str:
        """Maps the memory of the other ranks of a node. All of them call this when they have their first buffers.

        Args:
            node: communicator of the ranks that share memory.
            me: this rank in the communicator of all ranks.
            reserved: largest number of bytes that this rank may ever use.

        Returns:
            The reason why memory cannot be shared, the same on all ranks, or empty if it can.
        """
        self._reserved = max(reserved, self._end, _ALIGNED)
        size = node.size * LEASES * 8
        words, token, offer = -1, secrets.token_bytes(_TOKEN), None
        if not self.failure:
            try:
                offer = self._offer(node.size)
                words = memory_file("rudra-leases")
                os.ftruncate(words, size + _TOKEN)
                os.pwrite(words, token, size)
            except (OSError, AttributeError, RuntimeError) as error:
                self.failure = str(error).partition("\n")[0]
        told = node.allgather((me, os.getpid(), offer, words, token, self.failure))
        failure = next((f"rank {rank}: {why}" for rank, *_, why in told if why), "")
        own = None
        if not failure:
            try:
                for rank, pid, its_offer, other, its_token, _ in told:
                    self._attach(rank, pid, its_offer, node.rank)
                    self._map_words(rank, f"/proc/{pid}/fd/{other}", size, its_token, node.rank)
                own = mmap.mmap(words, size)
            except (OSError, ValueError, RuntimeError) as error:
                failure = f"rank {me}: {error}".partition("\n")[0]
        failure = next(filter(None, node.allgather(failure)), "")  # files stay open until all have opened them
        if words >= 0:
            os.close(words)
        self._met(failed=bool(failure))
        if failure:
            self.failure = failure
            self._regions.clear()
            self._words.clear()
        if failure or own is None:
            return failure
        self._said = {
            rank: memoryview(own)[i * LEASES * 8 : (i + 1) * LEASES * 8].cast("Q") for i, (rank, *_) in enumerate(told)
        }
        self.neighbours = frozenset(self._regions)
        return ""

    def close(self) -> None:
        """Stops allocating. Existing buffers stay valid as long as a process uses them."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def intact(self, rank: int) -> bool:
        """Returns whether the memory of a neighbour is there. This memory exists until the last process unmaps it."""
        return True

    def _offer(self, ranks: int) -> Any:
        """Returns what other ranks need to attach to this rank's memory. `ranks` is their number."""
        self._open()
        os.ftruncate(self._file, self._reserved)
        return self._file, self._end, self._reserved

    def _met(self, *, failed: bool) -> None:
        """Ends the time when others attach."""
        if failed:
            self.close()

    def _attach(self, rank: int, pid: int, offer: Any, place: int) -> None:
        """Attaches to the memory of a neighbour.

        Args:
            rank: the neighbour.
            pid: process of the neighbour.
            offer: result of the neighbour's `_offer`.
            place: number of this rank among the ranks of the node.
        """
        number, end, reserved = offer
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, reserved, mmap.MAP_SHARED, mmap.PROT_READ)
            with suppress(OSError):  # an old kernel: the first read of each page is slower
                memory.madvise(_POPULATE_READ, 0, end)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors
            self._regions[rank] = torch.from_numpy(np.frombuffer(memory, np.uint8))

    def _map_words(self, rank: int, path: str, size: int, token: bytes, place: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(file, _TOKEN, size) != token:
                raise ValueError("not the expected file")
            memory = memoryview(mmap.mmap(file, size))
        finally:
            os.close(file)
        self._words[rank] = memory[place * LEASES * 8 : (place + 1) * LEASES * 8].cast("Q")

    def offset(self, array: npt.NDArray[Any]) -> int | None:
        """Returns the offset of an array in this rank's memory, or None if the array is elsewhere."""
        return self._offset_at(array.ctypes.data)

    def offset_of(self, buffer: Buffer) -> int | None:
        """Returns the offset of a buffer in this rank's memory, or None if it is elsewhere."""
        return self._offset_at(buffer.vector.data_ptr())  # a fifth of the time of its array

    def _offset_at(self, address: int) -> int | None:
        place = bisect_right(self._mine, address, key=itemgetter(0)) - 1
        if place < 0:
            return None
        first, size, offset = self._mine[place]
        return offset + address - first if address < first + size else None

    def bytes_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        """Returns a neighbour's memory as a tensor, (length,) uint8, to be read only."""
        return self._regions[rank][offset : offset + length]

    def floats_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        """Returns a neighbour's memory as float32. `length` is in bytes."""
        key = rank, offset, length
        if key not in self._views:
            self._views[key] = self.bytes_at(*key).view(torch.float32)
        return self._views[key]

    def said(self, reader: int, number: int) -> int:
        """Returns the last word of a reader about one of this rank's leases."""
        return self._said[reader][number % LEASES]

    def say(self, owner: int, number: int, *, done: bool) -> None:
        """Reports to the owner that this reader has received a place, or has finished reading it."""
        self._words[owner][number % LEASES] = 2 * number + done
