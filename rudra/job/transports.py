"""Transports: how tensors travel between two ranks if one of them computes on a GPU, and how their groups reduce."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

from topologies import Plan

if TYPE_CHECKING:
    from rudra.job.fields import JobFields

Transport = Literal["ipc", "mpi", "staged"]
"""Transport of a pair of ranks. "ipc": one reads the other's GPU memory. "mpi": the MPI library reads and writes GPU
memory. "staged": tensors are copied to main memory, and from there as between CPUs."""

IN_MAIN_MEMORY = "use transport = 'auto' or 'staged'"


SLOTS = 4
"""Number of slots for each role that sends tensors."""

HELD = 3
"""Number of slots for each group that a role reduces in: others still read one while two are filled."""


class Transports(NamedTuple):
    """Transports of all pairs of ranks that compute on GPUs.

    Attributes:
        within: transport of two ranks of a node.
        between: transport of ranks of two nodes.
        nccl: whether the learners of a compute group reduce by NCCL.
        excluded: nodes whose ranks cannot read each other's GPU memory. Their pairs are "staged", not "ipc".
    """

    within: Transport
    between: Transport
    nccl: bool = False
    excluded: frozenset[int] = frozenset()

    def of_pair(self, one: int, other: int) -> Transport:
        """Returns the transport of ranks of two nodes, which may be the same."""
        if one != other:
            return self.between
        return "staged" if self.within == "ipc" and one in self.excluded else self.within

    def names(self, nodes: Sequence[int], owner: int = 0) -> str:
        """Returns the names of the transports, for result files. `parsed` reverses it.

        Args:
            nodes: node of every role.
            owner: node of the role that decides about the weights.
        """
        found = [self.of_pair(owner, owner), *([self.between] if len({*nodes}) > 1 else [])]
        return ", ".join(["nccl"] * self.nccl + list(dict.fromkeys(found)))

    def text(self, nodes: Sequence[int], *, node_memory: bool) -> str:
        """Describes the transports for people: within a node, between nodes if there are several, and in groups.

        Args:
            nodes: node of every role.
            node_memory: whether ranks of a node read each other's main memory.
        """
        how = _HOW | ({"staged": "copies in memory that the ranks share"} if node_memory else {})
        within, between = f"{self.within}{{}}: {how[self.within]}", f"{self.between}{{}}: {_HOW[self.between]}"
        several = len({*nodes}) > 1 and within != between
        found = [within.format(" within a node"), between.format(" between nodes")] if several else [within.format("")]
        return "; ".join([*found, *(["nccl in groups: NCCL adds gradients in its own order"] if self.nccl else [])])


def parsed(names: str) -> Transports | None:
    """Returns the transports that a result file names. None: it names none."""
    first, *others = [name for name in names.split(", ") if name != "nccl"] or [""]
    last = others[-1] if others else first
    valid: dict[str, Transport] = {"ipc": "ipc", "mpi": "mpi", "staged": "staged"}
    if first not in valid or last not in valid:
        return None
    return Transports(valid[first], valid[last], names.startswith("nccl"))


def refused_because(job: "JobFields", plan: Plan, transport: str) -> str:
    """Returns the feature of a job that a transport does not support. It is empty if the transport supports the job."""
    if transport == "mpi":
        return _refused_by_mpi(job, plan)
    table = "[[hogbatch.workers]] device = 'cpu'" if job.scheduled else "cpu_learners"
    on_cpu = table if job.learners_on_cpu(plan) else ""
    if transport == "nccl":
        if on_cpu:
            return on_cpu
        if plan.groups and plan.reduction != "mpi":
            return f"[topology] options.reduction = '{plan.reduction}', as NCCL adds in its own order"
        return "" if plan.groups else f"topology {job.make_topology().name}, whose learners do not reduce in groups"
    if transport == "staged":
        return ""
    if plan.window:
        return "[hogbatch] weights = 'shared'"
    return on_cpu or ("" if job.cluster.node_memory else "node_memory = false")


def _refused_by_mpi(job: "JobFields", plan: Plan) -> str:
    if plan.groups:
        return "compute groups"
    if job.cluster.gradient_format != "float32":
        return f"gradient_format = '{job.cluster.gradient_format}'"
    return "several servers that each hold a part of the weights" if plan.sharded else ""


def transports_of(job: "JobFields", plan: Plan, *, gpu_aware: bool = False) -> Transports | None:
    """Returns the transports that a job chooses for its pairs of ranks, before a trial.

    Args:
        job: Job with the kind of device that learners compute on.
        plan: Role assignment.
        gpu_aware: Whether the MPI libraries of all ranks read and write GPU memory.

    Returns:
        None if no rank computes on a GPU, or if there is only one rank.
    """
    asked = job.cluster.transport
    if not job.cluster.accelerated or plan.local:
        return None
    if asked in ("mpi", "staged"):
        return Transports(asked, asked)
    by_mpi = asked != "ipc" and gpu_aware and not refused_because(job, plan, "mpi")
    between: Transport = "mpi" if by_mpi else "staged"
    within: Transport = "staged" if refused_because(job, plan, "ipc") else "ipc"
    return Transports(within, between, job.cluster.nccl)


def transport_text(job: "JobFields", plan: Plan, nodes: Sequence[int]) -> str:
    """Returns the transports of all pairs of ranks, for people. It is empty if no rank computes on a GPU."""
    found = transports_of(job, plan)
    return "" if found is None else found.text(nodes, node_memory=job.cluster.node_memory)


def on_devices(plan: Plan, nodes: Sequence[int], transports: Transports | None) -> frozenset[int]:
    """Returns the ranks whose vectors are on GPUs. Servers on these ranks compute on GPUs, too.

    These are the ranks with a pair of transport "ipc", and those of groups that reduce by NCCL. A group on several
    nodes that reduces in the plan's order does so in main memory, and so its learners' vectors are there.

    Args:
        plan: Role assignment.
        nodes: Node of every role.
        transports: Transports. None: no rank computes on a GPU.
    """
    if transports is None:
        return frozenset()
    plan = plan.whole  # dormant learners may begin later
    ranks = [role.world_rank for role in plan.roles]
    elsewhere = {
        ranks[role]
        for members in plan.groups
        if not transports.nccl and len({nodes[role] for role in members}) > 1
        for role in members
    }
    found = {ranks[role] for members in plan.groups for role in members} if transports.nccl else set()
    for one, other in _pairs(plan):
        pair = {ranks[one], ranks[other]}
        if len(pair) > 1 and transports.of_pair(nodes[one], nodes[other]) == "ipc" and not pair & elsewhere:
            found |= pair
    return frozenset(found)


def lends(plan: Plan, rank: int, nodes: Sequence[int], transports: Transports | None) -> bool:
    """Returns whether a rank and others of its node read each other's GPU memory. Arguments as for `slots_of`."""
    place = {role.world_rank: node for role, node in zip(plan.roles, nodes, strict=True)}
    if transports is None or rank not in place or transports.of_pair(place[rank], place[rank]) != "ipc":
        return False
    near = {other for other in on_devices(plan, nodes, transports) if place[other] == place[rank]}
    return rank in near and len(near) > 1


def slots_of(plan: Plan, rank: int, nodes: Sequence[int], transports: Transports | None) -> int:
    """Returns the number of slots in the memory that a rank lends to others of its node. A slot holds one vector.

    Args:
        plan, nodes, transports: As for `on_devices`.
        rank: The rank.
    """
    if not lends(plan, rank, nodes, transports):
        return 0
    roles = [role for role in plan.on_rank(rank) if not plan.traits(role).tests]
    grouped = [role for role in roles if role in plan.learners and plan.roles[role].group is not None]
    return SLOTS * len(roles) + HELD * len(grouped) * (1 + (plan.sharing != "nothing"))


def _pairs(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yields the pairs of roles that exchange tensors."""
    for role, (children, receivers) in enumerate(zip(plan.children, plan.receivers, strict=True)):
        yield from ((role, other) for other in {*children, *receivers})
    for owner in plan.owners:
        yield owner, plan.statistics
        yield from ((owner, learner) for learner in (plan.learners if plan.parted else ()))
    for members in (*plan.groups, *((plan.learners,) if plan.sharing != "nothing" else ())):
        yield from combinations(members, 2)


_HOW: dict[Transport, str] = {
    "ipc": "ranks read each other's GPU memory",
    "mpi": "MPI reads and writes GPU memory",
    "staged": "copies in main memory, and messages",
}
"""Transport -> how it works, between nodes if it depends on that."""
