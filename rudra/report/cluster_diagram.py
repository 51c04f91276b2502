"""Diagrams of the roles in a study's runs: one figure for each topology, with its trees and its nodes."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from rudra.report.curve_styles import COLOURS
from rudra.report.palette import GRID, INK, MUTED
from rudra.report.panels import Figure, Panel
from rudra.report.plan_tree import Branch, by_gradients, by_weights
from rudra.report.runs import Run, Study
from rudra.report.tables import MOST_ROWS, ReportTable
from rudra.report.topology import Cast, ShownNode, counted, name_of, placed, roles, spans
from topologies.kinds import ELSEWHERE, KINDS

_MOST_DRAWN = 6
_MOST_LINES = 18
_MOST_NODES = 8
_MOST_DOTS = 16
_LETTERS = 42  # letters in one line of a panel
_ROW = 0.235  # inches
_INDENT = 15  # points, like all following sizes
_BESIDE = 9
_LETTER = 5.7


class _Mark(NamedTuple):
    """A branch with its position in the drawing."""

    branch: Branch
    depth: int
    row: int
    text: str
    beside: str
    under: str
    parent: "_Mark | None"


def drawings(study: Study) -> list[Figure]:
    """Returns one figure for each topology of the runs, drawn from the run with the most learners."""
    alike: dict[str, list[tuple[Run, Cast]]] = {}
    for run in study.known:
        if run.cast is not None:
            alike.setdefault(run.cast.topology, []).append((run, run.cast))
    drawn = list(alike.values())[:_MOST_DRAWN]
    return [_drawing(runs, f"topology-{i}" if len(alike) > 1 else "topology") for i, runs in enumerate(drawn, 1)]


def _drawing(runs: Sequence[tuple[Run, Cast]], name: str) -> Figure:
    cast = max(runs, key=lambda pair: pair[0].learners)[1]
    plan = cast.plan
    trees = {"Gradients go up" if plan.overlapped else "Connections of roles": by_gradients(plan, _MOST_LINES)}
    if plan.overlapped:
        trees["Weights come down"] = by_weights(plan, _MOST_LINES)
    marks = {title: _laid_out(cast, branches) for title, branches in trees.items()}
    nodes = [(place, wrap(place.text, _LETTERS)) for place in placed(cast, _MOST_NODES)]
    heights = [1.0 + max(mark.row + bool(mark.under) for mark in tree) for tree in marks.values()]
    heights.append(sum(1.5 + len(what) for _, what in nodes))
    tallest = max(heights)
    panels = [
        _tree(cast, title, tree, (own, tallest), dashed=title.startswith("Weights"))
        for (title, tree), own in zip(marks.items(), heights, strict=False)
    ]
    panels.append(_nodes(cast, nodes, (heights[-1], tallest)))
    return Figure(
        name,
        f"Topology {cast.topology}",
        _caption(cast, runs),
        panels,
        _table(cast, name),
        heights=[_ROW * (height + 0.3) + 0.5 for height in heights],
    )


def _caption(cast: Cast, runs: Sequence[tuple[Run, Cast]]) -> str:
    plan = cast.plan
    way = "Gradients go up along the lines, and weights come down."
    if plan.overlapped:
        way = "Gradients go up a tree of servers; weights come down one of learners (dashed), on each edge the newest."
    elif plan.sharded:
        way = "Learners push a part of each gradient to each of the servers on top, and pull a part of the weights."
    elif plan.sharing == "reference":
        way = "The learners in a box are a block: the reference that they share corrects their replicas."
    elif plan.groups:
        way = "The learners in a box are a compute group: they add their gradients on a communicator of their own."
    if plan.stage is not None:
        way += (
            " These are gradients and weights of the first layers, which learners hold. The stage server holds the "
            "last layers: it receives activations and returns their gradients."
        )
    lambdas = sorted({run.learners for run, _ in runs} - {len(plan.learners)})
    others = f" Runs with λ = {spans(lambdas)} are placed by the same rule." if lambdas else ""
    shared = " Ranks in the box of a node read each other's memory." if cast.node_memory else ""
    return f"{way}{shared} The drawing has λ = {len(plan.learners)} under {cast.protocol}: {roles(plan)}.{others}"


def _laid_out(cast: Cast, branches: Sequence[Branch]) -> list[_Mark]:
    """Puts each branch on its own line, below and right of its parent. Text about hidden roles takes another line."""
    found: list[_Mark] = []
    row = 0

    def add(branch: Branch, parent: _Mark | None) -> None:
        nonlocal row
        beside = counted(cast.plan, branch.roles) if branch.groups else ""
        if len(branch.roles) == 1 and not branch.groups:
            beside = f"rank {cast.plan.roles[branch.roles[0]].world_rank}"
        under = f"with {counted(cast.plan, branch.hidden)}" if branch.hidden else ""
        depth = parent.depth + 1 if parent else 0
        mark = _Mark(branch, depth, row, name_of(cast.plan, branch), beside, under, parent)
        found.append(mark)
        row += 2 if under else 1
        for child in branch.below:
            add(child, mark)

    for branch in branches:
        add(branch, None)
    return found


def _tree(cast: Cast, title: str, marks: Sequence[_Mark], rows: tuple[float, float], *, dashed: bool) -> Panel:
    def draw(axis: Any) -> None:
        _prepare(axis, title, rows)
        line = {"color": COLOURS[0] if dashed else MUTED, "linewidth": 1.2, "linestyle": "--" if dashed else "-"}
        for mark in marks:
            x = _INDENT * mark.depth
            if mark.parent is not None:
                bend = _INDENT * mark.parent.depth + 4 * bool(mark.parent.branch.groups)
                end = x + (4 if mark.branch.groups else -4)
                axis.plot([bend, bend, end], [mark.parent.row, mark.row, mark.row], zorder=1, **line)
            if mark.branch.groups:
                _box(axis, x + 4, mark.row - 0.42, 0.84 + sum(other.parent is mark for other in marks))
            else:
                _dot(axis, cast, mark.branch.roles[0], (x, mark.row), many=len(mark.branch.roles) > 1)
            text = axis.annotate(mark.text, (x, mark.row), (_BESIDE, 0), textcoords="offset points", va="center")
            text.set(color=INK, fontsize=10)
            _note(axis, x + 2 * _BESIDE + _LETTER * len(mark.text), mark.row, mark.beside)
            _note(axis, x + _BESIDE, mark.row + 1, mark.under)
        for kind in dict.fromkeys(role.kind for role in cast.plan.roles):  # for the legend
            marker, colour = _mark_of(kind)
            axis.plot([], [], marker=marker, color=colour, linestyle="none", label=kind)

    return draw


def _nodes(cast: Cast, nodes: Sequence[tuple[ShownNode, list[str]]], rows: tuple[float, float]) -> Panel:
    def draw(axis: Any) -> None:
        _prepare(axis, "Nodes", rows)
        row = 0.0
        for place, what in nodes:
            _box(axis, 1, row - 0.55, 1.2 + len(what))
            text = f"{'nodes' if place.several else 'node'} {place.name}"
            axis.text(8, row, text, va="center", color=INK, fontsize=10)
            for i, role in enumerate(place.roles if len(place.roles) <= _MOST_DOTS else ()):
                _dot(axis, cast, role, (20 + _LETTER * len(text) + 9 * i, row))
            for i, line in enumerate(what, 1):
                _note(axis, 8, row + i, line)
            row += 1.5 + len(what)

    return draw


def _prepare(axis: Any, title: str, rows: tuple[float, float]) -> None:
    """Sets axes in points, with rows downwards. Panels in one row have room for the tallest one."""
    columns = axis.get_gridspec().ncols
    axis.set_axis_off()
    axis.set(title=title, xlim=(-8, 72 * axis.figure.get_figwidth() / columns - 30))
    axis.set_ylim((rows[0] if columns == 1 else rows[1]) - 0.4, -0.7)


def _box(axis: Any, x: float, y: float, height: float) -> None:
    """Draws a box from that point to the panel's right edge."""
    from matplotlib.patches import Rectangle

    width = axis.get_xlim()[1] - x - 2
    axis.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=GRID, linewidth=1.2, zorder=0.5))


def _dot(axis: Any, cast: Cast, role: int, at: tuple[float, float], *, many: bool = False) -> None:
    """Draws a role's marker, which is hollow if it represents several roles."""
    marker, colour = _mark_of(cast.plan.roles[role].kind)
    fill = "none" if many else colour
    axis.plot(*at, marker=marker, markersize=6, color=colour, markerfacecolor=fill, linestyle="none", zorder=2)


def _mark_of(kind: str) -> tuple[str, str]:
    """Returns marker and colour of a kind of roles, by what they do."""
    traits = KINDS[kind]
    if traits.trains:
        return "o", COLOURS[2]
    if traits.tests:
        return "^", MUTED
    if traits.relays:
        return "D", COLOURS[0]
    return ("o", INK) if traits.concludes else ("s", COLOURS[4])


def _note(axis: Any, x: float, row: float, text: str) -> None:
    if text:
        axis.text(x, row, text, va="center", color=MUTED, fontsize=9.5)


def _table(cast: Cast, name: str) -> ReportTable:
    plan = cast.plan
    rows = []
    for role, node in zip(plan.roles, cast.nodes, strict=True):
        above = plan.roles[role.parent].name if role.parent is not None and not role.kind_traits.tests else None
        place = "of its own" if node == ELSEWHERE else node
        given_by = None if role.kind_traits.tests else plan.weight_source(role)
        source = None if given_by is None else plan.roles[given_by].name
        rows.append((role.name, role.world_rank, above, source, place, cast.hosts.get(node), role.group))
    heads = ("role", "rank", "gradients to", "weights from", "node", "host", "group")
    return ReportTable(name, heads, rows[:MOST_ROWS], {}, len(rows) > MOST_ROWS)
