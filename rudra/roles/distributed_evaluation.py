"""Evaluation of the weights at the end of an epoch, in parts that are assigned to workers while training pauses.

Source: Hogbatch (Ma and Rusu 2020), §5.2: after each pass, the coordinator adds up partial losses, and the time does
not count. Here the parts do not depend on the workers, and they are added in a fixed order. So the sums are bitwise
identical each time, although faster workers compute more parts.
"""

from collections import deque

import numpy as np

from rudra.core import records
from rudra.core.messages import PartEvaluated, Rows

PARTS = 64
"""Number of parts of an evaluation: enough that fast workers do not wait for slow ones, with few enough messages."""


class DistributedEvaluation:
    """Assignment and results of the parts of one evaluation.

    Args:
        epoch: epoch whose weights are evaluated.
        began: start of the evaluation, in seconds on the driver's clock.

    Attributes:
        epoch: epoch whose weights are evaluated.
        began: start of the evaluation, in seconds on the driver's clock.
        testing: role -> part that is assigned to it.
    """

    def __init__(self, epoch: int, began: float) -> None:
        self.epoch, self.began = epoch, began
        self.testing: dict[int, int] = {}
        self._left = deque(range(PARTS))
        self._found: dict[int, list[Rows]] = {part: [] for part in range(PARTS)}

    @property
    def complete(self) -> bool:
        """Whether the results of all parts have arrived."""
        return not self._left and not self.testing

    def deal(self, role: int) -> int | None:
        """Assigns the next part to a role and returns it. None: the role has a part already, or none is left."""
        if role in self.testing or not self._left:
            return None
        self.testing[role] = self._left.popleft()
        return self.testing[role]

    def take(self, message: PartEvaluated) -> bool:
        """Takes the result of a part or a piece of it, and returns whether the role is free again."""
        if message.rows is not None:
            self._found[message.part].append(message.rows)
        if message.last:
            del self.testing[message.sender]
        return message.last

    def lose(self, role: int) -> None:
        """Handles the death of a role: its part is assigned to another one."""
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
    """Schedule and progress of evaluations by workers, as a member of a parameter server.

    Args:
        wanted: whether workers evaluate at all.
        epoch: the last epoch whose weights need no evaluation.

    Attributes:
        under_way: current evaluation, or None if there is none.
    """

    def __init__(self, *, wanted: bool, epoch: int) -> None:
        self._wanted, self._epoch = wanted, epoch
        self.under_way: DistributedEvaluation | None = None

    def is_due(self, epoch: int) -> bool:
        """Returns whether workers must evaluate the weights of an epoch now."""
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
