"""Clipping by the norm of a gradient whose parts are on several roles.

Each role computes the gradient's norm for each of its parameters, and sends these norms to the others. Then each role
combines all norms in the order of the parameters. The result is bitwise identical to the norm computed on one role.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from rudra.core import records
from rudra.core.actions import Action, ComputeNorms, Fail, Send, Update
from rudra.core.events import NormsComputed
from rudra.core.messages import GradientNorms, LogEntries
from rudra.core.wire import in_pieces


@dataclass(slots=True)
class Norms:
    """Known norms of the parts of one gradient.

    Attributes:
        measured: whether this role's own norms are computed.
        theirs: norms for the parameters of other roles, float32.
        count: number of norms of other roles, or -1 if it is not known yet.
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
    """Returns the messages that send norms to other roles."""
    rows = np.frombuffer(event.norms, records.FLOATS)
    return [GradientNorms(sender, len(rows), piece) for piece in in_pieces(rows)]


class Clipping:
    """Queue of updates and later actions that wait until the norm of the whole gradient is known."""

    def __init__(self) -> None:
        self.norms = Norms()
        self._held: deque[Action] = deque()  # an update whose norm is not known yet, and all actions after it

    def in_turn(self, wanted: Iterable[Action]) -> list[Action]:
        """Returns the actions that can be carried out now, out of `wanted` and the queue."""
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
