"""An update and the next forward pass that begin while parts of the averaged gradient are still under way.

Nothing that others see changes before the update itself: the new weights and the new momentum are in other memory. The
update then adopts them, and the computation of the next gradient adopts the forward pass. If an action differs from the
prediction, the early work is dropped, and the action is performed as usual.
"""

from bisect import bisect_left, bisect_right

from rudra.compute.arrivals import Arrivals
from rudra.compute.averaging import CACHE_LINE, slices
from rudra.compute.early_forward import ForwardPass
from rudra.compute.sliced_steps import SlicedSteps
from rudra.compute.vectors import Buffer
from rudra.core.actions import Compute, Update
from rudra.core.buffer_names import WEIGHTS
from rudra.core.work import Work
from rudra.data.samples import Batch

STEPPED = (1 << 17) - CACHE_LINE
"""Number of elements that are stepped at once: few, because the last ones delay the last layer."""


class EarlyPass:
    """An update of some weights into other memory, and a forward pass at them.

    Args:
        step: steps of the weights' rule.
        before: buffer of the weights. Only `adopt` changes which buffer they are in.
        into: unnamed buffer for the new weights.
        counters: number of counters among the weights. They are the last elements, and whole numbers.
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
        step: SlicedSteps,
        before: Buffer,
        into: Buffer,
        counters: int,
        gradient: str,
        rate: float,
        arrivals: Arrivals,
        minibatch: tuple[int, Work],
    ) -> None:
        self._apart, self._before, self._version = step, before, before.version
        self.weights, self._gradient, self._rate = into, gradient, rate
        self.arrivals, self.minibatch = arrivals, minibatch
        self._slices = step.begin_apart(into.vector, rate, STEPPED)
        self._stepped, size = len(self._slices), len(into.vector)
        self._slices += slices(self._slices[-1].stop, size, STEPPED)
        self._counters = slice(size - counters, size)
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
        gradient = self.arrivals.take(slice(part.start - over, part.stop))[over:]
        if number < self._stepped:
            self._apart.step_apart(number, gradient)
        else:  # the model's buffers, which are averaged
            self.weights.vector[part] = gradient
            self.weights.vector[self._counters].round_()
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
        self._apart.adopt()
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
