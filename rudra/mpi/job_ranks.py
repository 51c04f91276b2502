"""All ranks of a job, as one of them deals with the others before and after training."""

import os
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from mpi4py import MPI

from rudra.errors import RudraError, RunError
from rudra.job.tables import FaultToleranceTable
from rudra.log import log, speak_as
from rudra.mpi import failures
from rudra.mpi.failures import SPEAKS_S, end_everybody
from rudra.mpi.patience import Patience
from rudra.mpi.relay import exit_line
from rudra.prepare.start import StartDecision
from rudra.results.writer import remove_if_empty
from topologies import Plan


class JobRanks:
    """All ranks of a job: wait for each other, agree, and end together.

    Args:
        comm: of the ranks.
        plan: who is who.
        tolerance: how long to wait for others.
        start: where the run begins.
        launched: whether a launcher of Rudra's waits for what the ranks say.

    Attributes:
        comm: as given.
        launched: as given.
        name: of this rank, for messages.
    """

    def __init__(
        self, comm: MPI.Comm, plan: Plan, tolerance: FaultToleranceTable, start: StartDecision, *, launched: bool
    ) -> None:
        self.comm, self.launched = comm, launched
        self._tolerance, self._start = tolerance, start
        self._roles = [", ".join(plan.roles[i].name for i in plan.on_rank(rank)) for rank in range(comm.size)]
        self.name = self._title(comm.rank)
        failures.roles = self._roles
        speak_as(comm.rank, self._roles[comm.rank])

    def agree(self, step: Callable[[], None]) -> int | None:
        """Takes a step on every rank.

        Args:
            step: of this rank, which may fail.

        Returns:
            None; or the exit code of the first rank whose step failed, which has said why.
        """
        report: tuple[int, str] | None = None
        try:
            step()
        except RudraError as error:
            report = (error.exit_code, str(error))
        except BaseException as error:  # the user's code may raise SystemExit, too
            line = f"{self.name} failed at start-up: {type(error).__name__}: {error}"
            report = (1, f"{line}\n{traceback.format_exc()}")
        self.meet()
        reports: list[tuple[int, str] | None] = self.comm.allgather(report)
        first = next((r for r in reports if r is not None), None)
        if first is None:
            return None
        if reports.index(first) == self.comm.rank:
            log.error(first[1])
        return first[0]

    def meet(self) -> None:
        """Waits for all ranks without burning a core, and not in silence."""
        try:
            self.wait(self.comm.Ibarrier().Test, "to get ready")
        except RunError as error:
            self.end_all(1, str(error))

    def wait(self, over: Callable[[], bool], to: str) -> None:
        """Waits for other ranks, without burning a core.

        Args:
            over: whether the wait is over.
            to: what the other ranks are to do.

        Raises:
            RunError: they did not within the job's limit; the first rank that can raises it.
        """
        tolerance, began = self._tolerance, time.monotonic()
        patience = Patience(tolerance.stall_warning_s, tolerance.stall_limit_s)
        while not over():
            time.sleep(1e-3)
            waited = time.monotonic() - began
            if not (due := patience.due(waited)):
                continue
            stopped = failures.stopped_neighbours(self.comm.size) - {self.comm.rank}
            place = self.comm.rank - sum(rank < self.comm.rank for rank in stopped)
            whom = ", ".join(map(self._title, sorted(stopped))) or "other ranks"
            text = f"{self.name} has waited {waited:.0f} s for {whom} {to}"
            if due == "end" and waited >= (tolerance.stall_limit_s or 0.0) + SPEAKS_S * min(place, 3):
                raise RunError(text)
            if due == "report" and place < 2:  # one of the two waits, unless both keep the others waiting
                log.warning(text)

    def end_all(self, code: int, text: str, *, lost: bool = False) -> NoReturn:
        """Ends every rank, with one line, where nobody can be asked to."""
        (log.error if code else log.warning)(text)
        if self._start.temporary:
            remove_if_empty(self._start.output)
        if self.launched:  # mpirun does not tell its parent
            os.write(2, exit_line(code, lost=lost))
        end_everybody(self.comm, code)

    def _title(self, rank: int) -> str:
        return f"{self._roles[rank] or 'a rank without a role'} (rank {rank})"
