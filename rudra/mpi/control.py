"""Receiving of control messages."""

from collections.abc import Iterable, Iterator

from mpi4py import MPI

from rudra.core.messages import Message
from rudra.core.wire import CONTROL_BYTES, decode, generation_of
from rudra.mpi.failures import Losses, outcome
from rudra.mpi.tags import CHANNELS, CONTROL, FIRST_TAG

RING = 16
"""Number of control messages for one role that may arrive before the role reads them."""


class ControlRing:
    """Ring of posted receives for the control messages of one role, read in the order of arrival."""

    def __init__(self, comm: MPI.Comm, role: int) -> None:
        self._buffers = [bytearray(CONTROL_BYTES) for _ in range(RING)]
        tag = FIRST_TAG + role * CHANNELS + CONTROL
        self._requests = [comm.Recv_init(b, tag=tag) for b in self._buffers]
        self._head = 0
        for request in self._requests:
            request.Start()

    @property
    def next(self) -> MPI.Prequest:
        """The receive of the next message. Receives match in the order of posting, so only the oldest can be next."""
        return self._requests[self._head]

    def take(self) -> tuple[int, Message] | None:
        """Returns the next message and its sender's generation: how often the sender had regrouped."""
        request = self.next
        if outcome(request) != "done":
            return None
        data = self._buffers[self._head]
        found = generation_of(data), decode(data)
        request.Start()
        self._head = (self._head + 1) % RING
        return found

    def close(self, losses: Losses) -> None:
        for request in self._requests:
            request.Cancel()
            losses.wait(request)
            request.Free()


class ControlRings:
    """Rings of all roles of a rank. A rank may have many roles, so MPI tests their receives together.

    Args:
        comm: communicator of all ranks.
        roles: ids of the roles of this rank, which receive messages from other ranks.
    """

    def __init__(self, comm: MPI.Comm, roles: Iterable[int]) -> None:
        self._roles = [*roles] if comm.size > 1 else []
        self._rings = [ControlRing(comm, role) for role in self._roles]
        self._next = [ring.next for ring in self._rings]
        self._together = True

    def take(self) -> Iterator[tuple[int, int, Message]]:
        """Yields the messages that have arrived: receiver, sender's generation, message."""
        while self._together and self._rings:
            try:
                place, found = MPI.Request.Testany(self._next)
            except MPI.Exception:  # a rank has died, and the error is of one receive
                self._together = False
                break
            if not found:
                return
            yield from self._taken(place)
        for place in range(len(self._rings)):
            yield from self._taken(place)

    def _taken(self, place: int) -> Iterator[tuple[int, int, Message]]:
        """Yields the messages of one role."""
        ring = self._rings[place]
        while (message := ring.take()) is not None:
            yield self._roles[place], *message
        self._next[place] = ring.next

    def close(self, losses: Losses) -> None:
        """Cancels all posted receives."""
        for ring in self._rings:
            ring.close(losses)
