"""Choice of the cut of a model whose job names a rule in `[placement] cut`. It happens once, before roles are made.

The job that is run, stored, replayed and resumed then names the layer, and the choice is not repeated.
"""

from collections.abc import Mapping
from dataclasses import replace

from rudra.core.bucket_rules import at_once_because, group_parts, passes_early, pull_parts, pulling, push_parts, pushing
from rudra.core.buckets import auto_size, copied
from rudra.core.placement import Buckets, Cutting, Layer, PlacementHardware, choose, whole
from rudra.errors import ConfigError, TopologyError
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.log import log
from rudra.prepare import cost_files
from rudra.prepare.nodes import network_of, nodes_of
from rudra.prepare.points import at
from rudra.prepare.profile import profile, sizes
from rudra.prepare.start import Decided
from topologies import groups


def with_cut(job: Job, decided: Decided, ranks: int) -> Decided:
    """Returns the decided keys with the layer that the rule in `[placement] cut` chooses, unless it is known.

    Args:
        job: Written job.
        decided: Keys that are already decided.
        ranks: Number of ranks. It decides the number of learners if the job does not.

    Raises:
        RudraError: The job has a mistake, or its model cannot be cut.
    """
    job = job.with_(**decided)
    if not job.placement.by_rule:
        return decided
    learners = job.cluster.learners
    if learners is None:
        try:
            learners = len(job.make_topology().fit([0] * ranks, None).learners)
        except ValueError as error:
            raise TopologyError(str(error)) from None
    return {**decided, "placement": {"cut": choose_cut(job.resolved(learners=learners))}}


def choose_cut(job: Job) -> str | None:
    """Chooses a cut by the rule in `[placement] cut`, and logs the reason in one line.

    Rule "ralp" depends only on the job. Rule "auto" needs times: the job's costs, or measurements.

    Args:
        job: Job with a rule. Its numbers of learners and threads are known.

    Returns:
        Name of the first layer at the stage server. None: placing layers does not pay.

    Raises:
        RudraError: The job has a mistake, or its model cannot be cut.
    """
    loaded, rule = cost_files.load(job), job.placement.cut
    costs = loaded.simulation
    layers = sizes(job)
    if rule == "auto":
        layers = _timed(layers, known(costs, job.training.minibatch_size) or profile(job).with_loss, rule)
    buckets = buckets_of(loaded)
    # A job without a cut has a server.
    copies = copies_by_group(loaded)
    decision = choose(rule, layers, cluster_of(job, costs), against=("server",), buckets=buckets, copies=copies)
    cut = None if decision.cut is None else decision.cut.name
    chosen = "places no layers" if cut is None else f"chooses {cut!r}"
    log.info(f"{job.name}: [placement] cut = {rule!r} {chosen}: {decision.why}")
    return cut


def cluster_of(job: Job, table: SimulationTable, back_speed: float = 1.0) -> PlacementHardware:
    """Returns the learners and servers of a step of a job, with these costs."""
    near = table.servers_on_first_node  # the machines of the servers are the last ones
    together = near or (len(table.machines) > 1 and table.machines[-1] == table.machines[-2])
    return PlacementHardware(
        job.learners,
        job.training.minibatch_size,
        table.bandwidth_bytes_per_s,
        table.latency_s,
        back_speed,
        job.placement.servers,
        together,
        table.sharing,
    )


def buckets_of(job: Job) -> dict[Cutting, Buckets]:
    """Returns functions that give the buckets of gradients that are pushed to a server, or averaged, and of weights.

    Args:
        job: Resolved job with its cost file read.
    """
    job = job.with_(placement={"cut": None})
    nodes, network = nodes_of(job), network_of(job)
    plan, group = job.plan(nodes), groups.plan(nodes)
    node = plan.nodes(near=job.simulation.servers_on_first_node)
    senders, receivers = pushing(job, plan, node, plan.server), pulling(job, plan, node, plan.server)
    members = () if at_once_because(job) else group.learners
    copies = copies_by_group(job)
    return {
        "server": lambda size: push_parts(job, size, size, auto_size(network, size), len(senders)),
        "allreduce": lambda size: group_parts(job, group, size, size, auto_size(network, size, copies=copies), members),
        "weights": (lambda size: pull_parts(job, size, size, auto_size(network, size))) if receivers else whole,
    }


def copies_by_group(job: Job) -> float:
    """Returns the number of vectors that are copied if learners average their gradients without a server, and the next
    forward pass begins early. 0: it may not.

    Args:
        job: Resolved job with its cost file read.
    """
    group = groups.plan(nodes_of(job))
    early = passes_early(job.with_(placement={"cut": None}), group, group.learners)
    return copied(job.optimizer.state_vectors) if early else 0


def _timed(layers: tuple[Layer, ...], times: tuple[Layer, ...], rule: str) -> tuple[Layer, ...]:
    """Returns the layers with their times.

    Raises:
        ConfigError: The times belong to another model.
    """
    ours, theirs = ([(each.name, each.parameters_bytes) for each in those] for those in (layers, times))
    if ours != theirs:
        names = ", ".join(each.name for each in layers)
        raise ConfigError(
            f"[simulation] layers belong to another model, which [placement] cut = {rule!r} does not support; "
            f"use rudra calibrate to measure the layers {names}"
        )
    pairs = zip(layers, times, strict=True)
    return tuple(replace(layer, forward_s=time.forward_s, backward_s=time.backward_s) for layer, time in pairs)


def known(table: SimulationTable, minibatch_size: int) -> tuple[Layer, ...]:
    """Returns the times of layers in the costs. Empty: there are none."""
    return tuple(
        Layer(
            each.name,
            each.kind,
            each.parameters_bytes,
            each.output_bytes,
            _at(each.forward_s, minibatch_size),
            _at(each.backward_s, minibatch_size),
            cut=each.cut and index < len(table.layers),
        )
        for index, each in enumerate(table.layers, 1)
    )


def _at(times: Mapping[int, float], minibatch_size: int) -> float:
    """Returns the seconds at a mini-batch size. A layer that never takes time takes none."""
    return at({size: max(seconds, 1e-12) for size, seconds in times.items()}, minibatch_size)
