"""Rules about changes during a run."""

from collections.abc import Iterator

import protocols
import topologies
from rudra.job.fields import JobFields
from rudra.job.rules.phrases import HOGBATCH, PLACED, ordered_values
from rudra.job.rules.registry import JobPart, change_rule


@change_rule
def same_teams(first: JobPart, later: JobPart) -> Iterator[str]:
    if first.job.simulation.batching == "big-batch" and first.plan.groups != later.plan.groups:
        yield "[simulation] batching = 'big-batch' is not supported with a change of groups; use batching = 'none'"


@change_rule
def same_coordinator(first: JobPart, later: JobPart) -> Iterator[str]:
    if first.plan.scheduled and first.job.protocol != later.job.protocol:
        yield f"{HOGBATCH} a change of [protocol]; change other keys"
    elif first.plan.scheduled != later.plan.scheduled:
        yield f"[protocol] name = '{later.name}' is not supported after {first.name}; begin another run"


@change_rule
def same_activations(first: JobPart, later: JobPart) -> Iterator[str]:
    sizes = [(part.job.training.minibatch_size, part.job.cluster.parts) for part in (first, later)]
    if first.job.placement.given and sizes[0] != sizes[1]:
        keep = "as buffers for activations keep their size"
        yield f"{PLACED} a change of minibatch_size or shares, {keep}; change other keys"


@change_rule
def same_replicas(first: JobPart, later: JobPart) -> Iterator[str]:
    if not first.plan.served and first.plan.whole.groups != later.plan.whole.groups:
        yield "[topology] options.groups is not supported with a change of replicas; use the same groups"
    if first.protocol.averages and later.protocol.averages:
        names = [protocols.Averaging.of(part.protocol).outer.optimizer for part in (first, later)]
        if names[0] != names[1]:
            yield f"[averaging.outer] name = '{names[1]}' is not supported after '{names[0]}'; use the same optimiser"


@change_rule
def same_roles(first: JobPart, later: JobPart) -> Iterator[str]:
    yield from other_roles(first.plan, later.plan, first.job.changing, first.job)


def other_roles(
    before: topologies.Plan,
    after: topologies.Plan,
    changing: str = "[[changes]]",
    job: JobFields | None = None,
) -> Iterator[str]:
    """Yields reasons why the ranks of a run cannot continue with another plan."""
    who = [[(role.kind, role.index, plan.traits(i)) for i, role in enumerate(plan.roles)] for plan in (before, after)]
    if who[0] != who[1]:
        yield "[topology] options must not change roles or ranks; use options that keep them"
    if after.reduction == "mpi":
        by_nccl = job is not None and job.cluster.nccl
        key = "[cluster] transport = 'nccl'" if by_nccl else "[topology] options.reduction = 'mpi'"
        yield f"{key} is not supported with {changing}; use {ordered_values(job)}"
