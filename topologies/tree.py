"""Trees of servers, for the topologies that have one."""

from collections import Counter
from collections.abc import Sequence

from topologies.kinds import ELSEWHERE, LEARNER, PARAMETER_SERVER, STATISTICS_SERVER, TREE_SERVER
from topologies.plan import Role

FanOut = int | Sequence[int] | None
Block = tuple[int, list[int]]
"""Node, and the ids of the roles that are together there."""

SERVERS = 2


def even(count: int, most: int | None) -> list[int]:
    """Splits `count` things into the smallest number of blocks of at most `most`. Sizes differ by one at most."""
    blocks = 1 if most is None else -(-count // most)
    return [(i + 1) * count // blocks - i * count // blocks for i in range(blocks)]


def whole(value: object, least: int = 1) -> bool:
    """Returns whether an option is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def fan_outs(value: FanOut, name: str) -> list[int]:
    """Returns the option as a list.

    Raises:
        ValueError: The value is not allowed.
    """
    given = list(value) if isinstance(value, Sequence) else [] if value is None else [value]
    if not all(map(whole, given, (1, *[2] * len(given)))):
        raise ValueError(
            f"[topology] options.{name} = {value!r} is not supported; use a whole number >= 1, or a list of these, "
            "all but the first >= 2"
        )
    if len(given) == 1 and given[0] < 2:
        given = [given[0], 2]
    return given


def server_tree(nodes: Sequence[int], fan_out: FanOut) -> list[Role]:
    """Returns the root, the statistics server, the tree of servers from top to bottom, and the learners.

    Args:
        nodes: Node of every learner, ascending.
        fan_out: Largest number of children of a leaf server, of the servers above it, and so on. The last number
            applies to all levels above. None: one leaf server on each node, all directly below the root. On a single
            node the root is the leaf itself.

    Raises:
        ValueError: A fan-out is out of range.
    """
    limits = fan_outs(fan_out, "fan_out")
    levels: list[list[Block]] = []  # from the leaf servers up: node, and places in the level below
    first = 0
    leaves: list[Block] = []
    for node, count in Counter(nodes).items():
        for size in even(count, limits[0] if limits else None):
            leaves.append((node, list(range(first, first + size))))
            first += size
    levels.append(leaves)
    above = limits[1:] or limits
    while above and len(levels[-1]) > above[min(len(levels), len(above)) - 1]:
        below, first, level = levels[-1], 0, list[Block]()
        for size in even(len(below), above[min(len(levels), len(above)) - 1]):
            level.append((below[first][0], list(range(first, first + size))))
            first += size
        levels.append(level)
    alone = not limits and len(leaves) == 1
    root = Role(PARAMETER_SERVER, 0, 0, node=nodes[0] if alone else ELSEWHERE)
    roles = [root, Role(STATISTICS_SERVER, 0, 1, parent=0)]
    if alone:
        return roles + [Role(LEARNER, i, SERVERS + i, 0, node=node) for i, node in enumerate(nodes)]
    parents = [0] * len(levels[-1])
    for level in reversed(levels):
        below_parents: list[int] = []
        for (node, members), parent in zip(level, parents, strict=True):
            id_ = len(roles)
            roles.append(Role(TREE_SERVER, id_ - SERVERS, id_, parent, node=node))
            below_parents += [id_] * len(members)
        parents = below_parents
    first = len(roles)
    return roles + [Role(LEARNER, i, first + i, parents[i], node=node) for i, node in enumerate(nodes)]


def max_gradients(roles: Sequence[Role]) -> int:
    """Returns the largest number of gradients in a message of a tree.

    A server forwards an average when it has as many gradients as learners below it. Before that it may have one less,
    and its largest child may add as many again.
    """
    return 2 * max(1, sum(role.kind_traits.trains for role in roles))
