"""Several stage servers with the same layers: one sum of all gradients, which goes from server to server.

Learners are divided among the servers, in learner order. The log that all of them read names gradients in the order in
which they are added. So a server adds its learners' to the sum that the one before has sent it, and sends that on; the
last one sends the whole sum to all others, and all step by it. What is added to what, in which order, is as with one
server, to the last bit, and so are the weights.

Source: ralp.txt §7 leaves replicas of a placed layer to future work.
"""

from collections.abc import Iterator
from typing import Any

from rudra.core.events import Accumulate, ComputeNorms, Copy, Receive, Reconfigure, Send, Update
from rudra.roles.multi_owner import LOGGED, NUMBER
from topologies import Plan

SUM = "sum"
"""The buffer for what another stage server has added up."""

Entry = tuple[Any, ...]


class SumRelay:
    """Follows the log, and says what of it is for one server.

    Args:
        role: id of the server.
        plan: who is who.
    """

    def __init__(self, role: int, plan: Plan) -> None:
        self._id, self._plan = role, plan
        self._forget()

    def _forget(self) -> None:
        self._holder = -1  # who has the sum for the next update; -1: nothing is added yet
        self._sum = b""  # its buffer there
        self._is_everywhere = len(self._plan.stages) == 1

    def mine(self, entry: Entry) -> Iterator[Entry]:
        """What an entry comes to, for this server: entries, of which some send or receive a sum."""
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
        """The server that has this gradient of a learner's."""
        return self._plan.stage_of(int(buffer.rpartition(b" ")[2]))

    def _moved(self, source: int, to: list[int], more: list[Any]) -> Iterator[Entry]:
        if self._id == source:
            yield from ((NUMBER[Send], target, self._sum, b"", *more) for target in to)
        elif self._id in to:
            yield NUMBER[Receive], source, SUM.encode(), b"", *more

    def _spread(self, more: list[Any]) -> Iterator[Entry]:
        """Everybody gets the whole sum."""
        if self._id == self._holder and self._sum != SUM.encode():  # nobody else has added anything
            yield NUMBER[Copy], -1, self._sum, SUM.encode(), *more
        self._sum, self._is_everywhere = SUM.encode(), True
        yield from self._moved(self._holder, [each for each in self._plan.stages if each != self._holder], more)
