"""Averaging gradients over a compute group in buckets, while they are still computed.

A backward pass finishes the last layers first. Therefore a gradient is cut into buckets, the last elements first. As
soon as a bucket is final, each rank sends every other rank its slice of the bucket. As soon as a rank has its slice of
all gradients, it adds them in the plan's order (`Plan.partial_sums`) and sends the mean to all. A thread does this
while the pass goes on, because MPI sends large messages only inside an MPI call. If MPI allows only one thread, the
computing thread does it between two layers, and less is sent during the pass.

Every element is added by the same operations in the same order as without buckets (`rudra.mpi.reduction`). So all
results are bitwise identical.

Buckets are for groups whose gradients all travel in messages, with one member on each rank.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from mpi4py import MPI

from rudra.compute.averaging import CHUNK, Addends, factors_of, finish_mean, slices
from rudra.compute.executor import Executor, arithmetic_of_thread
from rudra.compute.vectors import Buffer
from rudra.core.events import Reduce, Reduced
from rudra.errors import RunError
from rudra.mpi.comm_threads import WorkerThread
from rudra.mpi.group_messages import GroupRequests, GroupRows
from rudra.mpi.group_slices import ALIGNED, GroupSlices

PAUSE_S = 1e-3
"""Pause between two polls while a gradient is computed. In this time a network's buffers do not run full or empty."""


class Bucket:
    """A part of the vector on its way, with one slice for each rank.

    Args:
        part: the part of the vector.
        ranks: ranks of the group, in the order of their slices.
        comm: communicator of all ranks of the job.
        tags: tag of gradients, and tag of means.

    Attributes:
        first: first element of the part.
        of_rank: rank -> its slice of the vector.
        incoming: other rank -> memory for its elements of this rank's slice.
        sends: requests that send the gradient's slices.
        receives: requests that receive the others' elements of this rank's slice.
        means: requests that send and receive the finished slices.
    """

    def __init__(self, part: slice, ranks: Sequence[int], comm: MPI.Comm, tags: tuple[int, int]) -> None:
        self.first, size, me = part.start, part.stop - part.start, comm.rank
        step = -(-size // (len(ranks) * ALIGNED)) * ALIGNED
        edges = [part.start + min(i * step, size) for i in range(len(ranks) + 1)]
        self.of_rank = {rank: slice(edges[i], edges[i + 1]) for i, rank in enumerate(ranks)}
        mine = edges[ranks.index(me) + 1] - edges[ranks.index(me)]
        # Written, because transfers into memory that was never touched are slow.
        self.incoming = {rank: np.full(mine, 0.0, np.float32) for rank in ranks if rank != me}
        self.sends, self.receives = GroupRequests(comm, tags[0]), GroupRequests(comm, tags[0])
        self.means = GroupRequests(comm, tags[1])


class BucketedReduction:
    """The part of one rank, with one member, in the reductions of a group.

    All messages between two ranks go in a fixed order, because MPI matches them by their order: with the first tag the
    number of samples, the slices of all buckets, and the facts about the gradient, and with the second tag the means of
    all buckets.

    Args:
        comm: communicator of all ranks of the job.
        members: role -> rank of the group's members, in group_rank order.
        tags: tag of gradients, and tag of means.
        size: number of elements of the vector.
        parameters: number of parameters in it. The other elements become final together with the whole gradient.
        bucket: number of elements of a bucket.
        ring: wakes up the other members' ranks if they sleep.
        sums: order of addition (`Plan.partial_sums`). By default there is only one sum.
        to_all: whether all members need the mean. Otherwise only the first one does.

    Attributes:
        roles: the member on this rank.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Mapping[int, int],
        tags: tuple[int, int],
        size: int,
        parameters: int,
        bucket: int,
        ring: Callable[[], None],
        sums: Sequence[Sequence[int]] = (),
        *,
        to_all: bool = True,
    ) -> None:
        self._me, self._ring, self._size, self._parameters = comm.rank, ring, size, parameters
        self._division = its = GroupSlices(comm.rank, members, size, (), sums, library=False)
        self._rows, self.roles = GroupRows(its), its.roles
        self._ranks = [*members.values()]
        self._others = [rank for rank in self._ranks if rank != comm.rank]
        self._reads = to_all or comm.rank == self._ranks[0]  # the means
        self._readers = [rank for rank in self._others if to_all or rank == self._ranks[0]]
        self._buckets = [Bucket(part, self._ranks, comm, tags) for part in buckets_of(size, parameters, bucket)]
        self._room = torch.zeros(min(CHUNK, its.step))
        self._counts = {rank: np.zeros(1, np.int64) for rank in self._ranks}
        self._buffer: Buffer | None = None  # with the gradient of this member
        self._action: Reduce | None = None
        self._first = size  # from here on the gradient is final
        # Numbers of buckets: sent, with receives of their means, averaged, and with means that have been sent.
        self._sent = self._offered = self._added = self._shared = 0
        self._notes = GroupRequests(comm, tags[0])  # for numbers of samples
        self._facts = GroupRequests(comm, tags[0])  # for rows
        self._failed = self._driven = False
        self._lock = threading.Lock()  # of all attributes above, while the thread drives
        self._news = threading.Event()  # a bucket is final, or the thread must stop
        self._posted: deque[Callable[[], None]] = deque()
        self._thread: WorkerThread | None = None
        if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            self._thread = WorkerThread("buckets", self._posted.append)
            self._thread.submit(arithmetic_of_thread())

    @property
    def busy(self) -> bool:
        return self._action is not None

    def expect(self, buffer: Buffer, samples: int) -> Callable[[int], None]:
        """Prepares for a gradient that this member now computes.

        Args:
            buffer: receives the gradient, and must be the same one in `begin`.
            samples: number of samples of the gradient.

        Returns:
            Function to call with the first element from which on all gradients of parameters are final.
        """
        self._buffer, self._first = buffer, self._size
        self._sent = self._offered = self._added = self._shared = 0
        self._counts[self._me][0] = samples
        if not self._failed:
            for requests in self._all:
                requests.begin()
            for rank in self._others:
                self._notes.send(self._counts[self._me], rank)
                self._notes.receive(self._counts[rank], rank)
                for bucket in self._buckets:
                    bucket.receives.receive(bucket.incoming[rank], rank)
                self._facts.receive(self._rows.of_rank[rank], rank)
            if self._thread is not None:
                self._driven = True
                self._thread.submit(self._drive)
        return self._ready

    def _drive(self) -> None:
        """Advances the reduction while this rank's own thread computes."""
        while True:
            self._news.wait(PAUSE_S if self._sent else None)
            self._news.clear()
            with self._lock:
                if not self._driven:
                    return
                self._advance()

    def _take_over(self) -> None:
        """Lets this rank's own thread advance the reduction."""
        self._driven = False
        self._news.set()
        with self._lock:
            while self._posted:
                self._posted.popleft()()

    def _ready(self, first: int) -> None:
        self._first = first
        if self._thread is None:
            self._advance()
        elif first <= self._buckets[self._sent].first:
            self._news.set()

    def begin(self, role: int, action: Reduce, executor: Executor) -> None:
        """Starts the reduction of a complete gradient. Parts of it may have been averaged already."""
        self._take_over()
        if self._failed:
            return
        buffer, samples = executor.buffer(action.buffer), action.gradient.samples
        if self._buffer is None:
            self.expect(buffer, samples)
            self._take_over()
        if buffer is not self._buffer or samples != self._counts[self._me][0]:
            raise RunError(f"a gradient of {samples} samples is not the one whose buckets have been sent")
        self._action, self._first = action, 0
        self._rows.write(self._me, 0, action, 0)
        self._advance(whole=True)
        for rank in self._others:
            self._facts.send(self._rows.of_rank[self._me], rank)
        self._ring()

    def test(self) -> Reduced | None:
        """Advances the reduction, and returns the event for the member here when the reduction is complete."""
        self._advance(whole=True)
        done = self._shared == self._offered == len(self._buckets) and self._done(self._facts)
        if self._action is None or not done or not all(self._done(bucket.means) for bucket in self._buckets):
            return None
        assert self._buffer is not None
        action, self._action = self._action, None
        self._rows.take_in()
        self._buffer.version += 1
        self._buffer = None
        return Reduced(action.sequence, self._rows.gradients, self._rows.words, action.group)

    def _advance(self, *, whole: bool = False) -> None:
        """Sends the buckets that are final, averages the buckets that have arrived, and lets MPI continue."""
        if self._failed or self._buffer is None:
            return
        array, before = self._buffer.array, self._sent + self._added + self._shared
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if bucket.first < self._first or (bucket.first >= self._parameters and not whole):
                break
            for rank in self._others:
                bucket.sends.send(array[bucket.of_rank[rank]], rank)
            self._sent += 1
        while self._offered < self._sent and self._done(self._buckets[self._offered].sends):
            bucket = self._buckets[self._offered]  # its memory may be written again
            for rank in self._others if self._reads else ():
                bucket.means.receive(array[bucket.of_rank[rank]], rank)
            self._offered += 1
        while self._added < self._sent and self._done(self._notes) and self._done(self._buckets[self._added].receives):
            self._average(self._buckets[self._added])
            self._added += 1
        if self._offered == self._sent:  # gradients go first: others wait for them to begin their additions
            for bucket in self._buckets[self._shared : self._added]:
                for rank in self._readers:
                    bucket.means.send(array[bucket.of_rank[self._me]], rank)
            self._shared = self._added
        if self._sent + self._added + self._shared > before:
            self._ring()

    def _average(self, bucket: Bucket) -> None:
        """Computes the mean of this rank's slice of a bucket, in place."""
        assert self._buffer is not None
        into = self._buffer.vector[bucket.of_rank[self._me]]
        found = {rank: torch.from_numpy(came) for rank, came in bucket.incoming.items()} | {self._me: into}
        factors = factors_of([int(self._counts[rank][0]) for rank in self._ranks])
        for part in slices(0, len(into), CHUNK):
            addends: list[Addends] = [
                ([found[self._ranks[place]][part] for place in of], [factors[place] for place in of])
                for of in self._division.sums
            ]
            finish_mean(into[part], addends, sum(factors), self._room[: part.stop - part.start])

    def _done(self, requests: GroupRequests) -> bool:
        """Returns whether requests are complete. One that failed ends all reductions."""
        what = "failed" if self._failed else requests.drive()
        if what == "failed":  # a member has died; all ranks will regroup
            self._failed, self._action = True, None
        return what == "done"

    @property
    def _all(self) -> list[GroupRequests]:
        return [self._notes, self._facts] + [of for b in self._buckets for of in (b.sends, b.receives, b.means)]

    def abandon(self) -> None:
        """Ends a reduction that a member has left for ever. `quiet` reports when it can no longer write here."""
        self._take_over()
        self._action = self._buffer = None
        self._failed = True
        for requests in self._all:
            requests.cancel()

    @property
    def quiet(self) -> bool:
        """Whether no receive can write here any more."""
        return all(requests.quiet for requests in self._all)

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.close()


def buckets_of(size: int, parameters: int, bucket: int) -> list[slice]:
    """Returns the parts of a vector in the order in which they become final: the last parameters first, buffers last.

    Args:
        size: number of elements of the vector.
        parameters: number of parameters in it.
        bucket: number of elements of a bucket, except the first and the last one.
    """
    edges = [*range(0, parameters, bucket), parameters]
    parts = [slice(first, stop) for first, stop in pairwise(edges)][::-1]
    return parts + ([slice(parameters, size)] if size > parameters else [])
