"""Time to accuracy: when the evaluations of a run reach a target.

TTA(x) is the time until the median of the test accuracies of the last five epochs is x or better.
Source: CROSSBOW §5.1.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from rudra.errors import ConfigError, meant

WINDOW = 5
"""Default number of evaluations in the median."""

_FORM = re.compile(r"(?:(test|validation) +)?([^\s<>=]+) *(>=|<=) *(\S+)", re.IGNORECASE)
_SHARES = re.compile(r"accuracy|error|top5_error|precision@[0-9]+")
"""Pattern of Rudra's own metrics that are fractions of the samples."""

_ROUNDING = 1e-12
"""Tolerance within which a value equals a target, because `1 - error`, means and medians are rounded."""


@dataclass(frozen=True, slots=True)
class Target:
    """Goal of a training: a bound on a metric of evaluations.

    Attributes:
        split: Data set of the evaluation: "test" or "validation".
        metric: Name of the metric: "accuracy", "error", "loss", or a metric of the task, in upper or lower case.
        at_least: Whether the bound is a minimum.
        value: Value of the bound.
    """

    split: str
    metric: str
    at_least: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads a text such as "accuracy >= 0.98" or "validation perplexity <= 6".

        Raises:
            ConfigError: the text has another form, or a fraction of the samples is not between 0 and 1.
        """
        found = _FORM.fullmatch(text.strip())
        try:
            split, metric, sign, number = found.groups() if found else ("", "", "", "")
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"'{text}' is no target; use the form 'accuracy >= 0.98' or 'validation loss <= 0.1'")
        if _SHARES.fullmatch(metric.casefold()) and not 0 <= value <= 1:
            percent = f"; {value:g} % is {value / 100:g}" if 1 < value <= 100 else ""
            raise ConfigError(f"'{text}' is out of range: {metric} is a fraction of the samples; use 0 to 1{percent}")
        return cls((split or "test").lower(), metric, sign == ">=", value)

    @property
    def is_fraction(self) -> bool:
        """Whether the metric is a fraction of the samples."""
        return _SHARES.fullmatch(self.metric.casefold()) is not None

    @property
    def text(self) -> str:
        """The target as `parse` reads it."""
        return f"{self.split} {self.metric} {'>=' if self.at_least else '<='} {self.value}"

    def of(self, scores: Mapping[str, float | None]) -> float | None:
        """Returns the metric's value from the scores of one evaluation: "loss", "error" and metrics of the task."""
        named = {name.casefold(): value for name, value in scores.items()}
        wanted = self.metric.casefold()
        found = named.get(wanted)
        if found is None and wanted == "accuracy" and (error := named.get("error")) is not None:
            return 1 - error
        return found

    def check(self, measured: Iterable[str], splits: Iterable[str]) -> None:
        """Checks that evaluations can decide the target.

        Args:
            measured: metrics of an evaluation: "loss", "error" if the task has one, and others.
            splits: data sets that are evaluated.

        Raises:
            ConfigError: no evaluation measures the metric on this data set.
        """
        valid = [*measured]
        valid += ["accuracy"] if "error" in valid and "accuracy" not in valid else []
        if self.metric.casefold() not in {name.casefold() for name in valid}:
            hint = meant(self.metric, valid)
            raise ConfigError(f"target: no evaluation measures '{self.metric}'; use {', '.join(valid)}{hint}")
        if self.split not in (evaluated := [*splits]):
            raise ConfigError(f"target: there is no {self.split} set; use {', '.join(evaluated)}")


class Watch:
    """Observer of evaluations, which detects when they reach a target.

    Args:
        target: the target.
        window: number of evaluations in the median.
    """

    def __init__(self, target: Target, window: int = WINDOW) -> None:
        self.target = target
        self._window = window
        self._last: deque[float] = deque(maxlen=window)

    def reached(self, value: float | None) -> bool:
        """Adds the value of an epoch, or None without evaluation. Returns whether the target is reached."""
        if value is None or math.isnan(value):
            return False
        self._last.append(value)
        if len(self._last) < self._window:
            return False
        middle, wanted = median(self._last), self.target.value
        better = middle > wanted if self.target.at_least else middle < wanted
        return better or math.isclose(middle, wanted, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


class Best:
    """Observer that finds evaluations better than all before, by the target's metric, else by the error or the loss.

    Args:
        target: text such as "accuracy >= 0.98", whose value is ignored.

    Attributes:
        split: Data set whose evaluations count.
        since: Number of evaluations after the best one.
    """

    def __init__(self, target: str | None = None) -> None:
        self._by = _LEAST if target is None else (Target.parse(target),)
        self.split = self._by[0].split
        self._least = math.inf
        self.since = 0

    def improved(self, scores: Mapping[str, float | None]) -> bool:
        """Adds the scores of an evaluation. Returns whether it is the best so far."""
        found = ((-value if by.at_least else value) for by in self._by if (value := by.of(scores)) is not None)
        value = next((value for value in found if not math.isnan(value)), math.inf)
        better = value < self._least
        self._least, self.since = (value, 0) if better else (self._least, self.since + 1)
        return better


_LEAST = (Target("test", "error", False, 0.0), Target("test", "loss", False, 0.0))
