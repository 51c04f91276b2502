"""What is to happen in virtual time, in order: by time, then by priority, then as it was asked for.

So a simulation is deterministic, ties included.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

Call = Callable[[Any, Any], None]
Scheduled = tuple[float, int, Call, Any, Any]
"""When, a number that orders what happens then, and what: a function with its two arguments."""

_LAST = 1 << 58  # where the numbers begin of what comes last among things of one moment


def owner(entry: Scheduled) -> object:
    """The object whose method is to be called; None: it is a function."""
    return getattr(entry[2], "__self__", None)


class EventQueue:
    """What is to happen.

    Attributes:
        now: virtual time in seconds.
        heap: of entries; what happens all the time is pushed there without a call in between.
        first: numbers for ends of transfers and computations, which come first among what happens at one moment.
        last: numbers for events for roles, which come after those.
    """

    __slots__ = ("first", "heap", "last", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[Scheduled] = []
        self.first, self.last = count(), count(_LAST)

    def at(self, time: float, what: Call, whom: Any, about: Any) -> None:
        """The end of a transfer or of a computation."""
        heappush(self.heap, (time, next(self.first), what, whom, about))

    def later(self, time: float, what: Call, whom: Any, about: Any) -> None:
        """An event for a role."""
        heappush(self.heap, (time, next(self.last), what, whom, about))

    def step(self) -> None:
        """Lets happen what is next."""
        self.now, _, what, whom, about = heappop(self.heap)
        what(whom, about)

    def run(self) -> None:
        """Lets happen whatever there is, and what follows from it."""
        heap = self.heap
        while heap:
            self.now, _, what, whom, about = heappop(heap)
            what(whom, about)

    def has(self, wanted: Callable[[Scheduled], bool]) -> bool:
        """Whether such a thing is to happen."""
        return any(map(wanted, self.heap))

    def remove(self, wanted: Callable[[Scheduled], bool]) -> list[Scheduled]:
        """Lets some things not happen; returns them, in order."""
        removed: list[Scheduled] = []
        kept: list[Scheduled] = []
        for entry in sorted(self.heap):
            (removed if wanted(entry) else kept).append(entry)
        self.heap[:] = kept
        return removed

    def stretch(self, wanted: Callable[[Scheduled], bool], factor: float) -> None:
        """The time until such things happen becomes so much longer; they keep their places among those of a moment."""
        for place, entry in enumerate(self.heap):
            if wanted(entry):
                self.heap[place] = (self.now + (entry[0] - self.now) * factor, *entry[1:])
        heapify(self.heap)
