"""One clock for all ranks."""

import time
from collections.abc import Callable

from mpi4py import MPI

from rudra.mpi.tags import CLOCK_TAG

ROUND_TRIPS = 16
"""Number of times that each node asks for the root's clock. The fastest answer counts."""


def clock_origin(
    comm: MPI.Comm, root: int, clock: Callable[[], float] = time.perf_counter, node: MPI.Comm | None = None
) -> float:
    """Returns one common moment as this rank's own clock shows it, so that times since then are comparable between
    ranks.

    Ranks of one node share a clock. Between nodes, one rank of each node asks `root` for the time several times, and
    uses the fastest answer. The error is less than half of that round trip. All ranks call this together.

    Args:
        comm: communicator of all ranks.
        root: rank whose clock counts.
        clock: function that returns seconds, common to the ranks of a node.
        node: communicator of the ranks that share a clock, by default the ranks of this node.

    Returns:
        Reading of this rank's clock, in seconds, at the common moment.
    """
    own = comm.Split_type(MPI.COMM_TYPE_SHARED) if node is None else node
    leaders: list[int] = comm.allgather(own.bcast(comm.rank))
    offset = 0.0  # root's clock - this rank's clock
    if leaders[comm.rank] == comm.rank or comm.rank == root:
        for leader in sorted(set(leaders) - {leaders[root]}):
            if comm.rank == root:
                for _ in range(ROUND_TRIPS):
                    comm.recv(None, leader, CLOCK_TAG)
                    comm.send(clock(), leader, CLOCK_TAG)
            elif comm.rank == leader:
                offset = min(_ask_time(comm, root, clock) for _ in range(ROUND_TRIPS))[1]
    ahead: float = own.bcast(offset)
    if node is None:
        own.Free()
    return float(comm.bcast(clock(), root)) - ahead


def _ask_time(comm: MPI.Comm, root: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the round trip in seconds, and by how many seconds root's clock is ahead of this rank's clock."""
    asked = clock()
    theirs: float = comm.sendrecv(None, root, CLOCK_TAG, None, root, CLOCK_TAG)
    answered = clock()
    return answered - asked, theirs - (asked + answered) / 2
