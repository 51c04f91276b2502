"""Boundary between two phases of a run: a number of complete epochs, or a number of updates."""

import math
from typing import NamedTuple


class Boundary(NamedTuple):
    """Place in a run at which a phase begins. One of the two numbers is infinite.

    Attributes:
        epochs: Number of complete epochs.
        updates: Number of updates, which is the timestamp of the weights.
    """

    epochs: float = math.inf
    updates: float = math.inf

    def is_reached(self, epochs: int, updates: int) -> bool:
        """Returns whether a run with these numbers of complete epochs and of updates has reached the boundary."""
        return epochs >= self.epochs or updates >= self.updates

    def or_(self, other: "Boundary") -> "Boundary":
        """Returns the boundary that a run reaches with the first of two."""
        return Boundary(min(self.epochs, other.epochs), min(self.updates, other.updates))

    @property
    def key(self) -> str:
        """Key of `[[changes]]` that gives the boundary."""
        return "at_epoch" if self.updates == math.inf else "at_update"

    @property
    def number(self) -> int:
        """Number of epochs or updates."""
        return int(min(self))

    @property
    def text(self) -> str:
        """Text for people, such as `epoch 2`."""
        return f"{self.key.removeprefix('at_')} {self.number}"


START = Boundary(epochs=0)
"""Start of a run."""

NEVER = Boundary()
"""Boundary that no run reaches."""
