"""Memory that ranks of a node read of each other: between them gradients and weights travel without a copy.

The buffers of a rank's roles lie in a file without a name (`memfd_create`), which its neighbours map, and only read.
What MPI carries between them is a `Place`: where the tensor lies, and the message that belongs to it. So a tensor that
has been received completely stays whole if its sender dies right after: its memory is there as long as somebody maps
it. MPI's own windows end with the first rank that dies, and a file system for shared memory may be small or missing.

A buffer whose place was sent is lent. Its reader says in a word of its own, which the owner looks at, that it has taken
the place, and later, or at once if it made a copy, that it has done with it. Until then the owner writes elsewhere. A
dead reader's leases are over.
"""

import mmap
import os
import secrets
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.machine import memory_file

_ALIGNED = mmap.ALLOCATIONGRANULARITY
_TOKEN = 16
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
LEASES = 64
"""Of one owner to one reader, at most, at a time."""


class Arena:
    """This rank's memory, and that of its neighbours.

    Attributes:
        neighbours: world ranks that read this rank's memory, and whose memory this one reads, itself among them; empty
            before `meet`, and where it cannot be had.
        failure: why this rank has no such memory.
    """

    def __init__(self) -> None:
        self.neighbours: frozenset[int] = frozenset()
        self.failure = ""
        self._end = 0
        self._reserved = 0
        self._file = -1
        self._mine: list[tuple[int, int, int]] = []  # address, size and offset of each piece
        self._regions: dict[int, torch.Tensor] = {}  # the memory of each neighbour
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}  # of those memories, as far as they were asked for
        self._words: dict[int, memoryview] = {}  # of each neighbour, what this rank says of its leases
        self._said: dict[int, memoryview] = {}  # of each neighbour, what it says of this rank's

    def allocate(self, length: int) -> npt.NDArray[np.uint8] | None:
        """Memory for a buffer, zeros that are written; None: there is none here.

        Raises:
            MemoryError: where neighbours rely on it.
        """
        if self.failure:
            return None
        size = -(-length // _ALIGNED) * _ALIGNED
        try:
            self._open()
            if self.neighbours and self._end + size > self._reserved:
                raise OSError(f"{self._reserved} bytes were reserved, and {self._end + size} are needed")
            if not self.neighbours:
                os.ftruncate(self._file, self._end + size)
            os.posix_fallocate(self._file, self._end, size)  # else a lack of memory shows as a signal that kills
            memory = np.frombuffer(mmap.mmap(self._file, size, offset=self._end), np.uint8)
        except (OSError, AttributeError) as error:  # or it is no Linux
            if self.neighbours:
                raise MemoryError(f"no memory to share with the ranks of this node: {error}") from None
            self.failure = str(error)
            return None
        memory[:] = 0
        self._mine.append((memory.ctypes.data, size, self._end))
        self._end += size
        return memory[:length]

    def _open(self) -> None:
        if self._file < 0:
            self._file = memory_file("rudra-buffers")

    def meet(self, node: MPI.Comm, me: int, reserved: int) -> str:
        """Maps the memory of the other ranks of a node; all of them call, when they have their first buffers.

        Args:
            node: of ranks that share memory.
            me: this rank among all.
            reserved: bytes that this rank may ever use.

        Returns:
            Why it cannot be had, on all ranks alike; empty if it can.
        """
        self._reserved = max(reserved, self._end, _ALIGNED)
        size = node.size * LEASES * 8
        words, token = -1, secrets.token_bytes(_TOKEN)
        if not self.failure:
            try:
                self._open()
                os.ftruncate(self._file, self._reserved)
                words = memory_file("rudra-leases")
                os.ftruncate(words, size + _TOKEN)
                os.pwrite(words, token, size)
            except (OSError, AttributeError) as error:
                self.failure = str(error)
        told = node.allgather((me, os.getpid(), self._file, words, token, self._end, self._reserved, self.failure))
        failure = next((f"rank {rank}: {why}" for rank, *_, why in told if why), "")
        own = None
        if not failure:
            try:
                for rank, pid, file, other, its_token, its_end, its_reserved, _ in told:
                    self._map(rank, f"/proc/{pid}/fd/{file}", its_end, its_reserved)
                    self._map_words(rank, f"/proc/{pid}/fd/{other}", size, its_token, node.rank)
                own = mmap.mmap(words, size)
            except (OSError, ValueError) as error:
                failure = f"rank {me}: {error}"
        failure = next(filter(None, node.allgather(failure)), "")  # files stay open until all have opened them
        for file in (self._file if failure else -1, words):
            if file >= 0:
                os.close(file)
        if failure:
            self.failure, self._file = failure, -1
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
        """No more buffers; those that there are stay as long as somebody needs them."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _map(self, rank: int, path: str, end: int, reserved: int) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, reserved, mmap.MAP_SHARED, mmap.PROT_READ)
            with suppress(OSError):  # an old kernel: then the first reader of each page is slower
                memory.madvise(_POPULATE_READ, 0, end)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no tensors that are only read
            self._regions[rank] = torch.from_numpy(np.frombuffer(memory, np.uint8))

    def _map_words(self, rank: int, path: str, size: int, token: bytes, place: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(file, _TOKEN, size) != token:
                raise ValueError("not the file that was meant")
            memory = memoryview(mmap.mmap(file, size))
        finally:
            os.close(file)
        self._words[rank] = memory[place * LEASES * 8 : (place + 1) * LEASES * 8].cast("Q")

    def offset(self, array: npt.NDArray[Any]) -> int | None:
        """Where an array lies in this rank's memory; None: elsewhere."""
        address = array.ctypes.data
        for first, size, offset in self._mine:
            if first <= address < first + size:
                return offset + address - first
        return None

    def bytes_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        """Memory of a neighbour, to be read: (length,) uint8."""
        return self._regions[rank][offset : offset + length]

    def floats_at(self, rank: int, offset: int, length: int) -> torch.Tensor:
        """The same as float32; of so many bytes."""
        key = rank, offset, length
        if key not in self._views:
            self._views[key] = self.bytes_at(*key).view(torch.float32)
        return self._views[key]

    def said(self, reader: int, number: int) -> int:
        """What a reader has last said in the word of a lease of this rank's."""
        return self._said[reader][number % LEASES]

    def say(self, owner: int, number: int, *, done: bool) -> None:
        """Tells the owner that this reader has taken a place, or has done with it."""
        self._words[owner][number % LEASES] = 2 * number + done
