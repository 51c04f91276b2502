"""Figures of evaluations and training over epochs and over time, and of the learning rate."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from rudra.report.curve_styles import NOT_POSITIVE, Course, Numbers, band_of, draw_band, time_unit
from rudra.report.panels import Figure, Line, Panel, grouped, own_legends, said, set_axes, thin
from rudra.report.runs import Run, Study
from rudra.report.tables import MOST_ROWS, ReportTable, clock_of, percent
from rudra.results.progress import is_share

_FEW_CLASSES = 10  # with fewer classes, the error among the best five says little


class _Quantity(NamedTuple):
    """A measured quantity.

    Attributes:
        name: name of the quantity's figure files.
        title: heading.
        caption: text that explains the quantity.
        label: text at the axis and above the column.
        of: function that returns a run's values, one for each epoch. NaN: not measured.
        shown: function that formats a value. None: the column's format.
        course: function that returns the points to draw over epochs. None: the values of `of`.
    """

    name: str
    title: str
    caption: str
    label: str
    of: Callable[[Run], Numbers]
    shown: Callable[[Any], str] | None = None
    course: Callable[[Run], Course] | None = None

    def over(self, run: Run, *, time: bool) -> Course:
        """Returns the points that have a measured value."""
        if self.course is not None:
            return self.course(run).known()
        return Course(run.epoch, run.epoch_end_s if time else run.epoch, self.of(run)).known()


def curves(study: Study, lines: Sequence[Line], *, log: bool) -> list[Figure]:
    """Returns figures over epochs and time: first of evaluations (error, else loss), then of training."""
    tested = [figure for quantity in _tested(study.known) for figure in _figures(study, lines, quantity, log)]
    return [*tested, *_training(study, lines, log)]


def _tested(runs: Sequence[Run]) -> list[_Quantity]:
    found = []
    if any(run.error is not None for run in runs):
        caption = "Error on the test set at the end of each epoch."
        found.append(_Quantity("error", "Test error", caption, "test error (%)", attrgetter("test_error"), percent))
    if any(run.error is None and run.loss is not None for run in runs):
        caption = "Mean loss on the test set at the end of each epoch."
        found.append(_Quantity("loss", "Test loss", caption, "test loss", attrgetter("test_loss")))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if name != "top5_error" or any(run.attributes.get("classes", 0) > _FEW_CLASSES for run in runs):
            title, caption = name.replace("_", " ").capitalize(), "on the test set at the end of each epoch."
            of = methodcaller("metric", name)
            if is_share(name):
                whole = _Quantity(f"metric-{name}", title, f"{title} {caption}", f"{name} (%)", _percent(of), percent)
            else:
                whole = _Quantity(f"metric-{name}", title, f"{title} {caption}", name, of)
            found.append(whole)
    return found


def _percent(of: Callable[[Run], Numbers]) -> Callable[[Run], Numbers]:
    return lambda run: 100 * of(run)


_TRAINED = (
    _Quantity(
        "training-loss",
        "Training loss",
        "Mean loss of the gradients that each epoch applied.",
        "training loss",
        attrgetter("train_loss"),
    ),
    _Quantity(
        "training-error",
        "Training error",
        "Error on the samples of the gradients that each epoch applied.",
        "training error (%)",
        attrgetter("train_error"),
        percent,
    ),
    _Quantity(
        "learning-rate",
        "Learning rate",
        "The rate of updates, with schedule, warm-up and the protocol's modulation.",
        "learning rate α",
        attrgetter("learning_rate"),
        None,
        attrgetter("rate"),
    ),
)


def _shown(lines: Sequence[Line], quantity: _Quantity, log: bool) -> tuple[list[Line], dict[str, list[str]], bool]:
    """Returns the lines that a panel can show, why it cannot show the others, and whether the scale is logarithmic."""
    runs = [run for line in lines for run in line.runs]
    log = log and any((quantity.over(run, time=False).y > 0).any() for run in runs)

    def positive(run: Run) -> Any:
        values = quantity.over(run, time=False).y
        return values > (0 if log else -np.inf)

    kept = [line.of(lambda run: positive(run).any()) for line in lines]
    missing = [run.label for run in runs if not positive(run).any()]
    cut = [run.label for run in runs if positive(run).any() and not positive(run).all()]
    what = quantity.title.lower()
    left_out = {f"Not in {what}": missing, f"In {what} {NOT_POSITIVE}": cut}
    return [line for line in kept if line.runs], {why: names for why, names in left_out.items() if names}, log


def _panel(
    quantity: _Quantity, title: str, lines: Sequence[Line], clock: tuple[str, float] | None, *, log: bool
) -> Panel:
    """Makes a panel over epochs or, given a name and a unit in seconds, over time."""

    def draw(axis: Any) -> None:
        for line in lines:
            band = band_of([quantity.over(run, time=clock is not None) for run in line.runs])
            if clock is not None:
                band = band._replace(x=band.x / clock[1])
            steps = {} if quantity.course is None else {"drawstyle": "steps-post"}
            draw_band(axis, band, {**line.style, **steps}, line.label)
        set_axes(axis, title, clock[0] if clock else "epoch", quantity.label, counts=clock is None, log=log)

    return draw


def overlay(lines: Sequence[Line], *, log: bool) -> tuple[list[Panel], dict[str, list[str]]]:
    """Returns one panel with all lines for each quantity, and the reasons why a panel cannot show some runs."""
    panels: list[Panel] = []
    missing: dict[str, list[str]] = {}
    tested = _tested([run for line in lines for run in line.runs])
    for quantity in (*tested, *_TRAINED):
        own, left_out, scale = _shown(lines, quantity, log)
        if own and quantity in tested:
            for over, clock in (("epochs", None), ("time", _clock(own, quantity))):
                panels.append(_panel(quantity, f"{quantity.title} over {over}", own, clock, log=scale))
        elif own:
            panels.append(_panel(quantity, quantity.title, own, None, log=scale))
        missing |= left_out if own else {}
    return panels, missing


def _clock(lines: Sequence[Line], quantity: _Quantity) -> tuple[str, float]:
    """Returns the name of the time axis with a unit that suits the times, and the length of this unit in seconds."""
    runs = [run for line in lines for run in line.runs]
    unit, unit_s = time_unit(max(quantity.over(run, time=True).x[-1] for run in runs))
    return f"{clock_of(runs)} ({unit})", unit_s


def _figures(study: Study, lines: Sequence[Line], quantity: _Quantity, log: bool) -> list[Figure]:
    lines, left_out, log = _shown(lines, quantity, log)
    if not lines:
        return []
    runs = [run for line in lines for run in line.runs]
    clock = _clock(lines, quantity)
    groups = grouped(lines, lambda run: "")
    heads = ("run", "epoch", f"{clock_of(runs)} (s)", quantity.label)
    rows, thinned = _rows(runs, [quantity], time=True)
    shown = {quantity.label: quantity.shown} if quantity.shown else {}
    caption = quantity.caption + said(lines)
    if len(groups) == 1:
        table = ReportTable(quantity.name, heads, rows, shown, thinned)
        panels = [
            _panel(quantity, "Over epochs", groups[0][1], None, log=log),
            _panel(quantity, "Over time", groups[0][1], clock, log=log),
        ]
        return [Figure(quantity.name, quantity.title, caption, panels, table, 3.4, left_out=left_out)]
    return [
        Figure(
            f"{quantity.name}-over-{over}",
            f"{quantity.title} over {over}",
            caption,
            [_panel(quantity, title, own, of, log=log) for title, own in groups],
            ReportTable(f"{quantity.name}-over-{over}", heads, rows, shown, thinned),
            2.7,
            share_y=True,
            left_out=left_out,
            own_legends=own_legends(lines),
        )
        for over, of in (("epochs", None), ("time", clock))
    ]


def _training(study: Study, lines: Sequence[Line], log: bool) -> list[Figure]:
    """Returns one figure with a panel for each quantity, or one figure for each quantity if there are many lines."""
    found = [(quantity, *_shown(lines, quantity, log)) for quantity in _TRAINED]
    found = [told for told in found if told[1]]
    if not found:
        return []
    quantities = [quantity for quantity, *_ in found]
    left_out = {why: names for _, _, reasons, _ in found for why, names in reasons.items()}
    heads = ("run", "epoch", *(quantity.label for quantity in quantities))
    rows, thinned = _rows(study.known, quantities, time=False)
    shown = {quantity.label: quantity.shown for quantity in quantities if quantity.shown}
    if not any(line.panel for line in lines):
        panels = [_panel(quantity, quantity.title, own, None, log=scale) for quantity, own, _, scale in found]
        caption = f"{' '.join(quantity.caption for quantity in quantities)}{said(lines)}"
        table = ReportTable("training", heads, rows, shown, thinned)
        return [Figure("training", "Training", caption, panels, table, 3.0, left_out=left_out)]
    return [
        Figure(
            quantity.name,
            quantity.title,
            quantity.caption + said(own),
            [_panel(quantity, *group, None, log=scale) for group in grouped(own, lambda run: "")],
            ReportTable(quantity.name, heads, rows, shown, thinned),
            2.7,
            share_y=True,
            left_out=reasons,
            own_legends=own_legends(own),
        )
        for quantity, own, reasons, scale in found
    ]


def _rows(runs: Sequence[Run], quantities: Sequence[_Quantity], *, time: bool) -> tuple[list[tuple[Any, ...]], bool]:
    """Returns the epochs with at least one known quantity, and whether some epochs were left out."""
    rows: list[tuple[Any, ...]] = []
    thinned = False
    for run in runs:
        columns = [quantity.of(run) for quantity in quantities]
        known = np.flatnonzero(np.isfinite(columns).any(0))
        chosen = known[thin(len(known), max(20, MOST_ROWS // len(runs)))]
        thinned = thinned or len(chosen) < len(known)
        values = [*([run.epoch_end_s[chosen]] if time else []), *(column[chosen] for column in columns)]
        rows += zip(
            [run.label] * len(chosen), run.epoch[chosen].astype(int).tolist(), *map(_known, values), strict=True
        )
    return rows, thinned


def _known(values: Numbers) -> Iterable[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
