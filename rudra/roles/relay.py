"""Sum of all gradients, passed from one stage server to the next, if several stage servers hold the same layers.

The learners are divided among the stage servers, in learner order. All stage servers read one log, which lists
gradients in the order of addition. A server receives the previous server's sum and adds the gradients of its own
learners. Then it sends the sum to the next server. The last server sends the complete sum to all others. Every server
then updates its weights by this sum. The order of addition is the same as on a single stage server, so the weights are
bitwise identical.

Source: ralp.txt §7 leaves replicas of a placed layer to future work.
"""

from collections.abc import Iterator
from typing import Any

from rudra.core.actions import Accumulate, ComputeNorms, Copy, Receive, Reconfigure, Send, Update
from rudra.roles.multi_owner import LOGGED, NUMBER
from topologies import Plan

SUM = "sum"
"""Name of the buffer for a sum that another stage server has sent."""

Entry = tuple[Any, ...]


class SumRelay:
    """Translation of the shared log into the log entries of one stage server.

    Args:
        role: id of the stage server.
        plan: roles of the run and their connections.
    """

    def __init__(self, role: int, plan: Plan) -> None:
        self._id, self._plan = role, plan
        self._forget()

    def _forget(self) -> None:
        self._holder = -1  # id of the server with the sum for the next update; -1: nothing is added yet
        self._sum = b""  # name of the sum's buffer at that server
        self._is_everywhere = len(self._plan.stages) == 1

    def mine(self, entry: Entry) -> Iterator[Entry]:
        """Yields the entries of this server for one entry of the shared log. Some of them send or receive a sum."""
        what, role, buffer, other, *more = entry
        kind = LOGGED[what]
        if kind is Accumulate:
            self._begin(other)
            owner = self._owner(buffer)
            if owner != self._holder:
                yield from self._moved(self._holder, [owner], more)
                self._holder, self._sum = owner, SUM.encode()
            if owner == self._id:
                yield what, role, buffer, self._sum, *more
        elif kind in (ComputeNorms, Update):
            self._begin(buffer)
            if not self._is_everywhere:
                yield from self._spread(more)
            yield what, role, self._sum, other, *more
            if kind is Update:
                self._forget()
        else:
            if kind is Reconfigure:
                self._forget()
            yield entry

    def _begin(self, buffer: bytes) -> None:
        if self._holder == -1:
            self._holder, self._sum = self._owner(buffer), buffer

    def _owner(self, buffer: bytes) -> int:
        """Returns the id of the stage server that has a learner's gradient, by the name of its buffer."""
        return self._plan.stage_of(int(buffer.rpartition(b" ")[2]))

    def _moved(self, source: int, to: list[int], more: list[Any]) -> Iterator[Entry]:
        if self._id == source:
            yield from ((NUMBER[Send], target, self._sum, b"", *more) for target in to)
        elif self._id in to:
            yield NUMBER[Receive], source, SUM.encode(), b"", *more

    def _spread(self, more: list[Any]) -> Iterator[Entry]:
        """Yields the entries that give every stage server the complete sum."""
        if self._id == self._holder and self._sum != SUM.encode():  # no other server has added a gradient
            yield NUMBER[Copy], -1, self._sum, SUM.encode(), *more
        self._sum, self._is_everywhere = SUM.encode(), True
        yield from self._moved(self._holder, [each for each in self._plan.stages if each != self._holder], more)
