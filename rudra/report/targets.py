"""The figure of a report on targets: the time to a target over the number that the study varies most."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from rudra.report.curve_styles import Band, draw_band, log_ticks, look, matters
from rudra.report.panels import Figure, Panel, set_axes
from rudra.report.runs import Run, Study, follows, varying, words
from rudra.report.tables import ReportTable, clock_of

_AXES = {  # key of the job -> name of the axis
    "cluster.learners": "learners λ",
    "averaging.period": "mini-batches between averages τ",
    "training.minibatch_size": "mini-batch size μ",
}
_BANK, _GROWS = "cluster.learners_per_device", "auto"
_OF_BANKS = {_BANK, "cluster.learners", "cluster.most_learners_per_device", "cluster.growth"}
_HEADS = (("epochs to target", ""), ("time to target", " (s)"), ("samples/s", ""))
_LONG = 16  # smallest ratio of highest to lowest value for a logarithmic axis

Curve = dict[int, list[Run]]
"""Place on the axis -> runs of several seeds at this place."""


def targets(study: Study) -> list[Figure]:
    """Returns the figure. There is none if no run has a target, or if the runs differ in no number for an axis."""
    runs = [run for run in study.known if run.finished and run.summary["target"]]
    grows = any(run.job.get(_BANK) == _GROWS for run in runs)
    axis = _BANK if grows else max(_AXES, key=lambda key: len({run.job.get(key) for run in runs}))
    label = _AXES.get(axis, "learners on each device m")
    places: list[Any] = [(run.summary["learners_per_device"] or 1) if grows else run.job.get(axis) for run in runs]
    if len({*places}) < 2 or not all(isinstance(place, int) for place in places):
        return []
    clock = clock_of(runs)
    quantities = [
        ("Epochs to target", "epochs", "target_epoch"),
        ("Time to target", f"{clock} (s)", "time_to_target_s"),
        ("Speed", "samples/s", "samples_per_s"),
    ]
    curves: dict[str, Curve] = {}
    for run, name, place in zip(runs, _names(runs, axis), places, strict=True):
        curves.setdefault(name, {}).setdefault(place, []).append(run)
    rows = [
        (name, place, len(own), *(cell for *_, key in quantities for cell in _cells(own, key)))
        for name, curve in curves.items()
        for place, own in sorted(curve.items())
    ]
    heads = [f"{what}{of}{unit}" for what, unit in _HEADS for of in ("", ", least", ", most")]
    late = [
        f"{name} at {place} ({missing} of {len(own)})"
        for name, curve in curves.items()
        for place, own in sorted(curve.items())
        if (missing := sum(run.summary["target_epoch"] is None for run in own))
    ]
    goal = ", ".join(dict.fromkeys(run.summary["target"] for run in runs))
    return [
        Figure(
            "target",
            "To the target",
            f"When the median of the last five evaluations reached the target ({goal}). Of several seeds: the median, "
            "and the range; a run that did not reach it ranks after all others.",
            [_panel(title, unit, curves, key, label) for title, unit, key in quantities],
            ReportTable("target", ("runs", label, "seeds", *heads), rows, {}),
            3.0,
            left_out={"Did not reach it": late},
        )
    ]


def _names(runs: Sequence[Run], axis: str) -> list[str]:
    """Returns names of the curves: the protocol, and settings that follow neither from it nor from the axis."""
    known = [(run.protocol, run.job.get(axis)) for run in runs]
    given = {axis} if axis != _BANK else _OF_BANKS
    keys = [key for key in varying(runs) if key not in given and matters(key) and not follows(key, known, runs)]
    grew = [[f"m by rule {run.job['cluster.growth']}"] if run.job.get(_BANK) == _GROWS else [] for run in runs]
    return [
        ", ".join([run.protocol, *(words(key, run.job.get(key)) for key in keys), *rule])
        for run, rule in zip(runs, grew, strict=True)
    ]


def _cells(runs: Sequence[Run], key: str) -> tuple[float | None, ...]:
    """Returns median, lowest and highest value. A run that missed the target counts as the slowest."""
    values = [math.inf if run.summary[key] is None else run.summary[key] for run in runs]
    found = statistics.median(values), min(values), max(values)
    return tuple(value if math.isfinite(value) else None for value in found)


def _panel(title: str, label: str, curves: dict[str, Curve], key: str, where: str) -> Panel:
    def draw(axis: Any) -> None:
        for i, (name, curve) in enumerate(curves.items()):
            places = sorted(curve)
            cells = np.array([_cells(curve[place], key) for place in places], float)
            draw_band(axis, Band(np.array(places, float), *cells.T), look(i), name)
        set_axes(axis, title, where, label, counts=True)
        axis.yaxis.set_major_formatter("{x:,g}")
        least, most = (which(which(curve) for curve in curves.values()) for which in (min, max))
        axis.set_xlim(0, 1.05 * most)
        if most >= _LONG * least:
            log_ticks(axis.xaxis, least, most)
            axis.set_xlim(0.9 * least, 1.1 * most)

    return draw
