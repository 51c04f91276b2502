"""Averaging gradients over a compute group.

In group_rank order: each rank gets its slice of all gradients, adds them up in that order, and hands the sum round
(or to the first member's rank alone). Every element is added by the same operations in the same order whatever the
slices are, so a replay, which has no slices, reaches the same bits, and so do learners that share ranks. Or by the MPI
library's own allreduce, in whatever order it likes, on a communicator of the group's own.

Gradients of ranks on this node are read where they lie (`rudra.mpi.arena`), and so are the sums of their slices: a rank
writes its sum over its own slice of its own gradient, which nobody else reads, and tells the others when it is there.
Few members on one node do without that: whoever needs the sum adds all up by itself, when its update goes through the
elements. A gradient stays as it is until all members bring their next one: by then they have done with it.

What ranks tell each other goes from one to the other, which still works where a communicator has lost a rank and
collectives fail. Nothing blocks: `test` drives what is under way, so a rank that waits for its group still notices
everything else.
"""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.averaging import CACHE_LINE, CHUNK, average
from rudra.compute.executor import Executor
from rudra.compute.vectors import Buffer, Take
from rudra.core.events import Reduce, Reduced
from rudra.core.messages import WORD_BYTES, Kind, Message, Word, tail_bytes
from rudra.core.records import Gradient
from rudra.mpi.arena import Arena
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import outcome
from topologies import Plan

FEW = 2
"""Of so many members that share memory, whoever needs the sum makes all of it."""

_ALIGNED = CACHE_LINE // 4
_OFFSET = struct.Struct("<q")
_MESSAGE = _OFFSET.size + WORD_BYTES
_ROW = _MESSAGE + tail_bytes(1)


class GroupReduction:
    """One rank's part in the reductions of a group, of which it hosts one member or several.

    Args:
        comm: of all ranks of the job.
        members: role -> rank, of the group's members, in group_rank order.
        tag: of all that their ranks send each other.
        size: of the vector, in elements.
        ring: wakes the other members' ranks, where they wait.
        library: communicator of these ranks, on which the MPI library adds; None: they add in group_rank order.
        arena: where their gradients lie, and those of the ranks here that are to be read there; None: none are.

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
        arena: Arena | None = None,
    ) -> None:
        self._comm, self._tag, self._ring, self._library, self._arena = comm, tag, ring, library, arena
        self._on_rank: dict[int, list[int]] = {}  # rank -> places of its members in the group
        for place, rank in enumerate(members.values()):
            self._on_rank.setdefault(rank, []).append(place)
        ranks = list(self._on_rank)
        step = -(-size // (len(ranks) * _ALIGNED)) * _ALIGNED
        self._step, self._size = step, size
        self._slices = {rank: slice(min(i * step, size), min((i + 1) * step, size)) for i, rank in enumerate(ranks)}
        self._told = {rank: np.zeros((len(places), _ROW), np.uint8) for rank, places in self._on_rank.items()}
        self._mine = self._on_rank.pop(comm.rank)
        self.roles = tuple(list(members)[place] for place in self._mine)
        self._has_first = 0 in self._mine  # who takes the sum where it goes to one alone
        shared = arena.neighbours if arena is not None and library is None else frozenset()
        self._near = [rank for rank in self._on_rank if rank in shared]
        self._far = [rank for rank in self._on_rank if rank not in shared and library is None]
        self._alone = bool(self._near) and not self._far and len(ranks) == len(members) <= FEW
        mine = self._slices[comm.rank]
        # Touched, not only promised: transfers into untouched memory are slow.
        self._incoming = {
            place: np.full(mine.stop - mine.start, 0.0, np.float32)
            for rank in self._far
            for place in self._on_rank[rank]
        }
        self._room = torch.zeros(min(CHUNK, mine.stop - mine.start))
        self._nothing = np.empty(0, np.uint8)
        self._requests: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []  # those of them that write
        self._begun: dict[int, tuple[Reduce, Executor, Buffer]] = {}  # role -> what it brings
        self._handed_out = 0  # by so many of the members here
        self._lent: list[Buffer] = []  # that others may read: of this reduction,
        self._lent_before: list[Buffer] = []  # and of the one before
        self._gradients: tuple[Gradient, ...] = ()
        self._gathering = self._failed = False

    @property
    def busy(self) -> bool:
        return bool(self._begun)

    def begin(self, role: int, action: Reduce, executor: Executor) -> None:
        """A member here starts a reduction; all start the same one, and none starts the next before it is over."""
        if self._failed:
            return
        if not self._begun:
            self._gathering, self._handed_out = False, 0
            self._receives.clear()
            for rank, places in self._on_rank.items():
                for place in places if rank in self._far else ():
                    self._receive(self._incoming[place], rank)
                self._receive(self._told[rank], rank)
        buffer = executor.buffer(action.buffer)
        if self._near:
            buffer.held += 1
            self._lent.append(buffer)
        self._begun[role] = action, executor, buffer
        while self._handed_out < len(self.roles) and self.roles[self._handed_out] in self._begun:
            action, _, buffer = self._begun[self.roles[self._handed_out]]
            self._hand_out(self._told[self._comm.rank][self._handed_out], action, buffer)
            self._handed_out += 1
        if len(self._begun) == len(self.roles):
            for rank in self._on_rank:
                self._send(self._told[self._comm.rank], rank)
        self._ring()

    def _hand_out(self, row: npt.NDArray[np.uint8], action: Reduce, buffer: Buffer) -> None:
        """Writes what is to be told of a gradient, and sends the ranks that cannot read it their slices.

        Members of a rank do so one after the other, as they are expected.
        """
        offset = self._arena.offset(buffer.array) if self._near and self._arena is not None else 0
        assert offset is not None
        message = Message(Kind.GRADIENT, 0, gradients=(action.gradient,)).encode()
        said = _OFFSET.pack(offset) + action.word.encode() + message
        row.data[: len(said)] = said
        for rank in self._far:
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
        buffers = [self._begun[role][2] for role in self.roles]
        action = self._begun[self.roles[0]][0]
        if not self._gathering:
            self._gathering = True
            self._take_in()
            if self._library is not None:
                self._allreduce(self._library, buffers)
            elif not self._alone:
                self._add(buffers, to_all=action.to_all)
            if self._requests:
                self._ring()
                return self.test()
        if self._near:
            self._defer(buffers, to_all=action.to_all)
        else:
            self._finish(buffers, to_all=action.to_all)
        self._begun.clear()
        return Reduced(action.sequence, self._gradients, self._words)

    def _take_in(self) -> None:
        """What all members have told is here."""
        rows: dict[int, memoryview] = {}
        for rank, places in (*self._on_rank.items(), (self._comm.rank, self._mine)):
            rows |= zip(places, (row.data for row in self._told[rank]), strict=True)
        ordered = [rows[place] for place in range(len(rows))]
        self._gradients = tuple(Message.decode(row[_MESSAGE:]).gradients[0] for row in ordered)
        self._words = tuple(Word.decode(row[_OFFSET.size :]) for row in ordered)
        self._offsets = [_OFFSET.unpack_from(row)[0] for row in ordered]
        self._give_back(self._lent_before)
        self._lent, self._lent_before = self._lent_before, self._lent

    def _give_back(self, lent: list[Buffer]) -> None:
        for buffer in lent:
            buffer.held -= 1
        lent.clear()

    def _there(self, rank: int, place: int) -> torch.Tensor:
        """The gradient of a member on a rank of this node."""
        assert self._arena is not None
        return self._arena.floats_at(rank, self._offsets[place], self._size * 4)

    def _in_order(self, buffers: Sequence[Buffer], part: slice) -> list[torch.Tensor]:
        """That part of all gradients."""
        parts = {place: buffer.vector[part] for place, buffer in zip(self._mine, buffers, strict=True)}
        parts |= {place: self._there(rank, place)[part] for rank in self._near for place in self._on_rank[rank]}
        parts |= {place: torch.from_numpy(came) for place, came in self._incoming.items()}
        return [parts[place] for place in range(len(parts))]

    def _add(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Adds this rank's slice, and starts to hand the sum on."""
        mine = self._slices[self._comm.rank]
        samples = [gradient.samples for gradient in self._gradients]
        ordered = self._in_order(buffers, mine)
        for part in (slice(start, start + CHUNK) for start in range(0, mine.stop - mine.start, CHUNK)):
            into = buffers[0].vector[mine][part]
            average(into, [gradient[part] for gradient in ordered], samples, self._room[: len(into)])
        array = buffers[0].array
        for rank, places in self._on_rank.items():
            if to_all or 0 in places:
                self._send(array[mine] if rank in self._far else self._nothing, rank)
            if to_all or self._has_first:
                self._receive(array[self._slices[rank]] if rank in self._far else self._nothing, rank)

    def _defer(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Lets those here who need the sum have it where it lies, or make it."""
        if not to_all and not self._has_first:
            return
        sources: list[torch.Tensor]
        if self._alone:
            sources = self._in_order(buffers, slice(None))
            samples = [gradient.samples for gradient in self._gradients]
        else:
            first = buffers[0].vector
            sources = [
                self._there(rank, self._on_rank[rank][0]) if rank in self._near else first for rank in self._slices
            ]
        for role in self.roles if to_all else self.roles[:1]:
            action, executor, _ = self._begun[role]
            room = torch.empty(0)
            take: Take
            if self._alone:
                take = partial(summed, sources, samples, room)
            else:
                take = partial(joined, sources, self._step, room)
            executor.defer(action.buffer, take)

    def _finish(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """The sum lies with the first member here."""
        first, *others = buffers
        if self._library is not None:
            first.vector.mul_(1 / sum(g.samples for g in self._gradients))
        for other in others if to_all else ():
            other.vector.copy_(first.vector)
        for buffer in buffers:
            buffer.version += 1

    def _allreduce(self, library: MPI.Comm, buffers: Sequence[Buffer]) -> None:
        first, *others = buffers
        samples = [self._gradients[place].samples for place in self._mine]
        first.vector.mul_(samples[0])
        for other, count in zip(others, samples[1:], strict=True):
            first.vector.add_(other.vector, alpha=count)
        self._requests = [library.Iallreduce(MPI.IN_PLACE, first.array, MPI.SUM)]

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever; `quiet` says when nothing of it writes here any more.

        Who has not heard of it may still read what was lent; but what comes of that will be dropped.
        """
        self._begun.clear()
        self._give_back(self._lent)
        self._give_back(self._lent_before)
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


def summed(gradients: Sequence[torch.Tensor], samples: Sequence[int], room: torch.Tensor, part: slice) -> torch.Tensor:
    """A part of the mean of gradients, which is made in some room."""
    room.resize_(part.stop - part.start)
    average(room, [gradient[part] for gradient in gradients], samples, room)
    return room


def joined(vectors: Sequence[torch.Tensor], step: int, room: torch.Tensor, part: slice) -> torch.Tensor:
    """A part of a vector of which each of these holds so many elements, one after the other."""
    start, stop = part.start, part.stop
    if start // step == (stop - 1) // step:
        found: torch.Tensor = vectors[start // step][part]
        return found
    room.resize_(stop - start)
    for first in range(start // step * step, stop, step):
        some = slice(max(first, start), min(first + step, stop))
        room[some.start - start : some.stop - start] = vectors[first // step][some]
    return room


def make_reduction(
    comm: MPI.Comm,
    plan: Plan,
    role: int,
    tag: int,
    size: int,
    doorbell: Doorbell,
    library: MPI.Comm | None = None,
    arena: Arena | None = None,
) -> GroupReduction:
    """This rank's part in the reductions of a learner's compute group.

    Args:
        comm: of all ranks of the job.
        plan: who is who.
        role: id of the learner, which is here.
        tag: of messages between members.
        size: of the vector, in elements.
        doorbell: wakes those that wait.
        library, arena: as for `GroupReduction`.
    """
    members = {i: plan.roles[i].world_rank for i in plan.group_of(role)}
    others = {*members.values()} - {comm.rank}

    def ring() -> None:
        for rank in others:
            doorbell.ring(rank)

    return GroupReduction(comm, members, tag, size, ring, library, arena)


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
