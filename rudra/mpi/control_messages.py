"""Small messages between ranks, and the doorbells that wake up their receivers."""

import secrets
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from mpi4py import MPI

from rudra.core.messages import Message
from rudra.mpi.control import ControlRings
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import Losses, outcome


class ControlMessages:
    """The small messages of a rank. All ranks create theirs together.

    Args:
        comm: communicator of all ranks.
        roles: ids of the roles of this rank, which receive messages.
        places: node of every rank.

    Attributes:
        doorbell: doorbell that wakes up ranks of this node.
        delivered: ranks whose tensors have arrived here. They wake up when this rank has nothing else to do, because
            most of them wait for an answer, which wakes them up.
    """

    def __init__(self, comm: MPI.Comm, roles: Collection[int], places: Sequence[int]) -> None:
        neighbours = [rank for rank, place in enumerate(places) if place == places[comm.rank]]
        self.doorbell = Doorbell(comm.bcast(secrets.token_hex(8)), comm.rank, neighbours)
        self._comm = comm
        self.delivered: set[int] = set()
        self._to_ring: set[int] = set()
        self._own: deque[tuple[int, int, Message]] = deque()
        self._sending: deque[tuple[MPI.Request, bytes]] = deque()
        self._rings = ControlRings(comm, roles)

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a small message to a rank."""
        self._sending.append((self._comm.Isend(data, to, tag), data))
        self._to_ring.add(to)

    def tell_here(self, role: int, generation: int, message: Message) -> None:
        """Sends a small message to a role of this rank, as `heard` yields it. It stays in this process."""
        self._own.append((role, generation, message))

    def wake(self, rank: int) -> None:
        """Marks a rank to be woken up at the next `ring`."""
        self._to_ring.add(rank)

    def ring(self) -> None:
        """Wakes up all ranks that were sent a message or marked."""
        self._to_ring.discard(self._comm.rank)  # it is awake
        while self._to_ring:
            rank = self._to_ring.pop()
            self.delivered.discard(rank)
            self.doorbell.ring(rank)

    def ring_delivered(self) -> None:
        """Wakes up the ranks whose tensors have arrived."""
        self.delivered.discard(self._comm.rank)
        while self.delivered:
            self.doorbell.ring(self.delivered.pop())

    def heard(self) -> Iterator[tuple[int, int, Message]]:
        """Yields the messages that have arrived: receiver, sender's generation, message."""
        while self._own:
            yield self._own.popleft()
        yield from self._rings.take()

    def poll(self) -> None:
        """Releases the memory of messages that have been sent."""
        while self._sending and outcome(self._sending[0][0]) != "no":
            self._sending.popleft()

    def flush(self, losses: Losses) -> None:
        """Waits until all messages are sent."""
        while self._sending:
            losses.wait(self._sending.popleft()[0])

    def close(self, losses: Losses) -> None:
        """Cancels all posted receives and closes the doorbell."""
        if not losses.dead:
            self._rings.close(losses)
        self.doorbell.close()
