"""Replicas: every learner, or compute group, trains its own weights, and all of them are averaged. A server is
optional.

Source: crossbow.txt §3.2 and §4.2: every learner also holds the central model, and updates it by the same sum. With a
server (Zhang et al. 2015) each learner exchanges only with the server. Compute groups are from omnivore.txt §IV-A.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies import base
from topologies.groups import evenly
from topologies.groups import plan as grouped
from topologies.kinds import Reduction, Sharing
from topologies.plan import Plan


def plan(
    nodes: Sequence[int], reduction: Reduction = "ordered", parameter_server: bool = False, groups: int | None = None
) -> Plan:
    """Makes one group of all learners, or all learners with a server.

    Args:
        nodes: Node of every learner.
        reduction: Order of addition of differences, as in `groups`, and of gradients if groups train.
        parameter_server: Whether there is a parameter server, which each learner exchanges with separately.
        groups: Number of compute groups, whose sizes differ by one at most. Each trains one replica by the mean of its
            learners' gradients. None: each learner trains one.
    """
    together = grouped(nodes, 1, reduction, parameter_server)
    if groups is None:
        return replace(base.plan(nodes) if parameter_server else together, max_gradients_per_message=1, averaging=True)
    if parameter_server:
        raise ValueError(
            "[topology] options.groups is not supported with options.parameter_server = true; remove one of them"
        )
    return in_blocks(together, evenly(len(nodes), groups), "replica")


def in_blocks(plan: Plan, numbers: Sequence[int], sharing: Sharing) -> Plan:
    """Turns a plan of one group into a plan whose blocks share state and average with each other.

    Args:
        plan: Plan from `groups`.
        numbers: Number of each learner's block, ascending from 0.
        sharing: State that a block shares.
    """
    if plan.reduction == "mpi":
        raise ValueError(
            "[topology] options.reduction = 'mpi', or [cluster] transport = 'nccl', is not supported with blocks; use "
            "'ordered' or 'nodes', and transport = 'auto'"
        )
    roles = list(plan.roles)
    for id_, number in zip(plan.learners, numbers, strict=True):
        roles[id_] = replace(roles[id_], group=number)
    return replace(plan, roles=tuple(roles), max_gradients_per_message=1, averaging=True, sharing=sharing)
