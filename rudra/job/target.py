"""Time to accuracy: when the tests of a run reached what was wanted.

TTA(x) is the time until the median of the last five epochs' test accuracies is x or better.
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
"""Tests whose median counts, unless a job says otherwise."""

_FORM = re.compile(r"(?:(test|validation) +)?([^\s<>=]+) *(>=|<=) *(\S+)", re.IGNORECASE)
_SHARES = re.compile(r"accuracy|error|top5_error|precision@[0-9]+")
"""Metrics of Rudra's own that are a part of the samples."""

_ROUNDING = 1e-12
"""A value that misses a target by no more than this is equal to it: `1 - error`, means and medians are rounded."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        split: "test" or "validation".
        metric: "accuracy", "error", "loss", or one that the task measures; in any case.
        at_least: whether more is better.
        value: of the metric.
    """

    split: str
    metric: str
    at_least: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads a text such as "accuracy >= 0.98" or "validation perplexity <= 6".

        Raises:
            ConfigError: it is no such text, or wants a share of the samples that is none.
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

    def of(self, scores: Mapping[str, float | None]) -> float | None:
        """The metric's value among those of one test: "loss", "error", and what the task measures."""
        named = {name.casefold(): value for name, value in scores.items()}
        wanted = self.metric.casefold()
        found = named.get(wanted)
        if found is None and wanted == "accuracy" and (error := named.get("error")) is not None:
            return 1 - error
        return found

    def check(self, measured: Iterable[str], splits: Iterable[str]) -> None:
        """Makes sure that it can be decided.

        Args:
            measured: metrics of a test: "loss", "error" where the task knows one, and others.
            splits: that are tested.

        Raises:
            ConfigError: no test tells.
        """
        valid = [*measured]
        valid += ["accuracy"] if "error" in valid and "accuracy" not in valid else []
        if self.metric.casefold() not in {name.casefold() for name in valid}:
            hint = meant(self.metric, valid)
            raise ConfigError(f"target: no evaluation measures '{self.metric}'; use {', '.join(valid)}{hint}")
        if self.split not in (evaluated := [*splits]):
            raise ConfigError(f"target: there is no {self.split} set; use {', '.join(evaluated)}")


class Watch:
    """Looks at one test after the other.

    Args:
        target: what is to be reached.
        window: tests whose median counts.
    """

    def __init__(self, target: Target, window: int = WINDOW) -> None:
        self.target = target
        self._window = window
        self._last: deque[float] = deque(maxlen=window)

    def reached(self, value: float | None) -> bool:
        """Takes note of a test; an epoch that was not tested counts for nothing."""
        if value is None or math.isnan(value):
            return False
        self._last.append(value)
        if len(self._last) < self._window:
            return False
        middle, wanted = median(self._last), self.target.value
        better = middle > wanted if self.target.at_least else middle < wanted
        return better or math.isclose(middle, wanted, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


class Best:
    """Says which tests are better than all before: by the metric of a target, or else by the error, or by the loss.

    Args:
        target: such as "accuracy >= 0.98"; its value does not matter.

    Attributes:
        split: whose tests count.
        since: how many there were after the best one.
    """

    def __init__(self, target: str | None = None) -> None:
        self._by = _LEAST if target is None else (Target.parse(target),)
        self.split = self._by[0].split
        self._least = math.inf
        self.since = 0

    def improved(self, scores: Mapping[str, float | None]) -> bool:
        """Takes note of a test."""
        found = ((-value if by.at_least else value) for by in self._by if (value := by.of(scores)) is not None)
        value = next((value for value in found if not math.isnan(value)), math.inf)
        better = value < self._least
        self._least, self.since = (value, 0) if better else (self._least, self.since + 1)
        return better


_LEAST = (Target("test", "error", False, 0.0), Target("test", "loss", False, 0.0))
