"""A doorbell between ranks of one node: waiting without a busy core and without waking up late.

MPI has no blocking wait that sleeps. A rank that polls and sleeps in between wakes up late. A rank that polls without
sleeping takes the core from a rank that computes. So a rank that sends a message on its node also rings the receiver's
bell, a datagram of one byte, and a waiting rank sleeps in the kernel until then. Bells are only hints: the rank keeps
polling at a slow pace, so a lost bell costs milliseconds, and ranks on other nodes need none. An abstract socket has no
mode, so other users of the machine can also ring. Their rings only end a wait early, because the content of a ring is
never used.
"""

import select
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

RINGS = 1000
"""Largest number of rings that are read at once, because another process may ring without end."""


class Doorbell:
    """This rank's bell, and the addresses of its neighbours' bells.

    Args:
        job: name of the job, unique on the node.
        world_rank: world rank of this process.
        neighbours: ranks on this node, including this rank, whose own threads also ring.
    """

    def __init__(self, job: str, world_rank: int, neighbours: Iterable[int]) -> None:
        self._bell: socket.socket | None = None
        self._addresses: dict[int, str] = {}
        if sys.platform != "linux":
            return
        # Abstract names leave nothing in a file system, even after a crash.
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bell.bind(f"\0rudra-{job}-{world_rank}")
        except OSError:
            bell.close()
            return
        bell.setblocking(False)
        self._bell = bell
        self._addresses = {rank: f"\0rudra-{job}-{rank}" for rank in neighbours}

    def ring(self, world_rank: int) -> None:
        """Wakes up a rank if it is a neighbour and sleeps."""
        address = self._addresses.get(world_rank)
        if self._bell is not None and address is not None:
            with suppress(OSError):  # its queue of rings is full, or it has ended
                self._bell.sendto(b"\1", address)

    def reaches(self, world_ranks: Iterable[int]) -> bool:
        """Returns whether all these ranks are neighbours, which ring when they send."""
        return self._bell is not None and all(rank in self._addresses for rank in world_ranks)

    def wait(self, timeout_s: float) -> None:
        """Sleeps until the bell rings, at most for the timeout."""
        if self._bell is None:
            select.select([], [], [], timeout_s)
            return
        if select.select([self._bell], [], [], timeout_s)[0]:
            with suppress(BlockingIOError):
                for _ in range(RINGS):
                    self._bell.recv(1)

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
