"""Memory of one rank's device that the other ranks of its node read: transport "ipc".

Each rank has one region on its device, allocated once and mapped once by its neighbours. The buffers of its roles are
elsewhere on the device. A tensor that is sent is copied to a free slot of the region, and only then its place is sent.
The receiver copies it from there to its own buffer. Places and leases work as in `rudra.mpi.arena`.

The memory of a device may end with its process. So a tensor counts only if its sender still ran after the receiver had
copied it. Otherwise the receiver waits, until it learns that the sender is lost.

A tensor for another rank is copied to a room, from where MPI sends it, and is received in a room. Rooms are page-locked
main memory, or memory of the device if the MPI library reads that.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from rudra.compute.device import devices
from rudra.compute.device.regions import Region
from rudra.compute.vectors import Buffer
from rudra.mpi.arena import Arena

ALIGNED = 256
"""Slots begin at multiples of this number of bytes."""

_TOKEN = 16
_EXITS = 4  # PF_EXITING of Linux, in the flags of /proc/PID/stat


class Slot:
    """Part of a region that holds one tensor.

    Args:
        memory: the part, (bytes,) uint8.
        offset: offset of the part in the region, in bytes.

    Attributes:
        readers: number of leases and copies that use the slot.
    """

    def __init__(self, memory: torch.Tensor, offset: int) -> None:
        self.readers = 0
        self.memory, self.offset = memory, offset


class RegionBuffer(Buffer):
    """Vector in a slot that is reserved for it.

    Args:
        slot: the slot.
        size: number of elements.

    Attributes:
        slot: the slot.
    """

    def __init__(self, slot: Slot, size: int) -> None:
        self.version = 0
        self.slot = slot
        self.vector = slot.memory[: 4 * size].view(torch.float32)
        self._array = None


class DeviceArena(Arena):
    """The region of this rank and of its neighbours.

    Args:
        device: device of this rank.
        reads: whether the MPI library reads and writes memory of the device.
    """

    copies = True

    def __init__(self, device: torch.device, *, reads: bool = False) -> None:
        super().__init__()
        self._reads = reads
        self._rooms: list[torch.Tensor] = []
        self._device, self._kind = device, devices.kind_of(device)
        self.stream = self._kind.stream(device)
        self._region: Region | None = None
        self._token = b""
        self._slots: list[Slot] = []
        self._pids: dict[int, int] = {}

    def make_slots(self, count: int, length: int) -> None:
        """Allocates the region. All ranks of the node call `meet` afterwards.

        Args:
            count: number of slots.
            length: bytes of a slot.
        """
        step = max(1, -(-length // ALIGNED)) * ALIGNED
        try:
            self._region = self._kind.region(self._device, ALIGNED + count * step)
        except (OSError, AttributeError, RuntimeError) as error:
            self.failure = str(error).partition("\n")[0]
            return
        self._slots = [
            Slot(self._region.memory[first : first + step], first)
            for first in range(ALIGNED, ALIGNED + count * step, step)
        ]

    def free_slot(self) -> Slot | None:
        """Returns a slot without readers. None: all are in use."""
        return next((slot for slot in self._slots if not slot.readers), None)

    def reserve(self, size: int) -> RegionBuffer:
        """Reserves a slot for a vector. Its buffer has no readers."""
        slot = self.free_slot()
        assert slot is not None, "too few slots"
        slot.readers += 1
        return RegionBuffer(slot, size)

    def unreserve(self, buffer: Buffer) -> None:
        """Makes the slot of a vector free, if it has one."""
        if isinstance(buffer, RegionBuffer):
            buffer.slot.readers -= 1

    def offset_of(self, buffer: Buffer) -> int | None:
        return buffer.slot.offset if isinstance(buffer, RegionBuffer) else None

    def room(self, length: int) -> torch.Tensor:
        """Returns a room, (length,) uint8, for a tensor that MPI sends or receives. `leave` ends its use."""
        for place, room in enumerate(self._rooms):
            if len(room) == length:
                return self._rooms.pop(place)
        if self._reads:
            return torch.zeros(length, dtype=torch.uint8, device=self._device)
        return self._kind.main_memory(length)

    def written(self) -> None:
        """Waits until a message is in its room, if that is on the device: MPI does not know the device's streams."""
        if self._reads:
            self._kind.finish(self._device)

    def leave(self, room: torch.Tensor) -> None:
        """Makes a room free. Nothing may read it or write to it any more."""
        self._rooms.append(room)

    def intact(self, rank: int) -> bool:
        """Returns whether the memory of a neighbour is still there: its process has not begun to end."""
        if rank not in self._pids:
            return True  # it sent a message
        with suppress(OSError, ValueError):
            fields = Path(f"/proc/{self._pids[rank]}/stat").read_text().rpartition(")")[2].split()
            return not int(fields[6]) & _EXITS
        return False

    def close(self) -> None:
        """Forgets all regions. No tensor may be under way."""
        self._regions.clear()
        self._views.clear()
        self._slots.clear()
        self._rooms.clear()
        self._region = None

    def _offer(self, ranks: int) -> Any:
        assert self._region is not None
        self._token = secrets.token_bytes(_TOKEN)
        self._region.memory[:_TOKEN] = torch.frombuffer(bytearray(self._token), dtype=torch.uint8)
        self._kind.finish(self._device)
        return self._token, self._region.tickets(ranks)

    def _attach(self, rank: int, pid: int, offer: Any, place: int) -> None:
        token, tickets = offer
        self._pids[rank] = pid
        if pid == os.getpid():
            assert self._region is not None
            self._regions[rank] = self._region.memory
            return
        memory = self._kind.attached(tickets[place])
        if bytes(memory[:_TOKEN].cpu().numpy()) != token:
            raise ValueError("not the expected memory")
        self._regions[rank] = memory

    def _met(self, *, failed: bool) -> None:
        if self._region is not None:
            self._region.close()


def tried(node: MPI.Comm, me: int) -> str | None:
    """Returns the reason why ranks of a node cannot read each other's memory on devices, or nothing if they can.

    None: it was not tried, because a rank has no device, or there is only one rank.

    Args:
        node: communicator of the ranks. All of them call this.
        me: this rank in the communicator of all ranks.
    """
    kind = devices.DEVICES[devices.AUTO]
    count = kind.count()
    if node.size < 2 or not node.allreduce(count, MPI.MIN):
        return None
    arena = DeviceArena(kind.device(node.rank % count))
    arena.make_slots(1, 1)
    failure = arena.meet(node, me)
    arena.close()
    node.Barrier()  # no rank ends while another one has its memory
    return failure
