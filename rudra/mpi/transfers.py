"""Pending tensors that a rank's own thread transfers, and their handling after the death of a rank."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from rudra.compute.device.streams import Pending
from rudra.compute.executor import Executor
from rudra.compute.half import unrounded
from rudra.compute.vectors import EXPONENT, BorrowedBuffer, Buffer
from rudra.core.buffer_names import GRADIENT
from rudra.core.messages import PARTS, Message
from rudra.core.wire import decode, encode
from rudra.mpi import leases
from rudra.mpi.arena import Arena
from rudra.mpi.departures import Departures, Parcel, Pieces, half_of
from rudra.mpi.device_arena import DeviceArena
from rudra.mpi.failures import Losses, outcome
from rudra.mpi.leases import PLACE_BYTES, Going, Leases, Place


@dataclass(slots=True)
class Wanted:
    """A receive that a role has requested.

    Attributes:
        role: id of the receiving role.
        name: name of the buffer.
        source: rank of the sender. None: any rank.
        tag: tag of the message.
        halves: whether the tensor arrives as float16.
        or_tags: further tags that the tensor may have, from any rank.
        part_of: id of the other role if only a part of the tensor arrives, without a message. None: a whole tensor.
        near: whether every possible sender is a neighbour, which only sends the tensor's place.
        reads: whether the tensor of a neighbour is read in place and not copied.
        in_buckets_of: ids of the possible senders that push in buckets (`rudra.mpi.push_buckets`).
    """

    role: int
    name: str
    source: int | None
    tag: int
    halves: bool
    or_tags: Sequence[int] = ()
    part_of: int | None = None
    near: bool = False
    reads: bool = False
    in_buckets_of: Collection[int] = ()


@dataclass(slots=True)
class _Coming:
    """A receive that MPI has started, into a buffer, or only of a place if it has no buffer."""

    request: MPI.Request
    wanted: Wanted
    memory: Any
    buffer: Buffer | None
    status: MPI.Status


@dataclass(slots=True)
class _Landing:
    """A copy of a tensor that a device may still make, from a neighbour's memory or from a room.

    Attributes:
        wanted: the receive.
        source: rank of the sender.
        message: message that belongs to the tensor, if there is one.
        read: function that reports that the memory is free.
        copied: the copy.
        void: whether no role takes the tensor any more.
    """

    wanted: Wanted
    source: int
    message: Message | None
    read: Callable[[], None]
    copied: Pending
    void: bool = False


class Taken(NamedTuple):
    """Gradient that has come in buckets.

    Attributes:
        message: its message.
        source: rank of the sender.
        room: room that holds it. None: it is in the buffer of the role.
    """

    message: Message
    source: int
    room: torch.Tensor | None


class Transfers:
    """Sends and receives that are polled.

    While all ranks live, a receive from any rank is one request, posted in advance. After a death such requests are
    cancelled. A request that cannot be cancelled has matched a tensor. A living rank's tensor will arrive and a dead
    rank's will not, but MPI does not report which rank it is. So the request's memory is set aside, and used if the
    tensor arrives. Until then the role's buffer has other memory.

    After a death tensors from any rank are found by probes and received from their actual senders, because messages of
    the dead rank may still be announced. If ranks have several roles, whose tensors have different tags, probes are
    used from the start.

    Neighbours (`rudra.mpi.arena`) send places instead of tensors, in the same ways.

    Args:
        comm: communicator of all ranks.
        losses: ranks that have died.
        executors: role -> executor that holds the buffers.
        received: called when a tensor has arrived, with its message, or None if the message follows the tensor in the
            buffer.
        sent: called when the buffer of a send is free again, delivered or not.
        arena: memory that neighbours read.
        take: takes a gradient that has come in buckets for a role. None: there is none.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        losses: Losses,
        executors: Mapping[int, Executor],
        received: Callable[[Wanted, Message | None], None],
        sent: Callable[[Going], None],
        arena: Arena,
        take: Callable[[Wanted], "Taken | None"] = lambda wanted: None,
    ) -> None:
        self._take = take
        self._comm, self._losses, self._executors = comm, losses, executors
        self._received, self._sent = received, sent
        self._arena, self._leases = arena, Leases(arena)
        self._places_sent: list[tuple[MPI.Request, bytes]] = []  # places that are being sent
        self._departures: Departures | None = None  # tensors that are copied before they are sent
        if isinstance(arena, DeviceArena):
            self._departures = Departures(comm, arena, self._leases, self._places_sent, self.send)
        self._landing: list[_Landing] = []
        self._sends: list[tuple[MPI.Request, Going]] = []
        self._forgotten: list[MPI.Request] = []  # abandoned requests; their memory must stay
        self._ending: list[_Coming] = []  # also abandoned, but their memory will be used again after their end
        self._coming: list[_Coming] = []
        self._aside: list[_Coming] = []
        self._wanted: list[Wanted] = []
        self._anew = 0  # number of restarts
        self._turn = 0  # first tag of the next probe, so that every tag gets its turn

    def send(self, request: MPI.Request, going: Going) -> None:
        """Adds a send that was started elsewhere."""
        self._sends.append((request, going))

    def lend(self, going: Going, message: Message, to: int, tag: int, *, halves: bool, most: int) -> None:
        """Sends a neighbour the place of a tensor.

        Args:
            going: send of the buffer.
            message: message that belongs to the tensor.
            to: rank of the receiver.
            tag: tag of the message.
            halves: whether the tensor is read as float16.
            most: largest number of the role's buffers that others may keep. Further ones are copied.
        """
        executor = self._executors[going.role]
        if self._departures is not None:
            self._departures.lend(self._parcel(going, message, to, tag, halves=halves))
            return
        array = executor.send(going.name, message, going.to, halves=halves, near=True)
        copied = executor.held(going.name) >= most
        how = {"copied": copied, "copy_on_write": executor.copy_on_write(going.name)}
        buffer, offset = executor.buffer(going.name), self._arena.offset(array)
        place = self._leases.lend(buffer, offset, array, to, going, **how)
        data = place.encode() + (b"" if message.kind in PARTS else encode(message))
        self._places_sent.append((self._comm.Isend(data, to, tag), data))

    @property
    def on_device(self) -> bool:
        """Whether tensors are on this rank's device, and are copied from there before they are sent."""
        return self._departures is not None

    def depart(
        self, going: Going, message: Message, to: int, tag: int, *, halves: bool, pieces: Pieces | None = None
    ) -> None:
        """Sends another rank a copy of a tensor that is on this rank's device.

        Args:
            going, message, to, tag, halves: as for `lend`.
            pieces: parts of the tensor, as for `Departures.send`.
        """
        assert self._departures is not None
        tail = 0 if message.kind in PARTS else self._executors[going.role].tail
        self._departures.send(self._parcel(going, message, to, tag, halves=halves), tail, pieces)

    def _parcel(self, going: Going, message: Message, to: int, tag: int, *, halves: bool) -> Parcel:
        executor, part = self._executors[going.role], message.kind in PARTS
        vector = executor.lend(going.name).vector
        if part:
            vector = executor.slice_for(going.name, going.to)
        written = executor.copy_on_write(going.name)
        return Parcel(going, vector, b"" if part else encode(message), to, tag, halves, written)

    def receive(self, wanted: Wanted) -> None:
        """Begins to receive a tensor."""
        if wanted.in_buckets_of or (wanted.source is None and (self._losses.dead or wanted.or_tags)):
            self._wanted.append(wanted)
        else:
            self._post(wanted)

    def _post(self, wanted: Wanted) -> None:
        source = MPI.ANY_SOURCE if wanted.source is None else wanted.source
        memory, buffer = self._room(wanted)
        self._coming.append(_Coming(self._comm.Irecv(memory, source, wanted.tag), wanted, memory, buffer, MPI.Status()))

    def _room(self, wanted: Wanted) -> tuple[Any, Buffer | None]:
        """Returns the memory that receives the tensor, and its buffer."""
        executor = self._executors[wanted.role]
        joins = wanted.part_of is not None and not wanted.name.startswith(GRADIENT)  # with earlier parts
        if wanted.near:
            if not joins:
                executor.release(wanted.name, again=self._arena.copies)
            return bytearray(PLACE_BYTES + executor.tail), None
        if self._departures is not None:
            tail = 0 if wanted.part_of is not None else executor.tail
            return self._arena_of_device.room(max(self._bytes(wanted), PLACE_BYTES) + tail), None
        buffer = executor.buffer(wanted.name) if joins else executor.renew(wanted.name)
        if wanted.part_of is not None:
            return executor.slice_array(wanted.name, wanted.part_of), buffer
        return buffer.half if wanted.halves else buffer.wire, buffer

    def _land(self, coming: _Coming) -> None:
        """Processes a tensor or place that has arrived."""
        wanted, source = coming.wanted, coming.status.Get_source()
        if source not in self._arena.neighbours:
            if self._departures is None:
                self._received(wanted, None)
            else:
                self._land_from_room(wanted, source, coming.memory)
            return
        executor, memory = self._executors[wanted.role], coming.memory
        if isinstance(memory, torch.Tensor):
            memory = memory[: PLACE_BYTES + executor.tail].numpy(force=True).copy()
            self._arena_of_device.leave(coming.memory)
        place = Place.decode(memory)
        message = None if wanted.part_of is not None else decode(memoryview(memory)[PLACE_BYTES:])
        where = source, place.offset, place.length
        done = partial(self._give_back, source, place, self._anew)
        if leases.CHECKED:
            place.check(self._arena.bytes_at(*where))
        if wanted.reads and not place.copied:
            executor.release(wanted.name)
            form = executor.row_format if wanted.name.startswith(GRADIENT) else None
            executor.put(wanted.name, BorrowedBuffer(self._arena.floats_at(*where), done, form))
            self._arena.say(source, place.number, done=False)
            self._read(wanted, message)
            return
        if wanted.part_of is not None:
            copy = partial(_copied, executor.slice_for(wanted.name, wanted.part_of), self._arena.floats_at(*where))
        elif wanted.halves:
            how = _from_half if self._departures is not None else _unrounded
            copy = partial(how, executor.renew(wanted.name), self._arena.bytes_at(*where))
        else:
            copy = partial(_copied, executor.renew(wanted.name).vector, self._arena.floats_at(*where))
        self._begin_landing(wanted, source, message, done, copy)

    def _bytes(self, wanted: Wanted) -> int:
        """Returns the bytes of a tensor as it travels, without its message."""
        executor = self._executors[wanted.role]
        if wanted.part_of is not None:
            return 4 * len(executor.slice_for(wanted.name, wanted.part_of))
        size = executor.size_of(wanted.name)
        return 2 * size + EXPONENT if wanted.halves else 4 * size

    def _land_from_room(self, wanted: Wanted, source: int, room: torch.Tensor, message: Message | None = None) -> None:
        """Copies a tensor from a room to this rank's device.

        Args:
            wanted: the receive.
            source: rank of the sender.
            room: the room.
            message: message that belongs to the tensor. None: it follows the tensor, or there is none.
        """
        executor, length = self._executors[wanted.role], self._bytes(wanted)
        done = partial(self._arena_of_device.leave, room)
        if wanted.part_of is not None:
            into = executor.slice_for(wanted.name, wanted.part_of)
            copy = partial(_copied, into, room[:length].view(torch.float32))
            self._begin_landing(wanted, source, None, done, copy)
            return
        if message is None:
            message = decode(room[length:].numpy(force=True).data)
        buffer = executor.renew(wanted.name)
        if wanted.halves:
            copy = partial(_from_half, buffer, room)
        else:
            copy = partial(_copied, buffer.vector, room[:length].view(torch.float32))
        self._begin_landing(wanted, source, message, done, copy)

    @property
    def _arena_of_device(self) -> DeviceArena:
        assert isinstance(self._arena, DeviceArena)
        return self._arena

    def _begin_landing(
        self,
        wanted: Wanted,
        source: int,
        message: Message | None,
        read: Callable[[], None],
        copy: Callable[[], tuple[()]],
    ) -> None:
        self._landing.append(_Landing(wanted, source, message, read, self._arena.stream.submit(copy)))
        self._poll_landings()

    def _poll_landings(self) -> None:
        """Reports copies from neighbours that are complete. If the neighbour has died since, its tensor is void."""
        for landing in [landing for landing in self._landing if landing.copied.done()]:
            self._landing.remove(landing)
            if landing.void:
                if landing.source not in self._arena.neighbours:
                    landing.read()
                continue
            if self._arena.intact(landing.source):
                landing.read()
                self._read(landing.wanted, landing.message)
            elif landing.wanted.source is None:
                self._wanted.append(landing.wanted)

    def _read(self, wanted: Wanted, message: Message | None) -> None:
        """Reports a tensor that was read in a neighbour's memory."""
        if wanted.part_of is None:  # the receiver of a part counts it
            self._executors[wanted.role].buffer(wanted.name).version += 1
        self._received(wanted, message)

    def _give_back(self, owner: int, place: Place, anew: int) -> None:
        if leases.CHECKED and anew == self._anew:  # otherwise it was void before
            place.check(self._arena.bytes_at(owner, place.offset, place.length))
        self._arena.say(owner, place.number, done=True)

    def poll(self) -> None:
        """Reports transfers that are complete."""
        if self._sends:
            self._poll_sends()
        if self._departures is not None:
            self._departures.poll()
        if self._landing:
            self._poll_landings()
        for going in self._leases.poll():
            self._sent(going)
        if self._losses.dead:  # an uninformed role may still lease buffers to them, which would never be released
            for going in self._leases.end(lambda lease: lease.reader in self._losses.dead):
                self._sent(going)
        while self._places_sent and outcome(self._places_sent[0][0]) != "no":
            self._places_sent.pop(0)
        if self._coming:
            self._poll_receives()
        if self._wanted:
            self._look_for_wanted()
        if self._ending:
            self._ending = [coming for coming in self._ending if outcome(coming.request) == "no"]

    def _poll_sends(self) -> None:
        requests = [request for request, _ in self._sends]
        try:
            finished = MPI.Request.Testsome(requests)
        except MPI.Exception:
            if not self._losses.active:
                raise
            finished = [place for place, request in enumerate(requests) if request == MPI.REQUEST_NULL]
        if finished:
            gone = set(finished)
            over = [self._sends[place][1] for place in finished]
            self._sends = [send for place, send in enumerate(self._sends) if place not in gone]
            for going in over:
                self._sent(going)

    def _poll_receives(self) -> None:
        for coming, what in [(coming, outcome(coming.request, coming.status)) for coming in self._coming]:
            if what == "no":
                continue
            self._coming.remove(coming)
            if what == "done":
                self._land(coming)
            elif coming.wanted.source is None:  # the buffer's content is void
                self._wanted.append(coming.wanted)

    def _look_for_wanted(self) -> None:
        for wanted in list(self._wanted):
            if self._served_aside(wanted) or self._served_in_buckets(wanted):
                continue
            if wanted.source is not None:
                continue
            try:
                message = self._matched(wanted)
            except MPI.Exception:  # a loss that is not acknowledged yet
                return
            if message is not None:
                self._wanted.remove(wanted)
                memory, buffer = self._room(wanted)
                self._coming.append(_Coming(message.Irecv(memory), wanted, memory, buffer, MPI.Status()))

    def _matched(self, wanted: Wanted) -> MPI.Message | None:
        """Matches a tensor that has arrived, with any of its tags. The tags take turns."""
        tags = (wanted.tag, *wanted.or_tags)
        for turn in range(self._turn, self._turn + len(tags)):
            message = self._comm.Improbe(MPI.ANY_SOURCE, tags[turn % len(tags)])
            if message is not None:
                self._turn = turn + 1
                return message
        return None

    def _served_aside(self, wanted: Wanted) -> bool:
        """Gives the role a tensor that has arrived in memory which was set aside, if there is one."""
        for coming in self._aside:
            if coming.wanted.tag == wanted.tag and outcome(coming.request, coming.status) == "done":
                self._aside.remove(coming)
                self._wanted.remove(wanted)
                if coming.buffer is not None:
                    self._executors[wanted.role].put(wanted.name, coming.buffer)
                coming.wanted = wanted
                self._land(coming)
                return True
        return False

    def _served_in_buckets(self, wanted: Wanted) -> bool:
        """Gives the role a gradient that has come in buckets, if there is one."""
        found = self._take(wanted) if wanted.in_buckets_of else None
        if found is None:
            return False
        self._wanted.remove(wanted)
        if found.room is None:
            self._received(wanted, found.message)
        else:
            self._land_from_room(wanted, found.source, found.room, found.message)
        return True

    def withdraw(self, role: int, name: str) -> bool:
        """Cancels a receive, or returns False if its tensor is arriving or has arrived already."""
        for wanted in self._wanted:
            if (wanted.role, wanted.name) == (role, name):
                self._wanted.remove(wanted)
                return True
        for coming in self._coming:
            if (coming.wanted.role, coming.wanted.name) == (role, name):
                return self._cancelled(coming)
        return False

    def drop(self, to: int, rank: int) -> None:
        """Abandons transfers to a role, and receives from its rank. Buffers of unfinished receives get new memory."""
        self._wanted = [wanted for wanted in self._wanted if wanted.source != rank]
        for coming in [coming for coming in self._coming if coming.wanted.source == rank]:
            coming.request.Cancel()
            self._coming.remove(coming)
            self._forget(coming)
        sends, self._sends = self._sends, [send for send in self._sends if send[1].to != to]
        for request, going in sends:
            if going.to == to:
                self._forgotten.append(request)
                self._sent(going)
        for landing in self._landing:
            if landing.source == rank and not landing.void:
                landing.void = True
                self._executors[landing.wanted.role].put_new(landing.wanted.name)
        for going in [
            *self._leases.end(lambda lease: lease.going.to == to),
            *self._end_departures(lambda g: g.to == to),
        ]:
            self._sent(going)

    def _end_departures(self, which: Callable[[Going], bool]) -> list[Going]:
        return [] if self._departures is None else self._departures.end(which)

    def _forget(self, coming: _Coming) -> None:
        self._forgotten.append(coming.request)
        self._renew(coming)

    def _renew(self, coming: _Coming) -> None:
        """Gives a buffer other memory, because MPI may still write to the old memory."""
        if coming.buffer is not None:
            self._executors[coming.wanted.role].put_new(coming.wanted.name)

    def _cancelled(self, coming: _Coming) -> bool:
        """Cancels a receive and returns True, or returns False if it has matched. Reports it if it is complete."""
        coming.request.Cancel()
        what = outcome(coming.request, coming.status)
        if what == "no":
            return False
        self._coming.remove(coming)
        if what == "failed" or coming.status.Is_cancelled():
            return True
        self._land(coming)
        return False

    def lose(self, ranks: Collection[int]) -> None:
        """Handles dead ranks: drops receives from them, so that no role waits for those."""
        self._wanted = [wanted for wanted in self._wanted if wanted.source not in ranks]
        for coming in list(self._coming):
            wanted = coming.wanted
            if wanted.source is None:
                if self._cancelled(coming):
                    self._wanted.append(wanted)
                elif coming in self._coming:
                    self._coming.remove(coming)
                    self._aside.append(coming)
                    self._renew(coming)
                    self._wanted.append(wanted)
            elif wanted.source in ranks:
                self._coming.remove(coming)
                coming.request.Cancel()
        for coming in [coming for coming in self._ending if coming.wanted.source in {None, *ranks}]:
            self._ending.remove(coming)
            self._forget(coming)

    def abandon(self, roles: Collection[int], but_to: int) -> list[Going]:
        """Abandons the transfers of roles, except sends to one other role. `quiet` reports when none can write any
        more.

        Returns:
            The sends that continue.
        """
        self._anew += 1
        self._wanted = [wanted for wanted in self._wanted if wanted.role not in roles]
        self._ending += [coming for coming in self._coming if coming.wanted.role in roles]
        self._coming = [coming for coming in self._coming if coming.wanted.role not in roles]
        for coming in self._ending:
            coming.request.Cancel()
        self._forgotten += [request for request, going in self._sends if going.to != but_to]
        self._sends = [(request, going) for request, going in self._sends if going.to == but_to]
        # The reader of a leased buffer may not have regrouped yet, but its result will be dropped.
        self._leases.end(lambda lease: lease.going.to != but_to)
        self._end_departures(lambda going: going.to != but_to)
        for landing in self._landing:
            landing.void |= landing.wanted.role in roles
        waiting = [] if self._departures is None else self._departures.to(but_to)
        return [*(going for _, going in self._sends), *self._leases.to(but_to), *waiting]

    @property
    def quiet(self) -> bool:
        return not self._ending and not any(landing.void for landing in self._landing)

    def close(self) -> None:
        """Cancels pending receives, and completes the sends of places."""
        for coming in self._coming:
            coming.request.Cancel()
            self._losses.wait(coming.request)
        for request, _ in self._places_sent:
            self._losses.wait(request)


def _copied(into: torch.Tensor, found: torch.Tensor) -> tuple[()]:
    into[: len(found)].copy_(found, non_blocking=True)
    return ()


def _from_half(into: Buffer, found: torch.Tensor) -> tuple[()]:
    unrounded(*half_of(found, len(into.vector)), into.vector)
    return ()


def _unrounded(into: Buffer, found: torch.Tensor) -> tuple[()]:
    into.take_half(found)
    return ()
