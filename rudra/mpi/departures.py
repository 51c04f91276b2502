"""Tensors on a device that are copied to slots of this rank's region before their places are sent."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from mpi4py import MPI

from rudra.compute.device.streams import Pending
from rudra.compute.vectors import Buffer
from rudra.mpi.device_arena import DeviceArena, Slot
from rudra.mpi.leases import Going, Leases


@dataclass(slots=True)
class _Recipient:
    """Send of a tensor to one role: the send, its message, the rank and tag, and whether the owner may continue."""

    going: Going
    message: bytes
    rank: int
    tag: int
    copy_on_write: bool


@dataclass(slots=True)
class _Departure:
    """Tensor that waits for a slot, or for its copy.

    Attributes:
        buffer: buffer of the tensor. Its role does not change it before the tensor is sent.
        recipients: sends of the tensor.
        slot: slot for the tensor. None: it waits for one.
        copied: copy to the slot.
    """

    buffer: Buffer
    recipients: list[_Recipient] = field(default_factory=list)
    slot: Slot | None = None
    copied: Pending | None = None


class Departures:
    """The tensors of a rank that wait, in the order of their sends.

    Args:
        comm: communicator of all ranks.
        arena: region of this rank.
        leases: leases of its slots.
        sent: list that gets the sends of places, with their data.
    """

    def __init__(
        self, comm: MPI.Comm, arena: DeviceArena, leases: Leases, sent: list[tuple[MPI.Request, bytes]]
    ) -> None:
        self._comm, self._arena, self._leases, self._sent = comm, arena, leases, sent
        self._waiting: deque[_Departure] = deque()

    def add(self, buffer: Buffer, going: Going, message: bytes, rank: int, tag: int, *, copy_on_write: bool) -> None:
        """Begins to send a tensor. Roles that get the same tensor at the same time read the same slot."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.buffer is not buffer or not last.recipients:
            self._waiting.append(last := _Departure(buffer))
        last.recipients.append(_Recipient(going, message, rank, tag, copy_on_write))

    def poll(self) -> None:
        """Sends the places of tensors that are in their slots."""
        while self._waiting:
            first = self._waiting[0]
            if first.slot is None:
                first.slot = self._arena.free_slot()
                if first.slot is None:
                    return
                first.slot.readers += 1
                copy = partial(_copied, first.buffer.vector, first.slot.memory)
                first.copied = self._arena.stream.submit(copy)
            assert first.copied is not None
            if not first.copied.done():
                return
            self._waiting.popleft()
            first.slot.readers -= 1
            for each in first.recipients:
                self._send(first.slot, len(first.buffer.vector) * 4, each)

    def _send(self, slot: Slot, length: int, to: _Recipient) -> None:
        how = {"copied": True, "copy_on_write": to.copy_on_write}
        place = self._leases.lend(slot, slot.offset, slot.memory[:length], to.rank, to.going, **how)
        data = place.encode() + to.message
        self._sent.append((self._comm.Isend(data, to.rank, to.tag), data))

    def end(self, which: Callable[[Going], bool]) -> list[Going]:
        """Abandons the sends that `which` selects, and returns them."""
        ended = []
        for each in self._waiting:
            ended += [to.going for to in each.recipients if which(to.going)]
            each.recipients = [to for to in each.recipients if not which(to.going)]
        return ended

    def to(self, role: int) -> Sequence[Going]:
        """Returns the sends to a role."""
        return [to.going for each in self._waiting for to in each.recipients if to.going.to == role]


def _copied(vector: torch.Tensor, slot: torch.Tensor) -> tuple[()]:
    slot[: len(vector) * 4].view(torch.float32).copy_(vector, non_blocking=True)
    return ()
