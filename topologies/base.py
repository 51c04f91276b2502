"""Rudra-base: one parameter server, one statistics server, and every learner talks to both.

Source: rudra.txt §3.2, figure 1. The data server is the file system.
"""

from topologies.plan import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER, Plan, Role

SERVERS = 2


def plan(learners: int) -> Plan:
    """Rank 0 serves parameters, rank 1 statistics, and the others learn."""
    servers = (Role(PARAMETER_SERVER, 0, 0), Role(STATISTICS_SERVER, 0, 1, parent=0))
    return Plan(servers + tuple(Role(LEARNER, i, SERVERS + i, parent=0) for i in range(learners)))


def learners_for(ranks: int) -> int:
    """Learners that a launch of `ranks` ranks leaves; not positive where they are too few."""
    return ranks - SERVERS
