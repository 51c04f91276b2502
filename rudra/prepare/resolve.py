"""Resolution of a written job: every open key is filled in, and the plan, the role assignment, is made.

Three callers resolve a job: a process that starts ranks (`resolve`), the ranks themselves (`fit`), and a process with
virtual time (`resolve_virtual`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rudra.errors import ConfigError, TopologyError
from rudra.job.job import Job
from rudra.job.transports import IN_MAIN_MEMORY, Transports, on_devices, transports_of
from rudra.prepare.cut import choose_cut
from rudra.prepare.nodes import nodes_of
from rudra.prepare.start import Decided
from topologies import Plan

if TYPE_CHECKING:
    import torch


class ResolvedJob(NamedTuple):
    """Job without open keys, and its plan.

    Attributes:
        job: Job with learners, threads, device and layer. Shares and the way of computing gradients may still be
            "auto", because they are measured with the data.
        plan: Role assignment.
    """

    job: Job
    plan: Plan


class RankFacts(NamedTuple):
    """Facts of one rank.

    Attributes:
        node: Number that all ranks of a node share.
        host: Name of the machine.
        cores: Number of cores that the ranks of the node share.
        gpus: Number of devices that torch sees, of the kind that the job wants. 0: there are none, or it wants none.
        gpu_aware: Whether the MPI library accepts GPU memory.
        threaded: Whether MPI grants `MPI_THREAD_MULTIPLE`.
    """

    node: int
    host: str
    cores: int
    gpus: int = 0
    gpu_aware: bool = False
    threaded: bool = True


def resolve(job: Job, decided: Decided, *, cores: int) -> ResolvedJob:
    """Resolves a job for ranks that will be started on one node.

    Args:
        job: Written job.
        decided: Keys that are already decided.
        cores: Number of cores that the learners share.

    Raises:
        RudraError: The job does not allow these values, or its model cannot be cut.
    """
    written = job.with_(**decided)
    job = _on_one_rank(written, cores) or written.resolved(cores=cores)
    if job.placement.by_rule:
        job = job.with_(placement={"cut": choose_cut(job)})
    return ResolvedJob(job, job.plan())


def _on_one_rank(written: Job, cores: int) -> Job | None:
    """Returns the job on one rank if all learners would share the only GPU here. None: it has several ranks."""
    cluster = written.cluster
    if cluster.one_rank != "auto" or cluster.device == "cpu":
        return None
    from rudra.compute.device.devices import here  # and torch, which a process that starts ranks does without

    if here(cluster.device) != 1:
        return None
    try:
        return written.with_(cluster={"one_rank": True}).resolved(cores=cores)
    except ConfigError:  # it needs several ranks
        return None


def fit(job: Job, decided: Decided, ranks: Sequence[RankFacts]) -> ResolvedJob:
    """Fits a job to the actual ranks. Every rank gets the same result.

    Args:
        job: Written job.
        decided: Keys that are already decided, with the layer that a rule chooses: `rudra.prepare.cut.with_cut`.
        ranks: Facts of all ranks, in the order of their numbers.

    Raises:
        TopologyError: The topology does not fit this number of ranks, or needs an MPI feature that the ranks lack.
        ConfigError: The protocol does not work on the plan, or the transport between nodes.
    """
    by_rule, job = job.placement.by_rule, job.with_(**decided)
    places = [rank.node for rank in ranks]
    # Ranks that were started for stage servers are left over where the rule places no layers.
    left_over = by_rule and not job.placement.given and job.cluster.learners is not None
    if left_over and job.plan().ranks == len(ranks) - job.placement.servers:
        places = places[: -job.placement.servers]
    topology = job.make_topology()
    try:
        plan = topology.fit(places, job.cluster.learners)
    except ValueError as error:
        raise TopologyError(str(error)) from None
    if plan.overlapped and not all(rank.threaded for rank in ranks):
        raise TopologyError(
            f"[topology] name = '{topology.name}' is not supported without MPI_THREAD_MULTIPLE, which this MPI library "
            "does not grant; use topology adv, or another MPI library"
        )
    if job.cluster.transport == "ipc" and len({places[role.world_rank] for role in plan.roles}) > 1:
        raise ConfigError(f"[cluster] transport = 'ipc' is not supported between nodes; {IN_MAIN_MEMORY}")
    job = job.resolved(
        learners=len(plan.learners), threads_per_rank=job.cluster.threads_per_rank or _share(job, plan, ranks)
    )
    plan = job.active(plan)
    job.check(plan)
    return ResolvedJob(job, plan)


def _share(job: Job, plan: Plan, ranks: Sequence[RankFacts]) -> int:
    """Returns the number of cores for each rank that computes gradients, on the node with the fewest."""
    traits = [[plan.traits(role) for role in plan.on_rank(number)] for number in range(len(ranks))]
    computing = [any(kind.trains or kind.concludes for kind in kinds) for kinds in traits]  # one gradient at a time
    on_node = [[i for i, other in enumerate(ranks) if computing[i] and other.node == rank.node] for rank in ranks]
    return min(job.threads_of(plan, here, rank.cores) for rank, here in zip(ranks, on_node, strict=True))


def choose_devices(
    resolved: ResolvedJob, ranks: Sequence[RankFacts], number: int
) -> tuple[ResolvedJob, "torch.device", Transports | None]:
    """Resolves the kind of device that learners compute on.

    Args:
        resolved: Job from `fit`.
        ranks: Facts of all ranks, in the order of their numbers.
        number: Number of one rank.

    Returns:
        The job with this device, the device of that rank, and the transports.

    Raises:
        ConfigError: A rank lacks a GPU that the job requires, or its MPI library cannot use it.
    """
    from rudra.compute.device import placement  # and torch, which a process that starts ranks does without

    job, plan = resolved
    gpus, hosts, on_cpu = [rank.gpus for rank in ranks], [rank.host for rank in ranks], job.learners_on_cpu(plan)
    kind = placement.agreed(job.cluster.device, plan, gpus, hosts, on_cpu)
    _check_transport(job, plan, kind, ranks)
    places = [rank.node for rank in ranks]
    resolved = ResolvedJob(job.with_(cluster={"device": kind}), plan)
    transports = transports_of(resolved.job, plan, gpu_aware=all(rank.gpu_aware for rank in ranks))
    others = on_devices(plan, [places[role.world_rank] for role in plan.roles], transports)
    return resolved, placement.of_rank(kind, number, plan, places, gpus[number], on_cpu, others), transports


def _check_transport(job: Job, plan: Plan, kind: str, ranks: Sequence[RankFacts]) -> None:
    """Raises ConfigError if the job names a transport that these ranks cannot use."""
    if (transport := job.cluster.transport) == "auto":
        return
    line = f"[cluster] transport = '{transport}'"
    if kind == "cpu":
        raise ConfigError(f"{line} is for GPUs, but a learner has none; use transport = 'auto'")
    if transport == "mpi" and not all(rank.gpu_aware for rank in ranks):
        other = [rank.gpu_aware for rank in ranks].index(False)
        who = f"the MPI library of rank {other} on {ranks[other].host}, which reports no GPU support"
        raise ConfigError(f"{line} is not supported by {who}; {IN_MAIN_MEMORY}")


def resolve_virtual(job: Job, *, device: str | None = None, cores: int = 1) -> ResolvedJob:
    """Resolves a job for virtual time, on the nodes of its table `[simulation]`.

    Args:
        job: Written job with the keys of its cost file.
        device: Kind of device that computes in virtual time. None: as in the job.
        cores: Number of cores that the learners share.

    Raises:
        RudraError: The job does not allow these values or does not work on its nodes, or its model cannot be cut.
        ValueError: Options of the topology do not fit these learners.
    """
    job = job.with_(cluster={"transport": "auto"}).resolved(cores=cores)  # virtual time has no ranks
    if job.placement.by_rule:
        job = job.with_(placement={"cut": choose_cut(job)})
    if device is not None:
        job = job.with_(cluster={"device": device})
    return ResolvedJob(job, job.plan(nodes_of(job)))


def settle(job: Job, *, gradients: str, shares: Sequence[float] | None = None, bank: str | None = None) -> Job:
    """Fills in the keys that are measured with the data. No key is open afterwards.

    Args:
        job: Resolved job.
        gradients: Value of `training.gradients` after the first gradient.
        shares: Measured `cluster.shares`. None: the shares of the job stay.
        bank: Measured `cluster.bank`. None: it stays, except that a bank whose form is open is a loop.
    """
    cluster: dict[str, Any] = {} if shares is None else {"shares": shares}
    if job.cluster.learners_per_device is not None and job.cluster.bank == "auto":
        cluster["bank"] = bank or "loop"
    if job.cluster.grows:
        cluster["most_learners_per_device"] = job.cluster.bank_size
    return job.with_(training={"gradients": gradients}, cluster=cluster)
