"""One clock for all ranks."""

import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from rudra.mpi.tags import CLOCK_TAG

ROUND_TRIPS = 16
"""Number of times that each node asks for the root's clock. The fastest answer counts."""


def clock_origin(
    comm: MPI.Comm, root: int, places: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns one common moment as this rank's own clock shows it, so that times since then are comparable between
    ranks.

    Ranks of one node share a clock. Between nodes, one rank of each node asks `root` for the time several times, and
    uses the fastest answer. The error is less than half of that round trip. All ranks call this together.

    Args:
        comm: communicator of all ranks.
        root: rank whose clock counts.
        places: first rank of the node of every rank.
        clock: function that returns seconds, common to the ranks of a node.

    Returns:
        Reading of this rank's clock, in seconds, at the common moment.
    """
    offset = 0.0  # root's clock - this rank's clock
    for leader in sorted({*places} - {places[root]}):
        if comm.rank == root:
            for _ in range(ROUND_TRIPS):
                comm.recv(None, leader, CLOCK_TAG)
                comm.send(clock(), leader, CLOCK_TAG)
        elif comm.rank == leader:
            offset = min(_ask_time(comm, root, clock) for _ in range(ROUND_TRIPS))[1]
    found: list[tuple[float, float]] = comm.allgather((offset, clock()))
    return found[root][1] - found[places[comm.rank]][0]


def _ask_time(comm: MPI.Comm, root: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the round trip in seconds, and by how many seconds root's clock is ahead of this rank's clock."""
    asked = clock()
    theirs: float = comm.sendrecv(None, root, CLOCK_TAG, None, root, CLOCK_TAG)
    answered = clock()
    return answered - asked, theirs - (asked + answered) / 2
