"""Figures of a report: which runs a panel shows, how it is drawn, and the numbers behind it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rudra.report.curve_styles import COLOURS, log_ticks, look, time_unit
from rudra.report.curves import curves
from rudra.report.noise_figure import noise_scales
from rudra.report.over_updates import distances, staleness
from rudra.report.palette import GRID, MUTED
from rudra.report.panels import AfterLayout, Figure, Panel, family_order, lines_of, name_bars, set_axes, stacked_bars
from rudra.report.penalties import penalties
from rudra.report.runs import Run, Study
from rudra.report.tables import ReportTable, base_of, clock_of, percent, speed_up
from rudra.report.targets import targets
from rudra.report.worker_figures import workers

_MOST_POINTS = 150
_MOST_BARS = 30


def figures(study: Study, everything: Sequence[Run], *, log: bool = False) -> list[Figure]:
    """Returns all figures that the data of a study's runs allows, the study's main figure first.

    Args:
        study: runs to draw.
        everything: all runs of the report. The tradeoff curves show the hardsync region of the other runs.
        log: logarithmic axes for errors, losses and learning rates.
    """
    lines = lines_of(study.known) if study.known else []
    made = [
        *curves(study, lines, log=log),
        *workers([(run.label, run.workers) for run in study.known if run.workers is not None]),
        *targets(study),
        *staleness(lines),
        *distances(lines),
        *noise_scales(lines, log=log),
        *_tradeoff(study, everything),
        *_speed_up(study),
        *penalties(study),
        *_roles(study),
    ]
    first = {"test-error": ("error", "loss"), "speed-up": ("speedup",)}.get(study.figure, (study.figure,))
    return sorted(made, key=lambda figure: not figure.name.startswith(first))


def _tradeoff(study: Study, everything: Sequence[Run]) -> list[Figure]:
    runs = [run for run in study.known if run.finished and run.error is not None and run.time_s > 0]
    left_out = {"Not finished, or without an error": [run.label for run in study.known if run not in runs]}
    points = _points(runs)
    if len({key for cells in points.values() for key in cells}) < 3:
        return []
    like = [run for run in everything if run.finished and run.error is not None and _alike(run, runs[0])]
    hardsync = _points(like).get("hardsync", {})
    sizes = sorted({mu for cells in points.values() for mu, _ in cells})
    unit, unit_s = time_unit(max(run.time_s for run in runs))
    times = [time_s for cells in (*points.values(), hardsync) for time_s, _ in cells.values()]
    baseline = _baseline(runs)
    lines = [("baseline", baseline.error, "--")] if baseline else []
    level = f" Dashed: the baseline {baseline.triple} with {baseline.error:.1f} %." if baseline else ""
    if not study.quick:
        theirs = [r for r in study.paper if r.get("learners") == 1 and "test_error" in r and study.of(r)]
        lines += [("the paper's", 100 * row["test_error"], ":") for row in theirs[:1]]
        level += " Dotted: the paper's." if theirs else ""

    def panel(family: str, cells: dict[tuple[int, int], tuple[float, float]]) -> Panel:
        def draw(axis: Any) -> AfterLayout:
            if family != "hardsync":
                _shade(axis, hardsync, unit_s)
            ends = []
            for lam in sorted({lam for _, lam in cells}):
                path = [cells[mu, lam] for mu in sizes if (mu, lam) in cells]
                x, y = [t / unit_s for t, _ in path], [error for _, error in path]
                axis.plot(x, y, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), zorder=1.5)
                ends.append((f"λ = {lam}", list(zip(x, y, strict=True))))
            for i, mu in enumerate(sizes):
                path = [cells[mu, lam] for lam in sorted({lam for _, lam in cells}) if (mu, lam) in cells]
                x, y = [t / unit_s for t, _ in path], [error for _, error in path]
                style = {**look(i), "linestyle": "-"}
                axis.plot(x, y, label=f"μ = {mu}", zorder=3, **style)
            for text, error, dashes in lines:
                axis.axhline(error, color=COLOURS[4], linewidth=1.3, linestyle=dashes, label=text, zorder=1.2)
            set_axes(axis, family, f"{clock_of(runs)} ({unit})", "test error (%)")
            if max(times) > 6 * min(times):
                log_ticks(axis.xaxis, min(times) / unit_s, max(times) / unit_s)
                axis.set_xlim(0.7 * min(times) / unit_s, 1.25 * max(times) / unit_s)
            else:
                axis.set_xlim(0, 1.08 * max(times) / unit_s)
            return lambda: _place(axis, ends)

        return draw

    order = sorted(points.items(), key=lambda item: family_order(item[0]))
    rows = [
        (family, mu, lam, time_s, error)
        for family, cells in order
        for (mu, lam), (time_s, error) in sorted(cells.items())
    ]
    heads = ("protocol", "μ", "λ", f"{clock_of(runs)} (s)", "test error (%)")
    shading = " Grey area: hardsync's points." if hardsync and len(points) > ("hardsync" in points) else ""
    distinct = {(run.family, run.minibatch_size, run.learners) for run in runs}
    repeated = " Points are means over runs with equal protocol, μ and λ." if len(runs) > len(distinct) else ""
    return [
        Figure(
            "tradeoff",
            "Test error against training time",
            "Each point is a run: the lower and the further left, the better. Coloured lines join equal μ, dashed grey "
            f"lines equal λ.{level}{shading}{repeated}",
            [panel(family, cells) for family, cells in order],
            ReportTable("tradeoff", heads, rows, {heads[4]: percent}),
            3.9,
            share_y=True,
            from_zero=False,
            left_out=left_out,
        )
    ]


def _points(runs: Sequence[Run]) -> dict[str, dict[tuple[int, int], tuple[float, float]]]:
    """Returns protocol -> (μ, λ) -> mean time in seconds and test error in percent.

    With one learner all softsync protocols are the same, so a run with one learner belongs to all of them.
    """
    families = {run.family for run in runs if run.learners > 1} or {run.family for run in runs}
    found: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = {}
    for run in runs:
        own = run.learners > 1 or run.n is None or run.family not in families
        homes = [run.family] if own else [family for family in families if family != "hardsync"]
        for family in homes or [run.family]:
            cell = found.setdefault(family, {}).setdefault((run.minibatch_size, run.learners), [])
            cell.append((run.time_s, run.error or 0.0))
    return {
        family: {
            key: (float(np.mean([t for t, _ in c])), float(np.mean([e for _, e in c]))) for key, c in cells.items()
        }
        for family, cells in found.items()
    }


def _alike(one: Run, other: Run) -> bool:
    keys = ("model.name", "data.name", "data.train_limit", "training.epochs")
    return one.virtual == other.virtual and all(one.job.get(key) == other.job.get(key) for key in keys)


def _baseline(runs: Sequence[Run]) -> Run | None:
    """(0, B, 1): one learner with the batch size that the learning rate was tuned for."""
    alone = [r for r in runs if r.learners == 1 and r.minibatch_size == r.job.get("protocol.reference_batch_size")]
    return min(alone, key=lambda run: run.n is not None, default=None)


def _shade(axis: Any, cells: dict[tuple[int, int], tuple[float, float]], unit_s: float) -> None:
    """Fills the complete meshes of the hardsync grid."""
    sizes, lambdas = (sorted({key[i] for key in cells}) for i in (0, 1))
    for mu, next_mu in pairwise(sizes):
        for lam, next_lam in pairwise(lambdas):
            corners = [(mu, lam), (mu, next_lam), (next_mu, next_lam), (next_mu, lam)]
            if all(corner in cells for corner in corners):
                x, y = zip(*(cells[corner] for corner in corners), strict=True)
                axis.fill([t / unit_s for t in x], y, facecolor=GRID, edgecolor=GRID, linewidth=0.8, zorder=0.5)


def _speed_up(study: Study) -> list[Figure]:
    runs = [run for run in study.known if run.finished and speed_up(run, study.known) is not None]
    alone = [run for run in runs if run.learners == 1]
    panels: list[Panel] = []
    rows = []
    families = sorted({run.family for run in runs if run.learners > 1}, key=family_order)
    for mu in sorted({run.minibatch_size for run in runs if run.learners > 1}, reverse=True):
        curves = {}
        for family in families:
            points = {1: 1.0} | {
                run.learners: speed_up(run, study.known) or 0.0
                for run in runs
                if run.minibatch_size == mu and run.learners > 1 and run.family == family
            }
            if len(points) > 1:
                curves[family] = sorted(points.items())
        base = base_of(next(run for run in alone if run.minibatch_size == mu), alone)
        panels.append(_speed_up_panel(f"μ = {mu}", families, curves, base.triple if base else ""))
        rows += [(mu, family, lam, factor) for family, points in curves.items() for lam, factor in points]
    if not panels:
        return []
    virtual = "virtual time" if all(run.virtual for run in runs) else "time"
    heads = ("μ", "protocol", "λ", "speed-up")
    return [
        Figure(
            "speedup",
            "Speed-up",
            f"Samples per second of {virtual} against one learner with the same μ. Dotted: λ times as fast.",
            panels,
            ReportTable("speedup", heads, rows, {"speed-up": percent}),
            3.2,
        )
    ]


def _speed_up_panel(title: str, families: Sequence[str], curves: dict[str, Any], base: str) -> Panel:
    def draw(axis: Any) -> None:
        for family, points in curves.items():
            i = families.index(family)
            x, y = zip(*points, strict=True)
            axis.plot(x, y, label=family, **look(i))
        top = 1.08 * max(factor for points in curves.values() for _, factor in points)
        most = max(lam for points in curves.values() for lam, _ in points)
        axis.plot([0, most], [0, most], color=MUTED, linewidth=1.2, linestyle=":", scalex=False, scaley=False, zorder=1)
        set_axes(axis, title, "learners λ", f"speed-up over {base}", counts=True)
        axis.set_ylim(0, top)

    return draw


_ROOM = 1.28  # for the number next to a bar, as a factor of the longest bar
_PHASES = {
    "compute": COLOURS[0],
    "reduce": COLOURS[3],
    "push": COLOURS[1],
    "wait": COLOURS[4],
    "pull": COLOURS[2],
    "update": COLOURS[5],
}


def _roles(study: Study) -> list[Figure]:
    runs = [run for run in study.known if run.summary["learner_times"] and run.time_s > 0]
    if not runs:
        return []
    shares = []
    for run in runs:
        times = run.summary["learner_times"]
        phases = [100 * float(np.mean([row[f"{phase}_share"] or 0.0 for row in times])) for phase in _PHASES]
        whole = max(0.0, 100 - sum(phases))
        tested_s = max(run.time_s, run.evaluation_s)  # the last evaluation may end after the training
        shares.append((*phases, whole, 100 * run.update_s / run.time_s, 100 * run.evaluation_s / tested_s))
    drawn = [(run.label, share) for run, share in zip(runs, shares, strict=True)][:_MOST_BARS]
    kinds = {**_PHASES, "other": MUTED}
    longest = max(100.0, *(max(sum(share[: len(kinds)]), *share[len(kinds) :]) for _, share in drawn))

    def learners(axis: Any) -> None:
        stacked_bars(axis, drawn, kinds)
        name_bars(axis, [label for label, _ in drawn], "Learners (mean)", "share of the time (%)")
        axis.set(xlim=(0, _ROOM * longest), xticks=range(0, 101, 25))

    def single(title: str, column: int) -> Panel:
        def draw(axis: Any) -> None:
            values = [share[column] for _, share in drawn]
            axis.barh(range(len(drawn)), values, height=0.42, color=COLOURS[5])
            for i, value in enumerate(values):
                axis.annotate(
                    f"{value:.2f} %", (value, i), (3, 0), textcoords="offset points", va="center", fontsize="small"
                )
            name_bars(axis, [label for label, _ in drawn], title, "share of the time (%)")
            axis.set(xlim=(0, _ROOM * longest), xticks=range(0, 101, 25))

        return draw

    heads = ("run", *(f"learners: {kind} (%)" for kind in kinds), "server: updates (%)", "statistics: evaluation (%)")
    rows = [(run.label, *share) for run, share in zip(runs, shares, strict=True)]
    left_out = f" Drawn are the first {_MOST_BARS} of {len(runs)} runs." if len(runs) > _MOST_BARS else ""
    others = enumerate(("Server: updates", "Statistics server: evaluation"), len(kinds))
    virtual = "virtual training time" if all(run.virtual for run in runs) else "training time"
    return [
        Figure(
            "roles",
            "Time per role",
            f"Share of the {virtual} that each role spent at its work. The rest of the server's time is messages "
            "and waiting for them. Evaluations run in parallel with training; the last one may end after "
            f"it.{left_out}",
            [learners, *(single(title, i) for i, title in others if any(share[i] > 0 for _, share in drawn))],
            ReportTable("roles", heads, rows, dict.fromkeys(heads[1:], percent)),
            1.1 + 0.42 * len(drawn),
            left_out={"No times of roles": [run.label for run in study.known if run not in runs]},
        )
    ]


def _place(axis: Any, labels: Sequence[tuple[str, list[tuple[float, float]]]]) -> None:
    """Writes each label next to its line, at the position that covers the fewest points and other labels."""
    renderer = axis.figure.canvas.get_renderer()
    taken: list[Any] = []
    lines = [axis.transData.transform(line.get_xydata()) for line in axis.lines if line.get_label()[0] == "μ"]
    dots = np.vstack([line for line in lines if len(line)])
    steps = np.linspace(0, 1, 12)[:, None]
    between = np.vstack([dots, *(a + (b - a) * steps for line in lines for a, b in pairwise(line))])
    frame = axis.get_window_extent(renderer)
    for text, path in labels:
        best: Any = None
        for at in (path[-1], path[0], *path[1:-1]):
            for dx, dy in ((0, 9), (9, 0), (0, -9), (-9, 0), (8, 8), (8, -8), (-8, 8), (-8, -8)):
                ha, va = ("left", "center", "right")[1 - np.sign(dx)], ("bottom", "center", "top")[1 - np.sign(dy)]
                note = axis.annotate(
                    text, at, (dx, dy), textcoords="offset points", ha=ha, va=va, color=MUTED, fontsize="small"
                )
                note.set_in_layout(False)
                box = note.get_window_extent(renderer).padded(2)
                cost = 3 * sum(box.overlaps(other) for other in taken) + box.count_contains(dots)
                cost += 0.1 * box.count_contains(between)
                middle = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
                nearest = dots[np.hypot(*(dots - middle).T).argmin()]
                cost += 2 * (not np.isclose(axis.transData.transform(path), nearest).all(axis=1).any())
                cost += 2 * (not all(frame.contains(x, y) for x, y in box.corners()))
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (cost, note, box)
                else:
                    note.remove()
            if best[0] == 0:
                break
        taken.append(best[2])
