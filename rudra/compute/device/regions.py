"""Regions: memory of one process that other processes of its node read, on the host."""

import mmap
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rudra.machine import memory_file


class Region:
    """Memory that is allocated once, and that other processes of this node read. The base class is in main memory.

    Args:
        length: Number of bytes.

    Attributes:
        memory: (length,) uint8.

    Raises:
        OSError, AttributeError: The system has no such memory.
    """

    memory: torch.Tensor

    def __init__(self, length: int) -> None:
        self._file = memory_file("rudra-region")
        try:
            os.ftruncate(self._file, length)
            os.posix_fallocate(self._file, 0, length)  # otherwise a lack of memory causes a fatal signal
            self.memory = torch.from_numpy(np.frombuffer(mmap.mmap(self._file, length), np.uint8))
        except BaseException:
            self.close()
            raise

    def tickets(self, count: int) -> Sequence[Any]:
        """Returns objects that can be pickled. One other process attaches to the region by each of them."""
        return [(os.getpid(), self._file)] * count

    def close(self) -> None:
        """Ends the time when other processes may attach. The memory exists as long as a process uses it."""
        os.close(self._file)


def attached(ticket: Any) -> torch.Tensor:
    """Returns the memory of another process's region in main memory, (length,) uint8, to be read only.

    Raises:
        OSError, ValueError: It cannot be opened from here.
    """
    pid, number = ticket
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.from_numpy(np.frombuffer(memory, np.uint8))
