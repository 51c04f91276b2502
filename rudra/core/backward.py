"""Overlap of a backward pass with the transfer of its gradient.

A backward pass finishes a gradient part by part, usually the last layers first. Parts that are final may be sent while
the pass computes the others. The simulator and the choice of a cut use the same formula for the time that a transfer
takes after the pass (`after_s`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

SHARE = 2 / 3
"""Fraction of a gradient's time that the backward pass takes, if it is not measured.

The pass has twice the operations of a forward pass.
"""


class Lead(NamedTuple):
    """Moment of a backward pass when more of its gradient is final, and may be sent.

    Attributes:
        rest: Fraction of the gradient that is sent from this moment on.
        left: Fraction of the backward pass that follows.
    """

    rest: float
    left: float


Leads = tuple[Lead, ...]
"""Moments in the order of time. The last one is the end of the pass."""

WHOLE: Leads = (Lead(1.0, 0.0),)
"""A gradient that is sent after the pass."""


class TimedLayer(Protocol):
    """Size and times of a layer of a model."""

    @property
    def parameters_bytes(self) -> int:
        """Size of its parameters."""

    @property
    def backward_s(self) -> float:
        """Time of its backward pass."""

    @property
    def seconds(self) -> float:
        """Time of its forward and backward pass."""


FinalAt = Sequence[tuple[int, float]]
"""Numbers of consecutive parameters, and the fraction of a gradient's time after which their gradient is final."""


class BackwardPass:
    """Times in a backward pass when the parts of a gradient become final.

    Args:
        parameters: Number of parameters.
        steps: Numbers of consecutive parameters, and the fraction of the pass that follows when their gradient is
            final. Empty: parameters become final at a constant rate, the last ones first.
        share: Fraction of a gradient's time that the pass takes.

    Attributes:
        share: As passed in.
        starts: first parameters of those whose gradients become final at different times, as far as it is known.
    """

    def __init__(self, parameters: int, steps: Sequence[tuple[int, float]] = (), share: float = SHARE) -> None:
        self.share = share
        self._parameters = parameters
        self._stops = [*accumulate(count for count, _ in steps)]
        self.starts = (0, *self._stops[:-1])
        self._left = [left for _, left in steps]

    @classmethod
    def of_layers(cls, layers: Sequence[TimedLayer]) -> "BackwardPass":
        """Returns the pass over layers, which are in the order of the flat vector.

        The gradient of a layer's parameters is final at the end of the layer's part of the pass. Nothing is computed
        for layers before the first parameters.
        """
        sizes = [layer.parameters_bytes // 4 for layer in layers]
        first = next((place for place, size in enumerate(sizes) if size), 0)
        before_s = [*accumulate((layer.backward_s for layer in layers[first:]), initial=0.0)]
        pass_s, whole_s = before_s[-1], sum(layer.seconds for layer in layers)
        steps = [
            (size, seconds / pass_s if pass_s else 0.0)
            for size, seconds in zip(sizes[first:], before_s, strict=False)
            if size
        ]
        return cls(sum(sizes), steps, sum(layer.backward_s for layer in layers) / whole_s if whole_s else SHARE)

    @classmethod
    def measured(cls, final_at: FinalAt, parameters: int) -> "BackwardPass":
        """Returns the pass over the first `parameters` parameters of a model, from the measured times of all.

        If these are all parameters, the pass begins with the computation of the gradient. Otherwise it begins when the
        gradient of the others is final.
        """
        stops = [*accumulate(count for count, _ in final_at)]
        begins = max(
            (final for (_, final), stop in zip(final_at, stops, strict=True) if stop > parameters), default=0.0
        )
        steps = [
            (min(count, parameters - stop + count), min(1.0, (1 - final) / (1 - begins)) if begins < 1 else 0.0)
            for (count, final), stop in zip(final_at, stops, strict=True)
            if stop - count < parameters
        ]
        return cls(parameters, steps, 1.0)

    def left(self, part: slice) -> float:
        """Returns the fraction of the pass that follows when a part of the flat vector is final.

        Elements that are not parameters become final at the end of the pass.
        """
        if part.stop > self._parameters or not self._stops:
            return part.start / self._parameters if part.stop <= self._parameters else 0.0
        return min(self._left[bisect_right(self._stops, part.start) : bisect_left(self._stops, part.stop) + 1])

    def leads(self, parts: Sequence[slice]) -> Leads:
        """Returns the moments that matter for a gradient that is sent in parts.

        At other moments more is final, but on a link of any speed the transfer ends at the same time without them.

        Args:
            parts: Parts of the flat vector. Fewer than two: the gradient is sent as a whole.
        """
        if len(parts) < 2:
            return WHOLE
        size = rest = sum(part.stop - part.start for part in parts)
        found: list[Lead] = []
        for left, count in sorted(((self.left(part), part.stop - part.start) for part in parts), reverse=True):
            _add(found, Lead(rest / size, left))
            rest -= count
        _add(found, Lead(0.0, 0.0))  # the message that belongs to the gradient
        return tuple(found)


def _add(leads: list[Lead], lead: Lead) -> None:
    """Adds a lead, and removes leads that now change the end of no transfer.

    A transfer that takes t, and a pass that takes b, end at the earliest rest · t - left · b after the pass, for each
    lead. So only leads on the upper convex hull matter.
    """
    if leads and leads[-1].left <= lead.left:
        return
    while len(leads) > 1:
        first, middle = leads[-2:]
        slope = (first.rest - lead.rest) / (first.left - lead.left)
        if middle.rest > lead.rest + slope * (middle.left - lead.left) + 1e-9:
            break
        leads.pop()
    leads.append(lead)


def after_s(leads: Leads, transfer_s: float, backward_s: float) -> float:
    """Returns the time from the end of a backward pass to the end of a transfer on a link that is free.

    Args:
        leads: Moments when more of the gradient may be sent.
        transfer_s: Time of the whole transfer.
        backward_s: Time of the pass.
    """
    return max(lead.rest * transfer_s - lead.left * backward_s for lead in leads)
