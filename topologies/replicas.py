"""Replicas: every learner, or compute group, trains weights of its own, and all average them; there need be no server.

Source: crossbow.txt §3.2 and §4.2: every learner holds the central model, too, and updates it by the same sum. With a
server (Zhang et al. 2015) each learner exchanges with that alone. Compute groups are those of omnivore.txt §IV-A.
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
    """One group of all learners, or all with a server.

    Args:
        nodes: of every learner.
        reduction: how differences are added, as in `groups`; and gradients, where groups train.
        parameter_server: that there is a parameter server, with which each learner exchanges alone.
        groups: number of compute groups, blocks that differ by one at most, each of which trains one replica by the
            mean of its learners' gradients; None: each learner trains one.
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
    """A plan of one group as one in which the learners of each block share something, and blocks average.

    Args:
        plan: as `groups` makes it.
        numbers: of the block of each learner, ascending from 0.
        sharing: what they share.
    """
    if plan.reduction == "mpi":
        raise ValueError("[topology] options.reduction = 'mpi' is not supported with blocks; use 'ordered' or 'nodes'")
    roles = list(plan.roles)
    for id_, number in zip(plan.learners, numbers, strict=True):
        roles[id_] = replace(roles[id_], group=number)
    return replace(plan, roles=tuple(roles), max_gradients_per_message=1, averaging=True, sharing=sharing)
