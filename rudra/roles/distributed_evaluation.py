"""A test of the weights of an epoch's end that is dealt out to workers, part by part, while nobody trains.

Source: Hogbatch (Ma and Rusu 2020), §5.2: after each pass, partial losses are added up at the coordinator, and the time
does not count. Here the parts are always the same, whoever computes them, and added in their order, so that the sums
have the same bits; who is faster computes more of them.
"""

from collections import deque

import numpy as np

from rudra.core import records
from rudra.core.messages import PartEvaluated, Rows

PARTS = 64
"""Of a test: enough for the fast not to wait for the slow, and few enough messages."""


class DistributedEvaluation:
    """Who tests what.

    Args:
        epoch: whose weights are tested.
        began: when, in seconds on the driver's clock.

    Attributes:
        epoch, began: as given.
        testing: role -> the part that it has.
    """

    def __init__(self, epoch: int, began: float) -> None:
        self.epoch, self.began = epoch, began
        self.testing: dict[int, int] = {}
        self._left = deque(range(PARTS))
        self._found: dict[int, list[Rows]] = {part: [] for part in range(PARTS)}

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return not self._left and not self.testing

    def deal(self, role: int) -> int | None:
        """The next part for a role that has none; None: nothing is left."""
        if role in self.testing or not self._left:
            return None
        self.testing[role] = self._left.popleft()
        return self.testing[role]

    def take(self, message: PartEvaluated) -> bool:
        """What a part came to, or a piece of it; whether its role is free."""
        if message.rows is not None:
            self._found[message.part].append(message.rows)
        if message.last:
            del self.testing[message.sender]
        return message.last

    def lose(self, role: int) -> None:
        """A role is no more: somebody else has its part."""
        if role in self.testing:
            part = self.testing.pop(role)
            self._found[part].clear()
            self._left.appendleft(part)

    @property
    def rows(self) -> Rows:
        """Rows of all parts, in order."""
        found = (rows for part in range(PARTS) for rows in self._found[part])
        return np.concatenate([np.empty(0, records.SUM), *found])


class WorkersEvaluation:
    """Member of a parameter server: when workers evaluate the weights of an epoch's end, and how far they are.

    Args:
        wanted: whether workers evaluate at all.
        epoch: the last epoch whose weights need no evaluation.

    Attributes:
        under_way: the present evaluation; None: there is none.
    """

    def __init__(self, *, wanted: bool, epoch: int) -> None:
        self._wanted, self._epoch = wanted, epoch
        self.under_way: DistributedEvaluation | None = None

    def is_due(self, epoch: int) -> bool:
        """Whether the weights of an epoch are to be evaluated now."""
        return self._wanted and epoch != self._epoch

    def begin(self, epoch: int, now: float) -> None:
        """Begins the evaluation of an epoch."""
        self._epoch = epoch
        self.under_way = DistributedEvaluation(epoch, now)

    def end(self) -> DistributedEvaluation | None:
        """Ends the evaluation if it is complete, and returns it."""
        if self.under_way is None or not self.under_way.complete:
            return None
        found, self.under_way = self.under_way, None
        return found
