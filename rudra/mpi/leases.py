"""What a rank lends its neighbours of its memory (`rudra.mpi.arena`), and what it tells them of where it lies."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from rudra.compute.vectors import Buffer
from rudra.errors import RunError
from rudra.mpi.arena import LEASES, Arena

CHECKED = False
"""For tests: places carry a checksum, which is compared when a tensor is taken, and when it is given back."""

_PLACE = struct.Struct("<qqqI?3x")
PLACE_BYTES = _PLACE.size


@dataclass(slots=True)
class Going:
    """A send.

    Attributes:
        role: who sends.
        name: of the buffer.
        to: role that receives.
    """

    role: int
    name: str
    to: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its sender's memory.

    Attributes:
        offset, length: bytes.
        number: of the lease.
        copied: the reader is to make a copy, and be done with it.
        checksum: of the tensor, where `CHECKED`.
    """

    offset: int
    length: int
    number: int
    copied: bool
    checksum: int

    def encode(self) -> bytes:
        return _PLACE.pack(self.offset, self.length, self.number, self.checksum, self.copied)

    def check(self, tensor: torch.Tensor) -> None:
        """That it is still what was lent, where it was `CHECKED` then.

        Raises:
            RunError: it is not.
        """
        if zlib.crc32(tensor.numpy().data) != self.checksum:
            raise RunError(f"what a neighbour has lent at {self.offset} has changed meanwhile")

    @classmethod
    def decode(cls, data: Any) -> "Place":
        offset, length, number, checksum, copied = _PLACE.unpack_from(data)
        return cls(offset, length, number, copied, checksum)


@dataclass(slots=True)
class Lease:
    """One buffer lent to one reader.

    Attributes:
        buffer: that is lent.
        reader: world rank.
        number: of the lease, among those to this reader.
        going: the send.
        moves: the owner changes the tensor elsewhere while it is read.
        over: the send is: the reader has it, or the owner need not wait for that.
    """

    buffer: Buffer
    reader: int
    number: int
    going: Going
    moves: bool
    over: bool = False


class Leases:
    """What this rank has lent.

    Args:
        arena: in which it lies.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._open: list[Lease] = []
        self._numbers = dict.fromkeys(arena.neighbours, 0)

    def lend(
        self, buffer: Buffer, array: npt.NDArray[Any], reader: int, going: Going, *, copied: bool, moves: bool
    ) -> Place:
        """Lends what is to travel of a buffer; where it lies."""
        offset = self._arena.offset(array)
        assert offset is not None, going
        used = {lease.number % LEASES for lease in self._open if lease.reader == reader}
        first = self._numbers[reader] + 1
        number = next((number for number in range(first, first + LEASES) if number % LEASES not in used), None)
        assert number is not None, f"all {LEASES} leases to rank {reader} are open"
        self._numbers[reader] = number
        buffer.held += 1
        self._open.append(Lease(buffer, reader, number, going, moves))
        checksum = zlib.crc32(array.data) if CHECKED else 0
        return Place(offset, array.nbytes, number, copied, checksum)

    def poll(self) -> list[Going]:
        """Sends that are over since; what is done with is free again.

        Who changes a tensor elsewhere makes the next generation while one is read, and waits if two are.
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
                    lease.buffer.held -= 1
                    continue
            open_.append(lease)
        self._open = open_
        for lease in open_:
            if lease.moves and not lease.over and not self._lends_another(lease):
                lease.over = True
                over.append(lease.going)
        return over

    def _lends_another(self, lease: Lease) -> bool:
        """Whether another generation of the same tensor is read, too."""
        role, name = lease.going.role, lease.going.name
        return any(
            other.buffer is not lease.buffer and (other.going.role, other.going.name) == (role, name)
            for other in self._open
        )

    def end(self, which: Callable[[Lease], bool]) -> list[Going]:
        """Ends leases whose readers are no more, or are of no more interest; those sends that were not over yet."""
        ended = [lease for lease in self._open if which(lease)]
        self._open = [lease for lease in self._open if not which(lease)]
        for lease in ended:
            lease.buffer.held -= 1
        return [lease.going for lease in ended if not lease.over]

    def to(self, role: int) -> list[Going]:
        """Sends to a role that are not over yet."""
        return [lease.going for lease in self._open if lease.going.to == role and not lease.over]
