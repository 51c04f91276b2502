"""Idle time of a rank: it sleeps, reports long waits, and ends a run that no rank can continue."""

import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

from rudra.errors import RunError
from rudra.log import log
from rudra.mpi.deadlock import LEFT_S, Standstill
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import SPEAKS_S, Losses, named_ranks, stopped_neighbours
from rudra.mpi.patience import TOO_LONG, Patience
from rudra.roles.machine import listed
from topologies import Plan

SPIN_S = 20e-3
"""How long a rank with its own core polls before it sleeps. Falling asleep and waking up costs more than a small
message, and it lets the core's caches cool and its clock rate drop."""

ALONE_S = 5.0
"""Time to wait for last messages after the weights' owner and the statistics server, which end runs, have died."""


class Idleness:
    """Handling of a rank's idle time.

    Args:
        comm: communicator of all ranks.
        doorbell: doorbell that wakes up this rank.
        losses: ranks that have died.
        patience: limits after which a wait is reported, and after which it ends the run.
        standstill: check whether all surviving ranks wait.
        spins: whether this rank may poll for `SPIN_S` before it sleeps.
        shortest_s: shortest sleep, in seconds.
        longest_s: longest sleep, in seconds.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        doorbell: Doorbell,
        losses: Losses,
        patience: Patience,
        standstill: Standstill,
        *,
        spins: bool,
        shortest_s: float,
        longest_s: float,
    ) -> None:
        self._comm, self._doorbell, self._losses = comm, doorbell, losses
        self._patience, self._standstill = patience, standstill
        self._spins, self._shortest_s, self._longest_s = spins, shortest_s, longest_s
        self._since: float | None = None

    def end(self) -> None:
        """Ends an idle period, because there was work."""
        self._since = None
        self._patience.begin()

    def pause(
        self,
        now: float,
        plan: Plan,
        waits: Callable[[], Mapping[int, str]],
        *,
        origin: float,
        busy: bool,
        beside: bool,
    ) -> None:
        """Sleeps for a moment, or reports that this rank has waited for long.

        Args:
            now: time on this rank's clock, in seconds.
            plan: current role assignment.
            waits: returns, for each role of this rank, a text about its wait.
            origin: origin of the clock of all ranks, on this rank's clock.
            busy: whether other threads or devices work for this rank.
            beside: whether other threads of this rank work. They may need its core.

        Raises:
            RunError: the wait is too long, or no surviving rank can end it.
        """
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if due := self._patience.due(waited):
            self._report(plan, waits(), waited, ends=due == "end")
        if waited >= ALONE_S and self._losses.dead:
            self._end_alone(plan)
        if waited >= LEFT_S and self._losses.dead and not busy:
            self._stand_still(plan, waits(), time.perf_counter() - origin)
        if not self._spins or beside or waited >= SPIN_S:
            self._doorbell.wait(min(self._longest_s, max(self._shortest_s, waited / 8)))

    def _report(self, plan: Plan, waits: Mapping[int, str], waited: float, *, ends: bool) -> None:
        for role, what in waits.items():
            if not what:  # it waits for no other role
                continue
            line = f"has waited {waited:.0f} s for {what}"
            if ends:
                stopped = named_ranks(stopped_neighbours(self._comm.size))
                line = f"{line}, {TOO_LONG}"
                raise RunError(f"{line}; stopped by a signal: {stopped}" if stopped else line)
            log.warning(f"{plan.roles[role].title} {line}", extra={"role": plan.roles[role].name})

    def _stand_still(self, plan: Plan, waits: Mapping[int, str], now: float) -> None:
        """Ends the run if all other surviving ranks also wait."""
        texts = [f"{plan.roles[role].title} for {waits[role]}" for role in sorted(waits)]
        others = {role.world_rank for role in plan.roles} - self._losses.dead - {self._comm.rank}
        if all_wait := self._standstill.wait(", ".join(texts), others, now):
            failure = RunError(
                f"a rank has died, and for {LEFT_S:.0f} s all remaining ranks have waited: {listed(all_wait)}"
            )
            failure.lost = True
            raise failure

    def _end_alone(self, plan: Plan) -> None:
        """Ends the run if both the weights' owner and the statistics server have died. Normally one of them ends it."""
        roles = [plan.roles[i] for i in sorted({plan.server, plan.statistics})]
        if all(role.world_rank in self._losses.dead for role in roles):
            names = listed([role.title for role in roles])
            left = sorted({role.world_rank for role in plan.roles} - self._losses.dead)
            time.sleep(SPEAKS_S * min(left.index(self._comm.rank), 3))  # the first ends the others
            failure = RunError(f"{names} died, and the run cannot continue without them")
            failure.lost = True
            raise failure
