"""Messages between the ranks of a compute group, and the buffers that these ranks read of each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from rudra.compute.averaging import factors_of
from rudra.compute.vectors import Buffer
from rudra.core.messages import GroupFlags
from rudra.core.records import Gradient
from rudra.core.wire import MEMBER, members
from rudra.mpi.failures import RequestState, outcome
from rudra.mpi.group_slices import GroupSlices
from rudra.mpi.pieces import pieces_of


class GroupRequests:
    """Pending messages between the ranks of a group.

    Args:
        comm: communicator of all ranks of the job.
        tag: tag of all messages between the group's ranks.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._all: list[Any] = []
        self._receives: list[MPI.Request] = []  # the requests that write into memory here

    def begin(self) -> None:
        """Prepares for another reduction."""
        self._receives.clear()

    def send(self, what: npt.NDArray[Any], to: int) -> None:
        """Sends an array to a rank, in pieces. The array must not change until `drive` returns "done"."""
        self._all += [self._comm.Isend(piece, to, self._tag) for piece in pieces_of(what)]

    def receive(self, into: npt.NDArray[Any], of: int) -> list[MPI.Request]:
        """Receives an array from a rank, in pieces, each of which is a request."""
        requests = [self._comm.Irecv(piece, of, self._tag) for piece in pieces_of(into)]
        self._all += requests
        self._receives += requests
        return requests

    def add(self, request: Any) -> None:
        """Adds a request that was started elsewhere."""
        self._all.append(request)

    def drive(self) -> RequestState:
        """Returns "done" if all requests are complete, else the state of one that is not."""
        while self._all:
            what = outcome(self._all[-1])  # one after the other, so that none is left out
            if what != "done":
                return what
            self._all.pop()
        return "done"

    @property
    def quiet(self) -> bool:
        """Whether no receive can write here any more."""
        self._receives = [r for r in self._receives if outcome(r) == "no"]
        return not self._receives

    def cancel(self) -> None:
        """Cancels the pending receives."""
        if not self.quiet:
            for request in self._receives:
                request.Cancel()


class GroupRows:
    """Table of facts about the gradients of a group: one row from each member.

    Args:
        division: division of the group's vector.

    Attributes:
        of_rank: rank -> bytes of its members' rows of `MEMBER`, uint8.
        gradients: gradients of the members, in group_rank order. These and the next attributes are set when all rows
            are here.
        words: flags of the members, in group_rank order.
        factors: factors of the members' gradients in the sum.
        offsets: offsets of the members' gradients in the memory of their ranks.
    """

    def __init__(self, division: GroupSlices) -> None:
        self._places = {**division.others, division.me: division.mine}
        self.of_rank = {
            rank: np.zeros(len(places) * MEMBER.itemsize, np.uint8) for rank, places in self._places.items()
        }
        self.gradients: tuple[Gradient, ...] = ()
        self.words: tuple[GroupFlags, ...] = ()
        self.factors: Sequence[int] = ()
        self.offsets: list[int] = []

    def take_in(self) -> None:
        """Parses the rows, after the rows of all members have arrived."""
        found: dict[int, tuple[int, GroupFlags, Gradient]] = {}
        for rank, places in self._places.items():
            found |= zip(places, members(self.of_rank[rank]), strict=True)
        ordered = [found[place] for place in range(len(found))]
        self.offsets = [offset for offset, _, _ in ordered]
        self.words = tuple(word for _, word, _ in ordered)
        self.gradients = tuple(gradient for _, _, gradient in ordered)
        self.factors = factors_of([gradient.samples for gradient in self.gradients])


class LentBuffers:
    """Buffers that other ranks of a group may read until all members contribute their next gradients."""

    def __init__(self) -> None:
        self._now: list[Buffer] = []  # shared in this reduction
        self._before: list[Buffer] = []  # shared in the previous reduction

    def lend(self, buffer: Buffer) -> None:
        """Shares a buffer in this reduction."""
        buffer.readers += 1
        self._now.append(buffer)

    def turn(self) -> None:
        """Releases the buffers of the previous reduction: all members are in this one, and have finished reading."""
        _give_back(self._before)
        self._now, self._before = self._before, self._now

    def give_back(self) -> None:
        """Releases all buffers."""
        _give_back(self._now)
        _give_back(self._before)


def _give_back(lent: list[Buffer]) -> None:
    for buffer in lent:
        buffer.readers -= 1
    lent.clear()
