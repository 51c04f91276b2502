"""Buckets: parts of a gradient that are averaged while the rest is still computed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rudra.job.job import Job
from topologies import Plan

ALIGNED = 16
"""Number of elements in a cache line. Buckets begin at multiples of it."""

MOST = 64
"""Largest number of buckets. Each has tags of its own."""

AUTO_BYTES, AUTO_COUNT = 500_000, 16
"""A bucket is at least this large, and a gradient has at most this many, if the job does not say it."""


def bucket_size(job: Job, size: int) -> int:
    """Returns the number of elements of a bucket, for a gradient of `size` elements. 0: there are no buckets."""
    if job.cluster.buckets == "off":
        return 0
    if job.cluster.buckets == "auto":
        wanted = max(AUTO_BYTES, 4 * size / AUTO_COUNT)
    else:
        wanted = max(job.cluster.buckets * 1e6, 4 * size / (MOST - 2))
    found = -(-int(wanted) // (4 * ALIGNED)) * ALIGNED
    return found if found < size else 0


def in_buckets(job: Job, plan: Plan, members: Sequence[int]) -> bool:
    """Returns whether a compute group averages large gradients in buckets.

    It does if its gradients are reduced as soon as they are computed, and some of them travel between nodes. In a node
    buckets cost more than they hide, so there only a given size makes them.
    """
    if plan.averaging or len({plan.roles[i].world_rank for i in members}) < 2:
        return False
    return job.cluster.buckets != "auto" or len({plan.roles[i].node for i in members}) > 1


def parts(size: int, parameters: int, bucket: int) -> list[slice]:
    """Returns the buckets of a vector. The last parameters become final first and come first, and buffers come last.

    Args:
        size: number of elements of the vector.
        parameters: number of parameters in it.
        bucket: number of elements of a bucket, except the first and the last one. 0: the whole vector is one part.
    """
    if not bucket:
        return [slice(0, size)]
    edges = [*range(0, parameters, bucket), parameters]
    found = [slice(first, stop) for first, stop in pairwise(edges)][::-1]
    return found + ([slice(parameters, size)] if size > parameters else [])


class FinalParts:
    """Parts of a gradient that are final, while pieces of the gradient become final in any order.

    Args:
        parts: parts of the vector, which do not overlap.
    """

    def __init__(self, parts: Sequence[slice]) -> None:
        self._ordered = sorted(range(len(parts)), key=lambda number: parts[number].start)
        self._parts = [parts[number] for number in self._ordered]
        self._starts = [part.start for part in self._parts]
        self._left = [part.stop - part.start for part in self._parts]

    def add(self, piece: slice) -> Iterator[int]:
        """Adds a final piece. Yields the number of each part that is final with it."""
        for place in range(max(bisect_right(self._starts, piece.start) - 1, 0), len(self._parts)):
            part = self._parts[place]
            if part.start >= piece.stop:
                break
            common = min(part.stop, piece.stop) - max(part.start, piece.start)
            self._left[place] -= max(common, 0)
            if common > 0 and not self._left[place]:
                yield self._ordered[place]


def count_of(job: Job, plan: Plan, size: int, members: Sequence[int]) -> int:
    """Returns the number of buckets of a group's gradients of `size` elements. 1: they are averaged as a whole."""
    bucket = bucket_size(job, size) if in_buckets(job, plan, members) else 0
    return -(-size // bucket) if bucket else 1


def text_of(job: Job, plan: Plan) -> str:
    """Returns a text about the buckets of large gradients. It is empty if no group averages in buckets."""
    if job.cluster.buckets == "off" or not any(in_buckets(job, plan, members) for members in plan.groups):
        return ""
    least = AUTO_BYTES / 1e6 if job.cluster.buckets == "auto" else job.cluster.buckets
    return f"averaged during the backward pass, in buckets of at least {least:g} MB"
