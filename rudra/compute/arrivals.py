"""Parts of a vector that arrive while a pass uses those that are here."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

from rudra.compute.vectors import Take
from rudra.compute.waiting import NotInTime
from rudra.core.buckets import COPIED_BYTES_S

PATIENCE_S = 5.0
"""Time without any arrival after which an early pass is dropped, so that the rank handles its messages.

A part of a large model may take almost as long behind a slow link. A death in the group ends a pass at once.
"""

TICK_S = 0.05
"""Interval of checks whether a waiting pass must end."""


TENSOR_S = 2e-5
"""Assumed time of a pass to wait for one tensor. ResNet-32 has 188 of them, and its pass took 4 ms longer."""


class Arrivals:
    """Parts of a vector, an averaged gradient or weights, that have arrived, while others are under way.

    Args:
        parts: parts of the vector, which cover it.
        here: numbers of the parts that have arrived.
        take: returns a slice of the vector that has arrived.
        hurries: whether this rank must end its work as soon as possible.
        began: called once the first parameters have arrived. Any thread may call it.

    Attributes:
        parts: parts of the vector, the first ones first.
    """

    def __init__(
        self,
        parts: Sequence[slice],
        here: Collection[int],
        take: Take,
        hurries: Callable[[], bool],
        began: Callable[[], None],
    ) -> None:
        self._places = sorted(range(len(parts)), key=lambda number: parts[number].start)
        self.parts = [parts[number] for number in self._places]
        self._starts = [part.start for part in self.parts]
        self._here, self._failed = {*here}, False
        self._before, self._since = len(self._here), time.monotonic()
        self._size = max(part.stop for part in parts)
        self._news = threading.Event()
        self._hurries, self._began = hurries, began
        self.take = take
        if self.begun:
            began()

    @property
    def begun(self) -> bool:
        """Whether the first parameters have arrived."""
        return self._places[0] in self._here

    def worthwhile(self, copies: float, tensors: int) -> bool:
        """Returns whether the parts under way, at the rate of those that arrived, need more time than a pass costs.

        Args:
            copies: number of vectors that are copied (`rudra.core.buckets.copied`).
            tensors: number of tensors in the vector. The pass waits for each of them.
        """
        arrived = max(1, len(self._here) - self._before)
        left_s = (len(self._places) - len(self._here)) * (time.monotonic() - self._since) / arrived
        return bool(left_s > 4 * self._size * copies / COPIED_BYTES_S + tensors * TENSOR_S)

    def add(self, number: int) -> None:
        """Notes that a part has arrived. Any thread may call this."""
        self._here.add(number)
        self._news.set()
        if number == self._places[0]:
            self._began()

    def fail(self) -> None:
        """Notes that no part will arrive any more. Any thread may call this."""
        self._failed = True
        self._news.set()

    def have(self, stretch: slice) -> bool:
        """Returns whether a slice of the vector has arrived."""
        first, stop = bisect_right(self._starts, stretch.start) - 1, bisect_left(self._starts, stretch.stop)
        return self._here.issuperset(self._places[first:stop])

    def wait(self, stretch: slice) -> None:
        """Waits until some part arrives. Returns at once if the slice is complete.

        Raises:
            NotInTime: None may ever arrive, or this rank is needed for other work.
        """
        since = time.monotonic()
        while True:
            self._news.clear()
            if self.have(stretch):
                return
            if self._failed or self._hurries() or time.monotonic() - since > PATIENCE_S:
                raise NotInTime
            if self._news.wait(TICK_S):
                return
