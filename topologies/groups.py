"""Compute groups: synchronous inside a group, asynchronous between groups.

Source: omnivore.txt §IV-A and appendix D-A3. The learners of a group add their gradients on a communicator of their own
and act as one learner of batch kμ. The first learner of a group pushes and pulls for all. One group needs no parameter
server: every learner updates its own weights by the same sum, which is hardsync by allreduce.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import get_args

from topologies.kinds import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER, Reduction
from topologies.plan import Plan, Role, group_tree
from topologies.tree import whole


def plan(
    nodes: Sequence[int], groups: int = 1, reduction: Reduction = "ordered", parameter_server: bool = False
) -> Plan:
    """Makes groups of adjacent learners, whose sizes differ by one at most.

    Args:
        nodes: Node of every learner.
        groups: g, 1 to λ.
        reduction: "ordered": slices are exchanged and added in group_rank order. "nodes": first on each node in this
            order, then the sums of the nodes. A replay can repeat both. "mpi": the library's allreduce, which a replay
            cannot repeat.
        parameter_server: Whether one group has a parameter server, as in the paper. Several groups always have one.
    """
    learners = len(nodes)
    numbers = evenly(learners, groups)
    if reduction not in get_args(Reduction):
        raise ValueError(
            f"[topology] options.reduction = {reduction!r} is unknown; use {', '.join(get_args(Reduction))}"
        )
    if not isinstance(parameter_server, bool):
        raise ValueError(
            f"[topology] options.parameter_server = {parameter_server!r} is not supported; use true or false"
        )
    served = parameter_server or groups > 1
    roles = [Role(PARAMETER_SERVER, 0, 0)] if served else []
    roles.append(Role(STATISTICS_SERVER, 0, len(roles)))
    first = len(roles)
    for group in range(groups):
        begin, end = bisect_left(numbers, group), bisect_right(numbers, group)
        tree = group_tree(range(first + begin, first + end), 0 if served else None)
        for i, (parent, source) in zip(range(begin, end), tree, strict=True):
            roles.append(Role(LEARNER, i, first + i, parent, source, nodes[i], group))
    return Plan(tuple(roles), -(-learners // groups), replayable=reduction != "mpi", reduction=reduction)


def evenly(learners: int, blocks: int, option: str = "groups", also: str = "") -> list[int]:
    """Returns the number of each learner's block. Sizes of blocks differ by one at most.

    Args:
        learners: Number of learners.
        blocks: Number of blocks.
        option: Option of the topology that gives the number of blocks, for the error.
        also: Other allowed values, for the error.

    Raises:
        ValueError: There are fewer learners than blocks.
    """
    if not whole(blocks) or blocks > learners:
        valid = f"{also}1 to {learners}"
        raise ValueError(
            f"[topology] options.{option} = {blocks!r} is not supported with {learners} learners; use {valid}"
        )
    return [((i + 1) * blocks - 1) // learners for i in range(learners)]
