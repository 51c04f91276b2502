"""Rules that say which gradients, replicas and weights travel in buckets, and why others travel as a whole."""

from collections.abc import Sequence
from itertools import combinations

from rudra.core.buckets import bucket_size, parts
from rudra.job.job import Job
from rudra.job.tables import OPTIMIZERS
from topologies import Plan

AUTO_HELD_BYTES = 1_000_000_000
"""Largest memory of one server for gradients that come in buckets, if the job does not say the size of a bucket."""

_USED = ", which the next forward pass may use before the last ones are there"


def in_buckets(job: Job, plan: Plan, members: Sequence[int]) -> bool:
    """Returns whether a compute group averages large gradients in buckets.

    It does if its gradients are reduced as soon as they are computed, and some of them travel between nodes. In a node
    buckets cost more than they hide, so there only a given size makes them. Replicas are averaged in buckets on the
    same terms, if parts of them are final during the last backward pass before the average.
    """
    if averaged_whole_because(job, plan) or len({plan.roles[i].world_rank for i in members}) < 2:
        return False
    return job.cluster.buckets != "auto" or len({plan.roles[i].node for i in members}) > 1


def averaged_whole_because(job: Job, plan: Plan) -> str:
    """Returns the reason why replicas are averaged as a whole. It is empty if they are not, or if there are none."""
    if not plan.averaging:
        return ""
    if getattr(job.protocol_factory, "early", True):
        return f"protocol {getattr(job.protocol.name, '__name__', job.protocol.name)} averages them while they train"
    if plan.sharing != "nothing":
        return "members of a group step together, after the backward pass"
    if job.optimizer.name not in OPTIMIZERS:
        return f"optimizer {getattr(job.optimizer.name, '__name__', job.optimizer.name)} steps whole replicas"
    if job.optimizer.clip_norm is not None:
        return f"clip_norm = {job.optimizer.clip_norm:g} needs the norm of a whole gradient"
    if job.protocol.correction is not None:
        return "protocol.correction changes whole gradients"
    return at_once_because(job)


def passes_early(job: Job, plan: Plan, members: Sequence[int]) -> bool:
    """Returns whether members of a compute group may begin a forward pass before all buckets of the average are there.

    Each member must update its own weights, so there is no server, and be alone on its node: learners that share a node
    were up to 7 % slower with it. The update must be possible in any order of the elements: by an optimiser that jobs
    name without a module, without clipping, and without a correction of gradients. The gradient must become final part
    by part, in main memory, as whole vectors. With `reduction = "mpi"` all ranks must average the buckets in the same
    order, the last layers first. The executor decides the rest: task, layers and hooks must allow it.
    """
    cluster = job.cluster
    in_parts = not at_once_because(job) and not job.data.sparse and cluster.transport != "mpi" and plan.stage is None
    optimizer, whole = job.optimizer, job.protocol.correction is not None
    rule = optimizer.name in OPTIMIZERS and optimizer.clip_norm is None and not whole
    alone = len({plan.roles[i].node for i in members}) == len(members)
    owns = cluster.buckets != "off" and not (plan.served or plan.averaging) and plan.reduction != "mpi"
    return owns and alone and rule and in_parts and in_buckets(job, plan, members)


def at_once_because(job: Job) -> str:
    """Returns the reason why all parts of a gradient become final at the same time. It is empty if they do not."""
    computed = _computed_at_once_because(job)
    return computed or ("a GPU computes the gradient as a whole" if job.cluster.accelerated else "")


def _computed_at_once_because(job: Job) -> str:
    """Returns the same for a gradient in the memory of the device that computes it.

    From a GPU, the parts of a gradient come one after the other.
    """
    training = job.training
    if training.compile:
        return "training.compile = true computes all of a gradient at once"
    if training.microbatches > 1:
        return f"training.microbatches = {training.microbatches} adds whole gradients"
    if training.precision == "float16":
        return "training.precision = 'float16' scales whole gradients"
    return ""


def whole_because(job: Job) -> str:
    """Returns the reason why a job's learners push whole gradients. It is empty if they may push them in buckets."""
    if job.data.sparse:
        return "data.sparse = true pushes rows"
    if job.cluster.gradient_format != "float32":
        return f"cluster.gradient_format = {job.cluster.gradient_format!r} converts whole gradients"
    return "MPI reads them on the GPU" if job.cluster.transport == "mpi" else _computed_at_once_because(job)


def group_parts(
    job: Job, plan: Plan, size: int, parameters: int, auto: int, members: Sequence[int], tensors: Sequence[int] = ()
) -> list[slice]:
    """Returns the buckets of a group's gradients. They are averaged as a whole if there is only one.

    Args:
        job: Resolved job.
        plan: Role assignment.
        size: Number of elements of a gradient.
        parameters: Number of parameters among them.
        auto: Number that `auto_size` found for a whole gradient.
        members: Members of the group.
        tensors: As for `parts`.
    """
    return parts(size, parameters, bucket_size(job, size, auto) if in_buckets(job, plan, members) else 0, tensors)


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
    if job.cluster.buckets == "off" or whole_because(job) or owner in plan.stages:
        return ()
    several = plan.sharded and owner in plan.front_owners
    return tuple(
        learner
        for learner in (plan.learners if several else plan.children[owner])
        if plan.traits(learner).pushes_in_parts and _apart(job, plan, node, learner, owner)
    )


def _apart(job: Job, plan: Plan, node: Sequence[int], learner: int, owner: int) -> bool:
    """Returns whether messages between a learner and a server may come in buckets, because of their places."""
    by_messages = not job.cluster.node_memory and job.cluster.buckets != "auto"
    other_rank = plan.roles[learner].world_rank != plan.roles[owner].world_rank
    return other_rank and (by_messages or node[learner] != node[owner])


def weights_whole_because(job: Job, plan: Plan) -> str:
    """Returns the reason why all learners of a job get whole weights. It is empty if weights may come in buckets.

    Weights come in buckets only if a learner waits for them, and its forward pass can wait for each layer.
    """
    training = job.training
    if plan.overlapped:
        return "learners compute while weights arrive"
    if plan.stage is not None:
        return "a stage server has the last layers"
    if job.cluster.sharing:
        return f"cluster.{job.cluster.sharing} lets learners of a rank compute in turn"
    if job.data.sparse:
        return "data.sparse = true reads rows of them"
    if training.compile:
        return "training.compile = true computes with all of them at once"
    if training.microbatches > 1:
        return f"training.microbatches = {training.microbatches} reads all of them several times"
    if training.precision == "float16":
        return "training.precision = 'float16' may repeat a pass"
    return "MPI writes them on the GPU" if job.cluster.transport == "mpi" else ""


def pulling(job: Job, plan: Plan, node: Sequence[int], owner: int) -> tuple[int, ...]:
    """Returns the learners that get large weights from a role in buckets.

    They do if they are on other nodes, as for `pushing`, and wait for their weights. If several servers hold parts of
    the weights, all of them must be on other nodes. The model decides the rest on the ranks: its forward pass must be
    able to wait for each layer.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role.
        owner: Id of the role that gives the weights.
    """
    sources = plan.front_owners if plan.sharded else (owner,)
    if job.cluster.buckets == "off" or owner not in sources or weights_whole_because(job, plan):
        return ()
    return tuple(
        learner
        for learner in (plan.learners if plan.sharded else plan.receivers[owner])
        if plan.traits(learner).pushes_in_parts and all(_apart(job, plan, node, learner, source) for source in sources)
    )


def pull_parts(job: Job, size: int, parameters: int, auto: int) -> list[slice]:
    """Returns the parts of weights that come in buckets. Empty: they come as a whole.

    Buffers come first, because a forward pass needs all of them at its beginning. Then the first layers follow.

    Args:
        job: Resolved job.
        size: Number of elements that one server gives.
        parameters: Number of parameters among them.
        auto: Number that `auto_size` found for a whole gradient.
    """
    bucket = bucket_size(job, size, auto)
    found = parts(size, max(parameters, 0), bucket) if bucket else []
    return sorted(found, key=lambda part: (part.start < parameters, part.start))


def push_parts(job: Job, size: int, parameters: int, auto: int, senders: int) -> list[slice]:
    """Returns the parts of the gradients that a role takes in buckets. Empty: they come as a whole.

    Args:
        job: Resolved job.
        size: Number of elements that the role takes of a gradient.
        parameters: Number of parameters among them.
        auto: Number that `auto_size` found for a whole gradient.
        senders: Number of learners that push to the role in buckets. It holds a gradient of each.
    """
    bucket = bucket_size(job, size, auto)
    if not senders or (job.cluster.buckets == "auto" and 4 * size * senders > AUTO_HELD_BYTES):
        bucket = 0
    return parts(size, max(parameters, 0), bucket) if bucket else []


def held(job: Job, plan: Plan, node: Sequence[int], owner: int, size: int, parameters: int, auto: int) -> int:
    """Returns the number of gradients that a role holds while they come in buckets, one for each learner.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role.
        owner: Id of the role that takes the gradients.
        size: Number of elements that the role takes of a gradient.
        parameters: Number of parameters among them.
        auto: Number that `auto_size` found for a whole gradient.
    """
    senders = len(pushing(job, plan, node, owner))
    return senders if push_parts(job, size, parameters, auto, senders) else 0


def pairs_of_nodes(job: Job, plan: Plan, node: Sequence[int]) -> set[tuple[int, int]]:
    """Returns the pairs of nodes, the smaller one first, whose network decides the size of buckets.

    Gradients or weights may travel between them in buckets, and the job does not say the size. So the set is empty if
    it does.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role.
    """
    if job.cluster.buckets != "auto":
        return set()
    found: set[tuple[int, int]] = set()
    for members in plan.groups:
        if in_buckets(job, plan, members):
            found.update(combinations(sorted({node[i] for i in members}), 2))
    for owner in range(len(plan.roles)):
        for learner in {*pushing(job, plan, node, owner), *pulling(job, plan, node, owner)}:
            found.add((min(node[learner], node[owner]), max(node[learner], node[owner])))
    return found


def text_of(job: Job, plan: Plan, node: Sequence[int] | None = None) -> str:
    """Returns a text about the buckets of large gradients and weights. It is empty if there are none.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role. None: servers without a fixed node are on node 0.
    """
    if job.cluster.buckets == "off":
        return ""
    node = plan.nodes(near=True) if node is None else node
    roles = range(len(plan.roles))
    averaged = any(in_buckets(job, plan, members) for members in plan.groups)
    pushed = any(pushing(job, plan, node, owner) for owner in roles)
    pulled = any(pulling(job, plan, node, owner) for owner in roles)
    if not (averaged or pushed or pulled):
        return ""
    if job.cluster.buckets == "auto":
        chosen = "chosen at the start of the run from the network's latency and bandwidth"
        how = f" unless they are small, in buckets {chosen}"
    else:
        how = f", in buckets of at least {job.cluster.buckets:g} MB"
    if averaged and (reason := at_once_because(job)):
        return f"averaged after the backward pass{how}: {reason}"
    if plan.averaging:
        return f"replicas are averaged during the last backward pass of a period{how}"
    if averaged:
        early = any(passes_early(job, plan, members) for members in plan.groups)
        return f"averaged during the backward pass{how}{_USED if early else ''}"
    if not pushed:
        return f"weights come from servers{how}{_USED}"
    if pulled:
        back = f"weights come in buckets, too{_USED}"
    else:
        back = f"weights come whole: {weights_whole_because(job, plan) or 'a server is on the node of its learner'}"
    return f"pushed to servers during the backward pass{how}; {back}"


def spread(job: Job) -> tuple[Plan, tuple[int, ...]]:
    """Returns the plan of a job whose ranks with learners are on a node each, apart from the servers.

    Returns:
        The plan, and the node of every role.
    """
    each = job.cluster.on_rank(job.learners)
    plan = job.plan([learner // each for learner in range(job.learners)])
    return plan, plan.nodes(near=False)


def refusal(job: Job, plan: Plan, size: int | None = None) -> str:
    """Returns a text that says why gradients or replicas are sent whole, although the job gives the size of buckets.

    It is empty if they are sent in buckets, or if the job gives no size.

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
    elif size is not None and not bucket_size(job, part, 0):
        reason = f"{4 * part / 1e6:.3g} MB are not more than a bucket"
    elif averaged or here:
        reason = ""
    else:
        reason = "ranks of a node read them in memory; between nodes they have buckets"
        reason += f", but weights come whole: {why}" if (why := weights_whole_because(job, plan)) else ""
    return reason and f"{'replicas are averaged' if plan.averaging else 'gradients leave'} whole: {reason}"


def _kept_whole(job: Job, plan: Plan) -> str:
    """Returns the reason why learners of a job neither average nor push in buckets."""
    if plan.averaging:
        return averaged_whole_because(job, plan) or "they are on one rank"
    if plan.scheduled:
        return "protocol hogbatch has no buckets"
    if reason := whole_because(job):
        return reason
    return "the group has one rank" if plan.groups else "leaf servers are on the nodes of their learners"
