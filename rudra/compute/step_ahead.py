"""A step of a replica that is made while its gradient is computed, so that parts of its difference can leave at once.

Nothing that others see changes before the step itself: the new replica and the new state are in other memory, which
the step adopts. The backward pass reads the old replica until its end.
"""

import torch

from rudra.compute.averaging import CACHE_LINE, CHUNK
from rudra.compute.final_gradients import Ready
from rudra.compute.sliced_steps import SlicedSteps
from rudra.compute.vectors import Buffer
from rudra.core.actions import StepReplica
from rudra.core.buckets import FinalParts

STEPPED = 1 << 17
"""Number of elements that are stepped at once: a bucket waits for few others, and they fit into a processor's cache."""


class StepAhead:
    """A step of a replica into other memory, and its difference from the weights.

    Args:
        action: the step.
        steps: steps of the replica's rule.
        into: unnamed buffer for the new replica.
        gradient: buffer with the gradient.
        weights: buffer with the weights.
        difference: buffer for the difference.
        final: called with each part of the difference that is final.

    Attributes:
        action: the step.
        into: buffer with the new replica.
    """

    def __init__(
        self,
        action: StepReplica,
        steps: SlicedSteps,
        into: Buffer,
        gradient: Buffer,
        weights: Buffer,
        difference: Buffer,
        final: Ready,
    ) -> None:
        self.action, self.into = action, into
        self._steps, self._final = steps, final
        self._gradient, self._weights, self._difference = gradient.vector, weights.vector, difference.vector
        self._slices = steps.begin_apart(into.vector, action.learning_rate, STEPPED)
        self._left, self._ready = {*range(len(self._slices))}, FinalParts(self._slices)

    def take(self, piece: slice) -> None:
        """Steps the parts whose gradient is final with a piece."""
        for number in self._ready.add(piece):
            self._step(number)

    def _step(self, number: int) -> None:
        part = self._slices[number]
        self._steps.step_apart(number, self._gradient[part])
        self._left.remove(number)
        torch.sub(self._weights[part], self.into.vector[part], out=self._difference[part])
        self._final(part)  # the average may overwrite the difference from now on

    def complete(self) -> float:
        """Steps the rest, and lets the rule continue with the new state.

        Returns:
            The sum of the squares of the difference.
        """
        for number in sorted(self._left):
            self._step(number)
        self._steps.adopt()
        return self._squares()

    def _squares(self) -> float:
        """Computes the sum of the squares in the same chunks as usual steps, whose last bits it has."""
        squares, room = 0.0, torch.empty_like(self._difference[: CHUNK + CACHE_LINE])
        for part in self._steps.slices(CHUNK):
            over = part.start % CACHE_LINE
            found = room[over : over + part.stop - part.start]
            torch.sub(self._weights[part], self.into.vector[part], out=found)
            squares += float(torch.dot(found, found))
        return squares
