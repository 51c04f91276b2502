"""Beginning anew on real ranks, by another plan or another job (`rudra.core.events.Regroup`).

The owner of the weights says from which position, and who has died; the plan follows from that. Every rank then drops
what is under way between those who are left, waits until nothing of it can write into memory any more, and makes its
roles again. The statistics server goes on as it was, and so does what it is told. Control messages carry how often
their sender had regrouped, and so do the tags of tensors, so that nothing of before is taken for something of now.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from mpi4py import MPI

from rudra.core.events import Event, Received, Reconfigure, Stopped
from rudra.core.messages import BETWEEN_OWNERS, Message, MessageKind
from rudra.core.phases import Phases, phase_at
from rudra.core.training_state import TrainingState
from rudra.mpi.tags import REGROUP_TAG
from topologies import Plan


class RegroupingRank(Protocol):
    """What the agreement to regroup needs of a rank.

    Attributes:
        comm: of all ranks.
        plan: who is who.
        phases: of the run.
    """

    comm: MPI.Comm
    plan: Plan
    phases: Phases

    @property
    def lost(self) -> set[int]:
        """Ranks that have died."""

    @property
    def quiet(self) -> bool:
        """Whether nothing of before can write into memory any more."""

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a rank something small."""

    def announce(self, role: int, event: Event) -> None:
        """Gives a role an event."""

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Drops what is under way; from now on this plan holds."""

    def regroup(self, position: TrainingState) -> None:
        """Makes the roles again, for training that continues from there."""


class RankRegrouping:
    """How one rank agrees with all others to regroup, and what it hears meanwhile.

    Args:
        rank: in question.

    Attributes:
        generation: how often this rank has regrouped.
    """

    def __init__(self, rank: RegroupingRank) -> None:
        self._rank = rank
        self.generation = 0
        self._position: TrainingState | None = None  # where this rank begins when nothing of before can write any more
        self._early: list[tuple[int, int, Message]] = []  # of ranks that were quicker: generation, receiver, message

    def poll(self) -> None:
        """Does what there is to do where a rank has died, or the job changes."""
        self._look_for_plan()
        if self._position is not None and self._rank.quiet:
            position, self._position = self._position, None
            self._rank.regroup(position)
            early, self._early = self._early, []
            for generation, role, message in early:
                self.hear(role, generation, message)

    def _look_for_plan(self) -> None:
        plan, comm, status = self._rank.plan, self._rank.comm, MPI.Status()
        owner = plan.roles[plan.server].world_rank
        try:
            told = comm.Iprobe(owner, REGROUP_TAG, status)
        except MPI.Exception:  # a loss that is not acknowledged yet, or the owner's own
            return
        if told:
            data = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv(data, owner, REGROUP_TAG)
            gone, position = msgspec.msgpack.decode(data, type=tuple[list[int], TrainingState])
            plan = phase_at(self._rank.phases, position.epoch).plan
            self._abandon(plan.without(gone) if gone else plan, position)

    def regroup(self, action: Reconfigure) -> None:
        """Tells all others, and regroups here."""
        data = msgspec.msgpack.encode((sorted(action.plan.gone), action.position))
        others = {role.world_rank for i, role in enumerate(action.plan.roles) if i != action.plan.statistics}
        for other in sorted(others - self._rank.lost - {self._rank.comm.rank}):
            self._rank.tell(data, other, REGROUP_TAG)
        self._abandon(action.plan, action.position)

    def _abandon(self, plan: Plan, position: TrainingState) -> None:
        self.generation += 1
        self._position = position
        self._rank.abandon(plan, position)

    def hear(self, role: int, generation: int, message: Message) -> None:
        """Lets a control message in, unless it was said before all regrouped; owners of weights heed each other's.

        It waits where its sender has regrouped already, and this rank has not.
        """
        if message.kind is MessageKind.INTERRUPT:
            self._rank.announce(role, Stopped())
            return
        now = generation == self.generation and self._position is None
        if now or message.kind in BETWEEN_OWNERS or self._rank.plan.statistics in (role, message.sender):
            self._rank.announce(role, Received(message))
        elif generation >= self.generation:
            self._early.append((generation, role, message))

    def in_time(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """For another thread to call back: does nothing once this rank has regrouped."""
        generation = self.generation
        return lambda *about: what(*about) if generation == self.generation else None
