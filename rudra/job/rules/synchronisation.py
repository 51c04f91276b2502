"""Rules about protocols and topologies: waits between roles, and weights and corrections of gradients."""

import math
from collections.abc import Iterator

import protocols
from rudra.job.rules.phrases import either, library_key, ordered_values
from rudra.job.rules.registry import JobPart, part_rule
from rudra.job.table import named


@part_rule
def averaging_protocols(part: JobPart) -> Iterator[str]:
    """Requires that the plan averages replicas if, and only if, the protocol does."""
    if part.plan.averaging and not part.protocol.averages:
        names = either(*protocols.averaging_names().split(", "))
        yield f"{part.on} is not supported with protocol {part.name}; use protocol {names}"
    if part.protocol.averages and not part.plan.averaging:
        pairs = protocols.averaging_pairs()
        shapes = either(*dict.fromkeys(pair.shape for pair in pairs if "," not in pair.shape))
        yield f"{part.on} is not supported with protocol {part.name}; use topology {shapes}"


@part_rule
def overlapped_learners_never_wait(part: JobPart) -> Iterator[str]:
    if part.plan.overlapped and part.protocol.waits:
        yield (
            f"{part.on} is not supported with protocol {part.name}, which makes learners wait; "
            "use protocol softsync or async, or topology adv"
        )


@part_rule
def outstanding_gradients(part: JobPart) -> Iterator[str]:
    learners, needed = len(part.plan.learners), part.protocol.gradients_per_update
    if learners * (part.plan.outstanding or math.inf) < needed:
        yield (
            f"[topology] options.outstanding = {part.plan.outstanding} is not enough for the {needed} gradients per "
            f"update of protocol {part.name}; use {-(-needed // learners)} or more"
        )


@part_rule
def one_group_without_a_server(part: JobPart) -> Iterator[str]:
    needed = part.protocol.gradients_per_update
    if not part.plan.served and not part.plan.averaging and needed > 1:
        yield (
            f"{part.on} with one group is not supported with the {needed} gradients per update of protocol "
            f"{part.name}; use more groups, or gradients_per_update = 1"
        )


@part_rule
def own_update_due(part: JobPart) -> Iterator[str]:
    protocol, plan = part.protocol, part.plan
    if not protocols.own_update_due(protocol):
        return
    if protocol.ordered:
        yield (
            f"{part.on}: update_due of protocol {part.name} is not supported with ordered = True; "
            "use gradients_per_update, or ordered = False"
        )
    if not plan.served or plan.window:
        yield (
            f"{part.on}: update_due of protocol {part.name} is not supported if no server updates the weights; "
            "use gradients_per_update, or a topology with a server"
        )


@part_rule
def waiting_below_a_tree(part: JobPart) -> Iterator[str]:
    if not (part.relayed and part.protocol.waits):
        return
    if protocols.saved(part.protocol):
        yield f"{part.on} is not supported with protocol {part.name}, which waits and has a state; use topology base"
    if part.protocol.grants_on_push:
        yield (
            f"{part.on} is not supported with protocol {part.name}, which waits for pushes of all learners; "
            "use topology base, or grants_on_push = False"
        )


@part_rule
def weighing_below_a_tree(part: JobPart) -> Iterator[str]:
    if part.relayed and part.protocol.modulation.weighs:
        yield (
            f"[protocol] modulation = 'gradient_staleness' is not supported with topology "
            f"{named(part.job.topology.name)}; use modulation = 'mean_staleness', or topology base"
        )


@part_rule
def correction(part: JobPart) -> Iterator[str]:
    """Requires that the owners of the weights see single gradients, or the differences of single replicas."""
    job, plan = part.job, part.plan
    if job.protocol.correction is None:
        return
    on = f"[protocol] correction = '{named(job.protocol.correction)}' is not supported with"
    if part.relayed or plan.overlapped:
        yield (
            f"{on} topology {named(job.topology.name)}, whose servers add gradients on the way; "
            "use topology base, sharded, groups or replicas"
        )
    if plan.window:
        yield f"{on} [hogbatch] weights = 'shared', where no server sees a gradient; use weights = 'server'"
    if plan.reduction == "mpi":
        table, key = library_key(job)
        yield f"{on} [{table}] {key}, which is not repeatable; use {ordered_values(job)}"
    if job.placement.given:
        yield f"{on} [placement] cut, because no role sees a whole gradient; remove one of them"
    if job.simulation.batching == "big-batch":
        yield (
            f"{on} [simulation] batching = 'big-batch', which computes only the sum of all gradients; "
            "use batching = 'none' or 'vmap'"
        )


@part_rule
def norms(part: JobPart) -> Iterator[str]:
    """Requires that some role sees each gradient that makes an update."""
    job = part.job
    if job.results.norms_every is None:
        return
    on = f"[results] gradient_norms = '{job.results.gradient_norms}' is not supported with"
    off = "or gradient_norms = 'off'"
    if part.plan.window:
        yield f"{on} [hogbatch] weights = 'shared', where no server sees a gradient; use weights = 'server', {off}"
    if job.placement.given:
        yield f"{on} [placement] cut, because no role sees a whole gradient; remove the cut, {off}"
    if not job.simulation.tensors:
        yield f"{on} [simulation] tensors = false, which has no gradients; use tensors = true, {off}"
    if job.simulation.batching == "big-batch":
        yield (
            f"{on} [simulation] batching = 'big-batch', which computes only the sum of all gradients; "
            f"use batching = 'none' or 'vmap', {off}"
        )
