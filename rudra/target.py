"""Time to accuracy: when the tests of a run reached what was wanted.

TTA(x) is the time until the median of the last five epochs' test accuracies is x or better.
Source: CROSSBOW §5.1.
"""

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rudra.errors import ConfigError

EPOCHS = 5
"""Tests whose median counts."""

_FORM = re.compile(r"(?:(test|validation) +)?([^\s<>=]+) *(>=|<=) *(\S+)")


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        split: "test" or "validation".
        metric: "accuracy", "error", "loss", or one that the task measures.
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
            ConfigError: it is no such text.
        """
        found = _FORM.fullmatch(text.strip())
        try:
            split, metric, sign, number = found.groups() if found else ("", "", "", "")
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"'{text}' is not of the form 'accuracy >= 0.98' or 'validation loss <= 0.1'")
        return cls(split or "test", metric, sign == ">=", value)

    def of(self, scores: Mapping[str, float | None]) -> float | None:
        """The metric's value among those of one test: "loss", "error", and what the task measures."""
        found = scores.get(self.metric)
        if found is None and self.metric == "accuracy" and (error := scores.get("error")) is not None:
            return 1 - error
        return found


class Watch:
    """Looks at one test after the other."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._last: deque[float] = deque(maxlen=EPOCHS)

    def reached(self, value: float | None) -> bool:
        """Takes note of a test; an epoch that was not tested counts for nothing."""
        if value is None or math.isnan(value):
            return False
        self._last.append(value)
        middle, wanted = median(self._last), self.target.value
        return len(self._last) == EPOCHS and (middle >= wanted if self.target.at_least else middle <= wanted)


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
