"""What a rank does while nothing happens: sleeps, reports long waits, and ends a run that nobody can continue."""

import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

from rudra.errors import RunError
from rudra.log import log
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import SPEAKS_S, Losses, named_ranks, stopped_neighbours
from rudra.mpi.patience import Patience
from rudra.mpi.standstill import LEFT_S, Standstill
from rudra.roles.machine import listed
from topologies import Plan

ALONE_S = 5.0
"""How long a rank waits when both are dead that could end the run: the last that they said may still come."""


class Idleness:
    """The time in which a rank has nothing to do.

    Args:
        comm: of all ranks.
        doorbell: wakes this rank up.
        losses: which ranks have died.
        patience: after which waits are reported, and end the run.
        standstill: whether all ranks that are left wait.
        spin_s: how long to poll before sleeping.
        shortest_s: of a sleep.
        longest_s: likewise.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        doorbell: Doorbell,
        losses: Losses,
        patience: Patience,
        standstill: Standstill,
        *,
        spin_s: float,
        shortest_s: float,
        longest_s: float,
    ) -> None:
        self._comm, self._doorbell, self._losses = comm, doorbell, losses
        self._patience, self._standstill = patience, standstill
        self._spin_s, self._shortest_s, self._longest_s = spin_s, shortest_s, longest_s
        self._since: float | None = None

    def end(self) -> None:
        """There was something to do."""
        self._since = None
        self._patience.begin()

    def pause(
        self, now: float, plan: Plan, waits: Callable[[], Mapping[int, str]], *, origin: float, busy: bool
    ) -> None:
        """Sleeps for a moment, or reports that this rank has waited for long.

        Args:
            now: by this rank's clock.
            plan: who is who.
            waits: gives what each role of this rank waits for.
            origin: moment from which the clock of all ranks counts.
            busy: whether other threads of this rank work.

        Raises:
            RunError: the wait is too long, or nobody is left who could end it.
        """
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if due := self._patience.due(waited):
            self._report(plan, waits(), waited, ends=due == "end")
        if waited >= ALONE_S and self._losses.dead:
            self._end_alone(plan)
        if waited >= LEFT_S and self._losses.dead and not busy:
            self._stand_still(plan, waits(), time.perf_counter() - origin)
        if waited >= self._spin_s:
            self._doorbell.wait(min(self._longest_s, max(self._shortest_s, waited / 8)))

    def _report(self, plan: Plan, waits: Mapping[int, str], waited: float, *, ends: bool) -> None:
        for role, what in waits.items():
            line = f"has waited {waited:.0f} s for {what}"
            if ends:
                stopped = named_ranks(stopped_neighbours(self._comm.size))
                raise RunError(f"{line}; stopped by a signal: {stopped}" if stopped else line)
            log.warning(f"{plan.roles[role].title} {line}", extra={"role": plan.roles[role].name})

    def _stand_still(self, plan: Plan, waits: Mapping[int, str], now: float) -> None:
        """Ends the run if all others that are left wait, too."""
        texts = [f"{plan.roles[role].title} for {waits[role]}" for role in sorted(waits)]
        others = {role.world_rank for role in plan.roles} - self._losses.dead - {self._comm.rank}
        if all_wait := self._standstill.wait(", ".join(texts), others, now):
            failure = RunError(
                f"a rank has died, and for {LEFT_S:.0f} s all that are left have waited: {listed(all_wait)}"
            )
            failure.lost = True
            raise failure

    def _end_alone(self, plan: Plan) -> None:
        """Ends the run if neither the owner of the weights nor the statistics server is left, of whom each would."""
        roles = [plan.roles[i] for i in sorted({plan.server, plan.statistics})]
        if all(role.world_rank in self._losses.dead for role in roles):
            names = listed([role.title for role in roles])
            left = sorted({role.world_rank for role in plan.roles} - self._losses.dead)
            time.sleep(SPEAKS_S * min(left.index(self._comm.rank), 3))  # the first ends the others
            failure = RunError(f"{names} died, and the run cannot go on without them")
            failure.lost = True
            raise failure
