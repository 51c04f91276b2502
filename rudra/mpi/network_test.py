"""Measures the network before training: one rank of each of two nodes sends messages to the other.

This takes about 50 ms for two nodes behind 1 or 10 Gbit/s, because slow links get less data. Different nodes work in
parallel.
"""

import time
from collections.abc import Collection, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from rudra.core.buckets import NetworkSpeed
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.tags import NETWORK_TAG

ROUND_TRIPS = 20
"""Number of small messages each way. The median counts, because other processes may delay some of them."""

SIZES = (128 << 10, 512 << 10, 2 << 20, 8 << 20, 16 << 20)
"""Sizes of large messages in bytes. Each is sent twice, and the faster one counts, for the same reason."""

LONG_S = 0.01
"""Time of a large message that is long enough, so that no larger one follows. Shorter ones are not exact, because some
links carry the first megabytes faster."""


def in_turns(pairs: Collection[tuple[int, int]], places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns a pair of ranks for each pair of nodes, in an order in which different nodes can work in parallel.

    Args:
        pairs: pairs of nodes.
        places: node of every rank.
    """
    number = {node: number for number, node in enumerate(sorted({node for pair in pairs for node in pair}))}
    ordered = sorted(pairs, key=lambda pair: (sum(number[node] for node in pair) % len(number), pair))
    return [(places.index(first), places.index(second)) for first, second in ordered]


def measure(ranks: JobRanks, pairs: Sequence[tuple[int, int]]) -> NetworkSpeed | None:
    """Measures the network between this rank and others.

    Args:
        ranks: the ranks of the job.
        pairs: pairs of ranks, in the same order on all ranks.

    Returns:
        The largest latency and the smallest bandwidth. None: this rank is the first one of no pair.

    Raises:
        RunError: another rank did not start within the job's limit.
    """
    found, memory = list[NetworkSpeed](), np.ones(SIZES[-1] if pairs else 0, np.uint8)
    for first, second in pairs:
        if ranks.comm.rank == first:
            _meet(ranks, second)
            found.append(_network_to(ranks.comm, second, memory))
        elif ranks.comm.rank == second:
            _meet(ranks, first)
            _serve(ranks.comm, first, memory)
    return worst(found) if found else None


def worst(found: Collection[NetworkSpeed]) -> NetworkSpeed:
    """Returns the largest latency and the smallest bandwidth of several networks."""
    return NetworkSpeed(max(its.latency_s for its in found), min(its.bytes_per_s for its in found))


def _meet(ranks: JobRanks, other: int) -> None:
    """Waits until another rank is ready, which may measure other networks before."""
    nothing = np.empty(0, np.uint8)
    begun = [ranks.comm.Irecv(nothing, other, NETWORK_TAG), ranks.comm.Isend(nothing, other, NETWORK_TAG)]
    ranks.wait(lambda: MPI.Request.Testall(begun), "to measure the network")


def _network_to(comm: MPI.Comm, other: int, memory: npt.NDArray[np.uint8]) -> NetworkSpeed:
    """Measures the network to a rank that serves this one."""
    latency_s = median(_round_trip_s(comm, other, memory[:0]) for _ in range(ROUND_TRIPS)) / 2
    for size in SIZES:
        comm.send(size, other, NETWORK_TAG)
        taken_s = min(_round_trip_s(comm, other, memory[:size]) for _ in range(2))
        if taken_s > LONG_S:
            break
    comm.send(0, other, NETWORK_TAG)
    return NetworkSpeed(latency_s, size / max(taken_s - 2 * latency_s, taken_s / 2))


def _serve(comm: MPI.Comm, other: int, memory: npt.NDArray[np.uint8]) -> None:
    """Answers the messages of a rank that measures the network to this one."""
    for _ in range(ROUND_TRIPS):
        _answer(comm, other, memory[:0])
    while size := comm.recv(None, other, NETWORK_TAG):
        for _ in range(2):
            _answer(comm, other, memory[:size])


def _round_trip_s(comm: MPI.Comm, other: int, message: npt.NDArray[np.uint8]) -> float:
    """Returns the seconds until a message has been received and an empty answer has come."""
    began = time.perf_counter()
    comm.Send(message, other, NETWORK_TAG)
    comm.Recv(message[:0], other, NETWORK_TAG)
    return time.perf_counter() - began


def _answer(comm: MPI.Comm, other: int, message: npt.NDArray[np.uint8]) -> None:
    """Receives a message, and answers."""
    comm.Recv(message, other, NETWORK_TAG)
    comm.Send(message[:0], other, NETWORK_TAG)
