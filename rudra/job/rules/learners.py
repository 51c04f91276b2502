"""Rules about unequal, dormant and slow learners, and about learners that hooks and simulations name."""

import math
from collections.abc import Iterator

import topologies
from rudra.job.fields import JobFields
from rudra.job.rules.phrases import library_key, ordered_values
from rudra.job.rules.registry import JobPart, part_rule, simulated_rule
from rudra.job.table import named, short
from topologies.kinds import KINDS, TREE_SERVER


@part_rule
def shares(part: JobPart) -> Iterator[str]:
    given, learners = part.job.cluster.parts, part.plan.learner_numbers
    if not part.job.cluster.shares:
        return
    if len(given) != learners:
        yield f"[cluster] shares has {len(given)} numbers for {learners} learners; use one number for each learner"
    if not all(0 < share < math.inf for share in given):
        yield f"[cluster] shares = {list(given)} is not supported; use numbers > 0"
    if not part.plan.groups and not part.protocol.waits:
        yield f"[cluster] shares is not supported with protocol {part.name}; use protocol hardsync, or topology groups"
    if (batching := part.job.simulation.batching) != "none":
        yield f"[cluster] shares is not supported with [simulation] batching = '{batching}'; use batching = 'none'"


@part_rule
def active_learners(part: JobPart) -> Iterator[str]:
    """Checks keys that need all learners, or roles that cannot restart when a dormant learner begins."""
    job, plan, active = part.job, part.plan, part.job.cluster.active_learners
    if active is None and not job.cluster.grows:
        return
    given = short(list(active) if isinstance(active, tuple) else active)
    key = f"active_learners = {given}" if active else job.cluster.bank_key
    on = f"[cluster] {key} is not supported with"
    if isinstance(active, int) and active > plan.learner_numbers:
        yield f"{on} {plan.learner_numbers} learners; use 1 to {plan.learner_numbers}"
    if isinstance(active, tuple):
        m, ranks = job.cluster.bank_size, len(plan.whole.ranks_with_learners)
        if m is None:
            yield f"{on} learners that have no banks; use learners_per_device, or one number"
        elif len(active) != ranks:
            yield f"{on} {ranks} ranks with learners; use {ranks} numbers"
        elif max(active) > m:
            yield f"{on} banks of {m} learners; use 1 to {m} for each"
    if plan.window:
        yield f"{on} [hogbatch] weights = 'shared', which all workers update in place; use weights = 'server'"
    if plan.reduction == "mpi":
        table, key = library_key(job)
        yield f"{on} [{table}] {key}; use {ordered_values(job)}"
    if job.simulation.batching == "big-batch":
        yield f"{on} [simulation] batching = 'big-batch'; use batching = 'none' or 'vmap'"


@part_rule
def stragglers(part: JobPart) -> Iterator[str]:
    on = "[fault_tolerance] straggler_timeout_s is not supported with"
    if part.job.fault_tolerance.straggler_timeout_s is None:
        return
    if sharing := part.job.cluster.sharing:
        yield f"{on} [cluster] {sharing}; use {sharing.partition(' ')[0]} = 1"
    if part.plan.groups or not part.protocol.ordered:
        yield (
            f"{on} protocol {part.name} on topology {named(part.job.topology.name)}; "
            "use protocol hardsync on topology base or adv"
        )


@part_rule
def roles_of_hooks(part: JobPart) -> Iterator[str]:
    """Checks the roles that hooks name; relays only if the plan has nodes, because their number may depend on these."""
    relays = tuple(kind for kind, traits in KINDS.items() if traits.relays)
    for place, hook in enumerate(part.job.hooks):
        if part.placed or hook.at != "end" or not str(hook.role).startswith(relays):
            try:
                hook.roles(part.plan.whole)
            except ValueError as error:
                yield f"[hooks] {place}.role {error}"


@part_rule
def learners_of_simulations(part: JobPart) -> Iterator[str]:
    table, learners = part.job.simulation, part.plan.learner_numbers
    numbers = {"slowdown": [*table.slowdown], "learner_jitter": [*table.learner_jitter]}
    numbers["faults"] = [fault.learner for fault in table.faults if fault.learner is not None]
    for key, named_ones in numbers.items():
        for learner in named_ones:
            if not 0 <= learner < learners:
                yield f"[simulation] {key} names learner {learner}, which does not exist; use 0 to {learners - 1}"


@simulated_rule
def faults_of_tree_servers(job: JobFields, plan: topologies.Plan) -> Iterator[str]:
    servers = sum(role.kind == TREE_SERVER for role in plan.roles)
    for fault in job.simulation.faults:
        if fault.tree_server is not None and not 0 <= fault.tree_server < servers:
            valid = f"use 0 to {servers - 1}" if servers else "use a topology with tree servers, such as adv"
            yield f"[simulation] faults names tree server {fault.tree_server}, which does not exist; {valid}"
