"""Report of a benchmark: a table, notes, and goals with their figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Median of a figure that was measured several times, with the smallest and the largest value."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


Cell = str | float | Spread


def spread(values: Iterable[float]) -> Spread:
    """Returns the median, the smallest and the largest value."""
    taken = sorted(map(float, values))
    return Spread(median(taken), taken[0], taken[-1])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Divides values that were measured in turns: each of ours by theirs of the same turn."""
    return spread(a / b for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and whether it is reached.

    Attributes:
        text: condition to reach, such as `ratio >= 0.9`.
        figures: measured figures. The worst figure decides.
        at_least: lower limit, if the goal has one.
        at_most: upper limit, if the goal has one.
    """

    text: str
    figures: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def figure(self) -> float:
        return max(self.figures) if self.at_least is None else min(self.figures)

    @property
    def reached(self) -> bool:
        over = self.at_least is None or self.figure >= self.at_least
        return over and (self.at_most is None or self.figure <= self.at_most)

    def __str__(self) -> str:
        return f"goal {self.text}: {'reached' if self.reached else 'not reached'} ({self.figure:.3g})"


@dataclass(slots=True)
class Report:
    """Results of one benchmark.

    Attributes:
        columns: heads of the table. The first is the head of the rows' names.
        rows: rows with one cell for each column.
        notes: lines below the table.
        goals: goals with their figures.
        failures: names of rows that an error has ended. The command then ends with exit code 1.
    """

    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_text(self, *, goals: bool = True) -> str:
        lines = [list(self.columns), *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([f"{cells[0]:{widths[0]}}", *_right(cells[1:], widths[1:])]).rstrip() for cells in lines]
        return "\n".join([*table, *self.notes, *(map(str, self.goals) if goals else ())])

    def as_dict(self) -> dict[str, Any]:
        rows = [[c._asdict() if isinstance(c, Spread) else c for c in row] for row in self.rows]
        goals = [{"goal": g.text, "figure": g.figure, "reached": g.reached} for g in self.goals]
        return {"columns": list(self.columns), "rows": rows, "notes": self.notes, "goals": goals}


def _text(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, int | float) else str(cell)


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
