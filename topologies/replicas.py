"""Replicas: every learner trains weights of its own, and all average them; there need be no server.

Source: crossbow.txt §3.2 and §4.2: every learner holds the central model, too, and updates it by the same sum. With a
server (Zhang et al. 2015) each learner exchanges with that alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies import base, groups
from topologies.plan import Plan, Reduction


def plan(nodes: Sequence[int], reduction: Reduction = "ordered", server: bool = False) -> Plan:
    """One group of all learners, or all with a server.

    Args:
        nodes: of every learner.
        reduction: how differences are added, as in `groups`.
        server: that there is a parameter server, with which each learner exchanges alone.
    """
    together = groups.plan(nodes, 1, reduction, server)
    return replace(base.plan(nodes) if server else together, max_gradients_per_message=1, averaging=True)
