"""What figures of a report are made of: panels, and which runs go into which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rudra.analysis import MARKERS, look, set_scale
from rudra.report.runs import Run
from rudra.report.tables import Table

MOST_TOGETHER = 8  # lines in one panel that people can still tell apart
BY_PANEL = " One panel for each protocol and μ, one colour for each λ."
"""What the caption says of more than that."""

Finish = Callable[[], None]
Panel = Callable[[Any], Finish | None]
"""Draws on the axes it is given; what it returns is called when the layout stands."""


@dataclass(frozen=True)
class Figure:
    """One figure, whatever its width.

    Attributes:
        name: of its files, without suffix.
        title: heading.
        caption: what one sees, in a sentence or two.
        panels: what to draw.
        table: its numbers.
        height: of a panel, in inches.
        heights: of each panel, where they differ.
        share_y: whether the panels have one scale.
        from_zero: whether that begins at zero.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    table: Table
    height: float = 3.0
    share_y: bool = False
    from_zero: bool = True
    heights: Sequence[float] = ()


class Line(NamedTuple):
    """How a run is drawn in a panel."""

    run: Run
    label: str
    style: dict[str, Any]
    marker: str


def grouped(runs: Sequence[Run], split: Callable[[Run], str]) -> list[tuple[str, list[Line]]]:
    """Runs in panels: few by `split`, many by protocol and μ with a colour for every λ."""
    panels: dict[str, list[Line]] = {}
    if len(runs) <= MOST_TOGETHER:
        for i, run in enumerate(runs):
            line = Line(run, run.label, look(i), MARKERS[i % len(MARKERS)])
            panels.setdefault(split(run), []).append(line)
        if len(panels) == len(runs) > 1:  # the titles do for a legend
            return [(line.label, [line._replace(label="_")]) for (line,) in panels.values()]
        return list(panels.items())
    lambdas = sorted({run.learners for run in runs})
    for run in sorted(runs, key=lambda run: (family_order(run.family), run.minibatch_size, run.learners)):
        lines = panels.setdefault(f"{run.family}, μ = {run.minibatch_size}", [])
        i, again = lambdas.index(run.learners), sum(line.run.learners == run.learners for line in lines)
        style = look(i) | ({"linestyle": ("--", ":", "-.")[(again - 1) % 3]} if again else {})
        lines.append(Line(run, f"λ = {run.learners}", style, MARKERS[i % len(MARKERS)]))
    return list(panels.items())


def family_order(family: str) -> tuple[int, str]:
    known = ("hardsync", "λ-softsync", "async (λ-softsync)", "1-softsync")
    return (known.index(family) if family in known else len(known), family)


def set_axes(axis: Any, title: str, x: str, y: str, *, whole: bool = False) -> None:
    """Titles, and a scale from zero; `whole`: x counts things."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set(title=title, xlabel=x, ylabel=y)
    set_scale(axis)
    axis.set_xlim(0)
    if whole:
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def thin(length: int, most: int) -> Any:
    """Numbers of at most `most` rows, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(int))
