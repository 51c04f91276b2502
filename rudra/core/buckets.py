"""Buckets: parts of a gradient that are averaged, or pushed to a server, while the rest is still computed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rudra.job.job import Job
from topologies import Plan
from topologies.kinds import Variant

ALIGNED = 16
"""Number of elements in a cache line. Buckets begin at multiples of it."""

MOST = 64
"""Largest number of buckets. Each has tags of its own."""

AUTO_BYTES, AUTO_COUNT = 500_000, 16
"""A bucket is at least this large, and a gradient has at most this many, if the job does not say it."""

AUTO_HELD_BYTES = 1_000_000_000
"""Largest memory of one server for gradients that come in buckets, if the job does not say the size of a bucket."""

_PUSHING = {
    *(Variant.LEARNER, Variant.OVERLAPPED_LEARNER, Variant.SHARDED_LEARNER),
    *(Variant.FIRST_STAGE_LEARNER, Variant.FIRST_STAGE_OVERLAPPED_LEARNER, Variant.FIRST_STAGE_SHARDED_LEARNER),
}
"""Kinds of learners that push a gradient as they computed it."""


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


def passes_early(job: Job, plan: Plan, members: Sequence[int]) -> bool:
    """Returns whether members of a compute group may begin a forward pass before all buckets of the average are there.

    Each member must update its own weights, so there is no server, and be alone on its rank. The update must be
    possible in any order of the elements: SGD without clipping. The gradient must become final part by part, in main
    memory, as whole vectors. With `reduction = "mpi"` all ranks must average the buckets in the same order, the last
    layers first. The executor decides the rest: the model must be torch's own layers without buffers and hooks.
    """
    training, cluster = job.training, job.cluster
    at_once = training.compile or training.microbatches > 1 or training.precision == "float16" or job.data.sparse
    elsewhere = cluster.device == "cuda" or cluster.gpu_aware_mpi or plan.stage is not None
    rule = job.optimizer.name == "sgd" and job.optimizer.clip_norm is None
    alone = len({plan.roles[i].world_rank for i in members}) == len(members)
    owns = cluster.buckets != "off" and not plan.served and plan.reduction != "mpi" and in_buckets(job, plan, members)
    return owns and alone and rule and not at_once and not elsewhere


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


def pushing(job: Job, plan: Plan, node: Sequence[int], owner: int) -> tuple[int, ...]:
    """Returns the learners that push large gradients to a role in buckets.

    They do if they are on other nodes, and their gradients become final part by part. In a node only a given size makes
    buckets, if ranks exchange messages.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role.
        owner: Id of the role that takes the gradients.
    """
    training, cluster = job.training, job.cluster
    at_once = training.compile or training.microbatches > 1 or training.precision == "float16" or job.data.sparse
    changed = cluster.gradient_format != "float32" or cluster.device == "cuda" or cluster.gpu_aware_mpi
    if cluster.buckets == "off" or at_once or changed or owner in plan.stages:
        return ()
    by_messages = not cluster.node_memory and cluster.buckets != "auto"
    several = plan.sharded and owner in plan.front_owners
    return tuple(
        learner
        for learner in (plan.learners if several else plan.children[owner])
        if plan.traits(learner).variant in _PUSHING
        and plan.roles[learner].world_rank != plan.roles[owner].world_rank
        and (by_messages or node[learner] != node[owner])
    )


def push_parts(job: Job, size: int, parameters: int, senders: int) -> list[slice]:
    """Returns the parts of the gradients that a role takes in buckets. Empty: they come as a whole.

    Args:
        job: Resolved job.
        size: Number of elements that the role takes of a gradient.
        parameters: Number of parameters among them.
        senders: Number of learners that push to the role in buckets. It holds a gradient of each.
    """
    bucket = bucket_size(job, size)
    if not senders or (job.cluster.buckets == "auto" and 4 * size * senders > AUTO_HELD_BYTES):
        bucket = 0
    return parts(size, max(parameters, 0), bucket) if bucket else []


def push_count(
    job: Job, plan: Plan, size: int, node: Sequence[int], owner: int, part: float
) -> tuple[tuple[int, ...], int]:
    """Returns the learners that push to a role in buckets, and the number of buckets of each of their gradients.

    Args:
        job: Resolved job.
        plan: Role assignment.
        size: Number of elements of a gradient.
        node: Node of every role.
        owner: Id of the role that takes the gradients.
        part: Fraction of a gradient that the role takes.
    """
    senders = pushing(job, plan, node, owner)
    count = len(push_parts(job, round(size * part), round(size * part), len(senders)))
    return (senders, count) if count else ((), 1)


def text_of(job: Job, plan: Plan, node: Sequence[int] | None = None) -> str:
    """Returns a text about the buckets of large gradients. It is empty if there are none.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role. None: servers without a fixed node are on node 0.
    """
    if job.cluster.buckets == "off":
        return ""
    node = plan.nodes(near=True) if node is None else node
    averaged = any(in_buckets(job, plan, members) for members in plan.groups)
    pushed = any(pushing(job, plan, node, owner) for owner in range(len(plan.roles)))
    if not averaged and not pushed:
        return ""
    least = AUTO_BYTES / 1e6 if job.cluster.buckets == "auto" else job.cluster.buckets
    how = "averaged" if averaged else "pushed to servers"
    early = any(passes_early(job, plan, members) for members in plan.groups)
    more = ", which the next forward pass may use before the last ones are there" if early else ""
    return f"{how} during the backward pass, in buckets of at least {least:g} MB{more}"
