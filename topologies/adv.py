"""Rudra-adv: a tree of parameter servers, whose leaves sit on the node of the learners that they serve.

Source: rudra.txt §3.3, figure 2. Every server averages what its children push and passes one gradient on; the root
alone updates; weights come down the same tree, each server pulling from the one above. So all weights have one
timestamp.
"""

from collections.abc import Sequence

from topologies.plan import Plan
from topologies.tree import FanOut, max_gradients, server_tree


def plan(nodes: Sequence[int], fan_out: FanOut = None) -> Plan:
    """Root and statistics server, then the tree of servers, then the learners.

    Args:
        nodes: of every learner.
        fan_out: most children of a leaf server, of those above, …; the last number counts for all levels above. None:
            one leaf server to a node, all below the root.
    """
    roles = server_tree(nodes, fan_out)
    return Plan(tuple(roles), max_gradients(roles))
