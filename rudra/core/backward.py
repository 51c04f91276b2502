"""Overlap of a backward pass with the transfer of its gradient.

A backward pass finishes a gradient part by part, usually the last layers first. Parts that are final may be sent while
the pass computes the others. The simulator and the choice of a cut use the same formula for the time that a transfer
takes after the pass (`after_s`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

SHARE = 2 / 3
"""Fraction of a gradient's time that the backward pass takes, if it is not measured.

The pass has twice the operations of a forward pass.
"""


class Lead(NamedTuple):
    """Moment of a backward pass from which parts of its gradient may be sent.

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


class BackwardPass:
    """Times in a backward pass when the parts of a gradient become final.

    Args:
        parameters: Number of parameters.
        layers: Layers with their times, in the order of the flat vector. The gradient of a layer's parameters is final
            at the end of the layer's part of the pass. Empty: parameters become final at a constant rate, the last
            ones first.

    Attributes:
        share: Fraction of a gradient's time that the pass takes.
    """

    def __init__(self, parameters: int, layers: Sequence[TimedLayer] = ()) -> None:
        self._parameters = parameters
        self._stops: list[int] = []  # end of each layer's parameters, in elements of the flat vector
        before_s: list[float] = []  # time of the layers in front of each layer, which the pass computes later
        total_s = 0.0
        for layer in layers:
            if layer.parameters_bytes:
                self._stops.append((self._stops[-1] if self._stops else 0) + layer.parameters_bytes // 4)
                before_s.append(total_s)
            total_s += layer.backward_s if self._stops else 0.0  # nothing is computed for layers before the first one
        self._left = [seconds / total_s if total_s else 0.0 for seconds in before_s]
        whole_s = sum(layer.seconds for layer in layers)
        self.share = sum(layer.backward_s for layer in layers) / whole_s if whole_s else SHARE

    def left(self, place: int) -> float:
        """Returns the fraction of the pass that follows when the parameter at a place and all later ones are final."""
        if self._stops:
            return self._left[min(bisect_right(self._stops, place), len(self._stops) - 1)]
        return place / self._parameters

    def leads(self, parts: Sequence[slice]) -> Leads:
        """Returns the moments that matter for a gradient that is sent in parts.

        At other moments more is final, but on a link of any speed the transfer ends at the same time without them.

        Args:
            parts: Parts of the flat vector in the order in which they become final. Elements that are not parameters
                become final at the end of the pass. Fewer than two: the gradient is sent as a whole.
        """
        if len(parts) < 2:
            return WHOLE
        size = rest = sum(part.stop - part.start for part in parts)
        found: list[Lead] = []
        for part in parts:
            _add(found, Lead(rest / size, self.left(part.start) if part.start < self._parameters else 0.0))
            rest -= part.stop - part.start
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
        leads: Moments from which parts may be sent.
        transfer_s: Time of the whole transfer.
        backward_s: Time of the pass.
    """
    return max(lead.rest * transfer_s - lead.left * backward_s for lead in leads)
