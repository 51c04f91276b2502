"""Compute groups: synchronous inside a group, asynchronous between groups.

Source: omnivore.txt §IV-A and appendix D-A3. The learners of a group add their gradients on a communicator of their own
and act as one learner of batch kμ; the group's first learner pushes and pulls for all. With one group there need be no
parameter server: every learner updates weights of its own by the same sum, which is hardsync by allreduce.
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
    """Learners in blocks that differ by one at most; block i is group i.

    Args:
        nodes: of every learner.
        groups: g, 1 to λ.
        reduction: "ordered": slices are exchanged and added in group_rank order; "nodes": so on each node, and then the
            sums of the nodes, one exchange for each; both of which a replay can repeat; "mpi": the library's allreduce,
            which it cannot.
        parameter_server: that there is one with one group, too, as the paper has it; several always have one.
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
    """The number of each learner's block, where blocks differ by one at most.

    Args:
        learners: how many.
        blocks: how many.
        option: of the topology, that says so.
        also: what else it may be, for the error.

    Raises:
        ValueError: there are not so many learners.
    """
    if not whole(blocks) or blocks > learners:
        valid = f"{also}1 to {learners}"
        raise ValueError(
            f"[topology] options.{option} = {blocks!r} is not supported with {learners} learners; use {valid}"
        )
    return [((i + 1) * blocks - 1) // learners for i in range(learners)]
