"""Rules about banks of learners."""

from collections import Counter
from collections.abc import Iterator

from rudra.job.fields import JobFields
from rudra.job.rules.registry import JobPart, job_rule, part_rule
from rudra.job.table import named


@job_rule
def banks(job: JobFields) -> Iterator[str]:
    """Checks the keys of a bank of learners against others that need no plan."""
    table = job.cluster
    for key in () if table.grows else ("most_learners_per_device", "growth"):
        if key in table.non_defaults:
            yield f"[cluster] {key} is for learners_per_device = 'auto'; use this, or remove {key}"
    if table.learners_per_device is None:
        if table.bank != "auto":
            yield f"[cluster] bank = '{table.bank}' needs learners_per_device; set it, or leave bank out"
        if table.streams is not None:
            yield f"[cluster] streams = {table.streams} needs learners_per_device; set it, or leave streams out"
        return
    if table.learners_per_rank > 1:
        yield (
            f"[cluster] {table.bank_key} is not supported with learners_per_rank = {table.learners_per_rank}; "
            "use one of them"
        )
    if table.streams is not None and not table.grows and table.streams > table.per_rank:
        most = f"learners_per_device = {table.learners_per_device}"
        yield f"[cluster] streams = {table.streams} is more than {most}; use 1 to {table.learners_per_device}"
    if table.streams is not None and table.bank not in ("auto", "graphs"):
        yield f"[cluster] streams = {table.streams} is not supported with bank = '{table.bank}'; use bank = 'graphs'"
    reasons = {"fused": not_fused_because, "graphs": not_graphed_because}
    if table.bank in reasons and (reason := reasons[table.bank](job)):
        yield f"[cluster] bank = '{table.bank}' is not supported with {reason}; use bank = 'loop'"


def not_graphed_because(job: JobFields) -> str:
    """Returns the key that excludes `cluster.bank = "graphs"`. Empty: none does."""
    if job.cluster.graphs == "off":
        return "graphs = 'off'"
    if job.training.compile:
        return "[training] compile = true"
    if job.placement.given:
        return "[placement] cut"
    if job.scheduled:
        return f"protocol {named(job.protocol.name)}, whose mini-batches differ in size"
    return ""


def not_fused_because(job: JobFields) -> str:
    """Returns the key that excludes `cluster.bank = "fused"`. Empty: none does."""
    if job.cluster.deterministic:
        return "deterministic = true, because it changes the last bits"
    if job.training.compile:
        return "[training] compile = true"
    if job.training.precision == "float16":
        return "[training] precision = 'float16'"
    if job.training.microbatches > 1:
        return f"[training] microbatches = {job.training.microbatches}"
    if job.cluster.shares:
        return "shares, because all learners must have as many samples"
    if job.data.sparse is True:
        return "[data] sparse = true"
    if job.placement.given:
        return "[placement] cut"
    if job.scheduled:
        return f"protocol {named(job.protocol.name)}, whose mini-batches differ in size"
    if job.simulation.batching != "none":
        return f"[simulation] batching = '{job.simulation.batching}'"
    return ""


@part_rule
def learners_of_a_bank(part: JobPart) -> Iterator[str]:
    """Checks that each rank with learners gets a whole bank."""
    table, plan = part.job.cluster, part.plan.whole
    if (m := table.bank_size) is None or table.one_rank is True:
        return
    line = f"[cluster] {'most_' if table.grows else ''}learners_per_device = {m}"
    if left := plan.learner_numbers % m:
        fewer = plan.learner_numbers - left
        instead = f"use learners = {fewer + m}" + (f" or {fewer}" if fewer else "")
        yield f"{line} does not divide learners = {plan.learner_numbers}; {instead}, or another m"
    hosted = Counter(plan.roles[learner].world_rank for learner in plan.learners)
    if any(count != m for count in hosted.values()):
        where = "compute group" if plan.groups else "node"
        yield f"{line} does not divide the learners of each {where}; use a divisor of their number"
    if table.bank in ("fused", "graphs") and plan.overlapped:
        where = f"topology {named(part.job.topology.name)}, whose learners have threads"
        yield f"[cluster] bank = '{table.bank}' is not supported with {where}; use 'loop'"


@job_rule
def two_that_decide(job: JobFields) -> Iterator[str]:
    if job.cluster.grows and job.decisions.given:
        yield f"[cluster] {job.cluster.bank_key} is not supported with [decisions] call; remove call, or use a number"


@part_rule
def banks_that_grow(part: JobPart) -> Iterator[str]:
    """Checks that more learners only add replicas to an average."""
    if part.job.cluster.grows and (not part.plan.averaging or part.plan.served):
        text = f"protocol {part.name} on topology {named(part.job.topology.name)}, as it would change the batch of"
        yield (
            f"[cluster] {part.job.cluster.bank_key} is not supported with {text} an update; use a number, or a "
            "protocol that averages replicas synchronously, such as sma"
        )
