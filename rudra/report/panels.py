"""Parts of a report's figures: panels, and the assignment of runs to panels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rudra.report.curve_styles import log_ticks, look, set_scale, several, together, whole, with_rate
from rudra.report.runs import Run, names_of
from rudra.report.tables import ReportTable

MOST_TOGETHER = 8  # lines that can still be distinguished in one panel

AfterLayout = Callable[[], None]
Panel = Callable[[Any], AfterLayout | None]
"""Function that draws on the given axes. It returns a function to call when the layout is final."""


@dataclass(frozen=True)
class Figure:
    """A figure, independent of its width.

    Attributes:
        name: name of the figure's files, without suffix.
        title: heading.
        caption: one or two sentences that explain the figure.
        panels: functions that draw the panels.
        table: numbers of the figure.
        height: height of a panel, in inches.
        heights: heights of the panels, if they differ.
        share_y: whether the panels share one vertical scale.
        from_zero: whether the shared scale begins at zero.
        left_out: reason -> names of the runs that the figure cannot show.
        own_legends: whether a look has a different meaning in each panel.
        notes: lines of text below the panels.
        tooltips: id of a drawn part -> text that a reader sees while pointing at it.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    table: ReportTable
    height: float = 3.0
    share_y: bool = False
    from_zero: bool = True
    heights: Sequence[float] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own_legends: bool = False
    notes: Sequence[str] = ()
    tooltips: Mapping[str, str] = field(default_factory=dict)


class Line(NamedTuple):
    """Runs that differ only in their seeds, as one line with the same look in every panel of a study.

    Attributes:
        runs: runs of the line, at least one.
        label: text in legends.
        style: colour, dashes and marker.
        panel: name of the line's panel if there are too many lines for one panel.
    """

    runs: Sequence[Run]
    label: str
    style: dict[str, Any]
    panel: str = ""

    def of(self, which: Callable[[Run], Any]) -> "Line":
        """Returns the line with only the runs that `which` selects."""
        return self._replace(runs=[run for run in self.runs if which(run)])


def lines_of(runs: Sequence[Run], *, overlaid: bool = False) -> list[Line]:
    """Returns all lines of a study, each with a look of its own if there are few.

    Many lines share one look for each λ, if that distinguishes the lines of a panel.

    Args:
        runs: runs of the study.
        overlaid: whether one panel shows all lines, so that each line needs its own look.
    """
    alike = together([(run.job, (run.summary["driver"], run.learners)) for run in runs])
    groups = [[runs[i] for i in group] for group in alike]
    names = names_of([group[0] for group in groups])
    rates = [group[0].effective_rate for group in groups]
    differ = len(set(rates)) > 1
    seeds = [several([run.job.get("training.seed") for run in group]) for group in groups]
    labels = [
        with_rate(group[0].label if len(group) == 1 else name + more, rate if differ else None)
        for group, name, more, rate in zip(groups, names, seeds, rates, strict=True)
    ]
    looks = [look(i) for i in range(len(groups))]
    places = [(f"{group[0].family}, μ = {group[0].minibatch_size}", group[0].learners) for group in groups]
    if overlaid or len(groups) <= MOST_TOGETHER:
        return [Line(*told) for told in zip(groups, labels, looks, strict=True)]
    if len(set(places)) == len(groups):
        lambdas = sorted({lam for _, lam in places})
        looks = [look(lambdas.index(lam)) for _, lam in places]
        pairs = zip(places, rates, strict=True)
        labels = [with_rate(f"λ = {lam}", rate if differ else None) for (_, lam), rate in pairs]
    panels = [panel for panel, _ in places]
    made = [Line(*told) for told in zip(groups, labels, looks, panels, strict=True)]
    return sorted(made, key=lambda line: _order(line.runs[0]))


def _order(run: Run) -> tuple[Any, ...]:
    return family_order(run.family), run.minibatch_size, run.learners


def by_lambda(lines: Sequence[Line]) -> bool:
    """Whether each look represents a value of λ."""
    return bool(lines) and all(line.panel and line.label.startswith("λ = ") for line in lines)


def own_legends(lines: Sequence[Line]) -> bool:
    """Whether the lines of one λ have different learning rates."""
    return by_lambda(lines) and len({line.label for line in lines}) > len({line.runs[0].learners for line in lines})


def said(lines: Sequence[Line]) -> str:
    """Returns the caption's text about the lines."""
    text = " One panel for each protocol and μ" if lines and lines[0].panel else ""
    text += ", one colour for each λ" if by_lambda(lines) else ""
    several = any(len(line.runs) > 1 for line in lines)
    return text + "." * bool(text) + " Of several seeds: the median, and the range." * several


def grouped(lines: Sequence[Line], split: Callable[[Run], str]) -> list[tuple[str, list[Line]]]:
    """Groups lines into panels: few lines by `split`, many by their own `panel`, with a limit for each panel."""
    panels: dict[str, list[Line]] = {}
    for line in lines:
        panels.setdefault(line.panel or split(line.runs[0]), []).append(line)
    if len(panels) == len(lines) > 1 and not lines[0].panel:  # the titles replace a legend
        return [(line.label.replace(", α", "\nα"), [line._replace(label="_")]) for (line,) in panels.values()]
    made = []
    for title, own in panels.items():
        parts = np.array_split(np.arange(len(own)), -(-len(own) // MOST_TOGETHER))
        for i, part in enumerate(parts, 1):
            made.append((f"{title} ({i} of {len(parts)})" if len(parts) > 1 else title, [own[j] for j in part]))
    return made


def family_order(family: str) -> tuple[int, str]:
    known = ("hardsync", "λ-softsync", "async (λ-softsync)", "1-softsync")
    return (known.index(family) if family in known else len(known), family)


def set_axes(axis: Any, title: str, x: str, y: str, *, counts: bool = False, log: bool = False) -> None:
    """Sets titles, and a scale that begins at zero or a logarithmic one. `counts`: the x axis has whole numbers."""
    axis.set(title=title, xlabel=x, ylabel=y)
    if log:
        log_ticks(axis.yaxis, axis.dataLim.minposy, axis.dataLim.y1)
    else:
        set_scale(axis)
    axis.set_xlim(0)
    if counts:
        whole(axis)


def thin(length: int, most: int) -> Any:
    """Returns at most `most` row numbers, evenly spread, including the first and the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(int))


def stacked_bars(axis: Any, rows: Sequence[tuple[str, Sequence[float]]], kinds: Mapping[str, str]) -> None:
    """Draws a bar for each row, with one piece for each kind. `kinds`: label -> colour."""
    left = np.zeros(len(rows))
    for i, (kind, colour) in enumerate(kinds.items()):
        width = np.array([values[i] for _, values in rows])
        if width.any():
            axis.barh(range(len(rows)), width, left=left, height=0.42, color=colour, label=kind)
        left += width


def name_bars(axis: Any, names: Sequence[str], title: str, x: str) -> None:
    """Writes names above bars, which leaves room for long names."""
    for i, name in enumerate(names):
        note = axis.annotate(name, (0, i - 0.27), (3, 0), textcoords="offset points", va="bottom", fontsize="small")
        note.set_in_layout(False)
    axis.set(title=title, xlabel=x, yticks=[], ylim=(len(names) - 0.6, -0.85))
    axis.grid(False, axis="y")
