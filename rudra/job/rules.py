"""Rules about combinations of keys, protocols and plans of a job.

A rule is a small function that yields a line for each mistake. The line names the key, what is wrong, and what is valid
instead. Its decorator says what the rule looks at, and puts the rule into the list of its kind:

* `job_rule`: only the tables;
* `part_rule`: a part of the run, with its plan and its protocol, if the number of learners is known;
* `change_rule`: the first part, and a part after `[[changes]]`;
* `simulated_rule`: a plan with the nodes of a simulation.

The first mistake counts, in the order of this file.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import protocols
import topologies
from rudra.job.fields import JobFields
from rudra.job.making import explicit_momentum, table_of
from rudra.job.simulation import PER_BYTE
from rudra.job.table import named
from rudra.job.tables import ArgumentsTable
from topologies.kinds import TREE_SERVER


class JobPart(NamedTuple):
    """A part of a run: all of it, or what is between two `[[changes]]`.

    Attributes:
        job: the first part has all changes, later parts have none.
        plan: roles of the part.
        protocol: protocol of the part, made for this plan.
        placed: whether the plan says on which nodes the roles are.
    """

    job: JobFields
    plan: topologies.Plan
    protocol: protocols.Protocol
    placed: bool = False

    @property
    def on(self) -> str:
        """Key and name of the topology, with which a line about it begins."""
        return f"[topology] name: {named(self.job.topology.name)}"

    @property
    def name(self) -> str:
        """Name of the protocol."""
        return type(self.protocol).__name__.lower()

    @property
    def relayed(self) -> bool:
        """Whether servers of a tree pass gradients on to the weights."""
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
    """Raises ValueError with the first mistake that one of these rules finds.

    Args:
        rules: one of the lists above.
        about: the arguments of a rule of that list.
    """
    for rule in rules:
        for text in rule(*about):
            raise ValueError(text)


# The tables of a job.


@job_rule
def compiled_models(job: JobFields) -> Iterator[str]:
    if job.training.compile and job.simulation.batching != "none":
        yield "[training] compile = true computes one gradient at a time; valid: batching = 'none'"
    if job.training.compile and job.training.precision != "float32":
        yield "[training] compile = true computes in float32 so far; valid: precision = 'float32'"


@job_rule
def stop_at_target(job: JobFields) -> Iterator[str]:
    if job.training.stop_at_target and job.training.target is None:
        yield "[training] stop_at_target = true, but there is no target; valid: a target, or false"


@job_rule
def what_depends_on_tests(job: JobFields) -> Iterator[str]:
    if job.training.evaluate:
        return
    wanted = {
        "[results] keep_best": job.results.keep_best,
        "[training] patience": job.training.patience,
        "[optimizer] schedule = 'plateau'": job.optimizer.plateau,
    }
    for key in (key for key, value in wanted.items() if value):
        yield f"{key} depends on tests, but [training] evaluate = false; valid: evaluate = true"


@job_rule
def test_of_the_training_set(job: JobFields) -> Iterator[str]:
    if job.training.evaluate_training_set and job.training.evaluate != "workers":
        yield "[training] evaluate_training_set: workers do that; valid: with evaluate = 'workers'"


@job_rule
def momentum_correction(job: JobFields) -> Iterator[str]:
    optimizer = job.optimizer
    if optimizer.momentum_correction != "none" and not (optimizer.name == "sgd" and optimizer.momentum):
        yield "[optimizer] momentum_correction corrects the momentum of sgd, and there is none; valid: 'none'"


@job_rule
def loss_scale(job: JobFields) -> Iterator[str]:
    if job.training.precision == "float16" and job.simulation.batching == "vmap":
        yield (
            "[simulation] batching = 'vmap' chooses no loss scale, but [training] precision = 'float16' "
            "needs one; valid: batching none or big-batch, precision bfloat16"
        )


@job_rule
def seconds_per_byte(job: JobFields) -> Iterator[str]:
    for key, per_byte in PER_BYTE.items():
        default = type(job.simulation).model_fields[key].default  # which stands in the file of every run
        if getattr(job.simulation, per_byte) is not None and getattr(job.simulation, key) != default:
            yield f"[simulation] has {key} and {per_byte}; valid: one of them"


@job_rule
def shared_links(job: JobFields) -> Iterator[str]:
    """Links that carry several tensors at once, in this job and in background jobs."""
    if job.simulation.sharing != "equal":
        return
    refused = {
        "[simulation] blocking_servers": job.simulation.blocking_servers,
        "[simulation] faults": job.simulation.faults,
        "[fault_tolerance] straggler_timeout_s": job.fault_tolerance.straggler_timeout_s,
        "[[changes]]": job.changes,
        "[hogbatch] weights = 'shared'": job.hogbatch.shares_weights,
    }
    for key in (key for key, value in refused.items() if value):
        yield f"[simulation] sharing = 'equal': not with {key} so far; valid: sharing = 'turns'"


@job_rule
def changes_of_every_update(job: JobFields) -> Iterator[str]:
    if job.changes and job.optimizer.schedule_every == "update":
        yield "[[changes]]: schedule_every = 'update' counts updates of one protocol; valid: 'epoch'"


@job_rule
def changes_with_big_batches(job: JobFields) -> Iterator[str]:
    if job.changes and job.simulation.batching == "big-batch":
        yield "[[changes]]: batching = 'big-batch' needs a constant mini-batch size; valid: none, vmap"


@job_rule
def epochs_of_changes(job: JobFields) -> Iterator[str]:
    before = 0
    for change in job.changes:
        if not before < change.at_epoch < job.training.epochs:
            yield f"{change.where}: must be ascending, and less than training.epochs = {job.training.epochs}"
        before = change.at_epoch


@job_rule
def measured_shares_in_changes(job: JobFields) -> Iterator[str]:
    for change in job.changes:
        if change.cluster.get("shares") == "auto":
            yield f"{change.where}: cluster.shares = 'auto' is measured before training; valid: a list"


@job_rule
def tables_of_other_protocols(job: JobFields) -> Iterator[str]:
    for name, table in job:
        if isinstance(table, ArgumentsTable) and table is not table_of(job) and table.non_defaults:
            key, protocol = next(iter(table.non_defaults)), named(job.protocol.name)
            its = ", ".join(its_name for its_name, rule in protocols.shipped().items() if rule.table == name)
            yield f"[{name}] {key} is for {its}; valid with protocol {protocol}: no keys of [{name}]"


# Protocol and plan.


@part_rule
def averaging_protocols(part: JobPart) -> Iterator[str]:
    """Replicas are averaged in the plan if, and only if, the protocol averages replicas."""
    if part.plan.averaging and not part.protocol.averages:
        yield f"{part.on}: learners average replicas there; valid protocols: {protocols.averaging_names()}"
    if part.protocol.averages and not part.plan.averaging:
        pairs = protocols.averaging_pairs()
        shapes = ", ".join(dict.fromkeys(pair.shape for pair in pairs if "," not in pair.shape))
        yield f"{part.on}: protocol {part.name} averages replicas of the learners; valid: {shapes}"


@part_rule
def overlapped_learners_never_wait(part: JobPart) -> Iterator[str]:
    if part.plan.overlapped and part.protocol.waits:
        yield (
            f"{part.on}: its learners never wait for a server, but with protocol {part.name} they must; "
            "valid: softsync, async, or topology adv"
        )


@part_rule
def outstanding_gradients(part: JobPart) -> Iterator[str]:
    most = len(part.plan.learners) * (part.plan.outstanding or math.inf)
    if most < part.protocol.gradients_per_update:
        yield (
            f"{part.on}: options.outstanding = {part.plan.outstanding} lets {most} gradients be under way, but "
            f"protocol {part.name} wants {part.protocol.gradients_per_update} for an update; valid: more"
        )


@part_rule
def one_group_without_a_server(part: JobPart) -> Iterator[str]:
    if not part.plan.served and not part.plan.averaging and part.protocol.gradients_per_update > 1:
        yield (
            f"{part.on}: one compute group alone updates by each of its averages, but protocol {part.name} wants "
            f"{part.protocol.gradients_per_update} for an update; valid: more groups, or a protocol that takes one"
        )


@part_rule
def own_update_due(part: JobPart) -> Iterator[str]:
    protocol, plan = part.protocol, part.plan
    if protocols.own_update_due(protocol) and (protocol.ordered or not plan.served or plan.window):
        why = "adds one gradient of each learner" if protocol.ordered else "updates without a server that would ask"
        yield (
            f"{part.on}: protocol {part.name} {why}, so its update_due has no say; valid: gradients_per_update, or a "
            "server and ordered = False"
        )


@part_rule
def waiting_below_a_tree(part: JobPart) -> Iterator[str]:
    if not (part.relayed and part.protocol.waits):
        return
    if protocols.saved(part.protocol):
        yield (
            f"{part.on}: protocol {part.name} lets learners wait and has a state, which servers of a tree do not know; "
            "valid: topology base"
        )
    if part.protocol.grants_on_push:
        yield (
            f"{part.on}: protocol {part.name} decides by what every learner has pushed, which servers of a tree do not "
            "know; valid: topology base, or a rule by timestamps alone (grants_on_push = False)"
        )


@part_rule
def weighing_below_a_tree(part: JobPart) -> Iterator[str]:
    if part.relayed and part.protocol.modulation.weighs:
        yield (
            f"{part.on}: modulation 'gradient_staleness' weighs each gradient where weights are updated, but a tree "
            "has averaged them by then; valid: topology base, or modulation 'mean_staleness'"
        )


# Layers with a stage server.


@part_rule
def placed_layers_of_replicas(part: JobPart) -> Iterator[str]:
    if part.job.placement.given and (part.plan.averaging or part.plan.scheduled):
        yield (
            "[placement] cut: learners with replicas of their own, and workers, have all layers; valid: topologies "
            "base, sharded, adv, adv*, groups, and protocols that push gradients"
        )


@part_rule
def synchronous_placement(part: JobPart) -> Iterator[str]:
    protocol = part.protocol
    together = protocol.ordered and protocol.waits and protocol.gradients_per_update == part.plan.workers
    if part.job.placement.given and part.job.placement.rule == "synchronous" and not together:
        yield (
            "[placement] rule = 'synchronous': its updates take one gradient of each learner, in learner order; "
            "valid: protocol hardsync, or rule merged"
        )


@part_rule
def momentum_of_a_stage_server(part: JobPart) -> Iterator[str]:
    table, optimizer = part.job.placement, part.job.optimizer.name
    if table.given and table.momentum is not None and optimizer not in ("sgd", "rmsprop"):
        yield f"[placement] momentum: {optimizer} has none; valid: sgd and rmsprop"


@part_rule
def several_stage_servers(part: JobPart) -> Iterator[str]:
    table, learners = part.job.placement, len(part.plan.learners)
    if not table.given or table.servers == 1:
        return
    several = f"[placement] servers = {table.servers}"
    if table.servers > learners:
        yield f"{several}: each has learners of its own, of whom there are {learners}; valid: 1 to {learners}"
    if table.rule == "merged":
        yield (
            f"{several}: with rule merged each mini-batch is an update of its own, for which all servers would have to "
            "wait; valid: 1, or rule synchronous"
        )
    if part.plan.groups:
        yield f"{several}: the gradients of a compute group are averaged at one stage server; valid: 1"
    if part.relayed:
        yield f"{several}: topology {named(part.job.topology.name)} supports only one stage server; valid: 1"


@part_rule
def placed_layers(part: JobPart) -> Iterator[str]:
    job, merged, on = part.job, part.job.placement.rule == "merged", "[placement] cut"
    if not job.placement.given:
        return
    if not merged and not part.plan.served and job.optimizer.clip_norm:
        yield (
            f"{on}: [optimizer] clip_norm: learners that update weights of their own do not know the norm of the last "
            "layers; valid: none, or a topology with a parameter server"
        )
    if job.changes:
        yield f"{on}: [[changes]]: a stage server cannot begin anew with another job so far; valid: none"
    if merged and job.optimizer.plateau:
        yield (
            "[placement] rule = 'merged': [optimizer] schedule = 'plateau' goes by tests, of which the stage server "
            "does not hear; valid: other schedules"
        )
    refused = {
        "[cluster] gradient_format = 'float16' is for gradients alone; valid: float32": (
            job.cluster.gradient_format != "float32"
        ),
        f"[cluster] device = '{job.cluster.device}': placed layers compute on CPUs so far; valid: cpu": (
            job.cluster.device != "cpu"
        ),
        "[cluster] shares = 'auto' measures learners that compute all layers; valid: a list": (
            job.cluster.shares == "auto"
        ),
        "[training] compile = true compiles whole models; valid: false": job.training.compile,
        f"[training] precision = '{job.training.precision}': valid so far: float32": (
            job.training.precision != "float32"
        ),
        "[simulation] batching computes whole models; valid: none": job.simulation.batching != "none",
        "[fault_tolerance] straggler_timeout_s: a learner may wait for the stage server; valid: none": (
            job.fault_tolerance.straggler_timeout_s
        ),
    }
    for text in (text for text, value in refused.items() if value):
        yield f"{on}: {text}"


# Gradients in parts.


@part_rule
def microbatches(part: JobPart) -> Iterator[str]:
    job, most = part.job, part.most_samples
    if job.training.microbatches == 1:
        return
    on = f"[training] microbatches = {job.training.microbatches}"
    if job.training.microbatches > most:
        yield f"{on}: a gradient has {most} samples; valid: 1 to {most}"
    if job.placement.given:
        yield f"{on}: placed layers compute whole mini-batches; valid: 1"
    if job.simulation.batching != "none":
        yield (
            f"{on}: [simulation] batching = '{job.simulation.batching}' computes whole mini-batches; valid: 1, or "
            "batching = 'none'"
        )


# Replicas that are averaged.


@part_rule
def replicas_with_a_server(part: JobPart) -> Iterator[str]:
    if not (part.plan.averaging and part.plan.served):
        return
    if part.job.optimizer.plateau is not None:
        yield (
            "[optimizer] schedule = 'plateau': learners that exchange with a server alone do not hear of tests; "
            "valid there: other schedules"
        )
    if part.job.cluster.gradient_format != "float32":
        yield "[cluster] gradient_format = 'float16' is for gradients, not replicas; valid: float32"


@part_rule
def changes_of_replicas(part: JobPart) -> Iterator[str]:
    if part.plan.averaging and part.job.changes:
        yield "[[changes]]: replicas that are averaged cannot begin anew; valid: no changes"


@part_rule
def big_batches_of_replicas(part: JobPart) -> Iterator[str]:
    if part.plan.averaging and part.job.simulation.batching == "big-batch":
        yield (
            "[simulation] batching = 'big-batch' is for learners that share one vector of weights, which replicas "
            "do not; valid: none, vmap"
        )


# A coordinator that assigns the samples.


@part_rule
def topology_of_a_coordinator(part: JobPart) -> Iterator[str]:
    plan = part.plan
    plain = all(plan.roles[i].parent == plan.server for i in plan.learners) and not plan.groups
    unfit = not plan.served or not plain or plan.overlapped or plan.averaging or plan.parted
    if plan.scheduled and unfit:
        yield f"{_HOGBATCH}: not with topology {named(part.job.topology.name)} so far; valid: base"


@part_rule
def keys_beside_a_coordinator(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled:
        return
    if part.job.changes:
        yield f"{_HOGBATCH}: [[changes]]: a coordinator cannot begin anew; valid: no changes"
    if part.job.cluster.shares:
        yield f"{_HOGBATCH}: [cluster] shares: the coordinator says what each learner takes; valid: none"
    if (batching := part.job.simulation.batching) != "none":
        yield (
            f"{_HOGBATCH}: [simulation] batching = '{batching}': batches of different sizes cannot be computed "
            "together; valid: none"
        )


@part_rule
def tests_by_workers(part: JobPart) -> Iterator[str]:
    if not part.plan.scheduled and part.job.training.evaluate == "workers":
        yield "[training] evaluate = 'workers': a coordinator assigns its parts; valid: with protocol hogbatch"


_HOGBATCH = "[protocol] name: hogbatch"


# Weights that workers share.


@part_rule
def locks_across_nodes(part: JobPart) -> Iterator[str]:
    nodes = len({part.plan.roles[i].node for i in part.plan.learners})
    if part.plan.window and nodes > 1 and part.job.hogbatch.locking:
        yield (
            f"{_SHARED}: locking = true: updates on {nodes} nodes have no order; valid: locking = false, or one node"
        )


@part_rule
def optimizer_of_workers(part: JobPart) -> Iterator[str]:
    optimizer = part.job.optimizer
    if not part.plan.window:
        return
    if optimizer.name != "sgd" or optimizer.momentum or optimizer.options.get("nesterov"):
        yield f"{_SHARED}: [optimizer] workers keep no state, so they step by plain SGD; valid: name sgd, momentum 0"
    if optimizer.weight_decay or optimizer.clip_norm is not None or optimizer.groups or optimizer.options:
        keys = "weight_decay, clip_norm, groups and options"
        yield f"{_SHARED}: [optimizer] {keys} are not for shared weights so far; valid: none"


@part_rule
def modulation_of_workers(part: JobPart) -> Iterator[str]:
    if part.plan.window and (name := part.protocol.modulation.name) != "none":
        yield (
            f"{_SHARED}: [protocol] modulation = '{name}': workers do not know how stale their gradients will be; "
            "valid: none"
        )


@part_rule
def small_workers_on_gpus(part: JobPart) -> Iterator[str]:
    table, team = part.job.hogbatch, part.job.hogbatch.team(part.plan.learner_numbers)
    racing = part.plan.window and not table.locking
    if racing and part.job.cluster.device == "cuda" and any(w.kind == "small" and w.device != "cpu" for w in team):
        yield (
            f"{_SHARED}: [cluster] device = 'cuda': small workers without a lock compute where the weights are; "
            'valid: device = "cpu" in their [[hogbatch.workers]]'
        )


@part_rule
def gradient_format_of_workers(part: JobPart) -> Iterator[str]:
    if part.plan.window and part.job.cluster.gradient_format != "float32":
        yield f"{_SHARED}: [cluster] gradient_format = 'float16': no gradient travels; valid: float32"


@part_rule
def updates_that_no_role_sees(part: JobPart) -> Iterator[str]:
    kept = part.job.results.kept_interval
    if part.plan.window and any(hook.at == "update" for hook in part.job.hooks):
        yield f"{_SHARED}: [hooks] at = 'update': no role sees the weights of an update; valid: epoch, end"
    if part.plan.window and kept is not None and kept[1] == "update":
        yield f"{_SHARED}: [results] keep_checkpoints: they are made at epochs' ends; valid: epochs"


_SHARED = "[hogbatch] weights = 'shared'"


# The cluster.


@part_rule
def gpu_aware_mpi(part: JobPart) -> Iterator[str]:
    float16 = part.job.cluster.gradient_format == "float16"
    if part.job.cluster.gpu_aware_mpi and (part.plan.groups or float16):
        what = "compute groups add gradients" if part.plan.groups else "gradient_format float16 converts them"
        yield f"[cluster] gpu_aware_mpi: {what} in main memory; valid there: false"


@part_rule
def weights_in_parts(part: JobPart) -> Iterator[str]:
    """Keys that need a whole gradient, or all weights, in one place."""
    on = "[topology] name: sharded"
    job = part.job
    if not part.plan.sharded:
        return
    if job.optimizer.clip_norm is not None:
        yield (
            f"{on}: [optimizer] clip_norm goes by the norm of the whole gradient, of which each server has a part; "
            "valid: no clip_norm, or topology base"
        )
    if job.cluster.gradient_format != "float32":
        yield (
            f"{on}: [cluster] gradient_format = 'float16' scales a gradient as a whole, but it travels in parts; "
            "valid: float32"
        )
    if job.cluster.gpu_aware_mpi:
        yield f"{on}: [cluster] gpu_aware_mpi sends vectors as a whole, not in parts; valid: false"
    if job.simulation.batching == "big-batch":
        yield (
            f"{on}: [simulation] batching = 'big-batch' is for learners that share one vector of weights, which "
            "parts are not; valid: none, vmap"
        )


@part_rule
def groups_on_one_rank(part: JobPart) -> Iterator[str]:
    hosted = {(part.plan.roles[i].world_rank, part.plan.roles[i].group) for i in part.plan.learners}
    if part.plan.reduction == "mpi" and len({rank for rank, _ in hosted}) < len(hosted):
        yield (
            f"{part.on} puts learners of several groups on a rank, whose gradients "
            "the MPI library cannot add; valid there: reduction = 'ordered' or 'nodes'"
        )


@part_rule
def shares(part: JobPart) -> Iterator[str]:
    given, learners = part.job.cluster.parts, part.plan.learner_numbers
    if not part.job.cluster.shares:
        return
    if len(given) != learners:
        yield f"[cluster] shares: {len(given)} numbers for {learners} learners; valid: one for each"
    if not all(0 < share < math.inf for share in given):
        yield f"[cluster] shares: {list(given)}; valid: numbers > 0"
    if not part.plan.groups and not part.protocol.waits:
        yield (
            "[cluster] shares: only learners whose gradients are of the same weights can share a batch; valid with "
            "protocol hardsync or topology groups"
        )
    if part.job.simulation.batching != "none":
        yield "[cluster] shares: parts of different sizes cannot be computed together; valid: batching = 'none'"


@part_rule
def stragglers(part: JobPart) -> Iterator[str]:
    on = "[fault_tolerance] straggler_timeout_s"
    if part.job.fault_tolerance.straggler_timeout_s is None:
        return
    if part.job.cluster.learners_per_rank > 1:
        yield (
            f"{on}: learners that share a rank wait for each other, so none can be dropped alone; valid with "
            "cluster.learners_per_rank = 1"
        )
    if part.plan.groups or not part.protocol.ordered:
        yield (
            f"{on}: only a server that waits for each of its learners can drop one; valid with protocol hardsync and "
            "topology base or adv"
        )


@part_rule
def roles_of_hooks(part: JobPart) -> Iterator[str]:
    """The servers of a tree depend on the nodes, so their hooks are checked only if the plan has nodes."""
    for place, hook in enumerate(part.job.hooks):
        if part.placed or hook.at != "end" or not str(hook.role).startswith(TREE_SERVER):
            try:
                hook.roles(part.plan)
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
                yield f"[simulation] {key} names learner {learner}; valid: 0 to {learners - 1}"


# Changes during a run.


@change_rule
def parts_begin_anew(first: JobPart, later: JobPart) -> Iterator[str]:
    if first.plan.parted:
        yield "servers that share the weights cannot begin anew; valid: other topologies"


@change_rule
def same_roles(first: JobPart, later: JobPart) -> Iterator[str]:
    yield from other_roles(first.plan, later.plan)


@change_rule
def same_momentum(first: JobPart, later: JobPart) -> Iterator[str]:
    if explicit_momentum(first.job, first.plan) != explicit_momentum(later.job, later.plan):
        yield "[optimizer] momentum_correction would change the momentum; valid: 'none'"


def other_roles(before: topologies.Plan, after: topologies.Plan) -> Iterator[str]:
    """Reasons why the ranks of a run cannot continue with another plan."""
    who = [[(role.kind, role.index, plan.traits(i)) for i, role in enumerate(plan.roles)] for plan in (before, after)]
    if who[0] != who[1]:
        yield "[topology] options: roles must be those of before; valid: options that keep them"
    if after.reduction == "mpi":
        yield "[topology] options.reduction = 'mpi' cannot begin anew; valid: 'ordered', 'nodes'"


# Nodes of a simulation.


@simulated_rule
def faults_of_tree_servers(job: JobFields, plan: topologies.Plan) -> Iterator[str]:
    servers = sum(role.kind == TREE_SERVER for role in plan.roles)
    for fault in job.simulation.faults:
        if fault.tree_server is not None and not 0 <= fault.tree_server < servers:
            valid = f"0 to {servers - 1}" if servers else "none, there is no tree of servers"
            yield f"[simulation] faults names tree server {fault.tree_server}; valid: {valid}"
