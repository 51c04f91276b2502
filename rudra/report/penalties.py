"""The figure of a report over the number of compute groups: hardware gain, statistical cost, and both.

Penalties are relative to one group. P_HE compares the time per iteration, and P_SE the iterations to the target.
P_Total, their product, compares the time to the target. If several momenta and learning rates were run, each number of
groups uses the pair that reaches the target first.

Source: omnivore.txt §IV-A (equations 8 to 10) and Figures 26 to 30.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from rudra.report.curve_styles import Band, draw_band, look
from rudra.report.palette import MUTED
from rudra.report.panels import Figure, Panel, set_axes
from rudra.report.runs import Run, Study
from rudra.report.tables import ReportTable, best_of, epochs_to_target, iteration_s

_TITLES = ("P_HE: time per iteration", "P_SE: iterations to the target", "P_Total: time to the target")


class _Place(NamedTuple):
    """Runs with one number of groups, at the best momentum and learning rate for this number."""

    groups: int
    runs: Sequence[Run]

    @property
    def measures(self) -> tuple[Sequence[float], Sequence[float]]:
        """Returns for each run the seconds per iteration, and the epochs to the target (infinite if not reached)."""
        return [iteration_s(run) or math.nan for run in self.runs], [epochs_to_target(run) for run in self.runs]


def penalties(study: Study) -> list[Figure]:
    """Returns the figure. There is none if the study did not request it, or no run has one group."""
    if study.figure != "penalties":
        return []
    runs = [run for run in study.known if run.finished and run.n and iteration_s(run)]
    curves = {kind: _curve([run for run in runs if _kind(run) == kind]) for kind in dict.fromkeys(map(_kind, runs))}
    curves = {kind: curve for kind, curve in curves.items() if curve[0].groups == 1 and len(curve) > 1}
    if not curves:
        return []
    drawn = {id(run) for curve in curves.values() for place in curve for run in place.runs}
    several = any(len(place.runs) > 1 for curve in curves.values() for place in curve)
    statistics = any(np.isfinite(_ratios(curve)[1].y[1:]).any() for curve in curves.values())
    tuned = len(drawn) < len(runs)
    return [
        Figure(
            "penalties",
            "Penalties over compute groups",
            "Relative to one group, whose penalties are 1."
            + " Of several seeds: the median, and the range." * several
            + " With the momentum and the learning rate that need the fewest epochs." * tuned,
            [_panel(title, i, curves) for i, title in enumerate(_TITLES[: 3 if statistics else 1])],
            ReportTable("penalties", _HEADS, [row for kind in curves for row in _rows(kind, curves[kind])], {}),
            3.0,
            left_out={"not finished, or without one group": [r.label for r in study.known if r not in runs]},
        )
    ]


def _kind(run: Run) -> str:
    return "unmerged" if run.job.get("placement.cut") is None else "merged"


def _curve(runs: Sequence[Run]) -> list[_Place]:
    """Returns the places ordered by g."""
    counts = sorted({run.n or 0 for run in runs})
    return [_Place(g, best_of([run for run in runs if run.n == g])) for g in counts]


def _ratios(curve: Sequence[_Place]) -> tuple[Band, ...]:
    """Returns P_HE, P_SE and P_Total over g. NaN: unknown."""
    base = [value if math.isfinite(value) else math.nan for value in map(median, curve[0].measures)]
    x = np.array([place.groups for place in curve], float)
    each = [[np.array(values) / base[i] for i, values in enumerate(place.measures)] for place in curve]
    medians = [[float(np.median(values)) for values in both] for both in each]
    bands = []
    for which in ([0], [1], [0, 1]):
        of_runs = [np.prod([both[i] for i in which], 0) for both in each]
        y = [math.prod(both[i] for i in which) for both in medians]
        table = [(middle, min(middle, *runs), max(middle, *runs)) for middle, runs in zip(y, of_runs, strict=True)]
        bands.append(Band(x, *np.where(np.isfinite(table), table, np.nan).T))
    return tuple(bands)


def _panel(title: str, which: int, curves: Mapping[str, Sequence[_Place]]) -> Panel:
    def draw(axis: Any) -> None:
        for i, (kind, curve) in enumerate(curves.items()):
            draw_band(axis, _ratios(curve)[which], look(i), kind)
        axis.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=":", zorder=1)
        groups = sorted({place.groups for curve in curves.values() for place in curve})
        set_axes(axis, title, "compute groups g", title.partition(":")[0])
        axis.set_xscale("log", base=2)
        axis.set_xlim(0.85 * groups[0], 1.18 * groups[-1])
        axis.set_xticks(groups, [str(g) for g in groups])
        axis.minorticks_off()

    return draw


_SETTINGS = ("last layers", "g", "momentum", "η")
_HEADS = (*_SETTINGS, "time per iteration (s)", "epochs to target", "P_HE", "P_SE", "P_Total")


def _rows(kind: str, curve: Sequence[_Place]) -> list[tuple[Any, ...]]:
    rows = []
    for i, place in enumerate(curve):
        job = place.runs[0].job
        seconds, epochs = (median(values) for values in place.measures)
        numbers = (seconds, epochs, *(float(band.y[i]) for band in _ratios(curve)))
        told = [value if math.isfinite(value) else None for value in numbers]
        rows.append((kind, place.groups, job.get("optimizer.momentum"), job.get("optimizer.learning_rate"), *told))
    return rows
