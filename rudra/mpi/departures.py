"""Tensors that leave a device: a neighbour reads a copy in this rank's region, and others get a copy by MPI."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from rudra.compute.device.streams import Pending
from rudra.compute.half import round_to
from rudra.compute.vectors import EXPONENT
from rudra.mpi.device_arena import DeviceArena, Slot
from rudra.mpi.leases import Going, Leases

Pieces = Callable[[torch.Tensor], Sequence[tuple[Any, int]]]
"""Returns the parts of a room that are sent separately, and the tag of each."""


@dataclass(slots=True)
class Parcel:
    """Tensor for one role.

    Attributes:
        going: the send.
        vector: the tensor, (size,) float32. Its role does not change it before it is sent.
        message: message that belongs to the tensor, encoded. Empty: there is none.
        rank: rank of the receiver.
        tag: tag of the tensor.
        halves: whether it is sent as float16.
        copy_on_write: whether the role writes its next changes to other memory while the tensor is read.
    """

    going: Going
    vector: torch.Tensor
    message: bytes
    rank: int
    tag: int
    halves: bool = False
    copy_on_write: bool = False

    @property
    def length(self) -> int:
        """Bytes of the tensor as it travels."""
        return 2 * len(self.vector) + EXPONENT if self.halves else 4 * len(self.vector)

    def reads(self, other: "Parcel") -> bool:
        """Returns whether another parcel has the same tensor."""
        return other.vector.data_ptr() == self.vector.data_ptr() and other.length == self.length

    def copy(self, into: torch.Tensor) -> tuple[()]:
        """Copies the tensor to bytes, (length,) uint8 or more."""
        if self.halves:
            round_to(self.vector, *half_of(into, len(self.vector)))
        else:
            into[: self.length].view(torch.float32).copy_(self.vector, non_blocking=True)
        return ()


@dataclass(slots=True)
class _Departure:
    """Parcels with the same tensor for neighbours that wait for a slot, or for the copy to it.

    Attributes:
        parcels: the parcels.
        slot: slot for the tensor. None: it waits for one.
        copied: copy to the slot.
    """

    parcels: list[Parcel] = field(default_factory=list)
    slot: Slot | None = None
    copied: Pending | None = None


@dataclass(slots=True)
class _Message:
    """Parcel for another rank, and the copy to its room."""

    parcel: Parcel
    room: torch.Tensor
    copied: Pending
    pieces: Pieces | None


class Departures:
    """The tensors of a rank that wait, in the order of their sends.

    Args:
        comm: communicator of all ranks.
        arena: memory of this rank.
        leases: leases of its slots.
        sent: list that gets the sends of places, with their data.
        send: adds a send that was started here, for `Going.left`.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        arena: DeviceArena,
        leases: Leases,
        sent: list[tuple[MPI.Request, bytes]],
        send: Callable[[MPI.Request, Going], None],
    ) -> None:
        self._comm, self._arena, self._leases, self._sent, self._add = comm, arena, leases, sent, send
        self._waiting: deque[_Departure] = deque()
        self._messages: deque[_Message] = deque()
        self._rooms: list[tuple[torch.Tensor, list[MPI.Request]]] = []  # that are being sent

    def lend(self, parcel: Parcel) -> None:
        """Begins to send a tensor to a neighbour. Roles that get it at the same time read the same slot."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or not last.parcels or not last.parcels[0].reads(parcel):
            self._waiting.append(last := _Departure())
        last.parcels.append(parcel)

    def send(self, parcel: Parcel, tail: int, pieces: Pieces | None = None) -> None:
        """Begins to send a tensor to another rank.

        Args:
            parcel: the tensor.
            tail: bytes of the largest message that the receiver expects after it.
            pieces: its parts, if there are some. None: it is sent as a whole.
        """
        room = self._arena.room(parcel.length + tail)
        copied = self._arena.stream.submit(partial(parcel.copy, room))
        self._messages.append(_Message(parcel, room, copied, pieces))

    def poll(self) -> None:
        """Sends the tensors that are in their slots and rooms."""
        self._poll_messages()
        while self._waiting:
            first = self._waiting[0]
            if first.slot is None:
                first.slot = self._arena.free_slot() if first.parcels else None
                if first.slot is None:
                    if first.parcels:
                        return
                    self._waiting.popleft()
                    continue
                first.slot.readers += 1
                first.copied = self._arena.stream.submit(partial(first.parcels[0].copy, first.slot.memory))
            assert first.copied is not None
            if not first.copied.done():
                return
            self._waiting.popleft()
            first.slot.readers -= 1
            for each in first.parcels:
                self._send(first.slot, each)

    def _send(self, slot: Slot, parcel: Parcel) -> None:
        how = {"copied": True, "copy_on_write": parcel.copy_on_write}
        place = self._leases.lend(slot, slot.offset, slot.memory[: parcel.length], parcel.rank, parcel.going, **how)
        data = place.encode() + parcel.message
        self._sent.append((self._comm.Isend(data, parcel.rank, parcel.tag), data))

    def _poll_messages(self) -> None:
        while self._messages and self._messages[0].copied.done():
            self._send_message(self._messages.popleft())
        rooms, self._rooms = self._rooms, []
        for room, requests in rooms:
            if all(request == MPI.REQUEST_NULL for request in requests):
                self._arena.leave(room)
            else:
                self._rooms.append((room, requests))

    def _send_message(self, message: _Message) -> None:
        parcel, end = message.parcel, message.parcel.length + len(message.parcel.message)
        room = message.room[:end]
        if parcel.message:
            room[parcel.length :] = torch.frombuffer(bytearray(parcel.message), dtype=torch.uint8)
            self._arena.written()
        pieces = () if message.pieces is None else message.pieces(room)
        sends = pieces or [(room, parcel.tag)]
        requests = [self._comm.Isend(piece, parcel.rank, tag) for piece, tag in sends]
        self._rooms.append((message.room, requests))
        parcel.going.left = len(requests)
        for request in requests:
            self._add(request, parcel.going)

    def end(self, which: Callable[[Going], bool]) -> list[Going]:
        """Abandons the sends that `which` selects, and returns them."""
        ended = [message.parcel.going for message in self._messages if which(message.parcel.going)]
        self._messages = deque(message for message in self._messages if not which(message.parcel.going))
        for each in self._waiting:
            ended += [parcel.going for parcel in each.parcels if which(parcel.going)]
            each.parcels = [parcel for parcel in each.parcels if not which(parcel.going)]
        return ended

    def to(self, role: int) -> Sequence[Going]:
        """Returns the sends to a role."""
        parcels = [parcel for each in self._waiting for parcel in each.parcels]
        parcels += [message.parcel for message in self._messages]
        return [parcel.going for parcel in parcels if parcel.going.to == role]


def half_of(memory: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float16 tensor and its exponent in bytes: (size,) float16, and (1,) int16."""
    return memory[: 2 * size].view(torch.float16), memory[2 * size : 2 * size + EXPONENT].view(torch.int16)
