"""Rules about transports, devices and ranks."""

from collections.abc import Iterator

from rudra.job.rules.phrases import library_key, ordered_values
from rudra.job.rules.registry import JobPart, part_rule
from rudra.job.table import named
from rudra.job.transports import IN_MAIN_MEMORY, refused_because


@part_rule
def transport(part: JobPart) -> Iterator[str]:
    """Checks whether a transport suits the job. The nodes of the ranks are known only later."""
    table = part.job.cluster
    if table.transport == "auto":
        return
    line = f"[cluster] transport = '{table.transport}'"
    if table.device == "cpu":
        yield f"{line} is for GPUs, and [cluster] device = 'cpu'; use transport = 'auto'"
    if part.plan.local:
        yield f"{line} is not supported with one rank; use transport = 'auto', or one_rank = false"
    if table.transport != "staged" and (feature := refused_because(part.job, part.plan, table.transport)):
        yield f"{line} is not supported with {feature}; {IN_MAIN_MEMORY}"


@part_rule
def learners_on_the_cpu(part: JobPart) -> Iterator[str]:
    """Checks which learners compute on the CPU although others use GPUs. Those of a rank have the same device."""
    job, plan, table = part.job, part.plan.whole, part.job.cluster
    wanted = table.cpu_learners
    key = f"[cluster] cpu_learners = {list(wanted) if isinstance(wanted, tuple) else wanted}"
    if isinstance(wanted, tuple) and max(wanted, default=0) >= plan.learner_numbers:
        yield f"{key} names learner {max(wanted)}, which does not exist; use 0 to {plan.learner_numbers - 1}"
    if table.device == "cpu":
        return
    on_cpu = job.learners_on_cpu(plan)
    if wanted and table.device == "auto":
        yield f"{key} is not supported with device = 'auto'; use device = 'cuda'"
    if wanted and job.scheduled:
        yield f"{key} is not supported with protocol {part.name}; use device = 'cpu' in [[hogbatch.workers]]"
    if wanted and table.learners_per_device is not None:
        yield f"{key} is not supported with {table.bank_key}, as all banks compute alike; remove one of them"
    if wanted and len(on_cpu) == plan.learner_numbers:
        yield f"{key} leaves no learner for a GPU; use device = 'cpu', or more learners"
    ranks = {plan.roles[learner].world_rank for learner in plan.learners if learner not in on_cpu}
    if its := [plan.roles[learner].name for learner in sorted(on_cpu) if plan.roles[learner].world_rank in ranks]:
        on, own = ("one_rank = true", "one_rank = false") if plan.local else (table.sharing, "learners_per_rank = 1")
        yield f"[cluster] {on} is not supported if {its[0]}, but not its whole rank, computes on the CPU; use {own}"


@part_rule
def weights_in_parts(part: JobPart) -> Iterator[str]:
    """Checks keys that need a whole gradient, or all weights, in one place."""
    job, on = part.job, f"{part.on} is not supported with"
    if not part.plan.sharded:
        return
    if job.optimizer.clip_norm is not None:
        yield f"{on} [optimizer] clip_norm; remove clip_norm, or use topology base"
    if job.cluster.gradient_format != "float32":
        yield f"{on} [cluster] gradient_format = 'float16'; use 'float32', or topology base"
    if job.simulation.batching == "big-batch":
        yield f"{on} [simulation] batching = 'big-batch'; use batching = 'none' or 'vmap'"


@part_rule
def groups_on_one_rank(part: JobPart) -> Iterator[str]:
    hosted = {(part.plan.roles[i].world_rank, part.plan.roles[i].group) for i in part.plan.learners}
    if part.plan.reduction == "mpi" and len({rank for rank, _ in hosted}) < len(hosted):
        table, key = library_key(part.job)
        on = f"[{table}] {key} is not supported with"
        yield f"{on} learners of several groups on a rank; use {ordered_values(part.job)}"


@part_rule
def one_rank(part: JobPart) -> Iterator[str]:
    """Checks keys that need several ranks."""
    job, plan = part.job, part.plan
    if job.cluster.one_rank is not True:
        return
    on = "[cluster] one_rank = true is not supported with"
    if (per_rank := job.cluster.learners_per_rank) > 1:
        yield f"{on} learners_per_rank = {per_rank}; use learners_per_rank = 1"
    if job.cluster.bank_size not in (None, plan.learner_numbers):
        key = "most_learners_per_device" if job.cluster.grows else "learners_per_device"
        text = f"{key} = {job.cluster.bank_size} of {plan.learner_numbers} learners"
        yield f"{on} {text}; use {key} = {plan.learner_numbers}, or one_rank = false"
    if plan.window:
        yield f"{on} [hogbatch] weights = 'shared'; use weights = 'server'"
    if plan.overlapped:
        yield f"{on} topology {named(job.topology.name)}, whose learners have threads; use topology adv or base"
    if plan.reduction == "mpi":
        table, key = library_key(job)
        yield f"{on} [{table}] {key}; use reduction = 'ordered'"
    if job.fault_tolerance.straggler_timeout_s is not None:
        yield f"{on} [fault_tolerance] straggler_timeout_s; remove straggler_timeout_s"
