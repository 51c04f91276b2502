"""An update and the next forward pass that begin while parts of the averaged gradient are still under way.

Nothing that others see changes before the update itself: the new weights and the new momentum are in other memory. The
update then adopts them, and the computation of the next gradient adopts the forward pass. If an action differs from the
prediction, the early work is dropped, and the action is performed as usual.
"""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

from rudra.compute.averaging import CACHE_LINE
from rudra.compute.flat import ForwardPass
from rudra.compute.optim import UpdateRule
from rudra.compute.vectors import Buffer, Take
from rudra.compute.waiting import NotInTime
from rudra.core.actions import Compute, Update
from rudra.core.buffer_names import WEIGHTS
from rudra.core.work import Work
from rudra.data.samples import Batch

PATIENCE_S = 5.0
"""Time without any arrival after which an early pass is dropped, so that the rank handles its messages.

A part of a large model may take almost as long behind a slow link. A death in the group ends a pass at once.
"""

COPIED_BYTES_S = 1.5e9
"""Assumed rate of the copies of weights and velocities. A pass begins early only if the parts that are under way need
more time than copies of all weights. Behind 10 Gbit/s they need less, and early passes were slower than usual ones."""

STEPPED = (1 << 17) - CACHE_LINE
"""Number of elements that are stepped at once: few, because the last ones delay the last layer."""

TICK_S = 0.05
"""Interval of checks whether a waiting pass must end."""


class Arrivals:
    """Parts of an averaged gradient that have arrived, while others are under way.

    Args:
        parts: parts of the gradient, which cover it.
        here: numbers of the parts that have arrived.
        take: returns a slice of the gradient that has arrived.
        hurries: whether this rank must end its work as soon as possible.
        began: called once the first parameters have arrived. Any thread may call it.
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
        self._starts = [parts[number].start for number in self._places]
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

    @property
    def worthwhile(self) -> bool:
        """Whether the parts under way need more time than copies of the weights, at the rate of those that arrived."""
        arrived = max(1, len(self._here) - self._before)
        left_s = (len(self._places) - len(self._here)) * (time.monotonic() - self._since) / arrived
        return bool(left_s * COPIED_BYTES_S > 4 * self._size)

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
        """Returns whether a slice of the gradient has arrived."""
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


class EarlyPass:
    """An update of some weights into other memory, and a forward pass at them.

    Args:
        rule: rule of the weights. It must be `sliceable`.
        before: buffer of the weights. Only `adopt` changes which buffer they are in.
        into: unnamed buffer for the new weights.
        gradient: name of the buffer with the averaged gradient.
        rate: predicted learning rate of the update.
        arrivals: parts of the gradient that have arrived.
        minibatch: predicted step and work of the next gradient.

    Attributes:
        weights: buffer with the new weights.
        arrivals: parts of the gradient that have arrived.
        minibatch: step and work of the forward pass.
        batch: mini-batch of the forward pass.
        passed: the forward pass, after it is complete.
        adopted: whether the new weights have replaced the old ones.
    """

    def __init__(
        self,
        rule: UpdateRule,
        before: Buffer,
        into: Buffer,
        gradient: str,
        rate: float,
        arrivals: Arrivals,
        minibatch: tuple[int, Work],
    ) -> None:
        self._rule, self._before, self._version = rule, before, before.version
        self.weights, self._gradient, self._rate = into, gradient, rate
        self.arrivals, self.minibatch = arrivals, minibatch
        self._slices = rule.begin_apart(into.vector, rate, STEPPED)
        self._stops = [part.stop for part in self._slices]
        self._left = {*range(len(self._slices))}
        self.batch: Batch | None = None
        self.passed: ForwardPass | None = None
        self.adopted = False

    def need(self, stretch: slice) -> None:
        """Completes a slice of the new weights. While its gradient is under way, it steps others that have arrived.

        Raises:
            NotInTime: Its gradient has not arrived in time.
        """
        first = bisect_right(self._stops, stretch.start)
        for number in range(first, bisect_left(self._stops, stretch.stop, first) + 1):
            while number in self._left:
                part = self._slices[number]
                here = [number] if self.arrivals.have(part) else filter(self._has_arrived, self._left)
                if (other := next(iter(here), None)) is None:
                    self.arrivals.wait(part)
                else:
                    self._step(other)

    def _has_arrived(self, number: int) -> bool:
        return self.arrivals.have(self._slices[number])

    def _step(self, number: int) -> None:
        part = self._slices[number]
        over = part.start % CACHE_LINE
        self._rule.step_apart(number, self.arrivals.take(slice(part.start - over, part.stop))[over:])
        self._left.remove(number)

    def fits_update(self, action: Update, weights: Buffer) -> bool:
        """Whether this is the update that was predicted, and the forward pass is complete.

        Args:
            action: the update.
            weights: buffer of the weights now.
        """
        same = weights is self._before and weights.version == self._version and action.weights == WEIGHTS
        predicted = action.learning_rate == self._rate and action.gradient == self._gradient and not any(action.norms)
        return same and predicted and self.passed is not None

    def adopt(self) -> None:
        """Completes the new weights, and lets the rule continue with the new momentum.

        Raises:
            NotInTime: A part of the gradient has not arrived.
        """
        self.need(slice(0, self._stops[-1]))
        self._rule.adopt()
        self.adopted = True

    def keep(self) -> None:
        """Notes that the update is complete: the next gradient's weights must not change any more."""
        self._version = self.weights.version

    def fits_gradient(self, action: Compute, weights: Buffer) -> bool:
        """Whether this is the gradient that was predicted, after the update.

        Args:
            action: the computation.
            weights: buffer of its weights.
        """
        same = (action.step, action.work) == self.minibatch
        return same and weights is self.weights and weights.version == self._version
