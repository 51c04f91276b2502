"""Figures of a report on heterogeneous workers: convergence, updates by kind, batches and utilisation.

Source: Ma & Rusu, Heterogeneous CPU+GPU SGD, Figures 5 to 8.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.report.curve_styles import COLOURS, Band, Numbers, draw_band, log_ticks, look, time_unit
from rudra.report.panels import Figure, Panel, name_bars, set_axes, stacked_bars, thin
from rudra.report.tables import MOST_ROWS, ReportTable, percent
from rudra.report.workers import MANY, Workers

GOAL = 0.95
"""Share of the drop in loss where the report compares runs."""

_KINDS = ("small", "large")
_DrawOne = Callable[[Any, Workers, int, float, dict[str, Any]], None]


def workers(found: Sequence[tuple[str, Workers]]) -> list[Figure]:
    """Returns the figures of runs with heterogeneous workers, with a label for each run. None without such runs."""
    if not found:
        return []
    names = [about.name for _, about in found]
    named = [
        (name if names.count(name) == 1 else f"{name}: {label}", about)
        for name, (label, about) in zip(names, found, strict=True)
    ]
    courses = normalised([about for _, about in named])
    return [*_convergence(named, courses), _shares(named, courses), *_over_time(named)]


class Convergence(NamedTuple):
    """Convergence of one run. Each array has one value for each window (`Workers.losses`).

    Attributes:
        time_s: time since training began.
        epochs: passes over the training set.
        loss: training loss.
        normalised: (L0 - L) / (L0 - Lmin).
        reached_s: time when the loss (`Workers.falling`) had fallen by 95 % of L0 - Lmin. None: not reached in the
            time that all runs cover.
    """

    time_s: Numbers
    epochs: Numbers
    loss: Numbers
    normalised: Numbers
    reached_s: float | None = None


def normalised(runs: Sequence[Workers]) -> list[Convergence]:
    """Compares runs. L0 is the highest first loss, and Lmin the lowest loss of all runs in the time that all cover.

    If no loss fell or nothing was learned, all courses are empty.
    """
    found = [about.losses(MANY) for about in runs]
    fits = [about.falling() for about in runs]
    shared_s = min(about.end_s for about in runs)
    first = max((loss[0] for *_, loss in found if len(loss)), default=0.0)
    least = min((loss[since_s <= shared_s][-1] for since_s, loss in fits if len(loss)), default=0.0)
    nothing = np.zeros(0)
    if not first > least:  # also NaN, if nothing was learned
        return [Convergence(nothing, nothing, nothing, nothing)] * len(runs)
    made = []
    for course, (since_s, loss) in zip(found, fits, strict=True):
        low = since_s[(loss <= first - GOAL * (first - least)) & (since_s <= shared_s)]
        made.append(Convergence(*course, (first - course[2]) / (first - least), float(low[0]) if len(low) else None))
    return made


def _convergence(named: Sequence[tuple[str, Workers]], courses: Sequence[Convergence]) -> list[Figure]:
    drawn = [(name, course) for (name, _), course in zip(named, courses, strict=True) if len(course.loss) > 1]
    if not drawn:
        return []
    shared_s = min(about.end_s for _, about in named)
    unit, unit_s = time_unit(shared_s)

    def panel(title: str, label: str, per: float, *, time: bool) -> Panel:
        def draw(axis: Any) -> None:
            ends = []
            for i, (name, course) in enumerate(drawn):
                x, y = (course.time_s if time else course.epochs) / per, course.normalised
                draw_band(axis, Band(x, y, y, y), look(i), name)
                ends += [(x[0], x[-1])]
            axis.axhline(GOAL, color=COLOURS[4], linewidth=1.2, linestyle=":")
            set_axes(axis, title, label, "normalised loss")
            axis.set_ylim(min(0.0, max(-0.3, axis.get_ylim()[0])), 1.08)
            least, most = (np.array(side) for side in zip(*ends, strict=True))
            if time:
                axis.set_xlim(0, shared_s / per)
            elif most.max() > 20 * most.min():  # a run with only small workers completes few epochs
                log_ticks(axis.xaxis, least.min(), most.max())
                axis.set_xlim(least.min(), most.max())

        return draw

    rows = []
    for name, course in drawn:
        chosen = thin(len(course.loss), max(20, MOST_ROWS // len(drawn)))
        rows += [(name, *values) for values in zip(*(column[chosen].tolist() for column in course[:4]), strict=True)]
    heads = ("run", "time (s)", "epochs", "training loss", "normalised loss")
    return [
        Figure(
            "workers-convergence",
            "Convergence of heterogeneous workers",
            "Training loss L as (L0 − L) / (L0 − Lmin): 0 where training begins, 1 at the least loss of all runs in "
            "the time of the shortest. L is the mean over the samples of the gradients as they were computed, in "
            "windows of 1/100 of an epoch and of the time, or more. Dotted: 95 % of the drop.",
            [panel("Over time", f"time ({unit})", unit_s, time=True), panel("Over epochs", "epochs", 1.0, time=False)],
            ReportTable("workers-convergence", heads, rows, {}),
            3.4,
            share_y=True,
        )
    ]


def _shares(named: Sequence[tuple[str, Workers]], courses: Sequence[Convergence]) -> Figure:
    shares = [(name, [about.share(kind) for kind in _KINDS]) for name, about in named]
    rows = [(name, *share, course.reached_s) for (name, share), course in zip(shares, courses, strict=True)]

    def draw(axis: Any) -> None:
        stacked_bars(axis, shares, {f"{kind} workers": COLOURS[i] for i, kind in enumerate(_KINDS)})
        names = [f"{name}: {small:.1f} %" for name, (small, _) in shares]
        name_bars(axis, names, "Updates", "share of the updates (%)")
        axis.set(xlim=(0, 100), xticks=range(0, 101, 25))

    heads = ("run", *(f"{kind}: updates (%)" for kind in _KINDS), "time to 95 % of the drop in loss (s)")
    return Figure(
        "workers-updates",
        "Updates by kind of worker",
        "Shares of the updates made by small workers (one for each part of a batch) and by large workers.",
        [draw],
        ReportTable("workers-updates", heads, rows, dict.fromkeys(heads[1:3], percent)),
        1.1 + 0.42 * len(rows),
    )


def _over_time(named: Sequence[tuple[str, Workers]]) -> list[Figure]:
    """Returns one panel for each run with the batch size or the utilisation of each worker."""

    def people(about: Workers) -> list[tuple[int, str]]:
        alone = [about.kinds.count(kind) == 1 for kind in about.kinds]
        return [(i, kind if alone[i] else f"{kind} {i}") for i, kind in enumerate(about.kinds)]

    def panel(name: str, about: Workers, draw_one: _DrawOne, y: str) -> Panel:
        unit, unit_s = time_unit(about.end_s)

        def draw(axis: Any) -> None:
            for i, who in people(about):
                style = look(_KINDS.index(about.kinds[i]) if len(about.kinds) <= 2 else i)
                draw_one(axis, about, i, unit_s, {**style, "label": who})
            set_axes(axis, name, f"time ({unit})", y, log=y.startswith("batch"))
            axis.set_xlim(0, about.end_s / unit_s)

        return draw

    def batch(axis: Any, about: Workers, i: int, unit_s: float, style: dict[str, Any]) -> None:
        began_s, sizes = about.batches(i)
        chosen = thin(len(sizes), 400)
        style = {**style, "marker": "", "linewidth": 1.4}
        axis.plot(began_s[chosen] / unit_s, sizes[chosen], drawstyle="steps-post", **style)

    def used(axis: Any, about: Workers, i: int, unit_s: float, style: dict[str, Any]) -> None:
        x, y = about.utilisation(i)
        axis.plot(x / unit_s, y, **{**style, "marker": "", "linewidth": 1.6})
        axis.set_ylim(0, 105)

    means = [
        (name, who, float(about.utilisation(i)[1].mean()), about.updates[i], _median(about.batches(i)[1]))
        for name, about in named
        for i, who in people(about)
    ]
    heads = ("run", "worker", "utilisation (%)", "updates", "median batch")
    return [
        Figure(
            "workers-utilisation",
            "Utilisation of workers",
            "Share of the time in which a worker computes. For a large worker it is multiplied by "
            "its samples a second relative to its largest batches.",
            [panel(name, about, used, "utilisation (%)") for name, about in named],
            ReportTable("workers-utilisation", heads, means, {heads[2]: percent}),
            2.4,
            share_y=True,
        ),
        Figure(
            "workers-batches",
            "Batches of workers",
            "Samples of each batch, over time.",
            [panel(name, about, batch, "batch (samples)") for name, about in named],
            ReportTable("workers-batches", heads, means, {heads[2]: percent}),
            2.4,
            share_y=True,
            from_zero=False,
        ),
    ]


def _median(sizes: NDArray[np.int64]) -> int | None:
    return int(np.median(sizes)) if len(sizes) else None
