"""A doorbell between ranks of one node: waiting that neither burns a core nor oversleeps.

MPI has no blocking wait that sleeps. A rank that polls and sleeps in between wakes up late, and one that
polls without sleeping takes the core from a rank that computes. So whoever sends something to a rank on
its own node also rings that rank's bell, a datagram of one byte, and a waiting rank sleeps in the
kernel until then. Bells are only hints: polling goes on at a slow pace, so a lost one costs
milliseconds, and ranks on other nodes need none. An abstract socket has no mode, so other users of the machine can
ring, too. Their rings end a wait early: a ring says nothing, and nobody reads what is in it.
"""

import select
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

RINGS = 1000
"""How many are taken at once, at most: somebody may ring without end."""


class Doorbell:
    """This rank's bell, and the way to those of its neighbours.

    Args:
        job: a name that is unique on the node.
        world_rank: of this rank.
        neighbours: ranks on this node, this one among them: its own threads ring, too.
    """

    def __init__(self, job: str, world_rank: int, neighbours: Iterable[int]) -> None:
        self._bell: socket.socket | None = None
        self._addresses: dict[int, str] = {}
        if sys.platform != "linux":
            return
        # Abstract names: nothing is left in a file system, whatever happens.
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
        """Wakes that rank if it is a neighbour and sleeps."""
        address = self._addresses.get(world_rank)
        if self._bell is not None and address is not None:
            with suppress(OSError):  # it has rung often enough already, or nobody is there any more
                self._bell.sendto(b"\1", address)

    def reaches(self, world_ranks: Iterable[int]) -> bool:
        """Whether all these ranks ring when they send."""
        return self._bell is not None and all(rank in self._addresses for rank in world_ranks)

    def wait(self, timeout_s: float) -> None:
        """Sleeps until somebody rings, or that long."""
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
