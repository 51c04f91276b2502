"""One copy of the data on each node: one rank loads it, the others map its memory.

All arrays that an object contains go into an anonymous file (`memfd_create`). The other ranks open this file through
the process that made it. No clean-up is needed: the file disappears when the last rank unmaps it.
"""

import io
import mmap
import os
import pickle
import secrets
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
import torch
from mpi4py import MPI

from rudra.data.thread import in_data_thread
from rudra.machine import memory_file

_ALIGNED = 64
_TOKEN = 16


def share(node: MPI.Comm, leader: int, made: Any) -> Any:
    """Gives the ranks of a node an object that one of them made. Its arrays and tensors are in memory shared by all.

    A rank that writes to that memory gets private copies of the pages.

    Args:
        node: communicator of the ranks that share memory, all of which must call this.
        leader: rank in `node` that has the object.
        made: the object, on that rank.

    Returns:
        The object. None on ranks that must make their own, because the object cannot be pickled or reads files that are
        already mapped, or because memory cannot be shared.
    """
    file = -1
    place: tuple[int, int, bytes, list[tuple[int, int]]] | None = None
    if node.rank == leader:
        with suppress(Exception):  # any exception that pickling raises
            file, token, pieces = in_data_thread(_written, made)
            place = os.getpid(), file, token, pieces
    place = node.bcast(place, leader)
    found = made if node.rank == leader else None
    if place is not None:
        with suppress(OSError, ValueError):
            found = in_data_thread(_mapped, *place)
    node.Barrier()  # the file stays open until all have opened it
    if file >= 0:
        os.close(file)
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that leaves arrays and CPU tensors out of the stream."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.memmap):
            raise pickle.PicklingError("mapped already")
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            with suppress(TypeError, RuntimeError):  # tensors that NumPy cannot hold stay in the stream
                return torch.from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)


def _written(made: Any) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Writes the object to a new file. Returns descriptor, token, and offset and size of each piece, stream first."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(made)
    raws = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    pieces, end = [], _TOKEN
    for raw in raws:
        first = -(-end // _ALIGNED) * _ALIGNED
        pieces.append((first, raw.nbytes))
        end = first + raw.nbytes
    token = secrets.token_bytes(_TOKEN)
    file = memory_file("rudra-data")
    try:
        os.ftruncate(file, end)
        with mmap.mmap(file, end) as memory:
            memory[:_TOKEN] = token
            for raw, (first, size) in zip(raws, pieces, strict=True):
                memory[first : first + size] = raw
    except BaseException:
        os.close(file)
        raise
    return file, token, pieces


def _mapped(pid: int, file: int, token: bytes, pieces: list[tuple[int, int]]) -> Any:
    """Reads the object from a process's file.

    Raises:
        OSError, ValueError: the file cannot be opened from here, or is another one.
    """
    here = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(here, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(here)
    if memory[:_TOKEN] != token:
        raise ValueError("not the expected file")
    stream, *views = (memoryview(memory)[first : first + size] for first, size in pieces)
    return pickle.loads(stream, buffers=views)
