"""Pushes in buckets: gradients that leave for a server of another node while they are still computed.

A backward pass finishes the layers one after the other. A learner sends each part of its gradient as soon as it is
final, and after all parts the message that belongs to the gradient. The server's rank receives the parts into a buffer
that it keeps for this learner. Only the complete gradient, with its message, is given to the role, by exchanging two
buffers. So roles, messages and the order of addition are the same as for whole gradients, and a learner that dies in
between leaves nothing behind.

The receives of a gradient are posted in advance, one for each part. They match only this learner's parts. A learner
that ends while a server may still wait for the rest of a gradient reports which parts it has sent.
"""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import not_

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.final_gradients import Ready
from rudra.core.buckets import FinalParts
from rudra.core.buffer_names import GRADIENT
from rudra.core.messages import Message
from rudra.core.wire import decode, encode
from rudra.mpi.arena import Arena
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.device_arena import DeviceArena
from rudra.mpi.failures import Losses, outcome
from rudra.mpi.leases import Going
from rudra.mpi.tags import PUSHES, REDUCTIONS
from rudra.mpi.transfers import Taken, Wanted

Tag = Callable[[int, int, int], int]
"""Returns the tag of tensors for a role on a channel from a sender."""

_HEAD = struct.Struct("<Q?")
"""One bit for each part that was sent, and whether the learner ends without a message. Else the message follows."""


@dataclass(slots=True)
class _Push:
    """Push of a gradient to one role.

    Attributes:
        going: the send. Its `left` counts the parts that are under way.
        array: the gradient.
        parts: parts of the gradient.
        final: parts that are final.
        sent: one bit for each part that was sent or is under way.
    """

    going: Going
    array: npt.NDArray[np.float32]
    parts: Sequence[slice]
    final: FinalParts
    sent: int = 0


class OutgoingPushes:
    """Pushes in buckets from the learners of a rank.

    Args:
        comm: communicator of all ranks.
        tag: returns tags.
        carry: starts a send by a function, and counts down `Going.left` when it is complete.
    """

    def __init__(self, comm: MPI.Comm, tag: Tag, carry: Callable[[Callable[[], MPI.Request], Going], None]) -> None:
        self._comm, self._tag, self._carry = comm, tag, carry
        self._parts: dict[int, dict[int, list[slice]]] = {}  # learner -> role that takes its gradients -> parts
        self._rank: dict[int, int] = {}
        self._open: dict[tuple[int, str], dict[int, _Push]] = {}  # learner and buffer -> pushes that are not complete

    def renew(self, rule: BucketRule, executors: Mapping[int, Executor]) -> None:
        """Follows a plan. Pushes that are not complete are forgotten."""
        plan = rule.plan
        self._open.clear()
        self._parts.clear()
        self._rank = {owner: role.world_rank for owner, role in enumerate(plan.roles)}
        for owner in range(len(plan.roles)):
            for learner in rule.senders(owner):
                if learner in executors:
                    self._cut(rule, learner, owner, executors[learner])

    def _cut(self, rule: BucketRule, learner: int, owner: int, executor: Executor) -> None:
        its = executor.slices_by_owner.get(owner, slice(0, executor.size))
        found = rule.push_parts(owner, its.stop - its.start, min(executor.parameters, its.stop) - its.start)
        if found:
            placed = [slice(its.start + part.start, its.start + part.stop) for part in found]
            self._parts.setdefault(learner, {})[owner] = placed

    def __bool__(self) -> bool:
        """Whether some learner here pushes in buckets."""
        return bool(self._parts)

    def takes(self, role: int, to: int) -> bool:
        """Returns whether a learner pushes to a role in buckets."""
        return to in self._parts.get(role, ())

    def expect(self, role: int, name: str, buffer: npt.NDArray[np.float32]) -> Ready | None:
        """Prepares for a gradient that a learner here now computes.

        Args:
            role: id of the learner.
            name: name of the buffer.
            buffer: receives the gradient.

        Returns:
            Function to call with each piece of the gradient that is final. None: the learner pushes whole gradients.
        """
        if role not in self._parts:
            return None
        self._open[role, name] = {
            owner: _Push(Going(role, name, owner), buffer, parts, FinalParts(parts))
            for owner, parts in self._parts[role].items()
        }
        return partial(self._ready, role, name)

    def _ready(self, role: int, name: str, piece: slice) -> None:
        for push in self._open.get((role, name), {}).values():
            for number in push.final.add(piece):
                self._begin_part(push, number)

    def _begin_part(self, push: _Push, number: int) -> None:
        going, what = push.going, push.array[push.parts[number]]
        push.sent |= 1 << number
        going.left += 1
        tag = self._tag(going.to, REDUCTIONS + number, going.role)
        self._carry(partial(self._comm.Isend, what, self._rank[going.to], tag), going)

    def push(self, role: int, name: str, message: Message, to: int) -> None:
        """Sends the rest of a gradient, and its message."""
        push = self._open[role, name].pop(to)
        for number in range(len(push.parts)):
            if not push.sent >> number & 1:
                self._begin_part(push, number)
        self._conclude(push.going, push.sent, encode(message))

    def _conclude(self, going: Going, sent: int, message: bytes = b"") -> None:
        tag = self._tag(going.to, PUSHES, going.role)
        head = _HEAD.pack(sent, not message) + message
        self._carry(partial(self._comm.Isend, head, self._rank[going.to], tag), going)

    def close(self) -> None:
        """Reports which parts of its last gradient each learner has sent, if it never pushed that gradient."""
        for role, its in self._parts.items():
            for owner in its:
                pushes = (open_.get(owner) for (learner, _), open_ in self._open.items() if learner == role)
                sent = max((push.sent for push in pushes if push is not None), default=0)
                self._conclude(Going(role, "", owner), sent)


@dataclass(eq=False, slots=True)
class _Coming:
    """Receives of a learner's next gradient, or the gradient when it is complete.

    Attributes:
        role: id of the role that takes the gradient.
        sender: id of the learner.
        rank: rank of the learner.
        name: name of the buffer that is kept for the learner.
        parts: parts of the gradient.
        head: memory for `_HEAD` and the message.
        heading: receive of the head. None: it has arrived.
        requests: receives of parts that are not complete.
        failed: whether the learner died while it sent.
        room: room of the arena that receives the gradient. None: the buffer does.
    """

    role: int
    sender: int
    rank: int
    name: str
    parts: Sequence[slice]
    head: bytearray
    heading: MPI.Request | None = None
    requests: list[MPI.Request] = field(default_factory=list)
    failed: bool = False
    room: torch.Tensor | None = None

    @property
    def sent(self) -> int:
        """One bit for each part that the learner has sent, after the head has arrived."""
        found: int = _HEAD.unpack_from(self.head)[0]
        return found

    @property
    def ends(self) -> bool:
        """Whether the learner sends nothing more, after the head has arrived."""
        found: bool = _HEAD.unpack_from(self.head)[1]
        return found

    def test(self) -> bool:
        """Returns whether everything has arrived."""
        if self.failed:
            return False
        if self.heading is not None:
            what = outcome(self.heading)
            if what == "no":
                return False
            self.heading = None
            if what == "failed":
                self.failed = True
                return False
            sent = [bool(self.sent >> number & 1) for number in range(len(self.requests))]
            for request in compress(self.requests, map(not_, sent)):
                request.Cancel()
            self.requests = [*compress(self.requests, sent)]
        pending = []
        for request in self.requests:
            what = outcome(request)
            self.failed |= what == "failed"
            if what == "no":
                pending.append(request)
        self.requests = pending
        return not pending and not self.failed

    def cancel(self) -> list[MPI.Request]:
        """Cancels the receives and returns them. Those that have matched a part still write."""
        requests = [*self.requests, *([] if self.heading is None else [self.heading])]
        for request in requests:
            request.Cancel()
        self.requests, self.heading = [], None
        return requests


class IncomingPushes:
    """Pushes in buckets to the roles of a rank.

    Args:
        comm: communicator of all ranks.
        tag: returns tags.
        losses: ranks that have died.
        executors: role -> executor that holds the buffers.
        arena: memory of this rank. A `DeviceArena` has rooms for gradients, which are copied to the device later.

    Attributes:
        used: whether gradients have been expected in buckets.
    """

    def __init__(
        self, comm: MPI.Comm, tag: Tag, losses: Losses, executors: Mapping[int, Executor], arena: Arena | None = None
    ) -> None:
        self.used = False
        self._rooms = arena if isinstance(arena, DeviceArena) else None
        self._comm, self._tag, self._losses, self._executors = comm, tag, losses, executors
        self._coming: list[_Coming] = []
        self._complete: list[_Coming] = []  # gradients that no role has taken yet, in the order of their completion
        self._ending: list[tuple[_Coming, list[MPI.Request]]] = []  # abandoned; their memory will be used again
        self._forgotten: list[MPI.Request] = []  # of the dead; their memory must stay
        self._kept: list[torch.Tensor] = []  # rooms of those

    def renew(self, rule: BucketRule) -> None:
        """Receives pushes for the roles here by a plan. Nothing may be under way."""
        for role, executor in self._executors.items():
            parts = rule.push_parts(role, executor.size, executor.parameters)
            for sender in rule.senders(role) if parts else ():
                rank = rule.plan.roles[sender].world_rank
                head = bytearray(_HEAD.size + executor.tail)
                self._post(_Coming(role, sender, rank, f"{GRADIENT} of {sender}", parts, head))

    def senders(self, role: int) -> tuple[int, ...]:
        """Returns the learners that push to a role in buckets and still live."""
        return tuple(coming.sender for coming in (*self._coming, *self._complete) if coming.role == role)

    def _post(self, coming: _Coming) -> None:
        """Begins to receive a gradient."""
        self.used, executor = True, self._executors[coming.role]
        if self._rooms is None:
            array = executor.renew(coming.name).array
        else:
            coming.room = self._rooms.room(4 * executor.size + executor.tail)
            array = coming.room.numpy()[: 4 * executor.size].view(np.float32)
        receive, source = self._comm.Irecv, coming.rank
        coming.requests = [
            receive(array[part], source, self._tag(coming.role, REDUCTIONS + number, coming.sender))
            for number, part in enumerate(coming.parts)
        ]
        coming.heading = receive(coming.head, source, self._tag(coming.role, PUSHES, coming.sender))
        self._coming.append(coming)

    def poll(self) -> None:
        """Looks for gradients that are complete."""
        for coming in [coming for coming in self._coming if coming.test()]:
            self._coming.remove(coming)
            if coming.ends:
                self._free(coming)
            else:
                self._complete.append(coming)
        if self._ending:
            for coming in [coming for coming, all_ in self._ending if not _pending(all_)]:
                if coming.room is not None:
                    self._free(coming)
            self._ending = [(coming, left) for coming, all_ in self._ending if (left := _pending(all_))]

    def take(self, wanted: Wanted) -> Taken | None:
        """Gives a complete gradient to a role that wants it, and begins to receive the learner's next one.

        Returns:
            The gradient, in the wanted buffer or in a room. None: there is none.
        """
        for coming in self._complete:
            if coming.role == wanted.role and coming.sender in wanted.in_buckets_of:
                self._complete.remove(coming)
                found = Taken(decode(memoryview(coming.head)[_HEAD.size :]), coming.rank, coming.room)
                if coming.room is None:
                    executor = self._executors[wanted.role]
                    executor.renew(wanted.name)
                    executor.swap(wanted.name, coming.name)
                    executor.buffer(wanted.name).version += 1
                self._post(coming)
                return found
        return None

    def lose(self, ranks: Collection[int]) -> None:
        """Drops the gradients of dead ranks that no role has taken."""
        self._drop(lambda coming: coming.rank in ranks)

    def drop(self, role: int) -> None:
        """Receives nothing more from a learner."""
        self._drop(lambda coming: coming.sender == role)

    def _drop(self, which: Callable[[_Coming], bool]) -> None:
        for coming in filter(which, [*self._coming, *self._complete]):
            self._forget(coming, coming.cancel())
        for coming, requests in self._ending:
            if which(coming):
                self._forget(coming, requests)
        self._coming = [coming for coming in self._coming if not which(coming)]
        self._complete = [coming for coming in self._complete if not which(coming)]
        self._ending = [(coming, requests) for coming, requests in self._ending if not which(coming)]

    def _forget(self, coming: _Coming, requests: list[MPI.Request]) -> None:
        """Frees a buffer. If something may still be written there, its memory is not used again."""
        self._forgotten += requests
        if requests and coming.room is not None:
            self._kept.append(coming.room)
            coming.room = None
        elif requests:
            self._executors[coming.role].put_new(coming.name)
        self._free(coming)

    def _free(self, coming: _Coming) -> None:
        if self._rooms is None:
            self._executors[coming.role].release(coming.name, again=True)
        elif coming.room is not None:
            self._rooms.leave(coming.room)
            coming.room = None

    def abandon(self) -> None:
        """Drops all gradients that no role has taken. `quiet` reports when nothing can be written any more."""
        self._ending += [(coming, coming.cancel()) for coming in self._coming]
        self._coming, self._complete = [], []

    @property
    def quiet(self) -> bool:
        return not self._ending

    def end(self) -> bool:
        """Receives what living learners have sent, but no role takes it any more. Returns whether all have ended."""
        self.poll()
        for coming in self._complete:
            if coming.room is not None:
                self._free(coming)
            self._post(coming)
        self._complete = []
        if self._coming and self._losses.active and (ranks := self._losses.look()):
            self.lose(ranks)
        return not self._coming


def _pending(requests: list[MPI.Request]) -> list[MPI.Request]:
    """Returns the requests that are not complete."""
    return [request for request in requests if outcome(request) == "no"]
