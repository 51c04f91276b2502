"""All ranks of a job, as one rank deals with the others before and after training."""

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from rudra.compute.device.faults import fault_text
from rudra.errors import RudraError, RunError
from rudra.job.tables import FaultToleranceTable
from rudra.log import log, speak_as
from rudra.mpi import failures
from rudra.mpi.failures import SPEAKS_S, end_everybody
from rudra.mpi.patience import TOO_LONG, Patience
from rudra.mpi.quiet import QuietComm, pause
from rudra.mpi.relay import exit_line
from rudra.prepare.start import StartDecision
from rudra.results.writer import remove_if_empty
from topologies import Plan


class JobRanks:
    """The ranks of a job: they wait for each other, agree, and end together.

    Args:
        comm: communicator of the ranks.
        plan: role assignment.
        tolerance: limits of waits for other ranks.
        start: start of the run.
        launched: whether Rudra's launcher reads the output of the ranks.

    Attributes:
        comm: communicator of the ranks.
        launched: whether Rudra's launcher reads the output of the ranks.
        name: name of this rank, for messages.
    """

    def __init__(
        self, comm: QuietComm, plan: Plan, tolerance: FaultToleranceTable, start: StartDecision, *, launched: bool
    ) -> None:
        self.comm, self.launched = comm, launched
        self._tolerance, self._start = tolerance, start
        self._roles = [plan.names_on(rank) for rank in range(comm.size)]
        self.name = self._title(comm.rank)
        failures.roles = self._roles
        speak_as(comm.rank, self._roles[comm.rank])
        with suppress(OSError):  # ps shows this name; SLURM cannot signal names with spaces
            Path("/proc/self/comm").write_text(f"rudra-rank-{comm.rank}", encoding="ascii")

    def agree(self, step: Callable[[], None]) -> int | None:
        """Executes a step on every rank.

        Args:
            step: function for this rank, which may fail.

        Returns:
            None, or the exit code of the first rank that failed, after that rank has reported the reason.
        """
        report: tuple[int, str] | None = None
        try:
            step()
        except RudraError as error:
            report = (error.exit_code, str(error))
        except BaseException as error:  # the user's code may also raise SystemExit
            line = f"{self.name} failed at start-up: {type(error).__name__}: {error}"
            text = fault_text(error)
            report = (1, f"{line}\n{traceback.format_exc()}" if text is None else f"{self.name}: {text}")
        failed = np.empty(self.comm.size, np.uint8)
        self._await(self.comm.Iallgather(np.array([report is not None], np.uint8), failed))
        if not failed.any():
            return None
        reports: list[tuple[int, str] | None] = self.comm.allgather(report)
        first = next(r for r in reports if r is not None)
        if reports.index(first) == self.comm.rank:
            log.error(first[1])
        return first[0]

    def meet(self) -> None:
        """Waits for all ranks without keeping the core busy, and reports long waits."""
        self._await(self.comm.Ibarrier())

    def _await(self, request: MPI.Request) -> None:
        try:
            self.wait(request.Test, "to get ready")
        except RunError as error:
            self.end_all(1, str(error))

    def wait(self, over: Callable[[], bool], to: str) -> None:
        """Waits for other ranks without keeping the core busy.

        Args:
            over: returns whether the wait has ended.
            to: text about the awaited action of the other ranks, for messages.

        Raises:
            RunError: the wait exceeded the job's limit. The first rank that can raises it.
        """
        tolerance, began = self._tolerance, time.monotonic()
        patience = Patience(tolerance.stall_warning_s, tolerance.stall_limit_s)
        waited = 0.0
        while not over():
            pause(waited)
            waited = time.monotonic() - began
            if not (due := patience.due(waited)):
                continue
            stopped = failures.stopped_neighbours(self.comm.size) - {self.comm.rank}
            place = self.comm.rank - sum(rank < self.comm.rank for rank in stopped)
            whom = ", ".join(map(self._title, sorted(stopped))) or "other ranks"
            text = f"{self.name} has waited {waited:.0f} s for {whom} {to}"
            if due == "end" and waited >= (tolerance.stall_limit_s or 0.0) + SPEAKS_S * min(place, 3):
                raise RunError(f"{text}, {TOO_LONG}")
            if due == "report" and place < 2:  # two ranks report, because one may itself keep the others waiting
                log.warning(text)

    def end_all(self, code: int, text: str, *, lost: bool = False) -> NoReturn:
        """Ends every rank, with one line, if an orderly stop is impossible."""
        (log.error if code else log.warning)(text)
        if self._start.temporary:
            remove_if_empty(self._start.output)
        if self.launched:  # mpirun does not pass the code on to its parent
            os.write(2, exit_line(code, lost=lost))
        end_everybody(self.comm, code, lost=lost)

    def _title(self, rank: int) -> str:
        return f"{self._roles[rank] or 'a rank without a role'} (rank {rank})"
