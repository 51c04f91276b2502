"""Queue of future events in virtual time, ordered by time, then by priority, then by insertion.

This order makes a simulation deterministic, even if events have the same time.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

Call = Callable[[Any, Any], None]
Scheduled = tuple[float, int, Call, Any, Any]
"""Entry of the queue: time, a number that orders entries of the same time, and a function with its two arguments."""

_LAST = 1 << 58  # first number of entries that come last among entries of the same time


def owner(entry: Scheduled) -> object:
    """Returns the object whose method an entry calls, or None for a function."""
    return getattr(entry[2], "__self__", None)


class EventQueue:
    """Future events.

    Attributes:
        now: Virtual time in seconds.
        heap: Heap of entries. Frequent callers push entries directly, without a call of a method.
        first: Numbers for ends of transfers and computations, which come first among entries of the same time.
        last: Numbers for events for roles, which come after `first` among entries of the same time.
    """

    __slots__ = ("first", "heap", "last", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[Scheduled] = []
        self.first, self.last = count(), count(_LAST)

    def at(self, time: float, what: Call, whom: Any, about: Any) -> None:
        """Schedules the end of a transfer or of a computation."""
        heappush(self.heap, (time, next(self.first), what, whom, about))

    def later(self, time: float, what: Call, whom: Any, about: Any) -> None:
        """Schedules an event for a role."""
        heappush(self.heap, (time, next(self.last), what, whom, about))

    def step(self) -> None:
        """Runs the next entry."""
        self.now, _, what, whom, about = heappop(self.heap)
        what(whom, about)

    def run(self) -> None:
        """Runs all entries, including entries added while it runs."""
        heap = self.heap
        while heap:
            self.now, _, what, whom, about = heappop(heap)
            what(whom, about)

    def has(self, wanted: Callable[[Scheduled], bool]) -> bool:
        """Returns whether the queue has such an entry."""
        return any(map(wanted, self.heap))

    def remove(self, wanted: Callable[[Scheduled], bool]) -> list[Scheduled]:
        """Removes such entries, and returns them in order."""
        removed: list[Scheduled] = []
        kept: list[Scheduled] = []
        for entry in sorted(self.heap):
            (removed if wanted(entry) else kept).append(entry)
        self.heap[:] = kept
        return removed

    def stretch(self, wanted: Callable[[Scheduled], bool], factor: float) -> None:
        """Multiplies the remaining time of such entries by `factor`. Their order among entries of the same time is
        unchanged."""
        for place, entry in enumerate(self.heap):
            if wanted(entry):
                self.heap[place] = (self.now + (entry[0] - self.now) * factor, *entry[1:])
        heapify(self.heap)
