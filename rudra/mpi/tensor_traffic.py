"""Tensors between roles: the way and tag of each tensor, and the events that roles receive.

A tensor for a neighbour stays in place, and only its `Place` is sent. Other tensors are transferred by the rank's own
thread, which polls (`rudra.mpi.transfers`), or by a communication thread (`rudra.mpi.comm_threads`). A gradient may
leave part by part while it is computed (`rudra.mpi.push_buckets`), and weights may come part by part
(`rudra.mpi.pull_buckets`).
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.final_gradients import Ready
from rudra.compute.speculation import SpeculativeSteps
from rudra.core.actions import Receive, Send
from rudra.core.buffer_names import GRADIENT
from rudra.core.events import Event, ReceiveCancelled, Received, Sent
from rudra.core.messages import GRADIENTS as GRADIENT_KINDS
from rudra.core.messages import GradientPart, Message, WeightsPart
from rudra.mpi.arena import Arena
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.comm_threads import CommThread, Post
from rudra.mpi.failures import PAUSE_S, Losses
from rudra.mpi.leases import Going
from rudra.mpi.local_traffic import LocalTraffic
from rudra.mpi.pull_buckets import WeightBuckets
from rudra.mpi.push_buckets import IncomingPushes, OutgoingPushes
from rudra.mpi.tags import CHANNELS, FIRST_TAG, GRADIENTS, REDUCTIONS, STATES, WEIGHTS
from rudra.mpi.transfers import Transfers, Wanted
from topologies import Plan

GENERATIONS = 3
"""Largest number of buffers for one tensor instead of copies: one that is written, and others that are still read."""


class TensorTags:
    """The tags of tensors.

    Args:
        plan: role assignment. Roles never change their ranks.
        generation: returns how often this rank has regrouped.
    """

    def __init__(self, plan: Plan, generation: Callable[[], int]) -> None:
        hosted: dict[int, list[int]] = {}
        for id_, role in enumerate(plan.roles):
            hosted.setdefault(role.world_rank, []).append(id_)
        self._places = {id_: place for roles in hosted.values() for place, id_ in enumerate(roles)}  # of roles on ranks
        self._most = max(map(len, hosted.values()))
        self._roles, self._statistics, self._generation = len(plan.roles), plan.statistics, generation

    def tag(self, role: int, channel: int, sender: int | None = None) -> int:
        """Returns the tag of tensors for a role. Those of states stay; the others change when the roles regroup.

        Args:
            role: id of the receiving role.
            channel: channel of the tensors.
            sender: id of the sending role. None: the first role of its rank.
        """
        lasts = role == self._statistics or channel == STATES
        generation = 0 if lasts else self._generation()
        place = 0 if sender is None else self._places[sender]
        return FIRST_TAG + ((generation * self._roles + role) * self._most + place) * CHANNELS + channel

    def any_tag(self, role: int, channel: int) -> list[int]:
        """Returns all tags of tensors for a role, from any sender."""
        first = self.tag(role, channel)
        return [*range(first, first + self._most * CHANNELS, CHANNELS)]


class TensorTraffic:
    """The tensors that a rank sends and receives.

    Args:
        comm: communicator of all ranks.
        plan: role assignment.
        executors: role -> executor that holds the buffers.
        tags: tags of tensors.
        arena: memory that neighbours read.
        losses: ranks that have died.
        halves: whether gradients travel as float16.
        announce: appends an event for a role of this rank to the queue.
        post: hands a function over to this rank's own thread.
        wake: wakes up a rank to which a tensor was sent.
        delivered: called with the rank whose tensor has arrived here.
        in_time: wraps a callback, so that it does nothing after this rank has regrouped.
        hurries: whether this rank must end its work as soon as possible.
        speculation: as for `LocalTraffic`, if this is the only rank.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        executors: Mapping[int, Executor],
        tags: TensorTags,
        arena: Arena,
        losses: Losses,
        *,
        halves: bool,
        announce: Callable[[int, Event], None],
        post: Post,
        wake: Callable[[int], None],
        delivered: Callable[[int], None],
        in_time: Callable[[Callable[..., Any]], Callable[..., Any]],
        hurries: Callable[[], bool],
        speculation: SpeculativeSteps | None = None,
    ) -> None:
        self._comm, self._plan, self._executors, self._tags = comm, plan, executors, tags
        self._arena, self._halves = arena, halves
        self._announce, self._post, self._in_time = announce, post, in_time
        self._wake, self._delivered = wake, delivered
        self._outgoing = OutgoingPushes(comm, tags.tag, self._carry)
        self._incoming = IncomingPushes(comm, tags.tag, losses, executors, arena)
        self._weights = WeightBuckets(comm, tags.tag, executors, hurries)
        take = self._incoming.take
        self._transfers = Transfers(comm, losses, executors, self._received, self._sent, arena, take)
        about: dict[str, Any] = {
            "halves": halves,
            "received": self._received,
            "sent": self._sent,
            "speculation": speculation,
        }
        self._local = LocalTraffic(executors, **about) if comm.size == 1 else None
        self._wait = losses.wait
        self._threads: dict[int, CommThread] = {}
        self._carrier: CommThread | None = None  # carries buckets, may be one of these threads
        self._writing: set[int] = set()  # communication threads that may still write abandoned tensors

    def start_threads(self) -> None:
        """Moves transfers to two threads from now on: one pushes, one pulls."""
        for channel, name in ((GRADIENTS, "push"), (WEIGHTS, "pull")):
            self._threads[channel] = CommThread(name, self._post, self._wait)

    def use_buckets(self, rule: BucketRule) -> None:
        """Follows a rule that says which gradients and weights travel in buckets."""
        self._outgoing.renew(rule, self._executors)
        self._incoming.renew(rule)
        self._weights.renew(rule)
        some = self._outgoing or self._weights.any_come
        if some and self._carrier is None and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            self._carrier = self._threads.get(GRADIENTS) or CommThread("buckets", self._post, self._wait)

    def expect(self, role: int, gradient: str) -> Ready | None:
        """Prepares for the gradient that a role now computes.

        Args:
            role: id of the role.
            gradient: name of the gradient's buffer.

        Returns:
            Function to call while parts of the gradient become final, or None if it is not pushed in buckets.
        """
        if not self._outgoing:
            return None
        ready = self._outgoing.expect(role, gradient, self._executors[role].buffer(gradient).array)
        if ready is None or not self._threads:
            return ready
        ready, post = self._in_time(ready), self._post  # another thread computes
        return lambda first: post(partial(ready, first))

    def _carry(self, start: Callable[[], MPI.Request], going: Going) -> None:
        """Starts to send a part of a gradient."""
        if self._carrier is None:
            self._transfers.send(start(), going)
        else:
            self._carrier.carry(start, self._in_time(partial(self._sent, going)))

    def send(self, role: int, action: Send) -> None:
        """Sends a tensor of a role."""
        assert action.buffer is not None
        to = self._plan.roles[action.to].world_rank
        channel = GRADIENTS if action.message.kind in GRADIENT_KINDS else WEIGHTS
        going = Going(role, action.buffer, action.to)
        if self._local is not None:
            self._local.send(going, action.message, gradient=channel == GRADIENTS)
            return
        self._wake(to)
        halves = self._halves and channel == GRADIENTS
        tag = self._tags.tag(action.to, channel, role)
        if to in self._arena.neighbours:
            most = GENERATIONS - 1 - self._plan.traits(role).overlaps
            self._transfers.lend(going, action.message, to, tag, halves=halves, most=most)
            return
        if self._transfers.on_device:
            parts = partial(self._weights.pieces, role, action.to) if channel == WEIGHTS else None
            self._transfers.depart(going, action.message, to, tag, halves=halves, pieces=parts)
            return
        if channel == GRADIENTS and self._outgoing.takes(role, action.to):
            self._executors[role].send(action.buffer, action.message, action.to, near=True)
            self._outgoing.push(role, action.buffer, action.message, action.to)
            return
        wire = self._executors[role].send(action.buffer, action.message, action.to, halves=halves)
        if channel == WEIGHTS and (pieces := self._weights.pieces(role, action.to, wire)):
            going.left = len(pieces)
            for piece, its_tag in pieces:
                self._transfers.send(self._comm.Isend(piece, to, its_tag), going)
            return
        start = partial(self._comm.Isend, wire, to, tag)
        if channel in self._threads:
            self._threads[channel].carry(start, self._in_time(partial(self._sent, going)))
        else:
            self._transfers.send(start(), going)

    def receive(self, role: int, action: Receive) -> None:
        """Begins to receive a tensor for a role."""
        halves = self._halves and action.gradient
        source = None if action.source is None else self._plan.roles[action.source].world_rank
        channel = GRADIENTS if action.gradient else WEIGHTS
        if action.source is None:
            tag, *or_tags = self._tags.any_tag(role, channel)
        else:
            tag, or_tags = self._tags.tag(role, channel, action.source), []
        wanted = Wanted(role, action.buffer, source, tag, halves, or_tags)
        if action.source is not None:
            plan = self._plan
            if plan.in_parts(role, action.source) or plan.in_parts(action.source, role):
                wanted.part_of = action.source
        if self._local is not None:
            self._local.receive(wanted, action.source, gradient=action.gradient)
            return
        self._look_near(wanted, gradient=action.gradient)
        if action.gradient and self._incoming.used:
            senders = self._incoming.senders(role)
            wanted.in_buckets_of = [sender for sender in senders if action.source in {None, sender}]
        if channel in self._threads and not wanted.near and not self._transfers.on_device:
            assert source is not None
            wire = self._executors[role].buffer(action.buffer).wire
            start = partial(self._comm.Irecv, wire, source, tag)
            received = self._in_time(partial(self._received, wanted))
            self._threads[channel].carry(start, received, receives=True)
            return
        if channel == WEIGHTS and action.source is not None and self._weights.come(role, action.source):
            self._receive_buckets(wanted, action.source)
        else:
            self._transfers.receive(wanted)

    def _receive_buckets(self, wanted: Wanted, owner: int) -> None:
        """Begins to receive weights that come in buckets."""
        executor = self._executors[wanted.role]
        if wanted.part_of is None:
            weights = executor.renew(wanted.name)
            wire: npt.NDArray[Any] = weights.wire
        else:
            weights, wire = executor.buffer(wanted.name), executor.slice_array(wanted.name, owner)
        start = self._weights.receive(wanted.role, owner, wire, weights, self._post)
        assert self._carrier is not None
        self._carrier.carry(start, self._in_time(partial(self._received, wanted)), receives=True)

    def _look_near(self, wanted: Wanted, *, gradient: bool) -> None:
        """Sets whether only neighbours may send the wanted tensor, and whether it is read in their memory.

        Gradients are read there, unless they travel as float16. Weights are read there by a role that computes with
        them unchanged until newer weights arrive, and that does not forward them.
        """
        if not (neighbours := self._arena.neighbours):
            return
        plan, role, source = self._plan, wanted.role, wanted.source
        sources = {source} if source is not None else {plan.roles[i].world_rank for i in plan.children[role]}
        wanted.near = sources <= neighbours
        keeps = plan.traits(role).overlaps and not plan.receivers[role]
        wanted.reads = not wanted.halves if gradient else keeps and self._executors[role].computes_in_place

    def withdraw(self, role: int, buffer: str) -> None:
        """Cancels a receive, unless its tensor is already arriving. That tensor is then received as usual."""
        if (self._transfers if self._local is None else self._local).withdraw(role, buffer):
            self._announce(role, ReceiveCancelled(buffer))

    def drop(self, role: int) -> None:
        """Stops all transfers from and to a role."""
        if self._local is not None:
            self._local.drop(role)
        self._transfers.drop(role, self._plan.roles[role].world_rank)
        self._incoming.drop(role)

    def lose(self, ranks: Collection[int]) -> None:
        """Handles the transfers of dead ranks."""
        self._transfers.lose(ranks)
        self._incoming.lose(ranks)

    def poll(self) -> None:
        """Advances transfers."""
        if self._incoming.used:
            self._incoming.poll()
        self._transfers.poll()

    def abandon(self, plan: Plan, roles: Collection[int]) -> None:
        """Abandons transfers between roles that regroup with another plan."""
        self._plan = plan
        going = self._transfers.abandon(roles, plan.statistics)
        if self._local is not None:
            going += self._local.abandon(roles, plan.statistics)
        for role in roles:
            self._executors[role].lent = Counter(send.name for send in going if send.role == role)
        self._incoming.abandon()
        self._writing = {*self._all_threads}
        for channel, thread in self._all_threads.items():
            thread.abandon(self._in_time(partial(self._writing.discard, channel)))

    @property
    def quiet(self) -> bool:
        """Whether no abandoned transfer can write into a buffer any more."""
        return self._transfers.quiet and self._incoming.quiet and not self._writing

    def close(self) -> None:
        """Cancels pending transfers and ends the threads."""
        self._outgoing.close()
        while not self._incoming.end():
            time.sleep(PAUSE_S)
        self._transfers.close()
        if self._carrier is not None:
            self._carrier.abandon(lambda: None)  # a server that takes nothing more may have dropped a learner here
        for thread in self._all_threads.values():
            thread.close()

    @property
    def _all_threads(self) -> dict[int, CommThread]:
        """Communication threads of this rank, by the first channel of each."""
        if self._carrier is None or self._carrier in self._threads.values():
            return self._threads
        return {**self._threads, REDUCTIONS: self._carrier}

    def _sent(self, going: Going) -> None:
        going.left -= 1
        if going.left:
            return
        self._executors[going.role].sent(going.name)
        self._announce(going.role, Sent(going.name, going.to))

    def _received(self, wanted: Wanted, message: Message | None = None) -> None:
        role, name = wanted.role, wanted.name
        if wanted.part_of is not None:
            self._executors[role].buffer(name).version += 1
            gradient = name.startswith(GRADIENT)
            message = (GradientPart if gradient else WeightsPart)(wanted.part_of)
        elif message is None:
            buffer = self._executors[role].buffer(name)
            message = buffer.read_half() if wanted.halves else buffer.read()
        self._delivered(self._plan.roles[message.sender].world_rank)
        self._announce(role, Received(message, name))
