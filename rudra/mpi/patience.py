"""How long a rank, or the launcher, waits for others: when it reports the wait, and when it ends the run."""

from typing import Literal


class Patience:
    """The limits of one wait.

    Args:
        warning_s: seconds after which the wait is reported; the next report follows after twice the time.
        limit_s: seconds after which the run ends; None: never.
    """

    def __init__(self, warning_s: float, limit_s: float | None) -> None:
        self._warning_s, self._limit_s = warning_s, limit_s
        self._next_s = warning_s

    def begin(self) -> None:
        """Begins another wait."""
        self._next_s = self._warning_s

    def due(self, waited_s: float) -> Literal["", "report", "end"]:
        """What to do after that many seconds."""
        if self._limit_s is not None and waited_s >= self._limit_s:
            return "end"
        if waited_s < self._next_s:
            return ""
        self._next_s *= 2
        return "report"
