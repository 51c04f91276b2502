"""Averaging gradients over a compute group.

In group_rank order: each member gets its slice of all gradients, adds them up in that order, and hands the sum round
(or to the first member alone). Every element is added by the same operations in the same order whatever the slices
are, so a replay, which has no slices, reaches the same bits. Or by the MPI library's own allreduce, in whatever order
it likes, on a communicator of the group's own.

What members tell each other goes from one to the other, which still works where a communicator has lost a rank and
collectives fail. Nothing blocks: `test` drives what is under way, so a rank that waits for its group still notices
everything else.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.executor import CACHE_LINE, Buffer, Executor, average
from rudra.core.events import Reduce, Reduced
from rudra.core.messages import WORD_BYTES, Kind, Message, Word, tail_bytes
from rudra.core.records import Gradient
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import outcome
from topologies import Plan

_ALIGNED = CACHE_LINE // 4


class GroupReduction:
    """One rank's part in the reductions of its group.

    Args:
        comm: of all ranks of the job.
        members: ranks of the group's members, in group_rank order.
        tag: of all that they send each other.
        size: of the vector, in elements.
        ring: wakes the other members, where they wait.
        library: communicator of the members in the same order, on which the MPI library adds; None: they add in
            group_rank order.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Sequence[int],
        tag: int,
        size: int,
        ring: Callable[[], None],
        library: MPI.Comm | None = None,
    ) -> None:
        self._comm, self._members, self._tag, self._ring, self._library = comm, members, tag, ring, library
        self._k, self._rank = len(members), members.index(comm.rank)
        step = -(-size // (self._k * _ALIGNED)) * _ALIGNED
        self._slices = [slice(min(i * step, size), min((i + 1) * step, size)) for i in range(self._k)]
        mine = self._slices[self._rank]
        length = mine.stop - mine.start
        # Touched, not only promised: transfers into untouched memory are slow.
        self._incoming = [
            np.full(length if library is None and i != self._rank else 0, 0.0, np.float32) for i in range(self._k)
        ]
        self._records = np.zeros((self._k, WORD_BYTES + tail_bytes(1)), np.uint8)
        self._requests: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []  # those of them that write
        self._action: Reduce | None = None
        self._gradients: tuple[Gradient, ...] = ()
        self._gathering = False

    @property
    def busy(self) -> bool:
        return self._action is not None

    def begin(self, action: Reduce, buffer: Buffer) -> None:
        """Starts a reduction; every member starts the same one, and none starts the next before it is over."""
        self._action, self._buffer, self._gathering = action, buffer, False
        self._receives.clear()
        said = action.word.encode() + Message(Kind.GRADIENT, 0, gradients=(action.gradient,)).encode()
        self._records[self._rank, : len(said)] = np.frombuffer(said, np.uint8)
        for i in self._others:
            self._receive(self._records[i], i)
            self._send(self._records[self._rank], i)
        if self._library is None:
            for i in self._others:
                self._receive(self._incoming[i], i)
                self._send(buffer.array[self._slices[i]], i)
        self._ring()

    @property
    def _others(self) -> list[int]:
        return [i for i in range(self._k) if i != self._rank]

    def _send(self, what: npt.NDArray[Any], to: int) -> None:
        self._requests.append(self._comm.Isend(what, self._members[to], self._tag))

    def _receive(self, into: npt.NDArray[Any], of: int) -> None:
        request = self._comm.Irecv(into, self._members[of], self._tag)
        self._requests.append(request)
        self._receives.append(request)

    def test(self) -> Reduced | None:
        """Goes on as far as it can; the event, when it is over."""
        assert self._action is not None
        while self._requests:
            what = outcome(self._requests[-1])  # one after the other: none can be left out
            if what == "failed":  # a member has died; all will regroup
                self._action = None
            if what != "done":
                return None
            self._requests.pop()
        if not self._gathering:
            self._gathering = True
            rows = (Message.decode(row[WORD_BYTES:].data).gradients for row in self._records)
            self._gradients = tuple(gradient for gradients in rows for gradient in gradients)
            if self._library is None:
                self._add()
            else:
                self._allreduce(self._library)
            self._ring()
            return self.test()
        if self._library is not None:
            self._buffer.vector.mul_(1 / sum(g.samples for g in self._gradients))
        self._buffer.version += 1
        action, self._action = self._action, None
        assert action is not None
        return Reduced(action.sequence, self._gradients, tuple(Word.decode(row.data) for row in self._records))

    def _add(self) -> None:
        """Adds what came for this member's slice, and starts to hand the sum on."""
        assert self._action is not None
        array, mine = self._buffer.array, self._slices[self._rank]
        own = self._buffer.vector[mine]
        parts = [own if i == self._rank else torch.from_numpy(part) for i, part in enumerate(self._incoming)]
        average(own, parts, [gradient.samples for gradient in self._gradients])
        for i in self._others:
            if self._action.to_all or i == 0:
                self._send(array[mine], i)
            if self._action.to_all or self._rank == 0:
                self._receive(array[self._slices[i]], i)

    def _allreduce(self, library: MPI.Comm) -> None:
        assert self._action is not None
        self._buffer.vector.mul_(self._action.gradient.samples)
        self._requests = [library.Iallreduce(MPI.IN_PLACE, self._buffer.array, MPI.SUM)]

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever; `quiet` says when nothing of it writes here any more."""
        self._action = None
        if not self.quiet:
            for request in self._receives:
                request.Cancel()

    @property
    def quiet(self) -> bool:
        self._receives = [r for r in self._receives if outcome(r) == "no"]
        return not self._receives

    def close(self) -> None:
        if self._library is not None:
            self._library.Free()


def make_reduction(
    comm: MPI.Comm,
    plan: Plan,
    role: int,
    tag: int,
    executor: Executor,
    doorbell: Doorbell,
    library: MPI.Comm | None = None,
) -> GroupReduction:
    """A learner's part in the reductions of its compute group.

    Args:
        comm: of all ranks of the job.
        plan: who is who.
        role: id of the learner.
        tag: of messages between members.
        executor: holds the learner's gradient.
        doorbell: wakes those that wait.
        library: as for `GroupReduction`.
    """
    members = [plan.roles[i].world_rank for i in plan.group_of(role)]

    def ring() -> None:
        for rank in members:
            if rank != comm.rank:
                doorbell.ring(rank)

    return GroupReduction(comm, members, tag, executor.size, ring, library)


def library_comm(comm: MPI.Comm, plan: Plan, roles: Collection[int]) -> MPI.Comm | None:
    """For groups whose gradients the MPI library adds, the communicator of that of these roles; all ranks together."""
    if not plan.groups or plan.reduction != "mpi":
        return None
    for group, members in enumerate(plan.groups):
        for place, role in enumerate(members):
            if role in roles:
                return comm.Split(group, place)
    comm.Split(MPI.UNDEFINED)
    return None
