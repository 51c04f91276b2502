"""Rows and sections of `rudra bench gpu`, and their common setting."""

import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from benchmarks.gpu_device import Machine
from rudra.benchmark_report import Cell
from rudra.errors import RudraError, one_line

T = TypeVar("T")
Figures = Mapping[str, Cell]
"""Figures of a row by their names."""

Scale = Literal["full", "small", "quick"]
"""Sizes: "full" on a GPU, "small" on two cores, "quick" only to show that the benchmark works."""

LONGEST = 300
"""Characters of an error's text in a row."""


class LeftOut(Exception):
    """A row cannot be measured here. The text is the reason."""


class CheckFailed(Exception):
    """A check does not hold. The text says what was found, and what is right."""


class OutOfTime(BaseException):
    """The budget is spent. It is no `Exception`, so that no library that is measured catches it."""


class Found(NamedTuple):
    """Outcome of a row.

    Attributes:
        row: Name of the row.
        figures: Measured figures.
        problem: Reason why there are none: "failed: …" or "left out: …". Empty: there are figures.
        trace: Last lines of the traceback of a row that failed.
    """

    row: str
    figures: Figures = MappingProxyType({})
    problem: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        """Whether an error ended the row."""
        return self.problem.startswith("failed")

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {_text(value)}" for name, value in self.figures.items())
        return f"{self.row}: {self.problem or figures}"


def _text(value: Cell) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of all rows.

    Attributes:
        machine: Device to measure.
        scale: Sizes to measure.
        directory: Empty directory for files of the rows.
        deadline: Time of `time.monotonic` when the budget is spent.
    """

    machine: Machine
    scale: Scale
    directory: Path
    deadline: float = field(default_factory=lambda: time.monotonic() + 3600)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self.deadline - time.monotonic()

    def sized(self, full: T, small: T, quick: T | None = None) -> T:
        """Returns the value for this scale. Without a value for "quick" it is that for "small"."""
        return {"full": full, "small": small, "quick": small if quick is None else quick}[self.scale]


class Row(NamedTuple):
    """Row to measure, or several rows that are measured in turns.

    Attributes:
        name: Name of the row, or of what its rows have in common.
        measure: Yields the outcomes.
        expected_s: Expected seconds. The row is left out if fewer are left of the budget.
    """

    name: str
    measure: Callable[[Setting], Iterable[Found]]
    expected_s: float


class Section(NamedTuple):
    """Section of the benchmark.

    Attributes:
        name: Name of the section.
        rows: Returns its rows.
    """

    name: str
    rows: Callable[[Setting], list[Row]]


def row(name: str, expected_s: float, measure: Callable[[Setting], Figures]) -> Row:
    """Returns a row with one outcome."""
    return Row(name, lambda setting: [attempt(name, lambda: measure(setting))], expected_s)


def attempt(name: str, measure: Callable[[], Figures]) -> Found:
    """Returns the outcome of a measurement. An error becomes the row's problem."""
    try:
        return Found(name, measure())
    except Exception as error:  # the other rows do not depend on this one
        return failure(name, error)


def failure(name: str, error: Exception) -> Found:
    """Returns the outcome of a row that an error has ended."""
    if isinstance(error, LeftOut):
        return Found(name, problem=f"left out: {error}")
    kind = "" if isinstance(error, RudraError | CheckFailed) else f"{type(error).__name__}: "
    trace = "".join(traceback.format_exception(error)[-6:])
    return Found(name, problem=f"failed: {kind}{one_line(error)}"[:LONGEST], trace=trace)


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in the main thread after some seconds. An outer timer of the process continues afterwards."""

    def end(*_: Any) -> None:
        raise OutOfTime

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, end)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3))


def measured(each: Row, setting: Setting) -> Iterator[Found]:
    """Yields the outcomes of a row. If the budget is too small for it, the row is left out."""
    if setting.left_s < each.expected_s:
        yield Found(each.name, problem=f"left out: {setting.left_s:.0f} s of the budget are left")
        return
    try:
        with ends_after(setting.left_s):
            outcomes = iter(each.measure(setting))
        while True:
            with ends_after(setting.left_s):
                found = next(outcomes, None)
            if found is None:
                return
            yield found
    except OutOfTime:
        yield Found(each.name, problem="left out: the budget ended before it was measured")
    except Exception as error:  # the other rows do not depend on this one
        yield failure(each.name, error)
