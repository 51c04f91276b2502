"""Replicas: every learner trains weights of its own, and all average them on a communicator; there is no server.

Source: crossbow.txt §3.2 and §4.2: every learner holds the central model, too, and updates it by the same sum.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies import groups
from topologies.plan import Plan, Reduction


def plan(nodes: Sequence[int], reduction: Reduction = "ordered") -> Plan:
    """One group of all learners.

    Args:
        nodes: of every learner.
        reduction: how differences are added, as in `groups`.
    """
    return replace(groups.plan(nodes, 1, reduction), max_gradients_per_message=1, averaging=True)
