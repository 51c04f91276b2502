"""Rudra-adv*: gradients climb a tree of servers, weights come down a tree of learners, and no learner waits for either.

Source: rudra.txt §3.3, figure 3. The weights' tree consists of the root and all learners; each learner hands on what it
receives. On each of its edges the latest weights win.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies.plan import LEARNER, Plan
from topologies.tree import FanOut, records, server_tree, whole


def plan(nodes: Sequence[int], fan_out: FanOut = None, weight_fan_out: int = 2) -> Plan:
    """As adv, but for the way of the weights.

    Args:
        nodes: of every learner.
        fan_out: of the tree of servers, as in adv.
        weight_fan_out: of the weights' tree, between the first learners of all nodes, and between those of one node.
    """
    if not whole(weight_fan_out):
        raise ValueError(f"[topology] options.weight_fan_out = {weight_fan_out!r}: must be a whole number >= 1")
    width = weight_fan_out
    roles = server_tree(nodes, fan_out)
    first = next(i for i, role in enumerate(roles) if role.kind == LEARNER)
    heads: list[int] = []  # the first learner of every node
    here: list[int] = []  # the learners of the node at hand
    for id_ in range(first, len(roles)):
        if not here or roles[id_].node != roles[here[0]].node:
            here = [id_]
            place = len(heads)
            source = heads[(place - width) // width] if place >= width else 0
            heads.append(id_)
        else:
            source = here[(len(here) - 1) // width]
            here.append(id_)
        roles[id_] = replace(roles[id_], source=source)
    return Plan(tuple(roles), records(roles), overlapped=True)
