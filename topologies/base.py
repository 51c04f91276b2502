"""Rudra-base: one parameter server and one statistics server, which exchange messages with every learner.

Source: rudra.txt §3.2, figure 1. The data server is the file system.
"""

from collections.abc import Sequence

from topologies.kinds import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER
from topologies.plan import Plan, Role


def plan(nodes: Sequence[int]) -> Plan:
    """Makes the parameter server on rank 0, the statistics server on rank 1, and learners on all other ranks.

    Args:
        nodes: Node of every learner.
    """
    servers = (Role(PARAMETER_SERVER, 0, 0), Role(STATISTICS_SERVER, 0, 1, parent=0))
    learners = (Role(LEARNER, i, 2 + i, parent=0, node=node) for i, node in enumerate(nodes))
    return Plan((*servers, *learners))
