"""How long a rank, or the launcher, waits for others: when it reports the wait, and when it ends the run."""

from typing import Literal

PAUSE_S = 5.0
"""A process that looks at its wait this seldom did not run in between: it was stopped, or the machine was."""


class Patience:
    """The limits of one wait.

    A pause of the process that waits does not count: the others may have been paused, too.

    Args:
        warning_s: seconds after which the wait is reported; the next report follows after twice the time.
        limit_s: seconds after which the run ends; None: never.
    """

    def __init__(self, warning_s: float, limit_s: float | None) -> None:
        self._warning_s, self._limit_s = warning_s, limit_s
        self.begin()

    def begin(self) -> None:
        """Begins another wait."""
        self._next_s = self._warning_s
        self._looked_s = self._paused_s = 0.0

    def due(self, waited_s: float) -> Literal["", "report", "end"]:
        """Tells what to do after a wait of `waited_s` seconds; to be asked every second or so."""
        since_s, self._looked_s = waited_s - self._looked_s, waited_s
        if since_s > PAUSE_S:
            self._paused_s += since_s
        waited_s -= self._paused_s
        if self._limit_s is not None and waited_s >= self._limit_s:
            return "end"
        if waited_s < self._next_s:
            return ""
        self._next_s *= 2
        return "report"
