"""Sharded: several servers own a part of the weights each, and advance as one.

Every learner pushes a slice of its gradient to each server, and pulls a slice of the weights from each. The first
server decides which gradients make an update, their order, and the rate. The others carry that out. So there is one
timestamp, and the weights are bitwise identical to a single server's. But the links of several nodes carry them.
"""

from collections.abc import Sequence

from topologies.kinds import ELSEWHERE, LEARNER, PARAMETER_SERVER, SHARD, STATISTICS_SERVER
from topologies.plan import Plan, Role
from topologies.tree import whole


def plan(nodes: Sequence[int], shards: int = 2, servers_on_own_nodes: bool = False) -> Plan:
    """Makes the parameter server on rank 0, which owns the first part, then the other servers, the statistics server,
    and the learners.

    Args:
        nodes: Node of every learner.
        shards: N, the number of servers that share the weights. 1 is topology base.
        servers_on_own_nodes: Whether each server has, in a simulation, a node of its own instead of one with learners.
    """
    if not whole(shards):
        raise ValueError(f"[topology] options.shards = {shards!r} is not supported; use a whole number >= 1")
    if not isinstance(servers_on_own_nodes, bool):
        raise ValueError(
            f"[topology] options.servers_on_own_nodes = {servers_on_own_nodes!r} is not supported; use true or false"
        )
    there = list(dict.fromkeys(nodes))
    # Spread over the nodes, whose links they are there to share; the first server is where there is room.
    apart = servers_on_own_nodes or len(there) == 1
    places = [ELSEWHERE if apart else there[i * len(there) // shards] for i in range(shards)]
    servers = (Role(PARAMETER_SERVER, 0, 0), *(Role(SHARD, i, i, node=places[i]) for i in range(1, shards)))
    learners = (Role(LEARNER, i, shards + 1 + i, parent=0, node=node) for i, node in enumerate(nodes))
    return Plan((*servers, Role(STATISTICS_SERVER, 0, shards, parent=0), *learners))
