"""Weights in buckets: a learner begins its forward pass while the rest of the weights is still under way.

A server sends all parts of its weights at once, and after them the message that belongs to the weights. It does not
change its weights until all parts have left, as for whole weights. The learner receives a few parts at a time, the
first layers first, so it decides which parts travel. Large messages travel only after their receive has begun.

The roles see whole weights: the learner's role gets its event when all parts are there. Until then a forward pass that
has begun waits for the parts that it needs (`rudra.compute.pulled_pass`). If the server dies, the pass ends at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.arrivals import Arrivals
from rudra.compute.executor import Executor
from rudra.compute.pulled_pass import PullingExecutor
from rudra.compute.vectors import Buffer
from rudra.core.buckets import ABREAST
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.comm_threads import Post
from rudra.mpi.tags import REDUCTIONS

Tag = Callable[[int, int, int], int]
"""Returns the tag of tensors for a role on a channel from a sender."""

Piece = tuple[npt.NDArray[np.uint8], int]
"""Memory of a part, and its tag."""


class PartReceives:
    """Receives of the parts of weights from one server, a few at a time. Test and cancel it like one request.

    Args:
        comm: communicator of all ranks.
        source: rank of the server.
        pieces: memory and tag of each part, in the order of the receives.
        arrived: called with the number of each part that has arrived.
        failed: called if no part will arrive any more.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        source: int,
        pieces: Sequence[Piece],
        arrived: Callable[[int], None],
        failed: Callable[[], None],
    ) -> None:
        self._comm, self._source, self._pieces = comm, source, pieces
        self._arrived, self._failed = arrived, failed
        self._left = iter(range(len(pieces)))  # numbers of the parts whose receives have not begun
        self._open: dict[int, MPI.Request] = {}
        self._cancelled = False
        self._begin()

    def _begin(self) -> None:
        """Begins receives until enough are open."""
        while len(self._open) < ABREAST and (number := next(self._left, None)) is not None:
            memory, tag = self._pieces[number]
            self._open[number] = self._comm.Irecv(memory, self._source, tag)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Returns whether all parts have arrived, or after `Cancel`, whether none can be written any more.

        Raises:
            MPI.Exception: The server has died.
        """
        for number, request in [*self._open.items()]:
            try:
                over = request.Test()
            except BaseException:
                del self._open[number]  # it is void
                self.Cancel()
                raise
            if over:
                del self._open[number]
                if not self._cancelled:
                    self._arrived(number)
                    self._begin()
        return not self._open

    def Cancel(self) -> None:
        """Cancels all receives. Those that have matched a part still write."""
        if not self._cancelled:
            self._cancelled, self._left = True, iter(())
            self._failed()
        for request in self._open.values():
            request.Cancel()


@dataclass(slots=True)
class _Source:
    """Server that gives a learner weights in buckets.

    Attributes:
        rank: rank of the server.
        its: slice of the learner's weights that it gives.
        parts: parts of this slice.
        first: number of its first part among the parts of all servers.
    """

    rank: int
    its: slice
    parts: list[slice]
    first: int


@dataclass(slots=True)
class _Pull:
    """Weights that a learner receives.

    Attributes:
        arrivals: parts that have arrived.
        left: ids of the servers whose receives have not begun.
    """

    arrivals: Arrivals
    left: set[int]


class WeightBuckets:
    """Weights that travel in buckets from the servers of a rank, and to its learners.

    Args:
        comm: communicator of all ranks.
        tag: returns tags.
        executors: role -> executor that holds the buffers.
        hurries: whether this rank must end its work as soon as possible.
    """

    def __init__(
        self, comm: MPI.Comm, tag: Tag, executors: Mapping[int, Executor], hurries: Callable[[], bool]
    ) -> None:
        self._comm, self._tag, self._executors, self._hurries = comm, tag, executors, hurries
        self._gives: dict[tuple[int, int], list[slice]] = {}  # server here, and learner -> parts
        self._sources: dict[int, dict[int, _Source]] = {}  # learner here -> server
        self._pulls: dict[int, _Pull] = {}  # by learner here

    def renew(self, rule: BucketRule) -> None:
        """Follows a plan. Nothing may be under way."""
        self._gives.clear()
        self._sources.clear()
        self._pulls.clear()
        for owner in range(len(rule.plan.roles)):
            for learner in rule.receivers(owner):
                if owner in self._executors:
                    its = self._executors[owner]
                    self._gives[owner, learner] = rule.pull_parts(its.size, its.parameters)
                if learner in self._executors:
                    self._expect(rule, learner, owner)

    def _expect(self, rule: BucketRule, learner: int, owner: int) -> None:
        executor, sources = self._executors[learner], self._sources.setdefault(learner, {})
        its = executor.slices_by_owner.get(owner, slice(0, executor.size))
        parts = rule.pull_parts(its.stop - its.start, min(executor.parameters, its.stop) - its.start)
        first = sum(len(source.parts) for source in sources.values())
        sources[owner] = _Source(rule.plan.roles[owner].world_rank, its, parts, first)

    def come(self, role: int, owner: int) -> bool:
        """Returns whether a learner here receives weights in buckets.

        Args:
            role: id of the learner.
            owner: id of the server.
        """
        source = self._sources.get(role, {}).get(owner)
        return source is not None and bool(source.parts)

    @property
    def any_come(self) -> bool:
        """Whether some learner here receives weights in buckets."""
        return any(self.come(role, owner) for role, sources in self._sources.items() for owner in sources)

    def pieces(self, role: int, to: int, wire: npt.NDArray[Any] | torch.Tensor) -> list[Piece]:
        """Returns the parts of a server's weights, and their tags. Empty: the weights are sent as a whole.

        Args:
            role: id of the server.
            to: id of the learner.
            wire: weights, and the message after them if there is one. In main memory if they have parts.
        """
        if not self._gives.get((role, to)):
            return []
        return [
            *_cut(
                np.asarray(wire),
                self._gives.get((role, to), ()),
                lambda number: self._tag(to, REDUCTIONS + number, role),
            )
        ]

    def receive(self, role: int, owner: int, wire: npt.NDArray[Any], weights: Buffer, post: Post) -> Callable[[], Any]:
        """Prepares to receive weights that come from a server in buckets.

        Args:
            role: id of the learner.
            owner: id of the server.
            wire: memory of the weights, and of the message after them if there is one.
            weights: buffer with this memory.
            post: lets this rank's own thread call a function later, while another thread receives.

        Returns:
            Function that begins to receive them, and returns an object that is used like a request. Any thread may call
            it.
        """
        source = self._sources[role][owner]
        arrivals = self._joined(role, owner, weights, post)
        pieces = [*_cut(wire, source.parts, lambda number: self._tag(role, REDUCTIONS + number, owner))]

        def arrived(number: int) -> None:
            if arrivals is not None and number < len(source.parts):
                arrivals.add(source.first + number)

        failed = _nothing if arrivals is None else arrivals.fail
        return partial(PartReceives, self._comm, source.rank, pieces, arrived, failed)

    def _joined(self, role: int, owner: int, weights: Buffer, post: Post) -> Arrivals | None:
        """Returns the arrivals of weights with a server's part. None: some server gives its part as a whole."""
        executor, sources = self._executors[role], self._sources[role]
        if not isinstance(executor, PullingExecutor) or not all(source.parts for source in sources.values()):
            return None
        pull = self._pulls.get(role)
        if pull is None or owner not in pull.left:
            placed = [
                slice(source.its.start + part.start, source.its.start + part.stop)
                for source in sources.values()
                for part in source.parts
            ]
            began = partial(post, executor.pass_early)
            arrivals = Arrivals(placed, (), weights.vector.__getitem__, self._hurries, began)
            pull = self._pulls[role] = _Pull(arrivals, {*sources})
            executor.prepare_pass(weights, len(sources), arrivals)
        pull.left.discard(owner)
        return pull.arrivals


def _cut(wire: npt.NDArray[Any], parts: Sequence[slice], tag: Callable[[int], int]) -> Iterator[Piece]:
    """Yields the parts of weights, and then the message, if there are parts."""
    if not parts:
        return
    memory, last = wire.view(np.uint8), max(part.stop for part in parts)
    for number, part in enumerate(parts):
        yield memory[4 * part.start : 4 * part.stop], tag(number)
    if len(behind := memory[4 * last :]):
        yield behind, tag(len(parts))


def _nothing() -> None:
    pass
