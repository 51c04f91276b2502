"""One rank's part in a job: fits the job to the actual ranks, sets up with the other ranks, trains, and ends."""

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

from rudra.compute.device.faults import fault_text, loss_text
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.core.layout import NamedVectors
from rudra.core.phases import phase_at
from rudra.errors import HookError, RudraError, RunError
from rudra.job.job import Job
from rudra.log import log, speak_as
from rudra.machine import cores, end_with_parent
from rudra.mpi import failures
from rudra.mpi.agreement import facts_of_ranks
from rudra.mpi.driver import Ended, Rank
from rudra.mpi.failure_reports import Reported, report
from rudra.mpi.failures import abort_on_dead_rank, end_everybody, outcome, outlive, survivable
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.quiet import QuietComm
from rudra.mpi.relay import TRAINING_LINE, exit_line
from rudra.mpi.setup import RankSetup
from rudra.mpi.signals import GRACE_S, StopSignals, on_stops
from rudra.mpi.states import FINAL
from rudra.prepare.bank_size import with_bank_size
from rudra.prepare.cut import with_cut
from rudra.prepare.resolve import choose_devices, fit
from rudra.prepare.start import StartDecision, StartRequest, decide
from rudra.results import checkpoint
from rudra.results.identity import finished
from rudra.results.writer import remove_if_empty
from rudra.roles.checkpoint_cycle import final_name
from rudra.roles.ledger import Owner

T = TypeVar("T")

PART_S = 1.0
"""Time that ranks have to end by themselves, or to report a reason, before others end them."""

ENDED = "the launcher ended it: a rank died, or it was cancelled"
"""Reason for the end of a run that had no time for an orderly stop."""


def run_ranks(
    job: Job,
    start: StartRequest | StartDecision,
    *,
    progress: dict[str, Any],
    launched: bool = False,
    comm: MPI.Comm | None = None,
) -> tuple[int, Path]:
    """Runs this rank's part of a job until its end.

    Args:
        job: job as written. It is resolved here for the actual ranks.
        start: start of the run, decided or as the user requested it.
        progress: keyword arguments `mode` and `columns` of the progress bar.
        launched: whether `rudra.mpi.launch` started this rank, and reports on a run that was ended.
        comm: communicator of the ranks that run the job, by default all ranks.

    Returns:
        The exit code and the result file. The code is 0, 1 (the run failed), 2 (a mistake in the job or the launch) or
        3 (the run was stopped on request, and can be resumed).
    """
    with abort_on_dead_rank(), on_stops(signal.SIG_DFL, after=signal.SIG_IGN if launched else None):
        given = MPI.COMM_WORLD if comm is None else comm
        own = (given if isinstance(given, QuietComm) else QuietComm(given)).Dup()
        speak_as(rank := own.rank)
        begin = _decided_by_rank0(own, partial(_start, job, start, own.size))
        if isinstance(begin, int):
            return begin, start.output or Path()
        if begin.finished:
            return 0, begin.output
        try:
            return _run_ranks(job, begin, progress, own, launched=launched), begin.output
        finally:
            if start.output is None and not rank:
                remove_if_empty(begin.output)


def run_all(runs: Sequence[tuple[Job, StartRequest]]) -> int:
    """Runs several jobs, one after the other, each on the number of ranks that it needs.

    Args:
        runs: jobs that name their learners, each with its beginning, which names a result file. After each run an empty
            file with suffix `.done` appears next to the result file.

    Returns:
        The exit code: 0, or the code of the first run that did not succeed.
    """
    world = QuietComm(MPI.COMM_WORLD)
    for job, start in runs:
        comm = world.Split(0 if world.rank < job.plan().ranks else MPI.UNDEFINED)
        code = 0
        if comm != MPI.COMM_NULL:
            code = run_ranks(job, start, progress={"mode": "quiet"}, comm=comm)[0]
            if failures.outlived:  # no collective call works any more
                return code
            comm.Free()
        if code := int(world.allreduce(code, MPI.MAX)):
            return code
        if world.rank == 0:
            assert start.output is not None
            start.output.with_suffix(".done").touch()
    return 0


def _decided_by_rank0(comm: QuietComm, decide: Callable[[], T]) -> T | int:
    """Decides on rank 0 and returns the result on every rank. Returns an exit code if rank 0 fails and reports why."""
    found: T | int = 0
    if comm.rank == 0:
        try:
            found = decide()
        except RudraError as error:
            found = error.exit_code
            log.error(error)
        except BaseException as error:  # the others must not wait for an answer
            found = 1
            log.error(f"rank 0 failed at start-up: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    agreed: T | int = comm.bcast(found)
    return agreed


def _run_ranks(written: Job, start: StartDecision, progress: dict[str, Any], comm: QuietComm, *, launched: bool) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = facts_of_ranks(comm, node, written.cluster)
    decided = _decided_by_rank0(comm, lambda: with_bank_size(written, start.decided, ranks))
    if isinstance(decided, int):
        return decided
    start = start._replace(decided=decided)
    try:
        resolved = fit(written, start.decided, ranks)
        resolved, device, transports = choose_devices(resolved, ranks, comm.rank)
    except RudraError as error:
        if comm.rank == 0:
            log.error(error)
        return error.exit_code
    if comm.rank == 0 and (idle := comm.size - len({role.world_rank for role in resolved.plan.roles})):
        text = f"{idle} of {comm.size} ranks have no role: servers and learners cannot use exactly that many"
        log.warning(f"{text}; `rudra topology` shows the roles")
    if comm.rank == 0 and (unused := written.cpu_learners_unused()):
        log.warning(unused)
    together = JobRanks(comm, resolved.plan, resolved.job.fault_tolerance, start, launched=launched)
    setup = RankSetup(together, resolved, start, device, transports, node, [rank.node for rank in ranks])
    code = setup.prepare(progress)
    code = _Session(together, setup, start).run() if code is None else code
    if not launched:
        del setup
        gc.collect()  # the next run may need the memory before Python finds the cycles that hold it
    if not failures.outlived:
        comm.Free()
    return code


def _start(written: Job, asked: StartRequest | StartDecision, ranks: int) -> StartDecision:
    """Returns, on rank 0, the start of the run with all decisions that precede fitting the job to the ranks."""
    if isinstance(asked, StartDecision):
        return asked
    start = decide(written, asked)
    if start.text:
        log.info(start.text)
    return start if start.finished else start._replace(decided=with_cut(written, start.decided, ranks))


class _Session:
    """Training on one rank, from the end of its set-up to the end of the run."""

    def __init__(self, ranks: JobRanks, setup: RankSetup, start: StartDecision) -> None:
        self._ranks, self._setup, self._start = ranks, setup, start
        self._name, self._plan = setup.job.name, setup.plan
        self._stops = StopSignals(self._secure if setup.keeps_results else None)

    def run(self) -> int:
        """Drives the roles and returns the exit code, or ends the whole job."""
        with self._stops.heard():
            self._ranks.meet()
            self._stops.rank = rank = self._make_rank()
            if self._ranks.launched and self._ranks.comm.rank == 0:
                os.write(2, TRAINING_LINE)  # from now on each rank watches its own waits
            if self._setup.keeps_results:
                end_with_parent()  # with SIGTERM, instead of being killed at once
            try:
                code = self._serve(rank)
            except Ended:
                self._leave()
            except Reported as error:
                self._give_up(error.exit_code, error.text, lost=error.lost)
            except HookError as error:
                self._give_up(error.exit_code, error.report.removeprefix("rudra: "))
            except RudraError as error:
                lost, cause = (error.lost, error.cause) if isinstance(error, RunError) else (False, "")
                line = f"{cause or self._ranks.name}: {error.report.removeprefix('rudra: ')}"
                self._give_up(error.exit_code, line, lost=lost)
            except BaseException as error:
                if text := loss_text(error):
                    self._die(text)
                if text := fault_text(error):
                    self._give_up(1, f"{self._ranks.name}: {text}")
                line = f"{self._ranks.name} failed: {type(error).__name__}: {error}"
                self._give_up(1, f"{line}\n{traceback.format_exc()}")
        return code

    def _make_rank(self) -> Rank:
        setup = self._setup
        tolerance, plan = setup.job.fault_tolerance, setup.plan
        computes = not all(plan.traits(i).tests for i in setup.roles)
        here = setup.places[self._ranks.comm.rank]
        told = zip(setup.places, self._ranks.comm.allgather(computes), strict=True)
        busy = sum(place == here and other for place, other in told)
        return Rank(
            self._ranks.comm,
            phase_at(setup.phases, self._start.position).plan,
            setup.machines,
            setup.executors,
            setup.files.recorder(setup.executors, plan.statistics),
            setup.files.checkpoints,
            setup.make_machine,
            setup.phases,
            stall_warning_s=tolerance.stall_warning_s,
            stall_limit_s=tolerance.stall_limit_s,
            spins=busy + (not computes) <= cores(),  # the statistics server has the lowest priority
            halves=setup.job.cluster.gradient_format == "float16",
            arena=setup.arena,
            job=setup.job,
            places=setup.places,
            bucket_rule=setup.bucket_rule,
            library=setup.library,
        )

    def _serve(self, rank: Rank) -> int:
        """Does this rank's part until the end, and returns the exit code."""
        setup, launched = self._setup, self._ranks.launched
        if self._stops.told:  # while the rank was created
            rank.stop()
        code = rank.run()
        if not code:
            self._keep_end(rank)
        if setup.keeps_results and code:
            log.warning(f"{self._name}: stopped; {checkpoint.how_to_resume(self._start.output)}")
        for executor in setup.executors.values():
            executor.close()
        setup.arena.close()
        if rank.apart:
            self._part(code)
        if rank.lost and code and not setup.keeps_results:
            time.sleep(PART_S)  # the first end with a code ends all ranks, and the statistics server must report first
        if rank.lost or not self._depart(rank) or (launched and survivable()):
            outlive()
        return code

    def _keep_end(self, rank: Rank) -> None:
        """Keeps only a final checkpoint, for training of more epochs, or none if the job writes none.

        A run with a temporary result file keeps only the checkpoints of `kept_interval`.
        """
        plan, states, found = rank.plan, rank.states, list[NamedVectors]()
        results, executors = self._setup.job.results, self._setup.executors
        leaves = results.checkpoint_interval is not None and not self._start.temporary
        wanted = leaves or results.kept_interval is not None
        owned = [role for role in plan.keepers if role in executors] if wanted else []
        for role in owned:
            executor = executors[role]
            assert isinstance(executor, OwnerExecutor)
            if role == plan.server:
                found.append(executor.last_state())
                states.gather(FINAL, lambda others: found.extend(others or ()))
            else:
                states.give(role, FINAL, executor.last_state())
        states.finish()
        checkpoints = self._setup.files.checkpoints
        if checkpoints is None:
            return
        owner = self._setup.machines[self._plan.server]
        assert isinstance(owner, Owner)
        try:
            if wanted:
                position = owner.ledger.last_position
                checkpoints.finish(position, joined(found), final_name(results.kept_interval, position), leaves=leaves)
            elif not leaves:
                checkpoints.discard()
        except OSError as error:
            log.warning(
                f"{checkpoints.path}: the final checkpoint was not written: {error.strerror or error}; everything else "
                "is complete"
            )

    def _depart(self, rank: Rank) -> bool:
        """Waits until all ranks have finished. Returns False if one has died, because its part will never be done."""
        if rank.look():
            return False
        try:
            request = self._ranks.comm.Ibarrier()
        except MPI.Exception:  # a rank that has died since
            return False

        def over() -> bool:
            rank.pass_on_stop()  # a rank without a role waits here all the time
            return rank.look() or outcome(request) != "no"

        try:
            self._ranks.wait(over, "to end after training")
        except RunError as error:  # the rest of the run depends on other ranks, and may never come
            outlive()
            complete = False
            with suppress(RudraError):
                complete = finished(self._start.output)
            text = f"{error}; its results are {'' if complete else 'not '}complete: {self._start.output}"
            self._ranks.end_all(0 if complete else 1, text)
        return not rank.lost

    def _part(self, code: int) -> None:
        """Ends without the ranks that were dropped, which may be stopped. The statistics server ends them."""
        outlive()
        if self._setup.keeps_results:
            time.sleep(PART_S)
            if self._ranks.launched:
                os.write(2, exit_line(code))
            end_everybody(self._ranks.comm, code)

    def _secure(self) -> None:
        """Prepares the result file for a kill of this rank. The run may continue, and stop in order."""
        self._setup.files.note("interrupted", ENDED)
        if not self._ranks.launched:
            text = f"{self._name}: asked to end; if the time is too short for an orderly stop, "
            log.warning(text + checkpoint.how_to_resume(self._start.output))

    def _leave(self) -> NoReturn:
        """Ends at once, because the launcher is ending all ranks or has itself ended, and no report is needed."""
        if self._setup.keeps_results:
            reason = "stopped on request" if self._stops.asked else ENDED
            self._setup.files.save("interrupted", reason)
            if not self._ranks.launched:
                log.error(f"{self._name}: {reason}; {checkpoint.how_to_resume(self._start.output)}")
        os._exit(1)

    def _die(self, text: str) -> NoReturn:
        """Ends this rank like a kill. The others treat it as any lost rank."""
        if self._setup.keeps_results:
            self._give_up(1, f"{self._ranks.name}: {text}; {checkpoint.how_to_resume(self._start.output)}", lost=True)
        log.error(f"{self._ranks.name}: {text}")
        failures.heard()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _give_up(self, code: int, text: str, *, lost: bool = False) -> NoReturn:
        """Ends every rank. The statistics server saves the results and reports. Other ranks first wait for it."""
        comm, rank = self._ranks.comm, self._stops.rank
        if self._setup.keeps_results:
            self._setup.files.save("failed", text.partition("\n")[0])
        else:
            to = self._plan.roles[self._plan.statistics].world_rank
            request = report(comm, to, code, text, lost=lost)
            heard = rank is None or to not in rank.lost
            deadline = time.monotonic() + (GRACE_S if heard else 0.0)
            while time.monotonic() < deadline:
                outcome(request)
                time.sleep(1e-3)
        self._ranks.end_all(code, text, lost=lost)
