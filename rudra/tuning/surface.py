"""Surface of a search: predicted time to the target over the kind of a point and one more dimension."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rudra.report.panels import AfterLayout, Figure
from rudra.report.tables import ReportTable
from rudra.results.progress import duration
from rudra.tuning.rounds import OF_KIND, RATE, SIZE, diverges, kind
from rudra.tuning.space import Settings, in_words, said
from rudra.tuning.state import Estimate, SearchState
from rudra.tuning.untried import LEFT, Untried

GROUPS = "topology.options.groups"

ROWS = {SIZE: "mini-batch μ (samples)", RATE: "learning rate α0"}
"""Keys that may be the vertical axis -> title of the axis with its unit."""

SHADES = ((1.15, "#0b4a7a"), (1.5, "#2a6fa5"), (2.0, "#6fb0d8"), (4.0, "#a9d0e8"), (math.inf, "#d6e9f5"))
"""Largest ratio to the best time -> colour."""

FAILED, UNTRIED = "#f3cfc6", "#efefef"

DIVERGES = "dropped: a probe diverged that had no larger rate, momentum, staleness and mini-batch"

Kind = tuple[object, ...]


class Cell(NamedTuple):
    """A cell of the surface.

    Attributes:
        ratio: Best time of its candidates in units of the best time of all. Infinity: they make no progress. None: no
            candidate was tried.
        text: Its best candidate, or why it has none.
    """

    ratio: float | None
    text: str


class Surface(NamedTuple):
    """Times of candidates from the common checkpoint, by kind and by another setting.

    Attributes:
        key: Key of the rows.
        columns: Kind -> name, the least stale kind first.
        rows: Values of the key, in order.
        cells: Cells by kind and value.
    """

    key: str
    columns: Mapping[Kind, str]
    rows: Sequence[Any]
    cells: Mapping[tuple[Kind, Any], Cell]

    @classmethod
    def of(cls, state: SearchState, left: Sequence[Untried]) -> "Surface":
        """Makes the surface of a search.

        Args:
            state: The search.
            left: Points without a probe.
        """
        tried = [probe.by_key for probe in state.probes.values() if probe.origin]
        values = {key: sorted({s[key] for s in tried if key in s}) for key in ROWS}
        key = max(values, key=lambda each: len(values[each]))
        rows = sorted({*values[key], *(p.point.settings[key] for p in state.prices if key in p.point.settings)})
        columns, estimates = _columns(state), state.estimates()
        cells = {(c, row): _cell(state, estimates, left, c, key, row) for c in columns for row in rows}
        return cls(key, columns, rows, cells)

    def figure(self) -> Figure:
        """Returns the surface as a figure."""
        places = {(c, r): (i, j) for i, c in enumerate(self.columns) for j, r in enumerate(self.rows)}
        ids = {at: f"cell-{i}-{j}" for at, (i, j) in places.items()}

        def draw(axis: Any) -> AfterLayout:
            seen: set[str] = set()
            for at, (i, j) in sorted(places.items(), key=lambda item: _order(self.cells[item[0]].ratio)):
                colour, label = _look(self.cells[at].ratio)
                shown = "_" if label in seen else label  # the legend has each colour once
                seen.add(label)
                edge = {"edgecolor": "#c4c4c4", "linewidth": 0.6}
                (bar,) = axis.bar([i], [0.94], 0.94, bottom=[j - 0.47], color=colour, label=shown, **edge)
                bar.set_gid(ids[at])
            axis.grid(False)
            axis.set(title="Time, as a multiple of the best", xlim=(-0.5, len(self.columns) - 0.5))
            axis.set(ylim=(-0.5, len(self.rows) - 0.5), ylabel=ROWS[self.key])
            axis.set_xlabel("protocol, by staleness σ (updates)")
            axis.set_xticks(range(len(self.columns)), [*self.columns.values()], rotation=40, ha="right")
            axis.set_yticks(range(len(self.rows)), [f"{row:g}" for row in self.rows])
            return lambda: self._number(axis, places)

        shown = ("kind", self.key, "times the best", "candidate, or why there is none")
        rows = [(self.columns[c], row, _finite(cell.ratio), cell.text) for (c, row), cell in self.cells.items()]
        return Figure(
            "surface",
            "Predicted time to the target",
            "Each cell is the best candidate of a protocol with its splitting. Its number is the time "
            "from the common checkpoint to the target, as a multiple of the best time. Point at a cell to see the "
            "candidate, or why none was tried.",
            [draw],
            ReportTable("surface", shown, rows, {"times the best": "{:.2f}".format}),
            2.2 + 0.36 * max(4, len(self.rows)),
            tooltips={ids[at]: self._tooltip(at) for at in places},
        )

    def _number(self, axis: Any, places: Mapping[tuple[Kind, Any], tuple[int, int]]) -> None:
        """Writes the ratios into the cells, as far as they have room."""
        room = axis.get_window_extent().width / axis.figure.dpi * 72 / len(self.columns)  # in points
        for at, (i, j) in places.items():
            ratio = self.cells[at].ratio
            if ratio is not None and math.isfinite(ratio) and room > 16:
                ink = "#ffffff" if ratio <= SHADES[1][0] else "#1a1a1a"
                text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
                axis.text(i, j, text, ha="center", va="center", color=ink, fontsize=min(9.0, room / 2.6))

    def _tooltip(self, at: tuple[Kind, Any]) -> str:
        column, row = at
        return f"{self.columns[column]}, {said(self.key, row)}: {self.cells[at].text}"


def _columns(state: SearchState) -> dict[Kind, str]:
    """Returns the names of all kinds in the space, the least stale one first."""
    staleness: dict[Kind, float] = {}
    for price in state.prices:
        its = _kind(price.point.settings)
        staleness[its] = min(price.staleness, staleness.get(its, math.inf))
    names = {each: _name(each) for each in staleness}
    order = sorted(staleness, key=lambda each: (staleness[each], names[each]))
    return {each: f"{names[each]} (σ {staleness[each]:.1f})" for each in order}


def _kind(settings: Settings) -> Kind:
    """Returns the kind of a point. One group is as good as none."""
    return kind({key: value for key, value in settings.items() if (key, value) != (GROUPS, 1)})


def _name(its: Kind) -> str:
    return in_words(dict(zip(OF_KIND, its, strict=True))) or "the job's protocol"


def _cell(
    state: SearchState, estimates: Sequence[Estimate], left: Sequence[Untried], column: Kind, key: str, row: Any
) -> Cell:
    def here(settings: Settings) -> bool:
        return _kind(settings) == column and settings.get(key, row) == row

    mine = [estimate for estimate in estimates if here(estimate.settings)]
    if mine:
        return Cell(mine[0].time_s / estimates[0].time_s, _told(mine[0]))
    failed = (state.outcomes[p.name].failed for p in state.probes.values() if p.origin and here(p.by_key))
    if (reason := next(filter(None, failed), None)) is not None:
        return Cell(math.inf, f"failed: {reason}")
    if key == RATE and (others := [estimate.settings for estimate in estimates if _kind(estimate.settings) == column]):
        rates = [p.by_key[RATE] for p in state.probes.values() if state.outcomes[p.name].failed]
        late = any(rate <= row for rate in rates) and diverges(state, {**others[0], RATE: row})
        return Cell(None, DIVERGES if late else LEFT)
    return Cell(None, next((each.reason for each in left if here(each.settings)), "not in the space"))


def _told(estimate: Estimate) -> str:
    name = in_words(estimate.settings)
    if not math.isfinite(estimate.time_s):
        return f"{name}: no progress"
    if estimate.certain:
        return f"{name}: reached the target after {duration(estimate.time_s)}"
    low, high = duration(estimate.low_s), duration(estimate.high_s)
    return f"{name}: {duration(estimate.time_s)} predicted ({low} to {high})"


def _look(ratio: float | None) -> tuple[str, str]:
    """Returns the colour of a ratio, and its text in the legend."""
    if ratio is None:
        return UNTRIED, "not tried"
    if not math.isfinite(ratio):
        return FAILED, "failed, or no progress"
    place = next(i for i, (most, _) in enumerate(SHADES) if ratio <= most)
    least, (most, colour) = 1.0 if place == 0 else SHADES[place - 1][0], SHADES[place]
    return colour, f"{least:g} to {most:g} times" if math.isfinite(most) else f"more than {least:g} times"


def _order(ratio: float | None) -> tuple[bool, float]:
    """Returns the place of a ratio in the legend."""
    return ratio is None, ratio or 0.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
