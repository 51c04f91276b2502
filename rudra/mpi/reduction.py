"""Averaging gradients over a compute group.

In group_rank order: each rank gets its slice of all gradients, adds them up in that order, and hands the sum round
(or to the first member's rank alone). Every element is added by the same operations in the same order whatever the
slices are, so a replay, which has no slices, reaches the same bits, and so do learners that share ranks. Or by the MPI
library's own allreduce, in whatever order it likes, on a communicator of the group's own.

What ranks tell each other goes from one to the other, which still works where a communicator has lost a rank and
collectives fail. Nothing blocks: `test` drives what is under way, so a rank that waits for its group still notices
everything else.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.executor import CACHE_LINE, Buffer, average
from rudra.core.events import Reduce, Reduced
from rudra.core.messages import WORD_BYTES, Kind, Message, Word, tail_bytes
from rudra.core.records import Gradient
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import outcome
from topologies import Plan

_ALIGNED = CACHE_LINE // 4


class GroupReduction:
    """One rank's part in the reductions of a group, of which it hosts one member or several.

    Args:
        comm: of all ranks of the job.
        members: role -> rank, of the group's members, in group_rank order.
        tag: of all that their ranks send each other.
        size: of the vector, in elements.
        ring: wakes the other members' ranks, where they wait.
        library: communicator of these ranks, on which the MPI library adds; None: they add in group_rank order.

    Attributes:
        roles: the members here, in group_rank order.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Mapping[int, int],
        tag: int,
        size: int,
        ring: Callable[[], None],
        library: MPI.Comm | None = None,
    ) -> None:
        self._comm, self._tag, self._ring, self._library = comm, tag, ring, library
        self._on_rank: dict[int, list[int]] = {}  # rank -> places of its members in the group
        for place, rank in enumerate(members.values()):
            self._on_rank.setdefault(rank, []).append(place)
        self._mine = self._on_rank.pop(comm.rank)
        self.roles = tuple(list(members)[place] for place in self._mine)
        self._has_first = 0 in self._mine  # who takes the sum where it goes to one alone
        ranks = list(dict.fromkeys(members.values()))
        step = -(-size // (len(ranks) * _ALIGNED)) * _ALIGNED
        self._slices = {rank: slice(min(i * step, size), min((i + 1) * step, size)) for i, rank in enumerate(ranks)}
        mine = self._slices[comm.rank]
        length = mine.stop - mine.start if library is None else 0
        # Touched, not only promised: transfers into untouched memory are slow.
        self._incoming = {
            place: np.full(length, 0.0, np.float32) for places in self._on_rank.values() for place in places
        }
        self._records = np.zeros((len(members), WORD_BYTES + tail_bytes(1)), np.uint8)
        self._requests: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []  # those of them that write
        self._begun: dict[int, tuple[Reduce, Buffer]] = {}  # role -> what it brings
        self._handed_out = 0  # by so many of the members here
        self._gradients: tuple[Gradient, ...] = ()
        self._gathering = self._failed = False

    @property
    def busy(self) -> bool:
        return bool(self._begun)

    def begin(self, role: int, action: Reduce, buffer: Buffer) -> None:
        """A member here starts a reduction; all start the same one, and none starts the next before it is over."""
        if self._failed:
            return
        if not self._begun:
            self._gathering, self._handed_out = False, 0
            self._receives.clear()
            for rank, places in self._on_rank.items():
                for place in places:
                    self._receive(self._records[place], rank)
                    if self._library is None:
                        self._receive(self._incoming[place], rank)
        self._begun[role] = action, buffer
        while self._handed_out < len(self.roles) and self.roles[self._handed_out] in self._begun:
            self._hand_out(self._mine[self._handed_out], *self._begun[self.roles[self._handed_out]])
            self._handed_out += 1
        self._ring()

    def _hand_out(self, place: int, action: Reduce, buffer: Buffer) -> None:
        """Sends the others what a member brings: members of a rank one after the other, as they are expected."""
        said = action.word.encode() + Message(Kind.GRADIENT, 0, gradients=(action.gradient,)).encode()
        self._records[place, : len(said)] = np.frombuffer(said, np.uint8)
        for rank in self._on_rank:
            self._send(self._records[place], rank)
            if self._library is None:
                self._send(buffer.array[self._slices[rank]], rank)

    def _send(self, what: npt.NDArray[Any], to: int) -> None:
        self._requests.append(self._comm.Isend(what, to, self._tag))

    def _receive(self, into: npt.NDArray[Any], of: int) -> None:
        request = self._comm.Irecv(into, of, self._tag)
        self._requests.append(request)
        self._receives.append(request)

    def test(self) -> Reduced | None:
        """Goes on as far as it can; the event for all members here, when it is over."""
        while self._requests:
            what = outcome(self._requests[-1])  # one after the other: none can be left out
            if what == "failed":  # a member has died; all will regroup
                self._begun.clear()
                self._failed = True
            if what != "done":
                return None
            self._requests.pop()
        if len(self._begun) < len(self.roles):
            return None
        buffers = [self._begun[role][1] for role in self.roles]
        action = self._begun[self.roles[0]][0]
        if not self._gathering:
            self._gathering = True
            rows = (Message.decode(row[WORD_BYTES:].data).gradients for row in self._records)
            self._gradients = tuple(gradient for gradients in rows for gradient in gradients)
            if self._library is None:
                self._add(buffers, to_all=action.to_all)
            else:
                self._allreduce(self._library, buffers)
            self._ring()
            return self.test()
        first, *others = buffers
        if self._library is not None:
            first.vector.mul_(1 / sum(g.samples for g in self._gradients))
        for other in others if action.to_all else ():
            other.vector.copy_(first.vector)
        for buffer in buffers:
            buffer.version += 1
        self._begun.clear()
        return Reduced(action.sequence, self._gradients, tuple(Word.decode(row.data) for row in self._records))

    def _add(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Adds what came for this rank's slice, and starts to hand the sum on."""
        mine = self._slices[self._comm.rank]
        here = {place: buffer.vector[mine] for place, buffer in zip(self._mine, buffers, strict=True)}
        there = {place: torch.from_numpy(part) for place, part in self._incoming.items()}
        parts = here | there
        ordered = [parts[place] for place in range(len(parts))]
        average(here[self._mine[0]], ordered, [gradient.samples for gradient in self._gradients])
        array = buffers[0].array
        for rank, places in self._on_rank.items():
            if to_all or 0 in places:
                self._send(array[mine], rank)
            if to_all or self._has_first:
                self._receive(array[self._slices[rank]], rank)

    def _allreduce(self, library: MPI.Comm, buffers: Sequence[Buffer]) -> None:
        first, *others = buffers
        samples = [self._gradients[place].samples for place in self._mine]
        first.vector.mul_(samples[0])
        for other, count in zip(others, samples[1:], strict=True):
            first.vector.add_(other.vector, alpha=count)
        self._requests = [library.Iallreduce(MPI.IN_PLACE, first.array, MPI.SUM)]

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever; `quiet` says when nothing of it writes here any more."""
        self._begun.clear()
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
    size: int,
    doorbell: Doorbell,
    library: MPI.Comm | None = None,
) -> GroupReduction:
    """This rank's part in the reductions of a learner's compute group.

    Args:
        comm: of all ranks of the job.
        plan: who is who.
        role: id of the learner, which is here.
        tag: of messages between members.
        size: of the vector, in elements.
        doorbell: wakes those that wait.
        library: as for `GroupReduction`.
    """
    members = {i: plan.roles[i].world_rank for i in plan.group_of(role)}
    others = {*members.values()} - {comm.rank}

    def ring() -> None:
        for rank in others:
            doorbell.ring(rank)

    return GroupReduction(comm, members, tag, size, ring, library)


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
