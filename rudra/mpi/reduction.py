"""Averaging a part of the gradients over a compute group.

In the plan's order (`Plan.partial_sums`), each rank receives its slice of all gradients and adds them in that order.
It then distributes the sum, or sends it only to the first member's rank. Every element is added by the same operations
in the same order whatever the slices are. So results are bitwise identical in a replay, which has no slices, and if
learners share ranks. Alternatively, the MPI library's own allreduce adds in any order, on the group's own communicator.

If the plan has partial sums, one for each node, a rank receives its slice of the other partial sums. On each other
node, one rank adds that slice, sends it, and later receives the finished slice for its whole node. The ranks of a node
take different slices of the other nodes' ranks, so all of them add and send. With one partial sum, the owner of a slice
adds it.

Gradients of ranks on this node are read in shared memory (`rudra.mpi.arena`), and so are the sums of their slices. A
rank writes its sum over its own slice of its own gradient, which no other rank reads, and then notifies the others.
With few members on one node this is unnecessary: each rank that needs the sum adds everything itself while its update
processes the elements. A gradient stays unchanged until all members contribute their next one. By then no rank reads
the old one.

Ranks communicate by point-to-point messages, which still work after a communicator has lost a rank and collectives
fail. Nothing blocks: `test` advances pending work, so a rank that waits for its group still handles everything else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.averaging import CHUNK, Addends, added, average, finish_mean, slices
from rudra.compute.device.streams import Stream
from rudra.compute.vectors import Buffer, Take
from rudra.core.actions import Reduce
from rudra.core.messages import Rows
from rudra.core.wire import write_member
from rudra.mpi.arena import Arena
from rudra.mpi.failures import outcome
from rudra.mpi.group_messages import GroupRequests, GroupRows, LentBuffers
from rudra.mpi.group_slices import GroupSlices
from rudra.mpi.libraries import Library

_NOTHING = np.empty(0, np.uint8)


class PartReduction:
    """One rank's part in the reductions of a part of a group's vectors. One or more members are on this rank.

    Args:
        comm: communicator of all ranks of the job.
        members: role -> rank, of the group's members, in group_rank order.
        tag: tag of all messages between the group's ranks about this part.
        part: part of the vector.
        ring: wakes up the other members' ranks if they sleep.
        library: library that adds for the group. None: the ranks add, in group_rank order.
        arena: shared memory that contains the gradients of this rank and its neighbours. None: all gradients travel in
            messages.
        sums: order of addition (`Plan.partial_sums`). A rank's members must all be in one partial sum. By default there
            is only one sum.

    Attributes:
        part: part of the vector.
        division: division of the part among the group's ranks.
        rows: facts about the gradients of all members, after they have arrived.
        begun: role -> its contribution, for members here.
        failed: whether a member has died. All ranks will regroup.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Mapping[int, int],
        tag: int,
        part: slice,
        ring: Callable[[], None],
        library: Library | None = None,
        arena: Arena | None = None,
        sums: Sequence[Sequence[int]] = (),
    ) -> None:
        self.part, self._ring, self._library, self._arena = part, ring, library, arena
        shared = arena.neighbours if arena is not None and library is None else frozenset[int]()
        size = part.stop - part.start
        self.division = its = GroupSlices(comm.rank, members, size, shared, sums, library=library is not None)
        self._requests, self.rows, self._lent = GroupRequests(comm, tag), GroupRows(its), LentBuffers()
        # Written, because transfers into memory that was never touched are slow.
        self._incoming = {
            (place, owner): np.full(its.length(owner), 0.0, np.float32)
            for rank in its.far
            for place in its.others[rank]
            for owner in its.added_by(its.me)
        }
        self._sums_of_others = {
            number: np.full(its.length(its.me), 0.0, np.float32)
            for number in range(len(its.sums))
            if number != its.home
        }
        self._room = torch.empty(0)  # scratch memory for a slice
        self._stream = Stream() if arena is None else arena.stream
        self.begun: dict[int, tuple[Reduce, Buffer]] = {}
        self._row_requests: list[MPI.Request] = []  # receives of the other ranks' rows
        self._expects = False  # whether the receives of a reduction that has not begun here are pending
        self._handed_out = 0  # number of members here that have sent their slices
        self._course: Iterator[bool | None] | None = None  # remaining steps after all members have begun
        self.failed = False

    def expect(self) -> None:
        """Begins to receive what others send in the next reduction, which may come before members here begin."""
        its = self.division
        self._expects, self._course, self._handed_out = True, None, 0
        self._requests.begin()
        self._row_requests.clear()
        for rank, places in its.others.items():
            for place in places if rank in its.far else ():
                for owner in its.added_by(its.me):
                    self._requests.receive(self._incoming[place, owner], rank)
            self._row_requests += self._requests.receive(self.rows.of_rank[rank], rank)

    @property
    def begun_elsewhere(self) -> bool:
        """Whether another rank has begun this reduction, after `expect`."""
        found = [outcome(request) for request in self._row_requests]
        self.failed |= "failed" in found  # a later test of the request would not tell
        return "done" in found

    def begin(self, role: int, action: Reduce, buffer: Buffer) -> None:
        """Starts a reduction for a member here. All members start the same one, and complete it before the next."""
        its, roles, begun = self.division, self.division.roles, self.begun
        if not self._expects:
            self.expect()
        if its.near:
            self._lent.lend(buffer)
        begun[role] = action, buffer
        while self._handed_out < len(roles) and (found := begun.get(roles[self._handed_out])) is not None:
            self._hand_out(self._handed_out, *found)
            self._handed_out += 1
        complete = len(begun) == len(roles)
        for rank in its.others if complete else ():
            self._requests.send(self.rows.of_rank[its.me], rank)
        if complete or its.far:
            self._ring()

    def begin_all(self, action: Reduce, buffers: Sequence[Buffer], rows: Rows) -> None:
        """Starts a reduction for all members here at once.

        Args:
            action: what the first member brings.
            buffers: vectors of the members.
            rows: (members,) `MEMBER` of each, in order. Offsets are still missing.
        """
        its = self.division
        if not self._expects:
            self.expect()
        for number, (role, buffer) in enumerate(zip(its.roles, buffers, strict=True)):
            self.begun[role] = action, buffer
            if its.near:
                self._lent.lend(buffer)
                rows["offset"][number] = self._offset(buffer)
            self._send_slices(buffer)
        self.rows.of_rank[its.me][:] = rows.view(np.uint8)
        self._handed_out = len(buffers)
        for rank in its.others:
            self._requests.send(self.rows.of_rank[its.me], rank)
        self._ring()

    def _hand_out(self, number: int, action: Reduce, buffer: Buffer) -> None:
        """Writes a gradient's row, and sends slices of the gradient to ranks that cannot read it in memory.

        The members of a rank do so in order, because the receivers expect that order.
        """
        its = self.division
        offset = self._offset(buffer) if its.near else 0
        write_member(self.rows.of_rank[its.me], number, offset, action.word, action.gradient)
        self._send_slices(buffer)

    def _offset(self, buffer: Buffer) -> int:
        assert self._arena is not None
        offset = self._arena.offset_of(buffer)
        assert offset is not None
        return offset

    def _send_slices(self, buffer: Buffer) -> None:
        its = self.division
        for rank in its.far:
            for owner in its.added_by(rank):
                self._requests.send(self._array(buffer)[its.of_rank[owner]], rank)

    def _array(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Returns this part of a vector as an array."""
        return buffer.array[self.part]

    def _vector(self, buffer: Buffer) -> torch.Tensor:
        """Returns this part of a vector as a tensor."""
        return buffer.vector[self.part]

    def test(self) -> bool:
        """Advances the reduction, and returns whether it is complete."""
        while True:
            if (what := self._requests.drive()) != "done":
                self.failed = what == "failed"
                return False
            if len(self.begun) < len(self.division.roles):
                return False
            actions, buffers = zip(*(self.begun[role] for role in self.division.roles), strict=True)
            if self._course is None:
                self._course = self._steps(buffers, to_all=actions[0].to_all)
            step = next(self._course, False)
            if step is None:
                return False
            if not step:
                return True
            self._ring()

    @property
    def adds(self) -> bool:
        """Whether the addition has begun, after all members have begun."""
        return self._course is not None

    def end(self) -> None:
        """Ends a complete reduction."""
        self.begun.clear()
        self._expects = False

    def _steps(self, buffers: Sequence[Buffer], *, to_all: bool) -> Iterator[bool | None]:
        """Adds, after the rows of all members have arrived. Requests of one step must complete before the next step.

        Yields:
            True after each step, and None while a device still adds.
        """
        self.rows.take_in()
        self._lent.turn()
        if self._library is not None:
            self._allreduce(self._library, buffers)
            yield True
        elif not self.division.alone:
            if self._sums_of_others:
                self._exchange_sums(buffers)
                yield True
            adding = self._stream.submit(partial(self._add, buffers))
            while not adding.done():
                yield None
            if self._sums_of_others:
                self._exchange_means(buffers, to_all=to_all)
                yield True
            self._hand_on(buffers, to_all=to_all)
            yield True

    def _there(self, rank: int, place: int, some: slice) -> torch.Tensor:
        """Returns a slice of the gradient of a member on a rank of this node."""
        assert self._arena is not None
        first = self.rows.offsets[place] + 4 * (self.part.start + some.start)
        return self._arena.floats_at(rank, first, 4 * (some.stop - some.start))

    def _readable(self, buffers: Sequence[Buffer], some: slice) -> dict[int, torch.Tensor]:
        """Returns a slice of the gradients in memory that this rank can read, by group rank."""
        its, mine = self.division, slice(self.part.start + some.start, self.part.start + some.stop)
        found = {place: buffer.vector[mine] for place, buffer in zip(its.mine, buffers, strict=True)}
        return found | {place: self._there(rank, place, some) for rank in its.near for place in its.others[rank]}

    def _addends(self, buffers: Sequence[Buffer], owner: int) -> Addends:
        """Returns the addends of the home sum, in a slice that this rank adds."""
        its = self.division
        found = self._readable(buffers, its.of_rank[owner])
        found |= {place: torch.from_numpy(came) for (place, of), came in self._incoming.items() if of == owner}
        places = its.sums[its.home]
        return [found[place] for place in places], [self.rows.factors[place] for place in places]

    def _exchange_sums(self, buffers: Sequence[Buffer]) -> None:
        """Adds slices for ranks of other nodes, in this rank's gradient, and sends them. Receives its own slices."""
        its = self.division
        for number, came in self._sums_of_others.items():
            self._requests.receive(came, its.adders[number][its.me])
        for owner in its.added_by(its.me):
            if owner == its.me:
                continue
            vectors, factors = self._addends(buffers, owner)
            into = self._vector(buffers[0])[its.of_rank[owner]]
            for part, room in self._slices(into):
                into[part].copy_(added(([vector[part] for vector in vectors], factors), room))
            self._requests.send(self._array(buffers[0])[its.of_rank[owner]], owner)

    def _add(self, buffers: Sequence[Buffer]) -> tuple[()]:
        """Computes the mean in this rank's own slice, in its own gradient."""
        its = self.division
        into = self._vector(buffers[0])[its.of_rank[its.me]]
        sums = {number: ([torch.from_numpy(came)], [1]) for number, came in self._sums_of_others.items()}
        ordered: list[Addends] = [sums.get(i) or self._addends(buffers, its.me) for i in range(len(its.sums))]
        for part, room in self._slices(into):
            of_part = ordered
            if room.numel() < into.numel():
                of_part = [([vector[part] for vector in vectors], factors) for vectors, factors in ordered]
            finish_mean(into[part], of_part, sum(self.rows.factors), room)
        return ()

    def _slices(self, vector: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields slices to add at once, and scratch memory for each. A device adds whole vectors at once."""
        size = vector.numel()
        most = CHUNK if vector.is_cpu else max(1, size)
        if self._room.numel() < min(most, size):
            self._room = torch.zeros(min(most, size), device=vector.device)
        for part in slices(0, size, most):
            yield part, self._room[: part.stop - part.start]

    def _exchange_means(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Sends each finished slice to one rank of each node that needs it."""
        its, array = self.division, self._array(buffers[0])
        for number in range(len(its.sums)) if to_all else (its.home_of_first,):
            if number != its.home:
                self._requests.send(array[its.of_rank[its.me]], its.adders[number][its.me])
                continue
            for owner in its.added_by(its.me):
                if owner != its.me:
                    self._requests.receive(array[its.of_rank[owner]], owner)

    def _hand_on(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Sends the finished slices to the ranks of this node."""
        its = self.division
        if not to_all and its.home != its.home_of_first:
            return
        for rank in (*its.near, *its.far):
            if to_all or 0 in its.others[rank]:
                for what in self._handed(buffers, its.me, rank):
                    self._requests.send(what, rank)
            if to_all or its.has_first:
                for into in self._handed(buffers, rank, rank):
                    self._requests.receive(into, rank)

    def _handed(self, buffers: Sequence[Buffer], adder: int, other: int) -> list[npt.NDArray[Any]]:
        """Returns the finished slices to transfer between two ranks. A near rank gets only a notification."""
        its = self.division
        if other in its.near:
            return [_NOTHING]
        return [self._array(buffers[0])[its.of_rank[owner]] for owner in its.added_by(adder)]

    def taking(self, buffers: Sequence[Buffer]) -> Take:
        """Returns a function that reads slices of the result in the memory of this node's ranks.

        Args:
            buffers: gradients of the members here.
        """
        its, room = self.division, torch.empty(0, device=buffers[0].vector.device)
        if its.alone:
            readable = self._readable(buffers, slice(0, its.size))
            sources = [readable[place] for place in range(len(readable))]
            samples = [gradient.samples for gradient in self.rows.gradients]
            return partial(summed, sources, samples, room)
        own = self._vector(buffers[0])
        sources = [
            self._there(rank, its.others[rank][0], slice(0, its.size)) if rank in its.near else own
            for rank in its.adders[its.home].values()
        ]
        return partial(joined, sources, its.step, room)

    def finish(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Completes the result in the gradients of the members here. Not for results in shared memory."""
        first, *others = map(self._vector, buffers)
        if self._library is not None:
            first.mul_(1 / sum(gradient.samples for gradient in self.rows.gradients))
        for other in others if to_all else ():
            other.copy_(first)

    def _allreduce(self, library: Library, buffers: Sequence[Buffer]) -> None:
        first, *others = map(self._vector, buffers)
        samples = [self.rows.gradients[place].samples for place in self.division.mine]
        first.mul_(samples[0])
        for other, count in zip(others, samples[1:], strict=True):
            first.add_(other, alpha=count)
        self._requests.add(library.begin(first))

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever. `quiet` reports when it can no longer write here.

        A rank that does not know this yet may still read shared buffers, but its result will be dropped.
        """
        self.begun.clear()
        self._course = None
        self._lent.give_back()
        self._requests.cancel()

    @property
    def quiet(self) -> bool:
        return self._requests.quiet


def summed(gradients: Sequence[torch.Tensor], samples: Sequence[int], room: torch.Tensor, part: slice) -> torch.Tensor:
    """Computes a part of the mean of gradients in `room`, and returns it."""
    room.resize_(part.stop - part.start)
    average(room, [gradient[part] for gradient in gradients], samples, room)
    return room


def joined(vectors: Sequence[torch.Tensor], step: int, room: torch.Tensor, part: slice) -> torch.Tensor:
    """Returns a part of a vector that is cut into slices: each of `vectors` holds the next `step` elements."""
    start, stop = part.start, part.stop
    if start // step == (stop - 1) // step:
        found: torch.Tensor = vectors[start // step][part]
        return found
    room.resize_(stop - start)
    for first in range(start // step * step, stop, step):
        some = slice(max(first, start), min(first + step, stop))
        room[some.start - start : some.stop - start] = vectors[first // step][some]
    return room
