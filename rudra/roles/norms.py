"""Clipping by the norm of a gradient of which several roles have a part.

Each takes the norm of the gradient of every parameter that it has, and tells the others. From all of them, in the order
of the parameters, each makes the norm of the whole, as if it had all: to the same bits.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rudra.core import records
from rudra.core.events import Action, ComputeNorms, Fail, NormsComputed, Send, Update
from rudra.core.messages import GradientNorms, LogEntries
from rudra.core.wire import in_pieces


@dataclass(slots=True)
class Norms:
    """What is known of the norm of a whole gradient.

    Attributes:
        measured: one's own part is.
        theirs: norms of the parameters of others, float32.
        count: of those; -1: nobody knows.
    """

    measured: bool = False
    theirs: bytes = b""
    count: int = -1

    def hear(self, message: GradientNorms) -> None:
        self.theirs += message.rows.tobytes()
        self.count = message.parameters

    @property
    def complete(self) -> bool:
        return self.measured and len(self.theirs) == self.count * records.FLOATS.itemsize


def told(sender: int, event: NormsComputed) -> list[GradientNorms]:
    """What others are told of norms."""
    rows = np.frombuffer(event.norms, records.FLOATS)
    return [GradientNorms(sender, len(rows), piece) for piece in in_pieces(rows)]


class Clipping:
    """Lets updates, and all that is wanted after them, wait until the norm of the whole gradient is known."""

    def __init__(self) -> None:
        self.norms = Norms()
        self._held: deque[Action] = deque()  # an update whose norm is not known yet, and all behind it

    def in_turn(self, wanted: Iterable[Action]) -> list[Action]:
        """What of that, and of what has waited, can be done now."""
        actions: list[Action] = []
        for action in wanted:
            match action:
                case Fail() | Send(message=LogEntries() | GradientNorms()):
                    actions.append(action)
                case Update() if not self._held:
                    actions.append(ComputeNorms(action.gradient))
                    self._held.append(action)
                case _:
                    (self._held if self._held else actions).append(action)
        if self._held and self.norms.complete:
            update, *behind = self._held
            assert isinstance(update, Update)
            actions.append(structs.replace(update, norms=(b"", self.norms.theirs)))
            self.norms, self._held = Norms(), deque()
            actions += self.in_turn(behind)
        return actions
