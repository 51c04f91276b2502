"""Rules about gradients in parts, and replicas that are averaged."""

from collections.abc import Iterator

from rudra.job.rules.registry import JobPart, part_rule


@part_rule
def microbatches(part: JobPart) -> Iterator[str]:
    job, most = part.job, part.most_samples
    if job.training.microbatches == 1:
        return
    on = f"[training] microbatches = {job.training.microbatches}"
    if job.training.microbatches > most:
        yield f"{on} is more than the samples of a gradient; use 1 to {most}"
    if job.placement.given:
        yield f"{on} is not supported with [placement] cut; use microbatches = 1"
    if job.simulation.batching != "none":
        yield (
            f"{on} is not supported with [simulation] batching = '{job.simulation.batching}'; "
            "use microbatches = 1, or batching = 'none'"
        )


@part_rule
def replicas_with_a_server(part: JobPart) -> Iterator[str]:
    if not (part.plan.averaging and part.plan.served):
        return
    with_server = "is not supported with replicas and a server"
    if part.job.optimizer.plateau is not None:
        yield f"[optimizer] schedule = 'plateau' {with_server}; use another schedule, or no server"
    if part.job.cluster.gradient_format != "float32":
        yield f"[cluster] gradient_format = 'float16' {with_server}; use 'float32'"


@part_rule
def big_batches_of_replicas(part: JobPart) -> Iterator[str]:
    alone = part.plan.averaging and part.plan.sharing != "replica"
    if alone and part.job.simulation.batching == "big-batch":
        yield (
            f"[simulation] batching = 'big-batch' is not supported with protocol {part.name}; "
            "use batching = 'none' or 'vmap', or topology replicas with options.groups"
        )
