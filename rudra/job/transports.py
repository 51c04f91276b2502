"""Transports: how tensors travel between two ranks if one of them computes on a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from topologies import Plan

if TYPE_CHECKING:
    from rudra.job.fields import JobFields

Transport = Literal["ipc", "mpi", "staged"]
"""Transport of a pair of ranks. "ipc": one reads the other's GPU memory. "mpi": the MPI library reads and writes GPU
memory. "staged": tensors are copied to main memory, and from there as between CPUs."""

IN_MAIN_MEMORY = "use transport = 'auto' or 'staged'"


def refused_because(job: "JobFields", plan: Plan, transport: Transport) -> str:
    """Returns the feature of a job that a transport does not support. It is empty if the transport supports the job."""
    if plan.groups:
        return "compute groups"
    if job.cluster.gradient_format != "float32":
        return f"gradient_format = '{job.cluster.gradient_format}'"
    if plan.sharded:
        return "several servers that each hold a part of the weights"
    if transport != "ipc":
        return ""
    if plan.window:
        return "[hogbatch] weights = 'shared'"
    if job.hogbatch.learners_on_cpu(plan):
        return "[[hogbatch.workers]] device = 'cpu'"
    return "" if job.cluster.node_memory else "node_memory = false"


def transport_of(job: "JobFields", plan: Plan, nodes: Sequence[int]) -> Transport | None:
    """Returns the transport of all pairs of ranks that compute on GPUs. None: no rank does, or there is only one.

    Args:
        job: Job with the kind of device that learners compute on.
        plan: Role assignment.
        nodes: Node of every role.
    """
    if not job.cluster.accelerated or plan.local:
        return None
    if job.cluster.transport != "auto":
        return job.cluster.transport
    return "staged" if len({*nodes}) > 1 or refused_because(job, plan, "ipc") else "ipc"


def transport_text(job: "JobFields", plan: Plan, nodes: Sequence[int]) -> str:
    """Returns the transports of all pairs of ranks, for people. It is empty if no rank computes on a GPU."""
    transport = transport_of(job, plan, nodes)
    return "" if transport is None else pairs_text(transport, nodes, node_memory=job.cluster.node_memory)


def pairs_text(transport: Transport, nodes: Sequence[int], *, node_memory: bool) -> str:
    """Describes a transport between the ranks of a node, and between nodes if there are several."""
    within, between = _PAIRS[transport]
    within = within if node_memory else between
    if len({*nodes}) == 1 or within == between:
        return f"{transport}: {within}"
    return f"{transport}: {within} within a node; {between} between nodes"


_MESSAGES = "copies in main memory, and messages"
_ON_GPU = "MPI reads and writes GPU memory"
_PAIRS: dict[Transport, tuple[str, str]] = {
    "ipc": ("ranks read each other's GPU memory", ""),
    "mpi": (_ON_GPU, _ON_GPU),
    "staged": ("copies in memory that the ranks share", _MESSAGES),
}
"""Transport -> how it works within a node, and between nodes."""
