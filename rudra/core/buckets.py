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


def at_once_because(job: Job) -> str:
    """Returns the reason why all parts of a gradient become final at the same time. It is empty if they do not."""
    training = job.training
    if training.compile:
        return "training.compile = true computes all of a gradient at once"
    if training.microbatches > 1:
        return f"training.microbatches = {training.microbatches} adds whole gradients"
    if training.precision == "float16":
        return "training.precision = 'float16' scales whole gradients"
    return "a gradient is copied from the GPU as a whole" if job.cluster.device == "cuda" else ""


def whole_because(job: Job) -> str:
    """Returns the reason why a job's learners push whole gradients. It is empty if they may push them in buckets."""
    if job.data.sparse:
        return "data.sparse = true pushes rows"
    if job.cluster.gradient_format != "float32":
        return f"cluster.gradient_format = {job.cluster.gradient_format!r} converts whole gradients"
    return at_once_because(job) or ("MPI reads them on the GPU" if job.cluster.gpu_aware_mpi else "")


def group_parts(job: Job, plan: Plan, size: int, parameters: int, members: Sequence[int]) -> list[slice]:
    """Returns the buckets of a group's gradients. They are averaged as a whole if there is only one.

    Args:
        job: Resolved job.
        plan: Role assignment.
        size: Number of elements of a gradient.
        parameters: Number of parameters among them.
        members: Members of the group.
    """
    return parts(size, parameters, bucket_size(job, size) if in_buckets(job, plan, members) else 0)


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
    cluster = job.cluster
    if cluster.buckets == "off" or whole_because(job) or owner in plan.stages:
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


def held(job: Job, plan: Plan, node: Sequence[int], owner: int, size: int, parameters: int) -> int:
    """Returns the number of gradients that a role holds while they come in buckets, one for each learner.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role.
        owner: Id of the role that takes the gradients.
        size: Number of elements that the role takes of a gradient.
        parameters: Number of parameters among them.
    """
    senders = len(pushing(job, plan, node, owner))
    return senders if push_parts(job, size, parameters, senders) else 0


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
    buckets = f"in buckets of at least {least:g} MB"
    if averaged and (reason := at_once_because(job)):
        return f"averaged after the backward pass, {buckets}: {reason}"
    return f"{'averaged' if averaged else 'pushed to servers'} during the backward pass, {buckets}"


def spread(job: Job) -> tuple[Plan, tuple[int, ...]]:
    """Returns the plan of a job whose ranks with learners are on a node each, apart from the servers.

    Returns:
        The plan, and the node of every role.
    """
    plan = job.plan([learner // job.cluster.learners_per_rank for learner in range(job.learners)])
    return plan, plan.nodes(near=False)


def refusal(job: Job, plan: Plan, size: int | None = None) -> str:
    """Returns a text that says why gradients leave as a whole, although the job gives the size of buckets.

    It is empty if they leave in buckets, or if the job gives no size.

    Args:
        job: Resolved job.
        plan: Role assignment.
        size: Number of elements of a gradient. None: unknown.
    """
    if isinstance(job.cluster.buckets, str):
        return ""
    averaged = any(in_buckets(job, plan, members) for members in plan.groups)
    here, apart = (
        any(pushing(job, of, node, owner) for owner in of.owners)
        for of, node in ((plan, plan.nodes(near=True)), spread(job))
    )
    part = 1 if size is None else size // (len(plan.front_owners) if plan.sharded else 1)
    if not averaged and not here and not apart:
        reason = _kept_whole(job, plan)
    elif size is not None and not bucket_size(job, part):
        reason = f"{4 * part / 1e6:.3g} MB are not more than a bucket"
    else:
        reason = "" if averaged or here else "ranks of a node read them in memory; between nodes they have buckets"
    return reason and f"gradients leave whole: {reason}"


def _kept_whole(job: Job, plan: Plan) -> str:
    """Returns the reason why learners of a job neither average nor push gradients in buckets."""
    if plan.averaging:
        return "replicas are averaged, not gradients"
    if plan.scheduled:
        return "protocol hogbatch has no buckets"
    if reason := whole_because(job):
        return reason
    return "the group has one rank" if plan.groups else "leaf servers are on the nodes of their learners"
