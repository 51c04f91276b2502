"""Leases: parts of a rank's memory that neighbours may read (`rudra.mpi.arena`), and messages with their places."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rudra.errors import RunError
from rudra.mpi.arena import LEASES, Arena

CHECKED = False
"""For tests: places carry a checksum, which is compared when a tensor is received, and when it is released."""

_PLACE = struct.Struct("<qqqI?3x")
PLACE_BYTES = _PLACE.size


@dataclass(slots=True)
class Going:
    """A send of a buffer.

    Attributes:
        role: id of the sending role.
        name: name of the buffer.
        to: id of the receiving role.
        left: number of transfers that must still end.
    """

    role: int
    name: str
    to: int
    left: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a tensor in its sender's memory.

    Attributes:
        offset, length: position and size, in bytes.
        number: number of the lease.
        copied: whether the reader should make a copy and end the lease.
        checksum: checksum of the tensor, if `CHECKED` is set.
    """

    offset: int
    length: int
    number: int
    copied: bool
    checksum: int

    def encode(self) -> bytes:
        return _PLACE.pack(self.offset, self.length, self.number, self.checksum, self.copied)

    def check(self, tensor: torch.Tensor) -> None:
        """Checks that the tensor has not changed since it was sent. Needs `CHECKED` in the sender.

        Raises:
            RunError: the tensor has changed.
        """
        if zlib.crc32(tensor.numpy().data) != self.checksum:
            raise RunError(f"the tensor that a neighbour lent at {self.offset} has changed during the transfer")

    @classmethod
    def decode(cls, data: Any) -> "Place":
        offset, length, number, checksum, copied = _PLACE.unpack_from(data)
        return cls(offset, length, number, copied, checksum)


class Lent(Protocol):
    """Memory that others read: a buffer, or a slot of a region. `readers` counts them."""

    readers: int


@dataclass(slots=True)
class Lease:
    """Permission of one reader to read one buffer.

    Attributes:
        buffer: buffer or slot that may be read.
        reader: world rank of the reader.
        number: number of the lease, counted for each reader.
        going: send of the buffer.
        copy_on_write: whether the owner writes its next changes to other memory while the tensor is read.
        over: whether the send is complete: the reader has the place, or the owner need not wait for it.
    """

    buffer: Lent
    reader: int
    number: int
    going: Going
    copy_on_write: bool
    over: bool = False


class Leases:
    """The open leases of this rank's buffers.

    Args:
        arena: memory that contains the buffers.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._open: list[Lease] = []
        self._numbers = dict.fromkeys(arena.neighbours, 0)

    def lend(
        self,
        buffer: Lent,
        offset: int | None,
        memory: npt.NDArray[Any] | torch.Tensor,
        reader: int,
        going: Going,
        *,
        copied: bool,
        copy_on_write: bool,
    ) -> Place:
        """Opens a lease of memory of a buffer, at an offset in the arena, and returns its place."""
        assert offset is not None, going
        used = {lease.number % LEASES for lease in self._open if lease.reader == reader}
        first = self._numbers[reader] + 1
        number = next((number for number in range(first, first + LEASES) if number % LEASES not in used), None)
        assert number is not None, f"all {LEASES} leases to rank {reader} are open"
        self._numbers[reader] = number
        buffer.readers += 1
        self._open.append(Lease(buffer, reader, number, going, copy_on_write))
        checksum = zlib.crc32(np.asarray(memory).data) if CHECKED else 0
        return Place(offset, memory.nbytes, number, copied, checksum)

    def poll(self) -> list[Going]:
        """Returns sends that have completed since the last call, and releases buffers that were read.

        An owner that writes changes to other memory continues while one generation of a tensor is read, and waits if
        two are.
        """
        if not self._open:
            return []
        over, open_ = [], []
        for lease in self._open:
            said = self._arena.said(lease.reader, lease.number)
            if said >> 1 == lease.number:
                if not lease.over:
                    lease.over = True
                    over.append(lease.going)
                if said & 1:
                    lease.buffer.readers -= 1
                    continue
            open_.append(lease)
        self._open = open_
        for lease in open_:
            if lease.copy_on_write and not lease.over and not self._lends_another(lease):
                lease.over = True
                over.append(lease.going)
        return over

    def _lends_another(self, lease: Lease) -> bool:
        """Returns whether another generation of the same tensor is also read."""
        role, name = lease.going.role, lease.going.name
        return any(
            other.buffer is not lease.buffer and (other.going.role, other.going.name) == (role, name)
            for other in self._open
        )

    def end(self, which: Callable[[Lease], bool]) -> list[Going]:
        """Ends the leases that `which` selects, and returns their sends that were not complete yet."""
        ended = [lease for lease in self._open if which(lease)]
        self._open = [lease for lease in self._open if not which(lease)]
        for lease in ended:
            lease.buffer.readers -= 1
        return [lease.going for lease in ended if not lease.over]

    def to(self, role: int) -> list[Going]:
        """Returns the sends to a role that are not complete yet."""
        return [lease.going for lease in self._open if lease.going.to == role and not lease.over]
