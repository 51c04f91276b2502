"""Rudra-adv*: gradients climb a tree of servers, weights come down a tree of learners, and no learner waits for either.

Source: rudra.txt §3.3, figure 3. The weights' tree consists of the root and all learners; each learner hands on what it
receives. On each of its edges the latest weights win. So gradients may be much staler than on adv where weights come
slowly; `outstanding`, which is not the paper's, bounds that.
"""

from collections.abc import Sequence
from dataclasses import replace

from topologies.plan import Plan
from topologies.tree import FanOut, max_gradients, server_tree, whole


def plan(nodes: Sequence[int], fan_out: FanOut = None, weight_fan_out: int = 2, outstanding: int | None = None) -> Plan:
    """As adv, but for the way of the weights.

    Args:
        nodes: of every learner.
        fan_out: of the tree of servers, as in adv.
        weight_fan_out: of the weights' tree, between the first learners of all nodes, and between those of one node.
        outstanding: a learner computes no further gradient while so many of its own are not in its weights yet: 1 is
            no overlap, 2 hides one exchange behind one computation. None: it never waits, as in the paper.
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
