"""Buckets: parts of a gradient or a replica that are averaged, or pushed, while the rest is still computed.

Weights come from a server in buckets, too. The next forward pass then begins while the rest is under way. This module
has the sizes of buckets and their order. `rudra.core.bucket_rules` says what travels in buckets.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rudra.job.job import Job

ALIGNED = 16
"""Number of elements in a cache line. Buckets begin at multiples of it."""

MOST = 64
"""Largest number of buckets. Each has tags of its own."""

LEAST = 3
"""Smallest number of buckets, if the job does not say their size. Fewer hide too little of a transfer."""

OVERHEAD_S = 1e-4
"""Time that a bucket takes on a rank, for its messages, however small it is. Two learners, each on a core, exchanged a
gradient in 2 to 60 buckets. Each further bucket took 0.06 to 0.13 ms."""

FIXED_SHARE = 0.1
"""Largest part of the transfer time of a bucket that it takes however small it is, if the job does not say its size."""

ABREAST = 3
"""Number of buckets that travel at a time if forward passes begin early: enough to keep a link busy, and few enough
that a bucket of the first layers does not wait for many others."""

KEPT = 16
"""If forward passes begin early, one in so many buckets begins last: those of the last layers. While they travel, the
pass computes the layers before. They begin sooner if the network is free again after another bucket."""

PAUSE_S = 1e-3
"""Pause of the thread that sends buckets between two looks for news. In this time a network's buffers do not run full
or empty."""

LOOKS = 2
"""Number of looks until a bucket has been averaged, if its transfer takes no time: one rank sees that a part of the
gradient is there, adds, and sends the mean, and the other one sees that the mean is there. Two ranks that exchanged
buckets of 0.02 to 2 MB looked 1.6 to 2 times for each, and 0.6 to 1 times if three travelled at a time."""

COPIED_BYTES_S = 3e9
"""Assumed rate of the copies of weights and optimiser state. A pass begins early only if the parts that are under way
need more time than these copies. With momentum they need less behind 10 Gbit/s, and early passes were slower than usual
ones."""

LEAST_COPIED = 2
"""Smallest number of vectors whose copies count: weights and velocities. An optimiser without a state was not
measured."""


class NetworkSpeed(NamedTuple):
    """Speed of the network between nodes.

    Attributes:
        latency_s: Time of a small message from one rank to another.
        bytes_per_s: Bandwidth for large messages.
    """

    latency_s: float
    bytes_per_s: float


def copied(state_vectors: float) -> float:
    """Returns the number of vectors that are copied if a pass begins early: weights, and the optimiser's state."""
    return max(LEAST_COPIED, 1 + state_vectors)


def slower_than_copies(network: NetworkSpeed, copies: float) -> bool:
    """Returns whether an average takes longer than copies of this number of vectors, so that passes do begin early."""
    return 2 * copies * network.bytes_per_s < COPIED_BYTES_S


def auto_size(network: NetworkSpeed, size: int, *, copies: float = 0) -> int:
    """Returns the number of elements of a bucket that suits a network. 0: the gradient is too small for buckets.

    A backward pass hides the transfers of all buckets except the last one. Each bucket also takes a fixed time: the
    latency and `OVERHEAD_S`. So a step waits for the transfer of one bucket, and for the fixed time of all buckets. If
    a bucket is larger, the first wait is longer, and the second one is shorter. Their sum is least if the transfer of a
    bucket takes the geometric mean of two times: the fixed time, and the transfer time of the whole gradient.

    A bucket is not smaller than this. It is larger if its fixed time would exceed `FIXED_SHARE` of its transfer time,
    or if there would be more than `MOST` buckets. A gradient that has fewer than `LEAST` buckets of this size has none.

    Where forward passes begin early, and transfers take longer than computation, buckets are larger for two reasons:

    - The transfers go on during the forward pass. The network rests only after the last bucket has arrived: until its
      layers have computed, forwards and backwards, and their gradient is final. This takes less than the transfer of a
      bucket, because computation takes less than transfers. It is assumed to take half of it.
    - Only `ABREAST` buckets travel at a time, and begin and end together, because they share the network. After each
      such turn the network rests for `LOOKS` looks. This is part of the fixed time of a bucket. Without early passes
      all buckets that are final travel, and hide this.

    So the transfer of a bucket takes the geometric mean of twice this fixed time, and the transfer time of the whole
    gradient, but there are `LEAST` buckets. The network must be so slow that passes do begin early: copies of all
    weights and of the optimiser's state must take less time than the transfer of half of the weights.

    Args:
        network: NetworkSpeed between the nodes.
        size: Number of elements of a gradient.
        copies: Number of vectors that are copied if a forward pass begins before the last buckets have arrived
            (`copied`). 0: no pass does.
    """
    fixed = (network.latency_s + OVERHEAD_S) * network.bytes_per_s  # bytes that the network transfers in this time
    wanted = max(math.sqrt(fixed * 4 * size), fixed / FIXED_SHARE, 4 * size / (MOST - 2))
    if copies and slower_than_copies(network, copies):
        rests = LOOKS * PAUSE_S / ABREAST * network.bytes_per_s
        wanted = max(wanted, min(math.sqrt(2 * (fixed + rests) * 4 * size), 4 * size / LEAST))
    found = _aligned(wanted) if wanted < 4 * size else size
    return found if found * (LEAST - 1) < size else 0


def bucket_size(job: Job, size: int, auto: int) -> int:
    """Returns the number of elements of a bucket. 0: there are no buckets.

    Args:
        job: Resolved job.
        size: Number of elements that are cut into buckets: a gradient, or the part of it that one server takes.
        auto: Number that `auto_size` found for a whole gradient. A smaller part of this gradient is one bucket.
    """
    if job.cluster.buckets == "off":
        return 0
    if job.cluster.buckets == "auto":
        return min(auto, size)
    found = _aligned(max(job.cluster.buckets * 1e6, 4 * size / (MOST - 2)))
    return found if found < size else 0


def _aligned(size_bytes: float) -> int:
    """Returns the number of elements of at least this size. Buckets of it begin at cache lines."""
    return -(-int(size_bytes) // (4 * ALIGNED)) * ALIGNED


def kept(count: int) -> frozenset[int]:
    """Returns the numbers of the parts that wait for others if passes begin early, of `count` parts."""
    return frozenset(range(max(1, count // KEPT)))


def parts(size: int, parameters: int, bucket: int, tensors: Sequence[int] = ()) -> list[slice]:
    """Returns the buckets of a vector. The last parameters become final first and come first, and buffers come last.

    Where a tensor of at least a quarter of a bucket begins within half a bucket of an edge, the edge moves there.
    Otherwise a bucket would contain parts of two layers, and leave only after both are final.

    Args:
        size: number of elements of the vector.
        parameters: number of parameters in it.
        bucket: number of elements of a bucket, apart from the first one, the last one, and these changes. 0: the whole
            vector is one part.
        tensors: elements where the tensors of the vector begin, in order. Empty: unknown.
    """
    if not bucket:
        return [slice(0, size)]
    stops = [*tensors[1:], parameters]
    starts = [_aligned(4 * start) for start, stop in zip(tensors, stops, strict=False) if 4 * (stop - start) >= bucket]
    inner = {_edge_near(edge, bucket, starts) for edge in range(bucket, parameters, bucket)}
    edges = [0, *sorted(edge for edge in inner if 0 < edge < parameters), parameters]
    found = [slice(first, stop) for first, stop in pairwise(edges)][::-1]
    return found + ([slice(parameters, size)] if size > parameters else [])


def _edge_near(edge: int, bucket: int, starts: Sequence[int]) -> int:
    """Returns the start of the tensor that begins next to an edge of buckets, or the edge if none is near."""
    place = bisect_right(starts, edge)
    nearest = min(starts[max(place - 1, 0) : place + 1], key=lambda start: abs(start - edge), default=edge)
    return nearest if 2 * abs(nearest - edge) <= bucket else edge


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

    def add(self, piece: slice) -> list[int]:
        """Adds a final piece. Returns the numbers of the parts that are final with it."""
        place, final = max(bisect_right(self._starts, piece.start) - 1, 0), []
        while place < len(self._parts) and (part := self._parts[place]).start < piece.stop:
            common = min(part.stop, piece.stop) - max(part.start, piece.start)
            if common > 0:
                self._left[place] -= common
                if not self._left[place]:
                    final.append(self._ordered[place])
            place += 1
        return final
