"""Averaging gradients over a compute group, as a whole or in buckets while they are still computed.

A backward pass finishes the layers one after the other. Therefore a gradient is cut into buckets. Each bucket is a
reduction of its own (`PartReduction`), which begins on a rank as soon as the bucket is final there, in whichever order.
A thread advances these reductions during the pass, because MPI sends large messages only inside an MPI call. If MPI
allows only one thread, the computing thread does it between two layers, and less is sent during the pass.

Each element is added by the same operations in the same order, whatever the buckets are and whichever begins first. So
all results are bitwise identical. If the MPI library adds, all ranks must call it for the buckets in the same order.
"""

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from mpi4py import MPI

from rudra.compute.arrivals import Arrivals
from rudra.compute.device.streams import Pending
from rudra.compute.executor import Executor, arithmetic_of_thread
from rudra.compute.final_gradients import Ready
from rudra.compute.vectors import Buffer, Take
from rudra.core.actions import Reduce
from rudra.core.buckets import ABREAST, PAUSE_S, FinalParts, kept
from rudra.core.events import Reduced
from rudra.core.messages import Rows
from rudra.core.records import Gradient
from rudra.mpi.arena import Arena
from rudra.mpi.comm_threads import WorkerThread
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.exchange import Exchange
from rudra.mpi.libraries import Library
from rudra.mpi.reduction import PartReduction

MEASURED_STEPS = 5
"""Number of first steps that decide whether passes begin early. This costs copies, and another thread must notice what
arrives. So steps took longer with it where computation takes longer than the network."""


class WaitShare:
    """Measures, in the first steps, which share of its time a learner waits for averages."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._begun = self._ended = 0.0

    def begin(self, now: float) -> None:
        """Notes that a wait begins."""
        self._begun = now

    def end(self, now: float) -> bool:
        """Notes that the wait has ended, and returns whether enough is known. The first step does not count."""
        if self._ended:
            self._shares.append((now - self._begun) / (now - self._ended))
        self._ended = now
        return len(self._shares) == MEASURED_STEPS

    @property
    def is_large(self) -> bool:
        """Whether the learner usually waits for longer than it computes."""
        return median(self._shares) > 0.5


class GroupReduction:
    """One rank's part in the reductions of a group that has one or more members on this rank.

    Args:
        comm: communicator of all ranks of the job.
        members: role -> rank, of the group's members, in group_rank order.
        tag: tag of all messages about the first part. The next part has the next tag.
        parts: parts of the vector. The last one begins with the whole gradient, because it brings the facts about the
            gradient.
        ring: wakes up the other members' ranks if they sleep.
        library, arena, sums: arguments of `PartReduction`.
        to_all: whether all members need the result of gradients that come in buckets.
        early: whether the next forward pass may begin while parts are under way.
        exchange: copies of the vectors, which are on a device. None: the ranks read the vectors themselves, or a
            library adds them on the device.

    Attributes:
        roles: members on this rank, in group_rank order.
        early: whether the next forward pass may begin while parts are under way, and the first reductions have shown
            that they take longer than everything else. Then the parts of the first layers have priority, and only
            `ABREAST` parts travel at a time.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Mapping[int, int],
        tag: int,
        parts: Sequence[slice],
        ring: Callable[[], None],
        library: Library | None = None,
        arena: Arena | None = None,
        sums: Sequence[Sequence[int]] = (),
        *,
        to_all: bool = True,
        early: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self._library, self._to_all, self._exchange = library, to_all, exchange
        # Copies of contributions that a device makes, and of results. The roles wait for both.
        self._leaving: list[tuple[Sequence[Pending], Callable[[], None]]] = []
        self._arriving: list[Pending] | None = None
        self._abandoned: list[Pending] = []
        self._parts = [
            PartReduction(comm, members, tag + number, part, ring, library, arena, sums)
            for number, part in enumerate(parts)
        ]
        self._division = self._parts[0].division
        self.roles = self._receivers = self._division.roles
        self._begun: dict[int, tuple[Reduce, Executor, Buffer]] = {}  # role -> its complete contribution
        self._active: list[PartReduction] = []  # parts that have begun here, and are not complete
        self._early: dict[int, tuple[Reduce, Buffer]] = {}  # role -> contribution that is being computed
        self._waiting: dict[int, set[int]] = {}  # role -> numbers of its parts that have not begun
        self._final: dict[int, deque[int]] = {}  # role -> numbers of its parts that are final, and may begin
        self._driven: set[int] = set()  # roles whose gradients are being computed while the thread drives
        self._failed = False
        self._lock = threading.Lock()  # of all attributes above, while the thread drives
        self._news = threading.Event()  # a bucket is final, or the thread must stop
        self._posted: deque[Callable[[], None]] = deque()
        self._thread: WorkerThread | None = None
        if len(parts) > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            self._thread = WorkerThread("buckets", self._posted.append)
            self._thread.submit(arithmetic_of_thread())
        its = self._division
        far = bool(its.far) or len(its.sums) > 1
        may = (
            early
            and exchange is None
            and to_all
            and far
            and library is None
            and len(self.roles) == 1
            and self._thread is not None
        )
        self.early, self._waits = False, WaitShare() if may else None
        self._kept = kept(len(parts))  # numbers of the parts that wait for others if passes begin early
        self._held: set[int] = set()  # numbers of the parts that are final, and wait for others if passes begin early
        self._complete: set[int] = set()  # numbers of the parts that are complete in this reduction
        self._arrivals: Arrivals | None = None

    @property
    def buckets(self) -> bool:
        """Whether gradients come in buckets while they are computed."""
        return len(self._parts) > 1 and self._exchange is None

    @property
    def busy(self) -> bool:
        return bool(self._begun or self._leaving)

    @property
    def driven(self) -> bool:
        """Whether the thread advances a reduction."""
        return bool(self._driven)

    def expect(self, role: int, buffer: Buffer, name: str, samples: int) -> Ready | None:
        """Prepares for a gradient that a member here now computes.

        Args:
            role: the member.
            buffer: receives the gradient, and must be the same one in `begin`.
            name: name of the buffer.
            samples: number of samples of the gradient.

        Returns:
            Function to call with each piece of the gradient that is final. None: a member has died.
        """
        if self._failed:
            return None
        gradient = Gradient(0, 0, samples, 0, 0, 0, 0, 1.0, 0.0, 0.0, 0)  # the rest is not known yet
        self._early[role] = Reduce(name, 0, 0, gradient, self._to_all), buffer
        if not self._waiting:
            for part in self._parts:
                part.expect()
        self._waiting[role], self._final[role] = {*range(len(self._parts))}, deque()
        if self._thread is not None:
            self._driven.add(role)
            self._thread.submit(partial(self._drive, role))
        return partial(self._ready, role, FinalParts([part.part for part in self._parts[:-1]]))

    def _drive(self, role: int) -> None:
        """Advances the reductions while this rank's own thread computes."""
        while self.drive(role):
            self._news.wait(PAUSE_S if self._active or self._held else None)
            self._news.clear()

    def drive(self, role: int) -> bool:
        """Advances the reductions once for a member whose gradient is being computed. The thread calls this.

        Returns:
            Whether to call it again.
        """
        with self._lock:
            if self._failed or role not in self._driven:
                return False
            self._begin_final(role)
            if not self._failed:
                self._advance()
            if not self._failed:  # a member that died just now leaves nothing to begin
                self._begin_final(role)  # others may have made room
            if self._failed:
                return False
            if role in self._begun and not self._active and not self._waiting[role]:
                self._driven.discard(role)
            return role in self._driven

    def _take_over(self, roles: Collection[int]) -> None:
        """Lets this rank's own thread advance the reductions for some members."""
        self._driven.difference_update(roles)
        self._news.set()
        with self._lock:
            self._raise_of_thread()

    def _raise_of_thread(self) -> None:
        """Raises the exception that has ended the thread, if there is one."""
        while self._posted:
            self._posted.popleft()()

    def _ready(self, role: int, parts: FinalParts, piece: slice) -> None:
        final = parts.add(piece)
        self._final[role].extend(final)
        if self._thread is None and not self._failed:
            self._begin_final(role)
            self._advance()
        elif final:  # waking the thread up for each layer would take this rank's core from the pass
            self._news.set()

    def _begin_final(self, role: int) -> None:
        """Begins the parts that are final, or only some of them if passes begin early.

        A part that has begun on another rank begins here as well. So ranks that chose different parts do not wait for
        each other for ever.
        """
        if not self.early:
            while self._final[role]:
                self._begin_part(self._final[role].popleft(), role, *self._early[role])
            return
        while self._final[role]:
            self._held.add(self._final[role].popleft())
        last = len(self._parts) - 1  # the first layers or the model's buffers, which a pass needs first
        for number in sorted(self._held, key=lambda number: (number != last, self._parts[number].part.start)):
            part = self._parts[number]
            free = self._complete and not self._active  # again, after another part
            late = number in self._kept and not self._waiting[role] <= self._kept and not free
            if (len(self._active) < ABREAST and not late) or part.begun_elsewhere:
                self._held.remove(number)
                self._begin_part(number, role, *self._early[role])
            elif part.failed:
                self._fail()
                return

    def _begin_part(self, number: int, role: int, action: Reduce, buffer: Buffer) -> None:
        part = self._parts[number]
        if not part.begun:
            self._active.append(part)
        self._waiting[role].remove(number)
        part.begin(role, action, buffer)

    def begin(self, role: int, action: Reduce, executor: Executor) -> None:
        """Starts a reduction for a member here. All members start the same one, and complete it before the next."""
        if self._exchange is not None:
            copy, leaves = self._exchange.copied(executor.buffer(action.buffer).vector)
            self._leaving.append(([leaves], partial(self._begin, role, action, executor, copy)))
            return
        if self._thread is None:
            self._begin(role, action, executor, executor.buffer(action.buffer))
            return
        if not (self.early and role in self._driven):
            self._take_over([role])
        with self._lock:
            self._begin(role, action, executor, executor.buffer(action.buffer))
        self._news.set()

    def begin_all(self, action: Reduce, executors: Sequence[Executor], rows: Rows) -> None:
        """Starts a reduction for all members here at once. Only the first one gets the result, unless `give_all`.

        Args:
            action: what the first member brings. There are no buckets.
            executors: executors of the members, in group_rank order.
            rows: (members,) `MEMBER` of each, without offsets.
        """
        self._receivers, buffers = self.roles[:1], [executor.buffer(action.buffer) for executor in executors]
        if self._exchange is None:
            self._begin_all(action, executors, buffers, rows)
            return
        copies, leave = zip(*(self._exchange.copied(buffer.vector) for buffer in buffers), strict=True)
        self._leaving.append((leave, partial(self._begin_all, action, executors, copies, rows.copy())))

    def _begin_all(self, action: Reduce, executors: Sequence[Executor], buffers: Sequence[Buffer], rows: Rows) -> None:
        if not self._failed:
            (part,) = self._parts
            self._active.append(part)
            for role, executor, buffer in zip(self.roles, executors, buffers, strict=True):
                self._begun[role] = action, executor, buffer
            part.begin_all(action, buffers, rows)

    def give_all(self) -> bool:
        """Lets all members here get the result of the reduction, if it is under way. Returns whether it is."""
        self._receivers = self.roles
        return self.busy

    def _begin(self, role: int, action: Reduce, executor: Executor, buffer: Buffer) -> None:
        if self._failed:
            return
        if self._waits is not None:
            self._waits.begin(time.perf_counter())
        if (found := self._early.pop(role, None)) is not None:
            early, expected = found
            assert expected is buffer
            assert early.gradient.samples == action.gradient.samples
        if role in self._driven:  # the thread begins the rest
            self._early[role] = action, buffer
            self._held |= self._waiting[role]
            self._final[role].clear()
            self._begun[role] = action, executor, buffer
            return
        waiting = self._waiting.get(role)
        if waiting is None:
            waiting = self._waiting[role] = {*range(len(self._parts))}
        for number in sorted(waiting):
            self._begin_part(number, role, action, buffer)
        self._begun[role] = action, executor, buffer

    def test(self) -> Reduced | None:
        """Advances the reductions, and returns the event for all members here when all are complete."""
        for each in [each for each in self._leaving if all(copy.done() for copy in each[0])]:
            self._leaving.remove(each)
            each[1]()
        with self._lock:
            if self.early and self._driven:
                self._raise_of_thread()
                return None
            self._advance()
        if self._active or len(self._begun) < len(self.roles) or not self._returned():
            return None
        if self._waits is not None and self._waits.end(time.perf_counter()):
            self.early, self._waits = self._waits.is_large, None
        contributions = [self._begun[role] for role in self.roles]
        action, buffers, last = contributions[0][0], [buffer for *_, buffer in contributions], self._parts[-1]
        if self._exchange is not None:
            for buffer in buffers:
                buffer.readers -= 1
            self._arriving = None
        elif self._division.near:
            self._defer(buffers, to_all=action.to_all)
        else:
            received = buffers[: len(self._receivers)]
            for part in self._parts:
                part.finish(received, to_all=action.to_all)
            for buffer in received:
                buffer.version += 1
        for part in self._parts:
            part.end()
        self._begun.clear()
        self._early.clear()
        self._waiting.clear()
        self._complete.clear()
        self._arrivals, self._receivers = None, self.roles
        return Reduced(action.sequence, last.rows.gradients, last.rows.words, action.group)

    def _returned(self) -> bool:
        """Returns whether results are where the members here need them. Copies them there if they are on a device."""
        if self._exchange is None:
            return True
        if self._arriving is None:
            self._arriving = self._taken(self._exchange)
        if not all(copy.done() for copy in self._arriving):
            return False
        if self._exchange.intact(self._division.near):
            return True
        self._fail()
        return False

    def _taken(self, exchange: Exchange) -> list[Pending]:
        contributions = [self._begun[role] for role in self.roles]
        to_all, copies = contributions[0][0].to_all, [copy for *_, copy in contributions]
        contributions = contributions[: len(self._receivers)]
        if not self._division.near:
            for part in self._parts:
                part.finish(copies[: len(contributions)], to_all=to_all)
        elif not to_all and not self._division.has_first:
            return []
        found = []
        for action, executor, copy in contributions if to_all else contributions[:1]:
            into, take = (
                executor.buffer(action.buffer),
                self._taking(copies) if self._division.near else copy.vector.__getitem__,
            )
            into.version += 1
            found.append(exchange.taken(into.vector, take))
        return found

    def _advance(self) -> None:
        for part in [*self._active] if self._library is None else self._parts:
            if part in self._active and part.test():
                self._active.remove(part)
                self._arrive(part)
            elif part.failed:
                self._fail()
                return
            if self._library is not None and not part.adds:
                break

    def _fail(self) -> None:
        """Drops the reduction because a member has died. All ranks will regroup."""
        self._failed = True
        self._forget()

    def _arrive(self, part: PartReduction) -> None:
        number = self._parts.index(part)
        self._complete.add(number)
        if self._arrivals is not None:
            self._arrivals.add(number)

    def arrivals(self, hurries: Callable[[], bool], began: Callable[[], None]) -> Arrivals | None:
        """Returns the parts of the average that arrive, after `begin` for the only member here. None: a rank has died.

        Args:
            hurries: as for `Arrivals`.
            began: as for `Arrivals`.
        """
        with self._lock:
            if self._failed or not self._begun:
                return None
            ((_, _, buffer),) = self._begun.values()
            parts = [part.part for part in self._parts]
            take = self._gathered([buffer]) if self._division.near else buffer.vector.__getitem__
            self._arrivals = Arrivals(parts, self._complete, take, hurries, began)
            return self._arrivals

    def _forget(self) -> None:
        self._abandoned += [copy for copies, _ in self._leaving for copy in copies] + (self._arriving or [])
        self._leaving, self._arriving = [], None
        self._begun.clear()
        self._active.clear()
        self._early.clear()
        self._waiting.clear()
        self._held.clear()
        self._complete.clear()
        if self._arrivals is not None:
            self._arrivals.fail()
            self._arrivals = None

    def _defer(self, buffers: Sequence[Buffer], *, to_all: bool) -> None:
        """Lets members here that need the result read it in shared memory, or compute it, on use."""
        if not to_all and not self._division.has_first:
            return
        for role in self._receivers if to_all else self.roles[:1]:
            action, executor, _ = self._begun[role]
            executor.defer(action.buffer, self._taking(buffers))

    def _taking(self, buffers: Sequence[Buffer]) -> Take:
        """Returns a function for slices of the complete result."""
        return self._parts[0].taking(buffers) if len(self._parts) == 1 else self._gathered(buffers)

    def _gathered(self, buffers: Sequence[Buffer]) -> Take:
        """Returns a function for slices of the result. A slice must be complete when it is requested."""
        parts = sorted(self._parts, key=lambda part: part.part.start)
        starts, room = [part.part.start for part in parts], torch.empty(0, device=buffers[0].vector.device)
        takes: dict[int, Take] = {}

        def take(wanted: slice) -> torch.Tensor:
            room.resize_(wanted.stop - wanted.start)
            number = bisect_right(starts, wanted.start) - 1
            for place in range(number, len(parts)):
                part = parts[place].part
                if part.start >= wanted.stop:
                    break
                if place not in takes:
                    takes[place] = parts[place].taking(buffers)
                some = slice(max(part.start, wanted.start), min(part.stop, wanted.stop))
                found = takes[place](slice(some.start - part.start, some.stop - part.start))
                if some == wanted:
                    return found
                room[some.start - wanted.start : some.stop - wanted.start] = found
            return room

        return take

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever. `quiet` reports when it can no longer write here.

        A rank that does not know this yet may still read shared buffers, but its result will be dropped.
        """
        self._end_thread()
        self._failed = True
        self._forget()
        for part in self._parts:
            part.abandon()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._take_over([*self._driven])
            self._thread.close()
            self._thread = None

    @property
    def quiet(self) -> bool:
        """Whether no receive can write here any more."""
        self._abandoned = [copy for copy in self._abandoned if not copy.done()]
        return not self._abandoned and all(part.quiet for part in self._parts)

    def lose(self, ranks: Collection[int]) -> None:
        """Ends sums of a library that has lost some of these ranks."""
        if self._library is not None:
            self._library.lose(ranks)

    def close(self) -> None:
        """Ends the thread and the library, and frees the copies."""
        self._end_thread()
        if self._library is not None:
            self._library.close()
        self.free()

    def free(self) -> None:
        """Frees the copies, when it is quiet."""
        if self._exchange is not None:
            self._exchange.close()


def ringing(doorbell: Doorbell, comm: MPI.Comm, ranks: Collection[int]) -> Callable[[], None]:
    """Returns a function that wakes up the other ranks of a group."""
    others = {*ranks} - {comm.rank}

    def ring() -> None:
        for rank in others:
            doorbell.ring(rank)

    return ring
