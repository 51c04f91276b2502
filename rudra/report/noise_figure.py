"""Figure of the gradient noise scale over epochs, with the samples of an update."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rudra.report.curve_styles import Band, Course, Numbers, band_of, draw_band
from rudra.report.panels import Figure, Line, Panel, grouped, own_legends, said, set_axes, thin
from rudra.report.runs import Run
from rudra.report.tables import MOST_ROWS, ReportTable, number

_KEYS = ("samples", "error", "update_samples")
_LABEL = "noise scale B (samples)"


def noise_scales(everybody: Sequence[Line], *, log: bool) -> list[Figure]:
    """Returns the figure. There is none if no run has norms of gradients, or all have too few."""
    lines = [line for line in (line.of(lambda run: len(_known(run))) for line in everybody) if line.runs]
    runs = [run for line in lines for run in line.runs]
    if not runs:
        return []
    notes = dict.fromkeys(note for run in runs if (note := run.summary["noise_scale"]["note"]))
    about = (
        "B = tr(Σ)/|G|² of the updates in each epoch, with its standard error in a panel with one run. Dotted: samples "
        "of an update. If they are far below B, more samples save updates. If they are far above B, they save few."
    )
    each = max(20, MOST_ROWS // len(runs))
    heads = ("run", "epoch", _LABEL, "standard error", "samples of an update")
    rows = [row for run in runs for row in _rows(run, each)]
    table = ReportTable(
        "noise-scale", heads, rows, dict.fromkeys(heads[2:], number), any(len(_known(run)) > each for run in runs)
    )
    missing = [run.label for line in everybody for run in line.runs if run not in runs]
    return [
        Figure(
            "noise-scale",
            "Gradient noise scale",
            about + "".join(f" {note[0].upper()}{note[1:]}." for note in notes) + said(lines),
            [_panel(*group, log=log) for group in grouped(lines, lambda run: "")],
            table,
            2.8,
            left_out={"no norms of gradients, or too few": missing},
            own_legends=own_legends(lines),
        )
    ]


def _epochs(run: Run) -> Numbers:
    """Returns B, its standard error, and the samples of an update, shape (3, epochs). NaN: unknown."""
    found = run.summary.get("epoch_noise_scale") or []
    return np.array([[epoch[key] for epoch in found] for key in _KEYS], float).reshape(len(_KEYS), -1)


def _known(run: Run) -> NDArray[np.int64]:
    """Returns the places of the epochs whose B is known."""
    return np.flatnonzero(np.isfinite(_epochs(run)[0]))


def _rows(run: Run, most: int) -> list[tuple[Any, ...]]:
    values, known = _epochs(run), _known(run)
    return [(run.label, int(run.epoch[i]), *values[:, i].tolist()) for i in known[thin(len(known), most)]]


def _panel(title: str, lines: Sequence[Line], *, log: bool) -> Panel:
    def draw(axis: Any) -> None:
        for line in lines:
            courses = [[Course(run.epoch, run.epoch, values) for values in _epochs(run)] for run in line.runs]
            band = band_of([scale for scale, _, _ in courses])
            if len(lines) == len(line.runs) == 1:
                there = np.isfinite(courses[0][0].y)
                scale, error = (course.y[there] for course in courses[0][:2])
                band = Band(band.x, scale, scale - error, scale + error)
            draw_band(axis, band, line.style, line.label)
            sizes = band_of([size for _, _, size in courses])
            axis.plot(sizes.x, sizes.y, color=line.style["color"], linestyle=":", linewidth=1.4)
        set_axes(axis, title or "Over epochs", "epoch", _LABEL, counts=True, log=log)

    return draw
