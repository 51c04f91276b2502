"""Which protocols, plans and other keys of a job go together."""

import math
from collections.abc import Mapping
from typing import Any

import protocols
import topologies
from rudra.job.fields import JobFields
from rudra.job.table import Named, named
from topologies.kinds import TREE_SERVER


def check(job: JobFields, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
    """Raises ValueError where a job's protocol cannot work on a plan, or another key does not go with these."""
    _check_shape(protocol, plan, job.topology.name)
    if job.placement.given:
        _check_placement(job, plan, protocol)
    if job.training.microbatches > 1:
        _check_microbatches(job, protocol)
    if plan.averaging:
        _check_averaging(job, plan)
    if plan.scheduled:
        _check_scheduled(job, plan)
    elif job.training.evaluate == "workers":
        raise ValueError(
            "[training] evaluate = 'workers': a coordinator deals the test out; valid: with protocol hogbatch"
        )
    if job.weights.at == "window":
        _check_window(job, plan, protocol)
    if job.cluster.gpu_aware_mpi and (plan.groups or job.cluster.gradient_format == "float16"):
        what = "compute groups add gradients" if plan.groups else "gradient_format float16 converts them"
        raise ValueError(f"[cluster] gpu_aware_mpi: {what} in main memory; valid there: false")
    if plan.sharded:
        _check_parts(job)
    hosted = {(plan.roles[i].world_rank, plan.roles[i].group) for i in plan.learners}
    if plan.reduction == "mpi" and len({rank for rank, _ in hosted}) < len(hosted):
        raise ValueError(
            f"[topology] name: {job.topology.name} puts learners of several groups on a rank, whose gradients "
            "the MPI library cannot add; valid there: reduction = 'ordered' or 'nodes'"
        )
    if job.cluster.shares:
        _check_shares(job, plan, protocol)
    if job.fault_tolerance.straggler_timeout_s is not None and job.cluster.learners_per_rank > 1:
        raise ValueError(
            "[fault_tolerance] straggler_timeout_s: learners that share a rank wait for each other, so none can be "
            "dropped alone; valid with cluster.learners_per_rank = 1"
        )
    if job.fault_tolerance.straggler_timeout_s is not None and (plan.groups or not protocol.ordered):
        raise ValueError(
            "[fault_tolerance] straggler_timeout_s: only a server that waits for each of its learners can drop one;"
            " valid with protocol hardsync and topology base or adv"
        )


def _check_shape(protocol: protocols.Protocol, plan: topologies.Plan, topology: Named) -> None:
    """Raises ValueError where a protocol cannot work on a topology."""
    name, on = type(protocol).__name__.lower(), f"[topology] name: {topology}"
    if plan.averaging != isinstance(protocol, protocols.Averaging):
        if plan.averaging:
            raise ValueError(f"{on}: learners average replicas there; valid protocols: {averaging_protocols()}")
        shapes = ", ".join(dict.fromkeys(pair.shape for pair in averaging_pairs() if not pair.shape.partition(",")[2]))
        raise ValueError(f"{on}: protocol {name} averages replicas of the learners; valid: {shapes}")
    if plan.overlapped and protocol.waits:
        raise ValueError(
            f"{on}: its learners never wait for a server, but with protocol {name} they must; valid: softsync, async, "
            "or topology adv"
        )
    most = len(plan.learners) * (plan.outstanding or math.inf)
    if most < protocol.gradients_per_update:
        raise ValueError(
            f"{on}: options.outstanding = {plan.outstanding} lets {most} gradients be under way, but protocol {name} "
            f"wants {protocol.gradients_per_update} for an update"
        )
    if not plan.served and not plan.averaging and protocol.gradients_per_update > 1:
        raise ValueError(
            f"{on}: one compute group alone updates by each of its averages, but protocol {name} wants "
            f"{protocol.gradients_per_update} for an update; valid: more groups, or a protocol that takes one"
        )
    if protocols.own_update_due(protocol) and (protocol.ordered or not plan.served or plan.window):
        why = "adds one gradient of each learner" if protocol.ordered else "updates without a server that would ask"
        raise ValueError(
            f"{on}: protocol {name} {why}, so its update_due has no say; valid: gradients_per_update, or a server and "
            "ordered = False"
        )
    if any(role.kind_traits.relays for role in plan.roles):
        if protocol.waits and protocols.saved(protocol):
            raise ValueError(
                f"{on}: protocol {name} lets learners wait and has a state, which servers of a tree do not know; "
                "valid: topology base"
            )
        if protocol.waits and protocol.grants_on_push:
            raise ValueError(
                f"{on}: protocol {name} decides by what every learner has pushed, which servers of a tree do not know; "
                "valid: topology base, or a rule by timestamps alone (grants_on_push = False)"
            )
        if protocol.modulation.weighs:
            raise ValueError(
                f"{on}: modulation 'gradient_staleness' weighs each gradient where weights are updated, but a tree has "
                "averaged them by then; valid: topology base, or modulation 'mean_staleness'"
            )


def _check_microbatches(job: JobFields, protocol: protocols.Protocol) -> None:
    """Raises ValueError where gradients cannot be computed in parts."""
    most = job.training.minibatch_size
    if isinstance(protocol, protocols.Hogbatch):
        most = max(worker.most for worker in protocol.workers)
    refused = {
        f"a gradient has {most} samples; valid: 1 to {most}": job.training.microbatches > most,
        "placed layers compute whole mini-batches; valid: 1": job.placement.given,
        f"[simulation] batching = '{job.simulation.batching}' computes whole mini-batches; valid: 1, or batching = "
        "'none'": job.simulation.batching != "none",
    }
    _refuse(refused, f"[training] microbatches = {job.training.microbatches}")


def _check_averaging(job: JobFields, plan: topologies.Plan) -> None:
    """Raises ValueError for what has no sense where learners average replicas."""
    if plan.served and job.optimizer.plateau is not None:
        raise ValueError(
            "[optimizer] schedule = 'plateau': learners that exchange with a server alone do not hear of tests; "
            "valid there: other schedules"
        )
    if plan.served and job.cluster.gradient_format != "float32":
        raise ValueError("[cluster] gradient_format = 'float16' is for gradients, not replicas; valid: float32")
    if job.changes:
        raise ValueError("[[changes]]: replicas that are averaged cannot begin anew; valid: no changes")
    if job.simulation.batching == "big-batch":
        raise ValueError(
            "[simulation] batching = 'big-batch' is for learners that share one vector of weights, which replicas "
            "do not; valid: none, vmap"
        )


def _check_scheduled(job: JobFields, plan: topologies.Plan) -> None:
    """Raises ValueError for what cannot be where a coordinator deals the samples out."""
    on, batching = "[protocol] name: hogbatch", job.simulation.batching
    plain = all(plan.roles[i].parent == plan.server for i in plan.learners) and not plan.groups
    if not plan.served or not plain or plan.overlapped or plan.averaging or plan.parted:
        raise ValueError(f"{on}: not with topology {named(job.topology.name)} so far; valid: base")
    refused = {
        "[[changes]]: a coordinator cannot begin anew; valid: no changes": job.changes,
        "[cluster] shares: the coordinator says what each learner takes; valid: none": job.cluster.shares,
        f"[simulation] batching = '{batching}': batches of different sizes cannot be computed together; "
        "valid: none": batching != "none",
    }
    _refuse(refused, on)


def _check_window(job: JobFields, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
    """Raises ValueError for what cannot be where workers update the weights themselves."""
    on, optimizer, kept = "[weights] at = 'window'", job.optimizer, job.results.kept_interval
    nodes = len({plan.roles[i].node for i in plan.learners})
    state = optimizer.name != "sgd" or optimizer.momentum or optimizer.options.get("nesterov")
    refused = {
        "only workers of protocol hogbatch update the weights themselves; valid: server": not plan.scheduled,
        f"[weights] update = 'locked': updates on {nodes} nodes have no order; valid: racing, or one node": (
            nodes > 1 and job.weights.update == "locked"
        ),
        "[optimizer] workers keep no state, so they step by plain SGD; valid: name sgd, momentum 0": state,
        "[optimizer] weight_decay, clip_norm, groups and options are not for a window so far; valid: none": (
            optimizer.weight_decay or optimizer.clip_norm is not None or optimizer.groups or optimizer.options
        ),
        f"[protocol] modulation = '{protocol.modulation.name}': workers do not know how stale their gradients will "
        "be; valid: none": protocol.modulation.name != "none",
        "[cluster] device = 'cuda': small workers of a racing window compute where the weights are; "
        'valid: device = "cpu" in their [[workers]]': (
            job.cluster.device == "cuda"
            and job.weights.update == "racing"
            and any(table.kind == "small" and table.device != "cpu" for table in job.workers)
        ),
        "[cluster] gradient_format = 'float16': no gradient travels; valid: float32": (
            job.cluster.gradient_format != "float32"
        ),
        "[hooks] at = 'update': no role sees the weights of an update; valid: epoch, end": any(
            hook.at == "update" for hook in job.hooks
        ),
        "[results] keep_checkpoints: they are made at epochs' ends; valid: epochs": (
            kept is not None and kept[1] == "update"
        ),
    }
    _refuse(refused, on)


def _check_placement(job: JobFields, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
    """Raises ValueError for what cannot be where layers are placed."""
    on, table, optimizer = "[placement] cut", job.placement, job.optimizer
    if plan.averaging or plan.scheduled:
        raise ValueError(
            f"{on}: learners with replicas of their own, and workers, have all layers; valid: topologies base, "
            "sharded, adv, adv*, groups, and protocols that push gradients"
        )
    together = protocol.ordered and protocol.waits and protocol.gradients_per_update == plan.workers
    if table.rule == "synchronous" and not together:
        raise ValueError(
            "[placement] rule = 'synchronous': its updates take one gradient of each learner, in learner order; "
            "valid: protocol hardsync, or rule merged"
        )
    if table.momentum is not None and optimizer.name not in ("sgd", "rmsprop"):
        raise ValueError(f"[placement] momentum: {optimizer.name} has none; valid: sgd and rmsprop")
    merged = table.rule == "merged"
    if table.servers > len(plan.learners):
        raise ValueError(
            f"[placement] servers = {table.servers}: each has learners of its own, of whom there are "
            f"{len(plan.learners)}; valid: 1 to {len(plan.learners)}"
        )
    several = f"[placement] servers = {table.servers}"
    refused = {
        f"{several}: with rule merged each mini-batch is an update of its own, for which all servers would have to "
        "wait; valid: 1, or rule synchronous": merged and table.servers > 1,
        f"{several}: the gradients of a compute group are averaged at one stage server; valid: 1": (
            bool(plan.groups) and table.servers > 1
        ),
        f"{several}: where a server of a tree dies all begin anew, which several stage servers cannot; valid: 1": (
            any(role.kind_traits.relays for role in plan.roles) and table.servers > 1
        ),
        f"{on}: [optimizer] clip_norm: learners that update weights of their own do not know the norm of the last "
        "layers; valid: none, or a topology with a parameter server": (
            not merged and not plan.served and optimizer.clip_norm
        ),
        f"{on}: [[changes]]: a stage server cannot begin anew with another job so far; valid: none": job.changes,
        "[placement] rule = 'merged': [optimizer] schedule = 'plateau' goes by tests, of which the stage server "
        "does not hear; valid: other schedules": merged and optimizer.plateau,
        f"{on}: [cluster] gradient_format = 'float16' is for gradients alone; valid: float32": (
            job.cluster.gradient_format != "float32"
        ),
        f"{on}: [cluster] device = '{job.cluster.device}': placed layers compute on CPUs so far; valid: cpu": (
            job.cluster.device != "cpu"
        ),
        f"{on}: [cluster] shares = 'auto' measures learners that compute all layers; valid: a list": (
            job.cluster.shares == "auto"
        ),
        f"{on}: [training] compile = true compiles whole models; valid: false": job.training.compile,
        f"{on}: [training] precision = '{job.training.precision}': valid so far: float32": (
            job.training.precision != "float32"
        ),
        f"{on}: [simulation] batching computes whole models; valid: none": job.simulation.batching != "none",
        f"{on}: [fault_tolerance] straggler_timeout_s: a learner may wait for the stage server; valid: none": (
            job.fault_tolerance.straggler_timeout_s
        ),
    }
    _refuse(refused)


def _check_parts(job: JobFields) -> None:
    """Raises ValueError for what needs all of a gradient, or of the weights, in one place."""
    on = "[topology] name: sharded"
    if job.optimizer.clip_norm is not None:
        raise ValueError(
            f"{on}: [optimizer] clip_norm goes by the norm of the whole gradient, of which each server has a part; "
            "valid: no clip_norm, or topology base"
        )
    if job.cluster.gradient_format != "float32":
        raise ValueError(
            f"{on}: [cluster] gradient_format = 'float16' scales a gradient as a whole, but it travels in parts; "
            "valid: float32"
        )
    if job.cluster.gpu_aware_mpi:
        raise ValueError(f"{on}: [cluster] gpu_aware_mpi sends vectors as a whole, not in parts; valid: false")
    if job.simulation.batching == "big-batch":
        raise ValueError(
            f"{on}: [simulation] batching = 'big-batch' is for learners that share one vector of weights, which "
            "parts are not; valid: none, vmap"
        )


def _check_shares(job: JobFields, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
    shares, learners = job.cluster.parts, plan.learner_numbers
    if len(shares) != learners:
        raise ValueError(f"[cluster] shares: {len(shares)} numbers for {learners} learners; valid: one for each")
    if not all(0 < share < math.inf for share in shares):
        raise ValueError(f"[cluster] shares: {list(shares)}; valid: numbers > 0")
    if not plan.groups and not protocol.waits:
        raise ValueError(
            "[cluster] shares: only learners whose gradients are of the same weights can share a batch; valid with "
            "protocol hardsync or topology groups"
        )
    if job.simulation.batching != "none":
        raise ValueError(
            "[cluster] shares: parts of different sizes cannot be computed together; valid: batching = 'none'"
        )


def check_hooks(job: JobFields, plan: topologies.Plan, *, placed: bool) -> None:
    """Raises ValueError where a hook is of no role; servers of a tree depend on where all are placed."""
    for place, hook in enumerate(job.hooks):
        if placed or hook.at != "end" or not str(hook.role).startswith(TREE_SERVER):
            try:
                hook.roles(plan)
            except ValueError as error:
                raise ValueError(f"[hooks] {place}.role {error}") from None


def check_same_roles(before: topologies.Plan, after: topologies.Plan) -> None:
    """Raises ValueError where a run could not go on by another plan with the ranks that it has."""
    who = [[(role.kind, role.index, plan.traits(i)) for i, role in enumerate(plan.roles)] for plan in (before, after)]
    if who[0] != who[1]:
        raise ValueError("[topology] options: roles must be those of before; valid: options that keep them")
    if after.reduction == "mpi":
        raise ValueError("[topology] options.reduction = 'mpi' cannot begin anew; valid: 'ordered', 'nodes'")


def averaging_pairs() -> list[protocols.Pair]:
    """On which topologies learners average replicas, and by which of the shipped protocols."""
    rules = protocols.shipped().items()
    return protocols.pairs({name: rule for name, rule in rules if issubclass(rule, protocols.Averaging)})


def averaging_protocols(on: str = "replicas") -> str:
    """Names of the shipped protocols by which learners average replicas on a topology."""
    return ", ".join(pair.protocol for pair in averaging_pairs() if pair.shape == on)


def _refuse(wanted: Mapping[str, Any], on: str = "") -> None:
    """Raises ValueError with the first text whose thing is wanted, and what it does not go with."""
    for text in (text for text, value in wanted.items() if value):
        raise ValueError(f"{on}: {text}" if on else text)
