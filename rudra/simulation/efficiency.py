"""Hardware efficiency: time per iteration of g compute groups by Omnivore's model, in terms of Rudra's costs.

An iteration is one gradient of one group. A group of k machines computes convolutions for t_conv(k), in parallel with
other groups. One server computes the layers after the convolutions in t_fc, for one group at a time:

    HE(g) = max(t_fc, (t_conv(k) + t_fc) / g)

If the layers are merged, this server is the stage server, which has the last layers. If they are not merged, each group
computes the last layers itself, and gets all weights from the parameter server. The time of an iteration is then again
the time of a single group, divided by g.

The paper's server does one thing at a time. Rudra's servers receive and send tensors while they compute, so a saturated
server completes an iteration after t_busy, which is shorter than t_fc. In both cases a saturated parameter server also
bounds the rate, which the paper does not consider. A parameter server does not update while it sends, because weights
in transfer must not change.

Source: omnivore.txt §IV-B and appendix D-D1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rudra.benchmark_report import Report
from rudra.core.actions import AverageGroup, BackpropFirstStage, RunFirstStage, RunLastStage, Update
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.simulation.costs import CostModel
from topologies import Plan


class Times(NamedTuple):
    """Inputs of the model, in seconds.

    Attributes:
        compute_s: t_conv(k), or with t_fc' if not merged: time of a group's iteration without the server.
        server_s: t_fc: time that the server adds to the iteration of a single group.
        busy_s: t_busy: time between two iterations if a server is saturated.
    """

    compute_s: float
    server_s: float
    busy_s: float

    def iteration_s(self, groups: int) -> float:
        """Returns HE(g)."""
        return max(self.busy_s, (self.compute_s + self.server_s) / groups)


def convolutions_s(machines: int, compute_s: float, network_s: float, *, overlapped: bool = True) -> float:
    """Returns t_conv(k): k machines divide a batch, and each of them exchanges the weights of the convolutions.

    Args:
        machines: Number k of machines in a group.
        compute_s: T_cc, time of one machine for a whole batch.
        network_s: T_nc, time of one machine's exchange.
        overlapped: Whether machines compute while they exchange, as in the paper. In Rudra they wait, except on `adv*`.
    """
    computing_s, exchanging_s = compute_s / machines, network_s * machines
    return max(computing_s, exchanging_s) if overlapped else computing_s + exchanging_s


def merged(model: CostModel, size_bytes: int) -> Times:
    """Returns the times of groups, or of learners without groups, whose last layers are at a stage server.

    The parts of a group's batch pass through the server's link one after the other, and are computed one after the
    other. Then the last one is sent back.

    Args:
        model: Cost model of the job.
        size_bytes: Size of a gradient on the wire.
    """
    plan, stage = model.plan, model.plan.stage
    assert stage is not None
    members = plan.groups[0] if plan.groups else plan.learners[:1]
    learner, k = members[0], len(members)
    front_s = model.compute_s[learner] * (model.pieces[RunFirstStage] + model.pieces[BackpropFirstStage])
    exchange_s, server_busy_s = _exchange(model, learner, plan.server, size_bytes)
    way_s = _Way.of(model, learner, plan.server, size_bytes).seconds
    exchange_s += model.reduction_s(members, size_bytes) + handed_on_s(plan, way_s)
    there, back = (_Way.of(model, *ends, size_bytes) for ends in ((learner, stage), (stage, learner)))
    costs = model.local_s(stage)
    conclude_s, update_s = costs.get(RunLastStage, 0.0), costs.get(AverageGroup, 0.0) + costs.get(Update, 0.0)
    links_s = there.transfer_s + back.transfer_s if there.blocking else max(there.transfer_s, back.transfer_s)
    return Times(
        convolutions_s(1, front_s, exchange_s, overlapped=plan.overlapped),
        there.latency_s + k * (there.transfer_s + model.table.message_s + conclude_s) + back.seconds,
        max(k * links_s, k * conclude_s + update_s, server_busy_s),
    )


def unmerged(model: CostModel, size_bytes: int) -> Times:
    """Returns the times of groups, or of learners without groups, that have all layers. Arguments are as for
    `merged`."""
    plan = model.plan
    members = plan.groups[0] if plan.groups else plan.learners[:1]
    first = members[0]
    compute_s = model.compute_s[first] + model.reduction_s(members, size_bytes)
    if not plan.served:
        update_s = model.local_seconds(Update)
        return Times(compute_s, update_s, update_s)
    way_s = _Way.of(model, first, plan.server, size_bytes).seconds
    return Times(compute_s + handed_on_s(plan, way_s), *_exchange(model, first, plan.server, size_bytes))


class _Way(NamedTuple):
    """Time of a tensor from one role to another, and whether its transfer blocks the opposite direction."""

    latency_s: float
    transfer_s: float
    blocking: bool

    @classmethod
    def of(cls, model: CostModel, sender: int, receiver: int, size_bytes: int) -> "_Way":
        link = model.link(sender, receiver)
        transfer_s = size_bytes * model.travelling(sender, receiver) * link.seconds_per_byte
        return cls(link.latency_s, transfer_s, bool(link.blocking))

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s


def _exchange(model: CostModel, learner: int, server: int, size_bytes: int) -> tuple[float, float]:
    """Returns the time of a single learner from gradient to new weights, and the cycle of a saturated server."""
    there, back = (_Way.of(model, *ends, size_bytes) for ends in ((learner, server), (server, learner)))
    handling_s = model.table.message_s + model.local_s(server).get(Update, 0.0)
    cycle_s = handling_s + back.seconds
    busy_s = there.transfer_s + cycle_s if there.blocking else max(there.transfer_s, cycle_s)
    return there.seconds + handling_s + back.seconds, busy_s


def handed_on_s(plan: Plan, way_s: float) -> float:
    """Returns the delay between the first and the last start of a group's members: each forwards the weights first."""
    if not plan.groups:
        return 0.0
    has = {plan.groups[0][0]: 0.0}
    last = 0.0
    for member in plan.groups[0]:
        for count, to in enumerate(plan.receivers[member], 1):
            has[to] = has[member] + count * way_s
        last = max(last, has[member] + len(plan.receivers[member]) * way_s)
    return last


class Efficiency(NamedTuple):
    """Efficiency of a job's groups by the model, and in virtual time.

    Attributes:
        groups: Number g of groups.
        group_size: Number k of machines per group.
        merged: Times of the model if a stage server has the last layers.
        unmerged: Times of the model if no stage server has the last layers.
        simulated_s: Seconds per iteration in virtual time.
    """

    groups: int
    group_size: int
    merged: Times | None
    unmerged: Times
    simulated_s: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers as values that fit into JSON."""
        kinds = (
            {"unmerged": self.unmerged} if self.merged is None else {"merged": self.merged, "unmerged": self.unmerged}
        )
        told = {name: {**t._asdict(), "iteration_s": t.iteration_s(self.groups)} for name, t in kinds.items()}
        return {"groups": self.groups, "group_size": self.group_size, **told, "simulated_s": self.simulated_s}


def efficiency(job: Job, model: CostModel, size_bytes: int, samples_per_s: float) -> Efficiency | None:
    """Evaluates the model for a job.

    Args:
        job: Resolved job with its cost file read.
        model: Cost model of the job.
        size_bytes: Size of a gradient on the wire.
        samples_per_s: Rate in virtual time.

    Returns:
        None if the model does not cover the job. It covers groups that update one parameter server one at a time.
    """
    plan = model.plan
    firsts = [members[0] for members in plan.groups] or plan.learners
    pushing = {plan.roles[i].parent for i in firsts}
    alone = plan.workers < 2 or plan.averaging or job.make_protocol(plan).gradients_per_update != 1
    if alone or not plan.served or plan.overlapped or plan.sharded or pushing != {plan.server}:
        return None
    batch = job.training.minibatch_size * len(plan.learners) / plan.workers
    whole = model
    if plan.stage is not None:
        without = job.with_(placement={"cut": None})
        there = without.plan(nodes_of(job))
        whole = CostModel(job.simulation, there, job.training.minibatch_size, job.cluster.parts, model.size_bytes)
    return Efficiency(
        plan.workers,
        len(plan.learners) // plan.workers,
        merged(model, size_bytes) if plan.stage is not None else None,
        unmerged(whole, size_bytes),
        batch / samples_per_s,
    )


def as_text(found: Sequence[Efficiency]) -> str:
    """Returns a table with one row per job."""
    placed = all(one.merged for one in found)
    own = ("t_conv, s", "t_fc, s", "merged, s") if placed else ("t_conv + t_fc, s", "server, s")
    report = Report(["g", "k", *own[:2], "busy, s", *own[2:], "unmerged, s", "simulated, s"])
    for one in found:
        times = one.merged if placed and one.merged else one.unmerged
        merged_s = [times.iteration_s(one.groups)] if placed else []
        seconds = (*times, *merged_s, one.unmerged.iteration_s(one.groups), one.simulated_s)
        report.rows.append((str(one.groups), str(one.group_size), *seconds))
    server, lone = ("t_fc", "t_conv + t_fc") if placed else ("server", "t_conv + t_fc + server")
    report.notes = [
        f"Time per iteration of g groups of k learners, by Omnivore's model: max(busy, ({lone})/g).",
        f"busy: of {server}, what a saturated server spends on an iteration.",
    ]
    return report.as_text()
