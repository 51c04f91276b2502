"""Rules about the tables of a job, without a plan."""

import math
from collections.abc import Iterator

import protocols
from rudra.job.fields import JobFields
from rudra.job.rules.phrases import AVERAGE, either
from rudra.job.rules.registry import job_rule
from rudra.job.simulation import PER_BYTE
from rudra.job.table import named
from rudra.job.tables import OPTIMIZERS, WITH_MOMENTUM, ArgumentsTable


@job_rule
def compiled_models(job: JobFields) -> Iterator[str]:
    on = "[training] compile = true is not supported with"
    if job.training.compile and job.simulation.batching != "none":
        yield f"{on} [simulation] batching = '{job.simulation.batching}'; use batching = 'none'"
    if job.training.compile and job.training.in_16_bits:
        yield f"{on} precision = '{job.training.precision}'; use precision = 'float32'"


@job_rule
def precision_of_gpus(job: JobFields) -> Iterator[str]:
    if job.training.precision == "tf32" and job.cluster.device in ("cpu", "auto"):
        yield "[training] precision = 'tf32' needs [cluster] device = 'cuda'; use it, or precision = 'float32'"


@job_rule
def stop_at_target(job: JobFields) -> Iterator[str]:
    if job.training.stop_at_target and job.training.target is None:
        yield "[training] stop_at_target = true needs a target; set target, or use stop_at_target = false"


@job_rule
def keys_that_need_evaluation(job: JobFields) -> Iterator[str]:
    if job.training.evaluate:
        return
    wanted = {
        "[results] keep_best = true": job.results.keep_best,
        f"[training] patience = {job.training.patience}": job.training.patience,
        "[optimizer] schedule = 'plateau'": job.optimizer.plateau,
    }
    for key in (key for key, value in wanted.items() if value):
        yield f"{key} is not supported with [training] evaluate = false; use evaluate = true"


@job_rule
def evaluation_of_the_training_set(job: JobFields) -> Iterator[str]:
    if job.training.evaluate_training_set and job.training.evaluate != "workers":
        yield "[training] evaluate_training_set = true is only supported with evaluate = 'workers'; use both or neither"


@job_rule
def momentum(job: JobFields) -> Iterator[str]:
    table = job.optimizer
    if table.momentum and table.name in OPTIMIZERS and table.name not in WITH_MOMENTUM:
        yield (
            f"[optimizer] momentum = {table.momentum:g} is not supported with name = '{table.name}'; "
            "use momentum = 0, or sgd or rmsprop"
        )


@job_rule
def momentum_correction(job: JobFields) -> Iterator[str]:
    optimizer = job.optimizer
    if optimizer.momentum_correction != "none" and not (optimizer.name == "sgd" and optimizer.momentum):
        yield (
            "[optimizer] momentum_correction = 'implicit' is not supported without momentum of sgd; "
            "use name = 'sgd' with momentum > 0, or 'none'"
        )


@job_rule
def average_over_time(job: JobFields) -> Iterator[str]:
    if job.optimizer.average.given and job.training.evaluate == "workers":
        yield f"{AVERAGE} [training] evaluate = 'workers', which evaluate the last weights; use evaluate = true"


@job_rule
def loss_scale(job: JobFields) -> Iterator[str]:
    if job.training.precision == "float16" and job.simulation.batching == "vmap":
        yield (
            "[simulation] batching = 'vmap' is not supported with [training] precision = 'float16'; "
            "use batching = 'none' or 'big-batch', or precision = 'bfloat16'"
        )


@job_rule
def seconds_per_byte(job: JobFields) -> Iterator[str]:
    for key, per_byte in PER_BYTE.items():
        default = type(job.simulation).model_fields[key].default  # the file of every run contains it
        if getattr(job.simulation, per_byte) is not None and getattr(job.simulation, key) != default:
            yield f"[simulation] {key} is not supported with {per_byte}; use one of them"


@job_rule
def shared_links(job: JobFields) -> Iterator[str]:
    """Checks links that carry several tensors at once, in this job and in background jobs."""
    if job.simulation.sharing != "equal":
        return
    refused = {
        "blocking_servers": job.simulation.blocking_servers,
        "faults": job.simulation.faults,
        "[fault_tolerance] straggler_timeout_s": job.fault_tolerance.straggler_timeout_s,
        job.changing: job.changing,
        "[hogbatch] weights = 'shared'": job.hogbatch.shares_weights,
    }
    for key in (key for key, value in refused.items() if value):
        yield f"[simulation] sharing = 'equal' is not supported with {key}; use sharing = 'turns'"


@job_rule
def keys_without_a_function(job: JobFields) -> Iterator[str]:
    if not job.decisions.given:
        for key in job.decisions.non_defaults:
            yield f"[decisions] {key} is not supported without call; set call, or remove {key}"


@job_rule
def decisions_with_rates_of_updates(job: JobFields) -> Iterator[str]:
    if job.decides and job.optimizer.schedule_every == "update":
        by = "[decisions]" if job.decisions.given else f"[cluster] {job.cluster.bank_key}"
        yield f"{by} is not supported with [optimizer] schedule_every = 'update'; use schedule_every = 'epoch'"


@job_rule
def epochs_of_changes(job: JobFields) -> Iterator[str]:
    before = {"at_epoch": 0, "at_update": 0}
    most = {"at_epoch": job.training.epochs, "at_update": math.inf}
    for change in job.changes:
        key, number = change.boundary.key, change.boundary.number
        if not before[key] < number < most[key]:
            less = f", and less than [training] epochs = {job.training.epochs}" if key == "at_epoch" else ""
            yield f"{change.where}: must be ascending{less}"
        before[key] = number


@job_rule
def measured_shares_in_changes(job: JobFields) -> Iterator[str]:
    for change in job.changes:
        if change.cluster.get("shares") == "auto":
            yield f"{change.where}: cluster.shares = 'auto' is not supported in [[changes]]; use a list of numbers"


@job_rule
def tables_of_other_protocols(job: JobFields) -> Iterator[str]:
    for name, table in job:
        if isinstance(table, ArgumentsTable) and table is not job.protocol_table and table.non_defaults:
            key, protocol = next(iter(table.non_defaults)), named(job.protocol.name)
            its = either(*(its_name for its_name, rule in protocols.shipped().items() if rule.table == name))
            yield f"[{name}] {key} is not supported with protocol {protocol}; remove [{name}], or use protocol {its}"


@job_rule
def options_of_a_correction(job: JobFields) -> Iterator[str]:
    table = job.protocol
    if table.correction is None and table.correction_options:
        key = next(iter(table.correction_options))
        yield f"[protocol] correction_options.{key} is not supported without a correction; set correction, or remove it"
    if table.correction is not None:
        job.make_correction()
