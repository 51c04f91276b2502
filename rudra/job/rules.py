"""Rules about combinations of keys, protocols and plans of a job.

A rule is a small function that yields a line for each mistake. The line names the key, what is wrong, and what to use
instead. The decorator of a rule adds the rule to a list. The list decides which arguments the rule receives:

* `job_rule`: only the tables.
* `part_rule`: a part of the run with its plan and its protocol. The number of learners must be known.
* `change_rule`: the first part, and a part after `[[changes]]`.
* `simulated_rule`: a plan with the nodes of a simulation.

Only the first mistake is reported, in the order of this file.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import protocols
import topologies
from rudra.job.fields import JobFields
from rudra.job.simulation import PER_BYTE
from rudra.job.table import named, short
from rudra.job.tables import OPTIMIZERS, WITH_MOMENTUM, ArgumentsTable
from rudra.job.transports import IN_MAIN_MEMORY, refused_because
from topologies.kinds import KINDS, TREE_SERVER


class JobPart(NamedTuple):
    """Part of a run: the whole run, or the epochs between two `[[changes]]`.

    Attributes:
        job: Job of the part. The job of the first part has all changes, jobs of later parts have none.
        plan: Roles of the part.
        protocol: Protocol of the part, made for this plan.
        placed: Whether the plan assigns the roles to nodes.
    """

    job: JobFields
    plan: topologies.Plan
    protocol: protocols.Protocol
    placed: bool = False

    @property
    def on(self) -> str:
        """Key and name of the topology: the beginning of a line about it."""
        return f"[topology] name = '{named(self.job.topology.name)}'"

    @property
    def name(self) -> str:
        """Name of the protocol."""
        return type(self.protocol).__name__.lower()

    @property
    def relayed(self) -> bool:
        """Whether servers of a tree forward gradients to the parameter server."""
        return any(role.kind_traits.relays for role in self.plan.roles)

    @property
    def most_samples(self) -> int:
        """Largest number of samples of a gradient."""
        return self.protocol.most_samples or self.job.training.minibatch_size


JobRule = Callable[[JobFields], Iterator[str]]
PartRule = Callable[[JobPart], Iterator[str]]
ChangeRule = Callable[[JobPart, JobPart], Iterator[str]]
SimulatedRule = Callable[[JobFields, topologies.Plan], Iterator[str]]

JOB_RULES: list[JobRule] = []
PART_RULES: list[PartRule] = []
CHANGE_RULES: list[ChangeRule] = []
SIMULATED_RULES: list[SimulatedRule] = []


def job_rule(rule: JobRule) -> JobRule:
    JOB_RULES.append(rule)
    return rule


def part_rule(rule: PartRule) -> PartRule:
    PART_RULES.append(rule)
    return rule


def change_rule(rule: ChangeRule) -> ChangeRule:
    CHANGE_RULES.append(rule)
    return rule


def simulated_rule(rule: SimulatedRule) -> SimulatedRule:
    SIMULATED_RULES.append(rule)
    return rule


def check(rules: Iterable[Callable[..., Iterator[str]]], *about: Any) -> None:
    """Raises ValueError for the first mistake that one of these rules finds.

    Args:
        rules: one of the lists above.
        about: arguments for each rule of that list.
    """
    for rule in rules:
        for text in rule(*about):
            raise ValueError(text)


# The tables of a job.


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
        yield f"{_AVERAGE} [training] evaluate = 'workers', which evaluate the last weights; use evaluate = true"


_AVERAGE = "[optimizer] average is not supported with"


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
            its = _either(*(its_name for its_name, rule in protocols.shipped().items() if rule.table == name))
            yield f"[{name}] {key} is not supported with protocol {protocol}; remove [{name}], or use protocol {its}"


def _either(*names: str) -> str:
    """Returns the names as a choice: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


@job_rule
def options_of_a_correction(job: JobFields) -> Iterator[str]:
    table = job.protocol
    if table.correction is None and table.correction_options:
        key = next(iter(table.correction_options))
        yield f"[protocol] correction_options.{key} is not supported without a correction; set correction, or remove it"
    if table.correction is not None:
        job.make_correction()


# Protocol and plan.


@part_rule
def averaging_protocols(part: JobPart) -> Iterator[str]:
    """Requires that the plan averages replicas if, and only if, the protocol does."""
    if part.plan.averaging and not part.protocol.averages:
        names = _either(*protocols.averaging_names().split(", "))
        yield f"{part.on} is not supported with protocol {part.name}; use protocol {names}"
    if part.protocol.averages and not part.plan.averaging:
        pairs = protocols.averaging_pairs()
        shapes = _either(*dict.fromkeys(pair.shape for pair in pairs if "," not in pair.shape))
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
        table, key = _library(job)
        yield f"{on} [{table}] {key}, which is not repeatable; use {_ordered(job)}"
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


# Layers with a stage server.


@part_rule
def placed_layers_of_replicas(part: JobPart) -> Iterator[str]:
    if part.job.placement.given and (part.plan.averaging or part.plan.scheduled):
        yield (
            f"{_PLACED} protocol {part.name}; use hardsync, softsync or async, on topology base, sharded, adv, adv* "
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
            f"{_PLACED} [optimizer] clip_norm on topology {named(job.topology.name)}; "
            "remove clip_norm, or use a topology with a parameter server"
        )
    if job.changing and merged:
        ahead = "rule = 'merged', whose layers are ahead of the others; use rule = 'synchronous'"
        yield f"[placement] with {job.changing} is not supported with {ahead}"
    if job.changing and job.placement.servers > 1:
        servers = f"servers = {job.placement.servers}; use servers = 1"
        yield f"[placement] with {job.changing} is not supported with {servers}"
    if job.decisions.given and not part.plan.served:
        yield f"{_PLACED} [decisions] on topology {named(job.topology.name)}; use a topology with a parameter server"
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
        yield f"{_PLACED} {text}"


_PLACED = "[placement] cut is not supported with"


# Gradients in parts.


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


# Replicas that are averaged.


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


# A coordinator that assigns the samples.


@part_rule
def topology_of_a_coordinator(part: JobPart) -> Iterator[str]:
    plan = part.plan
    plain = all(plan.roles[i].parent == plan.server for i in plan.learners) and not plan.groups
    unfit = not plan.served or not plain or plan.overlapped or plan.averaging or plan.parted
    if plan.scheduled and unfit:
        yield f"{_HOGBATCH} topology {named(part.job.topology.name)}; use topology base"


@part_rule
def keys_with_a_coordinator(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled:
        return
    if part.job.cluster.shares:
        yield f"{_HOGBATCH} [cluster] shares; remove shares"
    if (batching := part.job.simulation.batching) != "none":
        yield f"{_HOGBATCH} [simulation] batching = '{batching}'; use batching = 'none'"


@part_rule
def evaluation_by_workers(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled and part.job.training.evaluate == "workers":
        yield (
            f"[training] evaluate = 'workers' is not supported with protocol {part.name}; "
            "use evaluate = true, or protocol hogbatch"
        )


_HOGBATCH = "[protocol] name = 'hogbatch' is not supported with"


# Weights that workers share.


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
        yield f"{_SHARED} [optimizer] {_either(*given)}; remove {_either(*given)}"


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
        yield f"{_AVERAGE} [hogbatch] weights = 'shared'; remove average, or use weights = 'server'"
    if part.plan.window and kept is not None and kept[1] == "update":
        yield f"{_SHARED} [results] keep_checkpoints = '{kept[0]} updates'; use a number of epochs"


@part_rule
def changes_in_windows(part: JobPart) -> Iterator[str]:
    for change in part.job.changes if part.plan.window else ():
        if change.at_update is not None:
            yield f"{_SHARED} [[changes]] at_update = {change.at_update}, as workers update alone; use at_epoch"
    if part.plan.window and part.job.decisions.at == "update":
        yield f"{_SHARED} [decisions] at = 'update', as workers update alone; use at = 'epoch'"


_SHARED = "[hogbatch] weights = 'shared' is not supported with"


# The cluster.


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
        table, key = _library(part.job)
        on = f"[{table}] {key} is not supported with"
        yield f"{on} learners of several groups on a rank; use {_ordered(part.job)}"


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
        table, key = _library(job)
        yield f"{on} [{table}] {key}; use reduction = 'ordered'"
    if job.fault_tolerance.straggler_timeout_s is not None:
        yield f"{on} [fault_tolerance] straggler_timeout_s; remove straggler_timeout_s"


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
        table, key = _library(job)
        yield f"{on} [{table}] {key}; use {_ordered(job)}"
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


# Changes during a run.


@change_rule
def same_teams(first: JobPart, later: JobPart) -> Iterator[str]:
    if first.job.simulation.batching == "big-batch" and first.plan.groups != later.plan.groups:
        yield "[simulation] batching = 'big-batch' is not supported with a change of groups; use batching = 'none'"


@change_rule
def same_coordinator(first: JobPart, later: JobPart) -> Iterator[str]:
    if first.plan.scheduled and first.job.protocol != later.job.protocol:
        yield f"{_HOGBATCH} a change of [protocol]; change other keys"
    elif first.plan.scheduled != later.plan.scheduled:
        yield f"[protocol] name = '{later.name}' is not supported after {first.name}; begin another run"


@change_rule
def same_activations(first: JobPart, later: JobPart) -> Iterator[str]:
    sizes = [(part.job.training.minibatch_size, part.job.cluster.parts) for part in (first, later)]
    if first.job.placement.given and sizes[0] != sizes[1]:
        keep = "as buffers for activations keep their size"
        yield f"{_PLACED} a change of minibatch_size or shares, {keep}; change other keys"


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
        yield f"{key} is not supported with {changing}; use {_ordered(job)}"


def _library(job: JobFields) -> tuple[str, str]:
    """Returns table and key by which a library adds in compute groups."""
    if job.cluster.nccl:
        return "cluster", "transport = 'nccl'"
    return "topology", "options.reduction = 'mpi'"


def _ordered(job: JobFields | None) -> str:
    """Returns the values of that key with which ranks add in an order of the plan."""
    return "transport = 'auto'" if job is not None and job.cluster.nccl else "'ordered' or 'nodes'"


# Nodes of a simulation.


@simulated_rule
def faults_of_tree_servers(job: JobFields, plan: topologies.Plan) -> Iterator[str]:
    servers = sum(role.kind == TREE_SERVER for role in plan.roles)
    for fault in job.simulation.faults:
        if fault.tree_server is not None and not 0 <= fault.tree_server < servers:
            valid = f"use 0 to {servers - 1}" if servers else "use a topology with tree servers, such as adv"
            yield f"[simulation] faults names tree server {fault.tree_server}, which does not exist; {valid}"
