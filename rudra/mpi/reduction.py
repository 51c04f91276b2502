"""Averaging gradients over a compute group.

In the plan's order (`Plan.partial_sums`): each rank gets its slice of all gradients, adds them up in that order, and
hands the sum round (or to the first member's rank alone). Every element is added by the same operations in the same
order whatever the slices are, so a replay, which has no slices, reaches the same bits, and so do learners that share
ranks. Or by the MPI library's own allreduce, in whatever order it likes, on a communicator of the group's own.

Where the plan has partial sums, those of nodes, a rank gets its slice of these: of each other node, one rank adds it,
sends it, and gets the finished slice for all its node. Ranks of a node take different slices of the others, so all of
them add and send. With one partial sum there are no others, and who owns a slice is who adds it.

Gradients of ranks on this node are read where they lie (`rudra.mpi.arena`), and so are the sums of their slices: a rank
writes its sum over its own slice of its own gradient, which nobody else reads, and tells the others when it is there.
Few members on one node do without that: whoever needs the sum adds all up by itself, when its update goes through the
elements. A gradient stays as it is until all members bring their next one: by then they have done with it.

What ranks tell each other goes from one to the other, which still works where a communicator has lost a rank and
collectives fail. Nothing blocks: `test` drives what is under way, so a rank that waits for its group still notices
everything else.
"""

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.averaging import CACHE_LINE, CHUNK, Addends, added, average, factors_of, finish_mean, slices
from rudra.compute.executor import Executor
from rudra.compute.vectors import Buffer, Take
from rudra.core.events import Reduce, Reduced
from rudra.core.messages import NOT_PULLING, PushedGradient
from rudra.core.records import Gradient
from rudra.core.wire import FLAGS_BYTES, decode, decode_flags, encode, encode_flags, tail_bytes
from rudra.mpi.arena import Arena
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import outcome
from topologies import Plan

FEW = 2
"""Of so many members that share memory, whoever needs the sum makes all of it."""

_ALIGNED = CACHE_LINE // 4
_OFFSET = struct.Struct("<q")
_MESSAGE = _OFFSET.size + FLAGS_BYTES
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
        sums: the order of addition (`Plan.partial_sums`), in which a rank has members in one partial sum; by default
            all are added in one.

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
        sums: Sequence[Sequence[int]] = (),
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
        self._sums = sums or [range(len(members))]
        by_place = list(members.values())
        in_sum = [list(dict.fromkeys(by_place[place] for place in of)) for of in self._sums]  # ranks of each
        self._home = next(number for number, its in enumerate(in_sum) if comm.rank in its)  # the partial sum made here
        self._home_of_first = next(number for number, of in enumerate(self._sums) if 0 in of)
        # For each partial sum: who adds which slice of it, by the slice's owner.
        self._adders = [
            {owner: owner if owner in its else its[place % len(its)] for place, owner in enumerate(ranks)}
            for its in in_sum
        ]
        self._mine = self._on_rank.pop(comm.rank)
        mates = set(in_sum[self._home])
        self.roles = tuple(list(members)[place] for place in self._mine)
        self._has_first = 0 in self._mine  # who takes the sum where it goes to one alone
        shared = arena.neighbours if arena is not None and library is None else frozenset()
        self._near = [rank for rank in self._on_rank if rank in mates & shared]
        self._far = [rank for rank in self._on_rank if rank in mates - shared and library is None]
        self._alone = len(mates) == len(members) <= FEW and len(self._near) == len(members) - 1 > 0
        mine = self._slices[comm.rank]
        # Touched, not only promised: transfers into untouched memory are slow.
        self._incoming = {
            (place, owner): np.full(self._length(owner), 0.0, np.float32)
            for rank in self._far
            for place in self._on_rank[rank]
            for owner in self._added_by(comm.rank)
        }
        self._sums_of_others = {
            number: np.full(mine.stop - mine.start, 0.0, np.float32)
            for number in range(len(in_sum))
            if number != self._home
        }
        self._room = torch.zeros(min(CHUNK, step))
        self._nothing = np.empty(0, np.uint8)
        self._requests: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []  # those of them that write
        self._begun: dict[int, tuple[Reduce, Executor, Buffer]] = {}  # role -> what it brings
        self._handed_out = 0  # by so many of the members here
        self._lent: list[Buffer] = []  # that others may read: of this reduction,
        self._lent_before: list[Buffer] = []  # and of the one before
        self._gradients: tuple[Gradient, ...] = ()
        self._course: Iterator[bool] | None = None  # of what follows when all have begun
        self._failed = False

    @property
    def busy(self) -> bool:
        return bool(self._begun)

    def _length(self, owner: int) -> int:
        """Elements of a slice."""
        return self._slices[owner].stop - self._slices[owner].start

    def _added_by(self, rank: int) -> list[int]:
        """Owners of the slices of the partial sum here that a rank adds."""
        return [owner for owner, adder in self._adders[self._home].items() if adder == rank]

    def begin(self, role: int, action: Reduce, executor: Executor) -> None:
        """A member here starts a reduction; all start the same one, and none starts the next before it is over."""
        if self._failed:
            return
        if not self._begun:
            self._course, self._handed_out = None, 0
            self._receives.clear()
            for rank, places in self._on_rank.items():
                for place in places if rank in self._far else ():
                    for owner in self._added_by(self._comm.rank):
                        self._receive(self._incoming[place, owner], rank)
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
        message = encode(PushedGradient(0, 0, NOT_PULLING, (action.gradient,)))
        said = _OFFSET.pack(offset) + encode_flags(action.word) + message
        row.data[: len(said)] = said
        for rank in self._far:
            for owner in self._added_by(rank):
                self._send(buffer.array[self._slices[owner]], rank)

    def _send(self, what: npt.NDArray[Any], to: int) -> None:
        self._requests.append(self._comm.Isend(what, to, self._tag))

    def _receive(self, into: npt.NDArray[Any], of: int) -> None:
        request = self._comm.Irecv(into, of, self._tag)
        self._requests.append(request)
        self._receives.append(request)

    def test(self) -> Reduced | None:
        """Goes on as far as it can; the event for all members here, when it is over."""
        while True:
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
            if self._course is None:
                self._course = self._go_on(buffers, to_all=action.to_all)
            if not next(self._course, False):
                break
            self._ring()
        if self._near:
            self._defer(buffers, to_all=action.to_all)
        else:
            self._finish(buffers, to_all=action.to_all)
        self._begun.clear()
        return Reduced(action.sequence, self._gradients, self._words, action.group)

    def _go_on(self, buffers: Sequence[Buffer], *, to_all: bool) -> Iterator[bool]:
        """Adds, when what all have told is here; after each step what it has begun must come to its end."""
        self._take_in()
        if self._library is not None:
            self._allreduce(self._library, buffers)
            yield True
        elif not self._alone:
            if self._sums_of_others:
                self._exchange_sums(buffers)
                yield True
            self._add(buffers)
            if self._sums_of_others:
                self._exchange_means(buffers, to_all=to_all)
                yield True
            self._hand_on(buffers, to_all=to_all)
            yield True

    def _take_in(self) -> None:
        """What all members have told is here."""
        rows: dict[int, memoryview] = {}
        for rank, places in (*self._on_rank.items(), (self._comm.rank, self._mine)):
            rows |= zip(places, (row.data for row in self._told[rank]), strict=True)
        ordered = [rows[place] for place in range(len(rows))]
        self._gradients = tuple(cast(PushedGradient, decode(row[_MESSAGE:])).gradients[0] for row in ordered)
        self._words = tuple(decode_flags(row[_OFFSET.size :]) for row in ordered)
        self._factors = factors_of([gradient.samples for gradient in self._gradients])
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

    def _readable(self, buffers: Sequence[Buffer]) -> dict[int, torch.Tensor]:
        """The gradients in memory that this rank reads, by place."""
        found = {place: buffer.vector for place, buffer in zip(self._mine, buffers, strict=True)}
        return found | {place: self._there(rank, place) for rank in self._near for place in self._on_rank[rank]}

    def _addends(self, buffers: Sequence[Buffer], owner: int) -> Addends:
        """What the partial sum here is made of, in a slice that this rank adds."""
        found = {place: vector[self._slices[owner]] for place, vector in self._readable(buffers).items()}
        found |= {place: torch.from_numpy(came) for (place, of), came in self._incoming.items() if of == owner}
        places = self._sums[self._home]
        return [found[place] for place in places], [self._factors[place] for place in places]

    def _exchange_sums(self, buffers: Sequence[Buffer]) -> None:
        """Adds slices that ranks of other nodes own, in this rank's gradient, and sends them; gets those of its own."""
        for number, came in self._sums_of_others.items():
            self._receive(came, self._adders[number][self._comm.rank])
        for owner in self._added_by(self._comm.rank):
            if owner == self._comm.rank:
                continue
            vectors, factors = self._addends(buffers, owner)
            into = buffers[0].vector[self._slices[owner]]
            for part in slices(0, len(into), CHUNK):
                into[part].copy_(added(([vector[part] for vector in vectors], factors), self._room[: len(into[part])]))
            self._send(buffers[0].array[self._slices[owner]], owner)

    def _add(self, buffers: Sequence[Buffer]) -> None:
        """Makes the mean in this rank's own slice, in its own gradient."""
        mine = self._comm.rank
        into = buffers[0].vector[self._slices[mine]]
        sums = {number: ([torch.from_numpy(came)], [1]) for number, came in self._sums_of_others.items()}
        ordered: list[Addends] = [sums.get(i) or self._addends(buffers, mine) for i in range(len(self._sums))]
        for part in slices(0, len(into), CHUNK):
            of_part = [([vector[part] for vector in vectors], factors) for vectors, factors in ordered]
            finish_mean(into[part], of_part, sum(self._factors), self._room[: len(into[part])])

    def _exchange_means(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Brings each finished slice to one rank of each node that needs it."""
        array, me = buffers[0].array, self._comm.rank
        for number in range(len(self._sums)) if to_all else (self._home_of_first,):
            if number != self._home:
                self._send(array[self._slices[me]], self._adders[number][me])
                continue
            for owner in self._added_by(me):
                if owner != me:
                    self._receive(array[self._slices[owner]], owner)

    def _hand_on(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Lets the ranks of this node have the finished slices that are here."""
        if not to_all and self._home != self._home_of_first:
            return
        for rank in (*self._near, *self._far):
            if to_all or 0 in self._on_rank[rank]:
                for what in self._handed(buffers, self._comm.rank, rank):
                    self._send(what, rank)
            if to_all or self._has_first:
                for into in self._handed(buffers, rank, rank):
                    self._receive(into, rank)

    def _handed(self, buffers: Sequence[Buffer], adder: int, other: int) -> list[npt.NDArray[Any]]:
        """What goes between this rank and another of finished slices that one of them has: if near, word of them."""
        if other in self._near:
            return [self._nothing]
        return [buffers[0].array[self._slices[owner]] for owner in self._added_by(adder)]

    def _defer(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Lets those here who need the sum have it where it lies, or make it."""
        if not to_all and not self._has_first:
            return
        sources: list[torch.Tensor]
        if self._alone:
            readable = self._readable(buffers)
            sources = [readable[place] for place in range(len(readable))]
            samples = [gradient.samples for gradient in self._gradients]
        else:
            first = buffers[0].vector
            sources = [
                self._there(rank, self._on_rank[rank][0]) if rank in self._near else first
                for rank in self._adders[self._home].values()
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
        self._course = None
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
    members: Sequence[int],
    tag: int,
    size: int,
    doorbell: Doorbell,
    library: MPI.Comm | None = None,
    arena: Arena | None = None,
) -> GroupReduction:
    """This rank's part in the reductions of some learners.

    Args:
        comm: of all ranks of the job.
        plan: who is who.
        members: ids of the learners, of which one is here (`Plan.together`).
        tag: of messages between members.
        size: of the vector, in elements.
        doorbell: wakes those that wait.
        library, arena: as for `GroupReduction`.
    """
    ranks = {i: plan.roles[i].world_rank for i in members}
    others = {*ranks.values()} - {comm.rank}

    def ring() -> None:
        for rank in others:
            doorbell.ring(rank)

    return GroupReduction(comm, ranks, tag, size, ring, library, arena, plan.partial_sums(members))


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
