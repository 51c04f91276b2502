"""Beginning anew on real ranks, by a plan without those that died (`rudra.core.events.Regroup`).

The owner of the weights says by which plan. Every rank then drops what is under way between those who are left, waits
until nothing of it can write into memory any more, and makes its roles again. The statistics server goes on as it was,
and so does what it is told. Control messages carry how often their sender had begun anew, and so do the tags of
tensors, so that nothing of before is taken for something of now.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from mpi4py import MPI

from rudra.core.events import Event, Lost, Received, Regroup, Started, Stopped
from rudra.core.messages import Kind, Message
from rudra.core.training_state import TrainingState
from rudra.roles import Machine
from rudra.roles.owner import outlasts
from topologies import Plan

if TYPE_CHECKING:
    from rudra.mpi.driver import Rank

REGROUP_TAG = 2
"""Of the message that says who is gone, and from where the others go on."""


class Regrouping:
    """How one rank begins anew; a friend of it, which changes what it has under way.

    Args:
        rank: in question.
        make_machine: makes a role's machine for a new plan, and its executor ready; None: nobody begins anew here.

    Attributes:
        generation: how often this rank has begun anew.
    """

    def __init__(self, rank: "Rank", make_machine: Callable[[int, Plan, TrainingState], Machine] | None) -> None:
        self._rank, self._make_machine = rank, make_machine
        self.generation = 0
        self._position: TrainingState | None = None  # where this rank begins when nothing of before can write any more
        self._writing: set[int] = set()  # communication threads in which something still may
        self._early: list[tuple[int, int, Message]] = []  # of ranks that were quicker: generation, receiver, message

    def poll(self) -> None:
        """Does what there is to do where a rank has died."""
        self._look_for_plan()
        if self._position is not None and self._quiet():
            position, self._position = self._position, None
            self._begin(position)

    def _look_for_plan(self) -> None:
        plan, comm, status = self._rank._plan, self._rank._comm, MPI.Status()
        owner = plan.roles[plan.server].world_rank
        try:
            told = comm.Iprobe(owner, REGROUP_TAG, status)
        except MPI.Exception:  # a loss that is not acknowledged yet, or the owner's own
            return
        if told:
            data = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv(data, owner, REGROUP_TAG)
            gone, position = msgspec.msgpack.decode(data, type=tuple[list[int], TrainingState])
            self._abandon(plan.without(gone), position)

    def regroup(self, action: Regroup) -> None:
        """Tells all others, and begins anew here."""
        data = msgspec.msgpack.encode((sorted(action.plan.gone), action.position))
        others = {role.world_rank for i, role in enumerate(action.plan.roles) if i != action.plan.statistics}
        for other in sorted(others - self._rank.lost - {self._rank._comm.rank}):
            self._rank._tell(data, other, REGROUP_TAG)
        self._abandon(action.plan, action.position)

    def _abandon(self, plan: Plan, position: TrainingState) -> None:
        """Forgets what is under way between those who begin anew."""
        rank = self._rank
        self.generation += 1
        rank._plan, self._position = plan, position
        roles = rank._running - {plan.statistics}
        going = rank._transfers.abandon(roles, plan.statistics)
        for role in roles:
            rank._executors[role].lent = Counter(send.name for send in going if send.role == role)
        self._writing = set(rank._comm_threads)
        for channel, thread in rank._comm_threads.items():
            thread.abandon(self.in_time(partial(self._writing.discard, channel)))
        for role in roles & rank._reductions.keys():
            rank._reductions[role].abandon()
        rank._long = deque(work for work in rank._long if work[0] not in roles)

        def counts(role: int, event: Event) -> bool:
            return role not in roles or (role == plan.server and outlasts(event, plan.statistics))

        rank._events = deque((role, event) for role, event in rank._events if counts(role, event))

    def _quiet(self) -> bool:
        """Whether nothing of before can write into a buffer any more."""
        rank = self._rank
        return rank._transfers.quiet and not self._writing and all(r.quiet for r in rank._reductions.values())

    def _begin(self, position: TrainingState) -> None:
        """Makes the roles again."""
        rank = self._rank
        plan, dead = rank._plan, rank.lost
        unknown = [i for i, role in enumerate(plan.roles) if role.world_rank in dead and i not in plan.gone]
        for role in sorted(rank._running - {plan.statistics}):
            if role in rank._reductions:
                rank._reductions[role] = rank._reduction(role)
            rank._events.append((role, Started()))
            if role != plan.server:  # which has a new plan already, and knows who is dead
                assert self._make_machine is not None
                before, rank._machines[role] = rank._machines[role], self._make_machine(role, plan, position)
                rank._machines[role].inherit(before)
                rank._events.extend((role, Lost(other)) for other in unknown)
        early, self._early = self._early, []
        for generation, role, message in early:
            self.hear(role, generation, message)

    def hear(self, role: int, generation: int, message: Message) -> None:
        """Lets a control message in, unless it was said before all began anew; if its sender did earlier than this
        rank, it waits."""
        if message.kind is Kind.INTERRUPT:
            self._rank._events.append((role, Stopped()))
            return
        now = generation == self.generation and self._position is None
        if now or self._rank._plan.statistics in (role, message.sender):
            self._rank._events.append((role, Received(message)))
        elif generation >= self.generation:
            self._early.append((generation, role, message))

    def in_time(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """For another thread to call back: does nothing once this rank has begun anew."""
        generation = self.generation
        return lambda *about: what(*about) if generation == self.generation else None
