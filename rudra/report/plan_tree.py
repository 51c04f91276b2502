"""Plans as readable trees of roles. A long run of similar siblings is one line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from topologies import Plan

_DEEPEST = 300
_TIGHTER = ((12, 12), (12, 8), (12, 4), (12, 2), (12, 1), (8, 1), (5, 1), (3, 1))
"""Successive limits on depth and on similar siblings, tried until the tree has few enough lines."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a tree: a role, a compute group, or a run of similar siblings.

    Attributes:
        roles: ids of the role, of a group's members, or of the siblings.
        below: branches below this one.
        groups: numbers of the compute groups, if the branch represents groups.
        hidden: ids of the roles below that are not shown.
    """

    roles: tuple[int, ...]
    below: tuple["Branch", ...] = ()
    groups: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()


def by_gradients(plan: Plan, most: int | None = None) -> tuple[Branch, ...]:
    """Returns trees by gradients: each role is below the receiver of its gradients. The statistics server is last.

    A compute group is one branch.

    Args:
        plan: roles and their connections.
        most: number of lines to aim at by leaving siblings out. None: show everything.
    """
    members = {group[0]: group for group in plan.groups}

    def branch(id_: int, room: int = _DEEPEST) -> Branch:
        if id_ in members:
            number = plan.roles[id_].group or 0
            return Branch(members[id_], tuple(Branch((role,)) for role in members[id_]), (number,))
        return _branch(plan.children, id_, room, branch)

    roots = [i for i, role in enumerate(plan.roles) if role.parent is None and not role.kind_traits.tests]
    if plan.sharing != "nothing":  # groups are siblings, although their first members have a parent
        roots = list(members)
    found = _fitted(plan, [branch(root) for root in roots], most)
    return (*found, *(Branch((i,)) for i, role in enumerate(plan.roles) if role.kind_traits.tests))


def by_weights(plan: Plan, most: int | None = None) -> tuple[Branch, ...]:
    """Returns the tree of the weights' distribution, from its root. Arguments as for `by_gradients`."""

    def branch(id_: int, room: int = _DEEPEST) -> Branch:
        return _branch(plan.receivers, id_, room, branch)

    return _fitted(plan, [branch(plan.server)], most)


def lines(branches: Sequence[Branch]) -> int:
    """Returns the number of branches, including those below."""
    return sum(1 + lines(branch.below) for branch in branches)


def _branch(below: Sequence[Sequence[int]], id_: int, room: int, branch: Callable[[int, int], Branch]) -> Branch:
    if room > 0:
        return Branch((id_,), tuple(branch(child, room - 1) for child in below[id_]))
    hidden = list(below[id_])
    for role in hidden:  # the list grows during this loop
        hidden += below[role]
    return Branch((id_,), hidden=tuple(hidden))


def _inside(branch: Branch) -> tuple[int, ...]:
    """Returns ids of all roles below. A branch of a group represents its members."""
    below = () if branch.groups else branch.below
    return (*branch.hidden, *(role for child in below for role in (*child.roles, *_inside(child))))


def _fitted(plan: Plan, branches: Sequence[Branch], most: int | None) -> tuple[Branch, ...]:
    """Leaves out as little as the number of lines requires."""
    found = tuple(branches)
    for depth, siblings in _TIGHTER:
        if most is None or lines(found) <= most:
            break
        found = _collapsed(plan, branches, siblings, depth)
    return found


def _collapsed(plan: Plan, branches: Sequence[Branch], most: int, depth: int) -> tuple[Branch, ...]:
    """Joins siblings if more than `most` are similar: the first ones, one branch for the middle, and the last."""
    found: list[Branch] = []
    for _, run in groupby(branches, key=lambda b: (plan.roles[b.roles[0]].kind, bool(b.below or b.hidden))):
        alike = list(run)
        if len(alike) > most:
            first, end = max(1, most - 2), len(alike) - (most > 1)
            alike = [*alike[:first], _together(alike[first:end]), *alike[end:]]
        found += alike
    if depth == 0:
        return tuple(_together([branch]) for branch in found)
    return tuple(replace(branch, below=_collapsed(plan, branch.below, most, depth - 1)) for branch in found)


def _together(branches: Sequence[Branch]) -> Branch:
    return Branch(
        tuple(role for branch in branches for role in branch.roles),
        groups=tuple(group for branch in branches for group in branch.groups),
        hidden=tuple(role for branch in branches for role in _inside(branch)),
    )
