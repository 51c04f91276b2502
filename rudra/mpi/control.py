"""Receiving of control messages."""

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

    def take(self) -> tuple[int, Message] | None:
        """Returns the next message and its sender's generation: how often the sender had regrouped."""
        # Receives match in the order of posting, so only the oldest can be next.
        request = self._requests[self._head]
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
