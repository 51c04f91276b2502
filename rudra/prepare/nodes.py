"""Nodes of a job's learners, and the network between them, in virtual time."""

import math
from collections.abc import Mapping

from rudra.core.buckets import NetworkSpeed
from rudra.job.job import Job


def nodes_of(job: Job) -> list[int]:
    """Returns the node of every learner in virtual time. Nodes differ by one rank with learners at most.

    Workers that share memory are on one node, unless the job gives the number of nodes.
    """
    learners, count = job.learners, job.simulation.nodes
    each = job.cluster.on_rank(learners)
    if isinstance(count, Mapping):
        known = max((size for size in count if size <= learners), default=min(count))
        count = math.ceil(count[known] * learners / known)
    ranks = -(-learners // each)
    alone = 1 if job.hogbatch.shares_weights else ranks
    count = alone if count is None else min(count, ranks)
    return [i // each * count // ranks for i in range(learners)]


def network_of(job: Job) -> NetworkSpeed:
    """Returns the network between nodes in virtual time."""
    return NetworkSpeed(job.simulation.latency_s, job.simulation.bandwidth_bytes_per_s)
