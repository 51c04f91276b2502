"""Room for the probes of a search on real ranks: the number of ranks, and the memory of their node."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rudra.job.job import Job
from rudra.simulation.dry_run import buffers_of
from rudra.simulation.predict import outline
from rudra.tuning.space import Candidate, Refused


class Room(NamedTuple):
    """Room for a probe.

    Attributes:
        ranks: Most ranks that a point may need. None: any number.
        node_bytes: Memory of the node if all ranks are on one, in bytes. Infinity: unknown.
    """

    ranks: int | None = None
    node_bytes: float = math.inf


def within(points: Sequence[Candidate], room: Room, refused: list[Refused]) -> list[Candidate]:
    """Returns the points that have room. The others are added to `refused`."""
    found, sizes = [], dict[int, int]()
    for point in points:
        needed, learners = point.job.plan().ranks, point.job.learners
        if room.ranks is not None and needed > room.ranks:
            refused.append(Refused(point.settings, f"needs {needed} ranks, but the launcher started {room.ranks}"))
            continue
        if math.isfinite(room.node_bytes):
            if learners not in sizes:
                sizes[learners] = outline(point.job).size_bytes
            if (least := least_bytes(point.job, sizes[learners])) > room.node_bytes:
                text = f"needs {least / 1e9:.3g} GB for vectors of weights alone, but the node has"
                refused.append(Refused(point.settings, f"{text} {room.node_bytes / 1e9:.3g} GB"))
                continue
        found.append(point)
    return found


def least_bytes(job: Job, size_bytes: int) -> int:
    """Returns the bytes that all ranks of a job take at least, on one node: the vectors in the size of the weights.

    Activations, data, Python and torch come on top, so this drops no point that has room. Owners of a part of the
    weights count with an equal part. Placed layers, and weights that all workers share, are not counted.

    Args:
        job: Job with its number of learners.
        size_bytes: Size of the weights.
    """
    plan = job.plan()
    if job.placement.given or plan.window:
        return 0
    parts = {role: len(plan.front_owners) if plan.sharded else 1 for role in plan.front_owners}
    return sum(len(names) * size_bytes // parts.get(role, 1) for role, names in buffers_of(job, plan).items())
