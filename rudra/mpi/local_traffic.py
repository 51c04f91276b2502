"""Tensors between roles of one rank: they are copied where they are, and MPI carries nothing."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from rudra.compute.executor import Executor
from rudra.compute.half import from_half, to_half
from rudra.compute.speculation import SpeculativeSteps
from rudra.core.messages import PARTS, Message
from rudra.mpi.leases import Going
from rudra.mpi.transfers import Wanted


class _Sent(NamedTuple):
    """A tensor that waits for its receiver, a role of this rank."""

    going: Going
    message: Message
    gradient: bool


class LocalTraffic:
    """Sends and receives between the roles of a rank, each in the order of its beginning.

    Args:
        executors: role -> executor that holds the buffers.
        halves: whether gradients are rounded to float16.
        received: called when a tensor has arrived, with its message.
        sent: called when the buffer of a send is free again.
        speculation: steps that the device does before the roles ask, or None.
    """

    def __init__(
        self,
        executors: Mapping[int, Executor],
        *,
        halves: bool,
        received: Callable[[Wanted, Message | None], None],
        sent: Callable[[Going], None],
        speculation: SpeculativeSteps | None = None,
    ) -> None:
        self._executors, self._halves, self._speculation = executors, halves, speculation
        self._received, self._sent = received, sent
        self._sends: list[_Sent] = []
        self._wanted: list[tuple[Wanted, int | None, bool]] = []  # with the sending role, and whether it is a gradient

    def send(self, going: Going, message: Message, *, gradient: bool) -> None:
        """Sends a tensor."""
        self._executors[going.role].lent[going.name] += 1
        self._sends.append(_Sent(going, message, gradient))
        self._match()

    def receive(self, wanted: Wanted, sender: int | None, *, gradient: bool) -> None:
        """Begins to receive a tensor.

        Args:
            wanted: the receive.
            sender: sending role. None: any role.
            gradient: whether it is a gradient, or else weights.
        """
        self._wanted.append((wanted, sender, gradient))
        self._match()

    def withdraw(self, role: int, buffer: str) -> bool:
        """Cancels a receive. Returns whether it was waiting."""
        before = len(self._wanted)
        self._wanted = [each for each in self._wanted if (each[0].role, each[0].name) != (role, buffer)]
        return len(self._wanted) < before

    def drop(self, role: int) -> None:
        """Abandons the sends to a role, and the receives from it."""
        self._wanted = [each for each in self._wanted if each[1] != role]
        gone = [sent.going for sent in self._sends if sent.going.to == role]
        self._sends = [sent for sent in self._sends if sent.going.to != role]
        for going in gone:
            self._sent(going)

    def abandon(self, roles: Collection[int], but_to: int) -> list[Going]:
        """Abandons the transfers of roles, except sends to one other role. Returns the sends that continue."""
        self._wanted = [each for each in self._wanted if each[0].role not in roles]
        self._sends = [sent for sent in self._sends if sent.going.to == but_to]
        return [sent.going for sent in self._sends]

    def _match(self) -> None:
        for place, (wanted, sender, gradient) in enumerate(self._wanted):
            for sent in self._sends:
                its = sent.going
                if (its.to, sent.gradient) == (wanted.role, gradient) and sender in {None, its.role}:
                    del self._wanted[place]
                    self._sends.remove(sent)
                    self._carry(sent, wanted)
                    return

    def _carry(self, sent: _Sent, wanted: Wanted) -> None:
        """Copies a tensor to the buffer of its receiver, unless the device is ahead of both."""
        going, message = sent.going, sent.message
        giver, taker = self._executors[going.role], self._executors[wanted.role]
        if self._speculation is None or not self._speculation.carries(giver, going.name, taker, wanted.name):
            self._copy(sent, wanted, giver, taker)
        self._sent(going)
        self._received(wanted, message)

    def _copy(self, sent: _Sent, wanted: Wanted, giver: Executor, taker: Executor) -> None:
        going, message = sent.going, sent.message
        if message.kind in PARTS:
            came, into = giver.slice_for(going.name, going.to), taker.slice_for(wanted.name, going.role)
        else:
            buffer = taker.renew(wanted.name)
            buffer.version += 1
            came, into = giver.buffer(going.name).vector, buffer.vector
        if self._halves and sent.gradient:
            half = torch.empty_like(came, dtype=torch.float16)
            from_half(half, to_half(came, half), into)
        else:
            into.copy_(came)
