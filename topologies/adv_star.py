"""Rudra-adv*: gradients go up a tree of servers, weights come down a tree of learners, and no learner waits for either.

Source: rudra.txt §3.3, figure 3. The tree of the weights consists of the root and all learners. Each learner forwards
the weights that it receives. On each edge the latest weights replace older ones. So gradients may be much staler than
on adv if weights arrive slowly. `outstanding`, which is not in the paper, bounds the staleness.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies.plan import Plan
from topologies.tree import FanOut, max_gradients, server_tree, whole


def plan(nodes: Sequence[int], fan_out: FanOut = None, weight_fan_out: int = 2, outstanding: int | None = None) -> Plan:
    """Makes the roles of adv, with another tree for the weights.

    Args:
        nodes: Node of every learner.
        fan_out: Fan-out of the tree of servers, as in adv.
        weight_fan_out: Fan-out of the tree of the weights, between the first learners of all nodes, and between the
            learners of one node.
        outstanding: Number of a learner's own gradients that may be missing in its weights before it waits. 1: no
            overlap. 2: one exchange is hidden behind one computation. None: it never waits, as in the paper.
    """
    for name, value in {"weight_fan_out": weight_fan_out, "outstanding": outstanding}.items():
        if not whole(value) and (name, value) != ("outstanding", None):
            raise ValueError(f"[topology] options.{name} = {value!r} is not supported; use a whole number >= 1")
    width = weight_fan_out
    roles = server_tree(nodes, fan_out)
    first = next(i for i, role in enumerate(roles) if role.kind_traits.trains)
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
    return Plan(tuple(roles), max_gradients(roles), overlapped=True, outstanding=outstanding)
