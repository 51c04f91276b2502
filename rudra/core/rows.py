"""Rule that decides whether gradients of a sparse first layer travel as rows or as a flat vector."""

from collections.abc import Sequence

from rudra.core import bucket_rules
from rudra.job.job import Job
from topologies import Plan


def form_of_gradients(job: Job, plan: Plan, node: Sequence[int] | None = None) -> str:
    """Returns a text that says how gradients travel and are applied.

    It is empty if the inputs are dense and no gradient travels in buckets.

    Args:
        job: Resolved job.
        plan: Role assignment.
        node: Node of every role. None: servers without a fixed node are on node 0.
    """
    texts = [bucket_rules.text_of(job, plan, node)]
    if job.data.sparse:
        reason = dense_because(job, plan)
        texts.insert(0, f"dense: {reason}" if reason else "rows, of a first layer whose inputs are sparse")
    return "; ".join(filter(None, texts))


def dense_because(job: Job, plan: Plan) -> str:
    """Returns the reason why gradients of a sparse first layer are not rows. It is empty if they are.

    Args:
        job: Resolved job with sparse inputs.
        plan: Role assignment.
    """
    optimizer, momentum = job.optimizer, job.explicit_momentum(plan)
    decays = [optimizer.weight_decay, *(group.weight_decay or 0 for group in optimizer.groups)]
    if optimizer.name != "sgd":
        return f"{optimizer.name} has state for every weight"
    if momentum:
        return f"momentum = {momentum:g} moves every weight"
    if any(decays):
        return f"weight_decay = {max(decays):g} changes every weight"
    if optimizer.clip_norm is not None:
        return f"clip_norm = {optimizer.clip_norm:g} needs the norm of all"
    if job.decisions.given:
        return "[decisions] may change what the optimiser needs"
    if job.training.microbatches > 1:
        return f"microbatches = {job.training.microbatches} adds whole vectors"
    if job.training.in_16_bits:
        return f"precision = '{job.training.precision}'"
    if job.cluster.gradient_format != "float32":
        return f"gradient_format = '{job.cluster.gradient_format}'"
    if plan.window:
        return "[hogbatch] weights = 'shared' adds whole vectors"
    if plan.parted or plan.stage is not None:
        return f"topology {job.make_topology().name} sends parts of gradients"
    if plan.groups or plan.averaging:
        return f"topology {job.make_topology().name} adds gradients among learners"
    whole = next((role.kind for i, role in enumerate(plan.roles) if not plan.traits(i).takes_rows), "")
    return f"a {whole} takes whole vectors" if whole else ""
