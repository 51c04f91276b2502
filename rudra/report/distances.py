"""The figure of a report on replicas that learners average: how far they are from the weights."""

from collections.abc import Sequence
from typing import Any

from rudra.report.analysis import draw_staleness
from rudra.report.panels import Figure, Line, Panel, grouped, own_legends, said, set_axes, thin
from rudra.report.runs import Run
from rudra.report.tables import MOST_ROWS, ReportTable


def distances(everybody: Sequence[Line]) -> list[Figure]:
    """Nothing where no learner has a replica of its own."""
    lines = [line for line in (line.of(lambda run: run.distance is not None) for line in everybody) if line.runs]
    runs = [run for line in lines for run in line.runs]
    if not runs:
        return []

    def over_updates(title: str, lines: Sequence[Line]) -> Panel:
        def draw(axis: Any) -> None:
            found = [[run.distance for run in line.runs if run.distance is not None] for line in lines]
            updates = max(int(blocks.update[-1]) for of_line in found for blocks in of_line)
            for line, of_line in zip(lines, found, strict=True):
                style, band = {**line.style, "linewidth": 1.6}, len(lines) == 1 or len(of_line) > 1
                draw_staleness(axis, of_line, style, label=line.label, band=band, updates=updates)
            set_axes(axis, title, "update", "distance", counts=True)

        return draw

    each = max(20, MOST_ROWS // len(runs))
    rows = [row for run in runs for row in _rows(run, each)]
    sent = [(line.label, f"{line.runs[0].bytes_per_sample:,.0f}") for line in lines if line.runs[0].bytes_per_sample]
    alike = len({count for _, count in sent}) == 1
    bytes_ = sent[0][1] if alike else "; ".join(f"{label}: {count}" for label, count in sent)
    return [
        Figure(
            "distance-over-updates",
            "Distance of replicas from the weights",
            "Euclidean distance when replicas are averaged (means over learners and blocks of updates, and their range "
            f"in a panel with one run). Bytes that a learner sends for each sample: {bytes_}." + said(lines),
            [over_updates(*group) for group in grouped(lines, lambda run: run.protocol)],
            ReportTable("distance-over-updates", ("run", "update", "distance", "lowest", "highest"), rows, {}, False),
            2.6,
            left_out={"no replicas": [line.runs[0].label for line in everybody if line.runs[0].distance is None]},
            own_legends=own_legends(lines),
        )
    ]


def _rows(run: Run, most: int) -> list[tuple[Any, ...]]:
    assert run.distance is not None
    columns = [column[thin(len(column), most)].tolist() for column in run.distance[1:]]
    return [(run.label, *row) for row in zip(*columns, strict=True)]
