"""Regrouping of real ranks: their roles restart with another plan or another job (`rudra.core.actions.Reconfigure`).

The owner of the weights announces the position and the dead ranks, which determine the plan. Every rank then drops
transfers and work between the surviving roles and waits until no dropped transfer can write into memory any more. Then
it creates its roles again. The statistics server and messages to it continue unchanged. Control messages and the tags
of tensors contain how often their sender had regrouped, so old messages are never taken for new ones.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from mpi4py import MPI

from rudra.core.actions import Reconfigure
from rudra.core.events import Event, Received, Stopped
from rudra.core.messages import BETWEEN_OWNERS, Message, MessageKind
from rudra.core.phases import Phases, phase_at
from rudra.core.training_state import TrainingState
from rudra.mpi.tags import REGROUP_TAG
from topologies import Plan


class RegroupingRank(Protocol):
    """The part of a rank's interface that regrouping needs.

    Attributes:
        comm: communicator of all ranks.
        plan: current role assignment.
        phases: phases of the run.
    """

    comm: MPI.Comm
    plan: Plan
    phases: Phases

    @property
    def lost(self) -> set[int]:
        """Ranks that have died."""

    @property
    def quiet(self) -> bool:
        """Whether no abandoned transfer can write into memory any more."""

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a small message to a rank."""

    def announce(self, role: int, event: Event) -> None:
        """Appends an event for a role."""

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Drops pending work and switches to this plan."""

    def regroup(self, position: TrainingState) -> None:
        """Creates the roles again, for training that continues from a position."""


class RankRegrouping:
    """Agreement of one rank with all others to regroup, and its handling of control messages in between.

    Args:
        rank: rank that regroups.

    Attributes:
        generation: number of times that this rank has regrouped.
    """

    def __init__(self, rank: RegroupingRank) -> None:
        self._rank = rank
        self.generation = 0
        self._position: TrainingState | None = None  # position for the restart of this rank when it is quiet
        self._early: list[tuple[int, int, Message]] = []  # from faster ranks: generation, receiver, message

    def poll(self) -> None:
        """Takes the next step of regrouping if a rank has died or the job changes."""
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
        except MPI.Exception:  # a loss that is not acknowledged yet, or the owner itself died
            return
        if told:
            data = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv(data, owner, REGROUP_TAG)
            gone, position = msgspec.msgpack.decode(data, type=tuple[list[int], TrainingState])
            plan = phase_at(self._rank.phases, position).plan
            self._abandon(plan.without(gone) if gone else plan, position)

    def regroup(self, action: Reconfigure) -> None:
        """Announces a plan to all others, and regroups here."""
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
        """Accepts a control message unless it was sent before all regrouped. Messages between owners of weights always
        pass.

        The message waits if its sender has regrouped already, and this rank has not.
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
        """Wraps a callback for another thread, so that it does nothing after this rank has regrouped."""
        generation = self.generation
        return lambda *about: what(*about) if generation == self.generation else None
