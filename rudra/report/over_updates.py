"""Figures over updates: staleness, and the distance of replicas from the weights."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rudra.report.curve_styles import Blocks, blocks_of, draw_blocks, draw_histogram, mean_of
from rudra.report.palette import INK
from rudra.report.panels import Figure, Line, Panel, grouped, own_legends, said, set_axes, thin
from rudra.report.runs import Run
from rudra.report.tables import MOST_ROWS, ReportTable

_MOST_POINTS = 150


def staleness(everybody: Sequence[Line]) -> list[Figure]:
    """Returns the figures of staleness. There are none if no gradient is stale, and a note says so."""
    lines = [line for line in (line.of(lambda run: run.stale) for line in everybody) if line.runs]
    runs = [run for line in lines for run in line.runs]
    if not runs:
        return []
    left_out = {"σ = 0": [run.label for line in everybody for run in line.runs if run not in runs]}
    counts = [
        (run.label, sigma, count)
        for run in runs
        for sigma, count in enumerate(run.summary["staleness_histogram"])
        if count
    ]
    law = f" {staleness_law(runs)}"
    about = f"⟨σ⟩ of the gradients in each update (means over blocks, and their range in a panel with one run).{law}."
    histograms = [staleness_histogram(*group) for group in grouped(lines, lambda run: run.protocol)]
    table = ReportTable(
        "staleness-histogram", ("run", "σ", "gradients"), counts[:MOST_ROWS], {}, len(counts) > MOST_ROWS
    )
    return [
        _figure("staleness", "Mean staleness over updates", about, lines, left_out),
        Figure(
            "staleness-histogram",
            "Staleness of gradients",
            f"Age of the gradients on arrival, in updates.{law}; dotted: 2n, which few gradients exceed." + said(lines),
            histograms,
            table,
            2.6,
            share_y=True,
            left_out=left_out,
            own_legends=own_legends(lines),
        ),
    ]


def distances(everybody: Sequence[Line]) -> list[Figure]:
    """Returns the figures of distances. There are none if no learner has its own replica."""
    lines = [line for line in (line.of(lambda run: run.distance is not None) for line in everybody) if line.runs]
    if not lines:
        return []
    sent = [(line.label, f"{line.runs[0].bytes_per_sample:,.0f}") for line in lines if line.runs[0].bytes_per_sample]
    alike = len({count for _, count in sent}) == 1
    bytes_ = sent[0][1] if alike else "; ".join(f"{label}: {count}" for label, count in sent)
    left_out = {"no replicas": [line.runs[0].label for line in everybody if line.runs[0].distance is None]}
    about = (
        "Euclidean distance when replicas are averaged (means over learners and blocks of updates, and their range "
        f"in a panel with one run). Bytes that a learner sends for each sample: {bytes_}."
    )
    return [_figure("distance", "Distance of replicas from the weights", about, lines, left_out)]


_LABELS = {"staleness": "⟨σ⟩", "distance": "distance"}
"""Name of a run's attribute with a value for each update -> its name on axes and in tables."""


def _figure(name: str, title: str, about: str, lines: Sequence[Line], left_out: dict[str, list[str]]) -> Figure:
    """Makes the figure of one quantity over updates. `name` is the attribute of the runs."""
    runs = [run for line in lines for run in line.runs]
    each = max(20, MOST_ROWS // len(runs))
    rows = [row for run in runs for row in _rows(run, name, each)]
    thinned = any(len(_blocks(run, name).update) > each or _blocks(run, name).width > 1 for run in runs)
    return Figure(
        f"{name}-over-updates",
        title,
        about + said(lines),
        [over_updates(*group, name=name) for group in grouped(lines, lambda run: run.protocol)],
        ReportTable(f"{name}-over-updates", ("run", "update", _LABELS[name], "lowest", "highest"), rows, {}, thinned),
        2.6,
        left_out=left_out,
        own_legends=own_legends(lines),
    )


def _blocks(run: Run, name: str) -> Blocks:
    blocks = getattr(run, name)
    assert isinstance(blocks, Blocks)
    return blocks


def _rows(run: Run, name: str, most: int) -> list[tuple[Any, ...]]:
    columns = [column[thin(len(column), most)].tolist() for column in _blocks(run, name)[1:]]
    return [(run.label, *row) for row in zip(*columns, strict=True)]


def staleness_law(runs: Sequence[Run]) -> str:
    """Explains the dashed lines in the panels of staleness."""
    if all(run.job.get("protocol.name") == "hogbatch" for run in runs):
        return "Dashed: the mean that theory expects; in a window, its upper bound"
    return "Dashed: (λ − 1)/c, the mean that theory expects"


def over_updates(title: str, lines: Sequence[Line], *, name: str = "staleness") -> Panel:
    """Draws a quantity over updates. For staleness it adds the expected mean if all lines have the same."""

    def draw(axis: Any) -> None:
        thinned = [[_thinned(_blocks(run, name)) for run in line.runs] for line in lines]
        updates = max((int(b.update[-1]) for blocks in thinned for b in blocks if len(b.update)), default=0)
        for line, blocks in zip(lines, thinned, strict=True):
            style, band = {**line.style, "linewidth": 1.6}, len(lines) == 1 or len(blocks) > 1
            draw_blocks(axis, blocks, style, label=line.label, band=band, updates=updates)
        if name == "staleness":
            _law(axis, lines, lambda run: run.expected_staleness, axis.axhline, "--")
        set_axes(axis, title, "update", _LABELS[name], counts=True)

    return draw


def staleness_histogram(title: str, lines: Sequence[Line]) -> Panel:
    """Draws the share of the gradients with each value of σ."""

    def draw(axis: Any) -> None:
        for line in lines:
            axis.plot([], [], label=line.label, **line.style)
            draw_histogram(axis, mean_of([r.histogram for r in line.runs]), line.style, filled=len(lines) == 1)
        _law(axis, lines, lambda run: run.expected_staleness, axis.axvline, "--")
        _law(axis, lines, lambda run: run.n and 2 * run.n, axis.axvline, ":")
        set_axes(axis, title, "σ (updates)", "gradients (%)", counts=True)
        own = [run for line in lines for run in line.runs]
        axis.set_xlim(-0.7, max(max(len(run.histogram) - 1, 2 * (run.n or 0)) for run in own) + 0.7)

    return draw


def _thinned(blocks: Blocks) -> Blocks:
    """Joins blocks of updates into fewer blocks, and keeps the lowest and the highest value of each."""
    joined = blocks_of(blocks.update, blocks.mean, _MOST_POINTS)
    if joined.width == 1:
        return joined._replace(low=blocks.low, high=blocks.high)
    starts = np.arange(0, len(blocks.update), joined.width)
    low, high = np.minimum.reduceat(blocks.low, starts), np.maximum.reduceat(blocks.high, starts)
    return joined._replace(low=low, high=high)


def _law(
    axis: Any, lines: Sequence[Line], law: Callable[[Run], float | None], draw: Callable[..., Any], linestyle: str
) -> None:
    """Marks the value that a law predicts, in a panel whose runs agree on it."""
    found = {law(line.runs[0]) for line in lines}
    said = found.pop()
    if not found and said:
        draw(said, color=INK, linewidth=1.2, linestyle=linestyle, zorder=2.5)
