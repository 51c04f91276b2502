"""Copies of a rank's vectors that other ranks of a group read, where the vectors themselves are on a device."""

from collections.abc import Collection

import torch

from rudra.compute.averaging import CHUNK, slices
from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Pending
from rudra.compute.vectors import Buffer, Take
from rudra.mpi.device_arena import DeviceArena


class Exchange:
    """Copies of the vectors of a group's members on this rank.

    Args:
        arena: memory of this rank.
        size: number of elements of a vector.
        device: device of the vectors.
        near: whether the group's ranks read the copies in the regions of their devices. Otherwise the copies are in
            main memory, and travel in messages.
    """

    def __init__(self, arena: DeviceArena, size: int, device: torch.device, *, near: bool) -> None:
        self._arena, self._size, self._near = arena, size, near
        self._pinned = kind_of(device).page_locks
        self._buffers: list[Buffer] = []

    def copied(self, vector: torch.Tensor) -> tuple[Buffer, Pending]:
        """Begins to copy a vector. Returns the copy, which has one reader, and the work."""
        buffer = next((buffer for buffer in self._buffers if not buffer.readers), None)
        if buffer is None:
            buffer = self._made()
            self._buffers.append(buffer)
        buffer.readers += 1

        def copy() -> tuple[()]:
            buffer.vector.copy_(vector, non_blocking=True)
            return ()

        return buffer, self._arena.stream.submit(copy)

    def _made(self) -> Buffer:
        return self._arena.reserve(self._size) if self._near else Buffer(self._size, 0, pinned=self._pinned)

    def taken(self, vector: torch.Tensor, take: Take) -> Pending:
        """Begins to copy a result to a vector, slice by slice in main memory, and at once on a device."""
        most = len(vector) if self._near else CHUNK

        def copy() -> tuple[()]:
            for part in slices(0, len(vector), most):
                vector[part].copy_(take(part))
            return ()

        return self._arena.stream.submit(copy)

    def intact(self, ranks: Collection[int]) -> bool:
        """Returns whether the memory of all these ranks, which this rank has read, is still there."""
        return not self._near or all(self._arena.intact(rank) for rank in ranks)

    def close(self) -> None:
        """Gives slots of the region back, for other copies."""
        for buffer in self._buffers:
            self._arena.unreserve(buffer)
        self._buffers.clear()
