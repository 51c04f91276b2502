"""Limits of waits of a rank or the launcher for others: when a wait is reported, and when it ends the run."""

from typing import Literal

PAUSE_S = 5.0
"""Longest gap between two checks of a running process: after a longer gap, the process or machine was paused."""

TOO_LONG = "longer than fault_tolerance.stall_limit_s allows"
"""End of the line about a wait that ends the run. Lines about shorter waits are the same without it."""


class Patience:
    """The limits of one wait.

    Pauses of the waiting process do not count, because the other processes may have been paused at the same time.

    Args:
        warning_s: seconds after which the wait is reported. Each further report follows after twice the time.
        limit_s: seconds after which the run ends. None: never.
    """

    def __init__(self, warning_s: float, limit_s: float | None) -> None:
        self._warning_s, self._limit_s = warning_s, limit_s
        self.begin()

    def begin(self) -> None:
        """Begins another wait."""
        self._next_s = self._warning_s
        self._looked_s = self._paused_s = 0.0

    def due(self, waited_s: float) -> Literal["", "report", "end"]:
        """Returns the action that is due after a wait of `waited_s` seconds. The caller asks about every second."""
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
