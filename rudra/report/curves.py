"""What tests measured, over epochs and over time."""

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from rudra.analysis import time_unit
from rudra.report.panels import BY_PANEL, Figure, Line, Panel, grouped, set_axes, thin
from rudra.report.runs import Numbers, Run, Study
from rudra.report.tables import MOST_ROWS, Table, clock_of, number, percent, quality_of, seconds

_MARKED = 12  # markers on a line
_FEW_CLASSES = 10  # of which the five best are no news


class _Quantity(NamedTuple):
    """Something that tests measure.

    Attributes:
        name: of its figures' files.
        title: heading.
        caption: what it is.
        label: of axis and column.
        shown: how a value is written.
        of: a run's values, one for each tested epoch; NaN where it was not measured.
    """

    name: str
    title: str
    caption: str
    label: str
    shown: Callable[[Any], str]
    of: Callable[[Run], Numbers]


def tests(study: Study) -> list[Figure]:
    """A figure, or one over epochs and one over time, for each quantity: the error, or the loss, and all metrics."""
    return [figure for quantity in _quantities(study.known) for figure in _curves(study, quantity)]


def _quantities(runs: Sequence[Run]) -> list[_Quantity]:
    label = quality_of(runs)
    error = _Quantity("error", "Test error", "Error", label, percent, attrgetter("test_error"))
    loss = _Quantity("loss", "Test loss", "Mean loss", label, number, attrgetter("test_loss"))
    found = [loss if label == "test loss" else error]
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if name != "top5_error" or any(run.attributes.get("classes", 0) > _FEW_CLASSES for run in runs):
            title = name.replace("_", " ").capitalize()
            found.append(_Quantity(f"metric-{name}", title, title, name, number, methodcaller("metric", name)))
    return found


def _curves(study: Study, quantity: _Quantity) -> list[Figure]:
    points = {id(run): np.isfinite(quantity.of(run)) for run in study.known}
    runs = [run for run in study.known if points[id(run)].any()]
    if not runs:
        return []
    unit, unit_s = time_unit(max(run.epoch_end_s[points[id(run)]][-1] for run in runs))
    clock = clock_of(runs)
    groups = grouped(runs, lambda run: "")

    def panel(title: str, lines: Sequence[Line], *, by_time: bool) -> Panel:
        def draw(axis: Any) -> None:
            for run, label, style, marker in lines:
                there = points[id(run)]
                x = (run.epoch_end_s / unit_s if by_time else run.epoch)[there]
                every = max(1, len(x) // _MARKED)
                axis.plot(x, quantity.of(run)[there], label=label, marker=marker, markevery=every, **style)
            set_axes(axis, title, f"{clock} ({unit})" if by_time else "epoch", quantity.label, whole=not by_time)

        return draw

    each = max(20, MOST_ROWS // len(runs))
    rows = []
    for run in runs:
        there = np.flatnonzero(points[id(run)])
        chosen = there[thin(len(there), each)]
        columns = (run.epoch[chosen].astype(int), run.epoch_end_s[chosen], quantity.of(run)[chosen])
        rows += [(run.label, *(value.item() for value in row)) for row in zip(*columns, strict=True)]
    thinned = sum(int(points[id(run)].sum()) for run in runs) > len(rows)
    shown = {f"{clock} (s)": seconds, quantity.label: quantity.shown}
    heads = ("run", "epoch", f"{clock} (s)", quantity.label)
    what = quantity.title.removeprefix("Test: ")
    caption = {"error": "Error on the test set", "loss": "Mean loss on the test set"}.get(
        quantity.name, f"{what} on the test set"
    )
    caption += " at the end of each epoch."
    if len(groups) == 1:
        table = Table(quantity.name, heads, rows, shown, thinned)
        lines = groups[0][1]
        panels = [panel("Over epochs", lines, by_time=False), panel("Over time", lines, by_time=True)]
        return [Figure(quantity.name, quantity.title, caption, panels, table, 3.4)]
    return [
        Figure(
            f"{quantity.name}-over-{over}",
            f"{quantity.title} over {over}",
            caption + BY_PANEL,
            [panel(title, lines, by_time=over == "time") for title, lines in groups],
            Table(f"{quantity.name}-over-{over}", heads, rows, shown, thinned),
            2.7,
            share_y=True,
        )
        for over in ("epochs", "time")
    ]
