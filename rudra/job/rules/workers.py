"""Rules about a coordinator that assigns the samples, and weights that workers share."""

from collections.abc import Iterator

from rudra.job.rules.phrases import AVERAGE, HOGBATCH, either
from rudra.job.rules.registry import JobPart, part_rule
from rudra.job.table import named


@part_rule
def topology_of_a_coordinator(part: JobPart) -> Iterator[str]:
    plan = part.plan
    plain = all(plan.roles[i].parent == plan.server for i in plan.learners) and not plan.groups
    unfit = not plan.served or not plain or plan.overlapped or plan.averaging or plan.parted
    if plan.scheduled and unfit:
        yield f"{HOGBATCH} topology {named(part.job.topology.name)}; use topology base"


@part_rule
def keys_with_a_coordinator(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled:
        return
    if part.job.cluster.shares:
        yield f"{HOGBATCH} [cluster] shares; remove shares"
    if (batching := part.job.simulation.batching) != "none":
        yield f"{HOGBATCH} [simulation] batching = '{batching}'; use batching = 'none'"


@part_rule
def evaluation_by_workers(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled and part.job.training.evaluate == "workers":
        yield (
            f"[training] evaluate = 'workers' is not supported with protocol {part.name}; "
            "use evaluate = true, or protocol hogbatch"
        )


@part_rule
def locks_across_nodes(part: JobPart) -> Iterator[str]:
    nodes = len({part.plan.roles[i].node for i in part.plan.learners})
    if part.plan.window and nodes > 1 and part.job.hogbatch.locking:
        yield f"{_SHARED} locking = true on {nodes} nodes; use locking = false, or one node"


@part_rule
def optimizer_of_workers(part: JobPart) -> Iterator[str]:
    optimizer = part.job.optimizer
    if not part.plan.window:
        return
    if optimizer.name != "sgd" or optimizer.momentum or optimizer.options.get("nesterov"):
        yield f"{_SHARED} an [optimizer] that has a state; use name = 'sgd' and momentum = 0"
    keys = ("weight_decay", "clip_norm", "groups", "options")
    if given := [key for key in keys if getattr(optimizer, key) not in (0, None, (), {})]:
        yield f"{_SHARED} [optimizer] {either(*given)}; remove {either(*given)}"


@part_rule
def modulation_of_workers(part: JobPart) -> Iterator[str]:
    if part.plan.window and (name := part.protocol.modulation.name) != "none":
        yield f"{_SHARED} [protocol] modulation = '{name}'; use modulation = 'none'"


@part_rule
def small_workers_on_gpus(part: JobPart) -> Iterator[str]:
    table, team = part.job.hogbatch, part.job.hogbatch.team(part.plan.learner_numbers)
    racing = part.plan.window and not table.locking
    if racing and part.job.cluster.accelerated and any(w.kind == "small" and w.device != "cpu" for w in team):
        yield f"{_SHARED} small workers on GPUs; use device = 'cpu' in their [[hogbatch.workers]], or locking = true"


@part_rule
def gradient_format_of_workers(part: JobPart) -> Iterator[str]:
    if part.plan.window and part.job.cluster.gradient_format != "float32":
        yield f"{_SHARED} [cluster] gradient_format = 'float16'; use 'float32'"


@part_rule
def updates_that_no_role_sees(part: JobPart) -> Iterator[str]:
    kept = part.job.results.kept_interval
    if part.plan.window and any(hook.at == "update" for hook in part.job.hooks):
        yield f"{_SHARED} [hooks] at = 'update'; use at = 'epoch' or 'end'"
    if part.plan.window and part.job.optimizer.average.given:
        yield f"{AVERAGE} [hogbatch] weights = 'shared'; remove average, or use weights = 'server'"
    if part.plan.window and kept is not None and kept[1] == "update":
        yield f"{_SHARED} [results] keep_checkpoints = '{kept[0]} updates'; use a number of epochs"


@part_rule
def changes_in_windows(part: JobPart) -> Iterator[str]:
    for change in part.job.changes if part.plan.window else ():
        if change.at_update is not None:
            yield f"{_SHARED} [[changes]] at_update = {change.at_update}, as no server updates; use at_epoch"
    if part.plan.window and part.job.decisions.at == "update":
        yield f"{_SHARED} [decisions] at = 'update', as no server updates; use at = 'epoch'"


_SHARED = "[hogbatch] weights = 'shared' is not supported with"
