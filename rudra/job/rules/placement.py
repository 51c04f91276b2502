"""Rules about layers on a stage server."""

from collections.abc import Iterator

from rudra.job.rules.phrases import PLACED
from rudra.job.rules.registry import JobPart, part_rule
from rudra.job.table import named


@part_rule
def placed_layers_of_replicas(part: JobPart) -> Iterator[str]:
    if part.job.placement.given and (part.plan.averaging or part.plan.scheduled):
        yield (
            f"{PLACED} protocol {part.name}; use hardsync, softsync or async, on topology base, sharded, adv, adv* "
            "or groups"
        )


@part_rule
def synchronous_placement(part: JobPart) -> Iterator[str]:
    protocol = part.protocol
    together = protocol.ordered and protocol.waits and protocol.gradients_per_update == part.plan.workers
    if part.job.placement.given and part.job.placement.rule == "synchronous" and not together:
        yield (
            f"[placement] rule = 'synchronous' is not supported with protocol {part.name}; "
            "use protocol hardsync, or rule = 'merged'"
        )


@part_rule
def momentum_of_a_stage_server(part: JobPart) -> Iterator[str]:
    table, optimizer = part.job.placement, part.job.optimizer.name
    if table.given and table.momentum is not None and optimizer not in ("sgd", "rmsprop"):
        yield f"[placement] momentum = {table.momentum:g} is not supported with {optimizer}; use sgd or rmsprop"


@part_rule
def several_stage_servers(part: JobPart) -> Iterator[str]:
    table, learners = part.job.placement, len(part.plan.learners)
    if not table.given or table.servers == 1:
        return
    several = f"[placement] servers = {table.servers}"
    if table.servers > learners:
        yield f"{several} is more than the number of learners; use 1 to {learners}"
    if table.rule == "merged":
        yield f"{several} is not supported with rule = 'merged'; use servers = 1, or rule = 'synchronous'"
    if part.plan.groups:
        yield f"{several} is not supported with compute groups; use servers = 1"
    if part.relayed:
        yield f"{several} is not supported with topology {named(part.job.topology.name)}; use servers = 1"


@part_rule
def placed_layers(part: JobPart) -> Iterator[str]:
    job, merged = part.job, part.job.placement.rule == "merged"
    if not job.placement.given:
        return
    if not merged and not part.plan.served and job.optimizer.clip_norm:
        yield (
            f"{PLACED} [optimizer] clip_norm on topology {named(job.topology.name)}; "
            "remove clip_norm, or use a topology with a parameter server"
        )
    if job.changing and merged:
        ahead = "rule = 'merged', whose layers are ahead of the others; use rule = 'synchronous'"
        yield f"[placement] with {job.changing} is not supported with {ahead}"
    if job.changing and job.placement.servers > 1:
        servers = f"servers = {job.placement.servers}; use servers = 1"
        yield f"[placement] with {job.changing} is not supported with {servers}"
    if job.decisions.given and not part.plan.served:
        yield f"{PLACED} [decisions] on topology {named(job.topology.name)}; use a topology with a parameter server"
    if merged and job.optimizer.plateau:
        yield (
            "[placement] rule = 'merged' is not supported with [optimizer] schedule = 'plateau'; "
            "use another schedule, or rule = 'synchronous'"
        )
    refused = {
        "[cluster] gradient_format = 'float16'; use 'float32'": job.cluster.gradient_format != "float32",
        f"[cluster] device = '{job.cluster.device}'; use 'cpu'": job.cluster.device != "cpu",
        "[cluster] shares = 'auto'; use a list of numbers": job.cluster.shares == "auto",
        "[training] compile = true; use compile = false": job.training.compile,
        f"[training] precision = '{job.training.precision}'; use 'float32'": job.training.precision != "float32",
        f"[simulation] batching = '{job.simulation.batching}'; use 'none'": job.simulation.batching != "none",
        "[fault_tolerance] straggler_timeout_s; remove it": job.fault_tolerance.straggler_timeout_s,
    }
    for text in (text for text, value in refused.items() if value):
        yield f"{PLACED} {text}"
