"""Hierarchical: every learner trains a replica, which a reference of its block corrects. All references are averaged.

Source: crossbow.txt §3.3 and figure 6, where a block is a device: corrections of each iteration stay inside it, and
only references are exchanged between devices. Here every learner of a block has its reference and, as in `replicas`,
the weights.
"""

from collections.abc import Sequence
from typing import Literal

from topologies.groups import evenly
from topologies.groups import plan as grouped
from topologies.kinds import Reduction
from topologies.plan import Plan
from topologies.replicas import in_blocks


def plan(nodes: Sequence[int], blocks: int | Literal["nodes"] = "nodes", reduction: Reduction = "ordered") -> Plan:
    """Makes blocks of adjacent learners.

    Args:
        nodes: Node of every learner.
        blocks: Number of blocks, whose sizes differ by one at most. "nodes": the learners of a node are a block.
        reduction: Order of addition in a block, as in `groups`.
    """
    if blocks == "nodes":
        place = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        numbers = [place[node] for node in nodes]
    else:
        numbers = evenly(len(nodes), blocks, "blocks", "'nodes', ")
    return in_blocks(grouped(nodes, 1, reduction), numbers, "reference")
