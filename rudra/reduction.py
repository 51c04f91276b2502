"""Averaging gradients over a compute group, on a communicator of its own.

In group_rank order: each member gets its slice of all gradients, adds them up in that order, and hands the sum round
(or to the first member alone). Every element is added by the same operations in the same order whatever the slices
are, so a replay, which has no slices, reaches the same bits. Or by the MPI library's own allreduce, in whatever order
it likes.

Nothing blocks: `test` drives what is under way, so a rank that waits for its group still notices everything else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from rudra.doorbell import Doorbell
from rudra.events import Reduce, Reduced
from rudra.executor import CACHE_LINE, Buffer, Executor, average
from rudra.failures import outcome
from rudra.messages import Kind, Message, tail_bytes
from rudra.records import Gradient
from topologies import Plan
from topologies.plan import Reduction

if TYPE_CHECKING:
    from mpi4py import MPI

_ALIGNED = CACHE_LINE // 4


class GroupReduction:
    """One rank's part in the reductions of its group.

    Args:
        comm: of the group's members, in group_rank order.
        size: of the vector, in elements.
        how: which of the two ways.
        ring: wakes the other members, where they wait.
    """

    def __init__(self, comm: "MPI.Comm", size: int, how: Reduction, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._comm, self._how, self._k, self._rank = comm, how, comm.size, comm.rank
        step = -(-size // (comm.size * _ALIGNED)) * _ALIGNED
        self._slices = [slice(min(i * step, size), min((i + 1) * step, size)) for i in range(comm.size)]
        mine = self._slices[self._rank]
        length = mine.stop - mine.start
        # Touched, not only promised: transfers into untouched memory are slow.
        self._incoming = [
            np.full(length if how == "ordered" and i != self._rank else 0, 0.0, np.float32) for i in range(comm.size)
        ]
        self._record = np.zeros(tail_bytes(1), np.uint8)
        self._records = np.zeros((comm.size, tail_bytes(1)), np.uint8)
        self._requests: list[MPI.Request] = []
        self._action: Reduce | None = None
        self._gradients: tuple[Gradient, ...] = ()
        self._gathering = False

    @property
    def busy(self) -> bool:
        return self._action is not None

    def begin(self, action: Reduce, buffer: Buffer) -> None:
        """Starts a reduction; every member starts the same one, and none starts the next before it is over."""
        self._action, self._buffer, self._gathering = action, buffer, False
        message = Message(Kind.GRADIENT, 0, gradients=(action.gradient,)).encode()
        self._record[: len(message)] = np.frombuffer(message, np.uint8)
        self._requests = [self._comm.Iallgather(self._record, self._records)]
        if self._how == "ordered":
            for i, (incoming, part) in enumerate(zip(self._incoming, self._slices, strict=True)):
                if i != self._rank:
                    self._requests.append(self._comm.Irecv(incoming, i))
                    self._requests.append(self._comm.Isend(buffer.array[part], i))
        self._ring()

    def test(self) -> Reduced | None:
        """Goes on as far as it can; the event, when it is over."""
        assert self._action is not None
        while self._requests:
            what = outcome(self._requests[-1])  # one after the other: none can be left out
            if what == "failed":  # a member has died; the run ends, and says so
                self._action = None
            if what != "done":
                return None
            self._requests.pop()
        if not self._gathering:
            self._gathering = True
            rows = (Message.decode(row.data).gradients for row in self._records)
            self._gradients = tuple(gradient for gradients in rows for gradient in gradients)
            if self._how == "ordered":
                self._add()
            else:
                self._allreduce()
            self._ring()
            return self.test()
        if self._how == "mpi":
            self._buffer.vector.mul_(1 / sum(g.samples for g in self._gradients))
        action, self._action = self._action, None
        assert action is not None
        return Reduced(action.sequence, self._gradients)

    def _add(self) -> None:
        """Adds what came for this member's slice, and starts to hand the sum on."""
        assert self._action is not None
        array, mine = self._buffer.array, self._slices[self._rank]
        own = self._buffer.vector[mine]
        parts = [own if i == self._rank else torch.from_numpy(part) for i, part in enumerate(self._incoming)]
        average(own, parts, [gradient.samples for gradient in self._gradients])
        members = range(self._k) if self._action.to_all else range(1)
        self._requests += [self._comm.Isend(array[mine], i) for i in members if i != self._rank]
        if self._rank in members:
            self._requests += [self._comm.Irecv(array[s], i) for i, s in enumerate(self._slices) if i != self._rank]

    def _allreduce(self) -> None:
        from mpi4py import MPI

        assert self._action is not None
        self._buffer.vector.mul_(self._action.gradient.samples)
        self._requests = [self._comm.Iallreduce(MPI.IN_PLACE, self._buffer.array, MPI.SUM)]

    def close(self) -> None:
        self._comm.Free()


def make_reductions(
    comm: "MPI.Comm", plan: Plan, executors: dict[int, Executor], doorbell: Doorbell
) -> dict[int, GroupReduction]:
    """A communicator for every compute group, and this rank's part in its own, by role; all ranks call this together.

    Args:
        comm: of all ranks of the job.
        plan: who is who.
        executors: of the roles that live here, by id.
        doorbell: wakes those that wait.
    """
    from mpi4py import MPI

    if not plan.groups:
        return {}
    here = ((role, members) for members in plan.groups for role in members if role in executors)
    role, members = next(here, (None, ()))
    if role is None:
        comm.Split(MPI.UNDEFINED)
        return {}
    group = comm.Split(plan.roles[role].group or 0, members.index(role))
    others = [plan.roles[i].world_rank for i in members if i != role]

    def ring() -> None:
        for rank in others:
            doorbell.ring(rank)

    return {role: GroupReduction(group, executors[role].size, plan.reduction, ring)}
