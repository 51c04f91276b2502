"""Buckets: parts of a gradient that are averaged while the rest is still computed."""

import sys
from collections.abc import Sequence

from rudra.job.job import Job
from topologies import Plan


def in_buckets(plan: Plan, members: Sequence[int], size: int, bucket: int, *, near: bool) -> bool:
    """Returns whether a compute group averages its gradients in buckets.

    It does if every gradient is reduced as soon as it is computed, travels in messages, and is larger than a bucket.

    Args:
        plan: plan of the job.
        members: learners of the group.
        size: number of elements of a gradient.
        bucket: number of elements of a bucket, or 0 for no buckets (`ClusterTable.bucket_elements`).
        near: whether ranks of a node read each other's memory (`cluster.node_memory`).
    """
    if not 0 < bucket < size or plan.averaging or plan.reduction == "mpi":
        return False
    ranks = {plan.roles[i].world_rank for i in members}
    nodes = {plan.roles[i].node for i in members}
    sums = plan.partial_sums(members)
    apart = len(ranks) == len(members) > 1 and (len(nodes) == len(members) or not near)
    return apart and (len(sums) == 1 or all(len(of) == 1 for of in sums))


def count_of(size: int, bucket: int) -> int:
    """Returns the number of buckets of a gradient of that many elements."""
    return -(-size // bucket)


def text_of(job: Job, plan: Plan) -> str:
    """Returns a text about the buckets of large gradients. It is empty if no group averages in buckets."""
    bucket, near = job.cluster.bucket_elements, job.cluster.node_memory
    if not any(in_buckets(plan, members, sys.maxsize, bucket, near=near) for members in plan.groups):
        return ""
    return f"averaged during the backward pass in buckets of {bucket * 4e-6:g} MB, if larger than one"
