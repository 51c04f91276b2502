"""Rudra-adv: a tree of parameter servers, whose leaf servers are on the nodes of their learners.

Source: rudra.txt §3.3, figure 2. Every server averages the gradients of its children and passes one gradient on. Only
the root updates. Weights come down the same tree: each server pulls from the server above it. So all weights have one
timestamp.
"""

from collections.abc import Sequence

from topologies.plan import Plan
from topologies.tree import FanOut, max_gradients, server_tree


def plan(nodes: Sequence[int], fan_out: FanOut = None) -> Plan:
    """Makes the root, the statistics server, the tree of servers, and the learners, in this order.

    Args:
        nodes: Node of every learner.
        fan_out: Largest number of children of a leaf server, of the servers above it, and so on. The last number
            applies to all levels above. None: one leaf server on each node, directly below the root.
    """
    roles = server_tree(nodes, fan_out)
    return Plan(tuple(roles), max_gradients(roles))
