"""One rank's part in a job: fit the job to the ranks there are, set up together, run, and end well or badly.

Set-up is agreed on: if one rank cannot load its data or build its model, all of them end, and one line says why.
"""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rudra.config import Job, cores
from rudra.errors import RudraError, TopologyError
from rudra.executor import Executor, make_executors
from rudra.mpi import FAILURE_TAG, Ended, Rank, Reported
from rudra.progress import Progress
from rudra.recorder import Recorder, arithmetic, make_writer
from rudra.results import default_output
from rudra.roles import make as make_machine
from topologies import Plan

if TYPE_CHECKING:
    from mpi4py import MPI

GRACE_S = 5.0
"""How long a failing rank leaves the statistics server to save the results."""


def run_ranks(
    job: Job, *, output: Path | None, progress: dict[str, Any], overwrite: bool, comm: "MPI.Comm | None" = None
) -> tuple[int, Path]:
    """Runs this rank's part of a job, to the end.

    Args:
        job: as given; learners and threads are resolved here from the ranks there are.
        output: result file, written by the statistics server's rank; None: named after the job and the time.
        progress: keyword arguments `mode` and `columns` of the progress bar.
        overwrite: whether an existing file may be replaced.
        comm: of the ranks that run it; by default all.

    Returns:
        The exit code: 0, 1 (the run failed) or 2 (a mistake in the job or the launch); and the result file.
    """
    from mpi4py import MPI

    comm = (comm or MPI.COMM_WORLD).Dup()
    path: Path = comm.bcast(output or default_output(job.name, now=datetime.now()))
    try:
        job, plan = _resolve(job, comm)
    except RudraError as error:
        if comm.rank == 0:
            print(f"rudra: {error}", file=sys.stderr, flush=True)
        return error.exit_code, path
    session = _Session(comm, job, plan)
    code = session.prepare(path, progress, overwrite)
    code = session.run() if code is None else code
    comm.Free()
    return code, path


def _resolve(job: Job, comm: "MPI.Comm") -> tuple[Job, Plan]:
    """Fits the job to the ranks there are; every rank comes to the same result."""
    from mpi4py import MPI

    job, topology = job.on_cpu(), job.make_topology()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    places: list[int] = comm.allgather(node.bcast(comm.rank))
    node.Free()
    try:
        plan = topology.fit(places, job.cluster.learners)
    except ValueError as error:
        raise TopologyError(str(error)) from None
    if plan.overlapped and comm.allreduce(MPI.Query_thread(), MPI.MIN) < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            f"topology {topology.name} pushes and pulls in threads of their own, for which MPI must grant "
            "MPI_THREAD_MULTIPLE; it does not here: use another MPI library, or topology adv"
        )
    learners = len(plan.learners)
    job.with_(cluster={"learners": learners}).check(plan)
    mine = sum(plan.roles[i].kind == "learner" for i in plan.on_rank(comm.rank))
    threads = max(1, cores() // max(1, _sum_on_node(comm, mine)))
    threads = job.cluster.threads_per_rank or comm.allreduce(threads, MPI.MIN)
    if comm.rank == 0 and (idle := comm.size - len({role.world_rank for role in plan.roles})):
        text = f"{idle} of {comm.size} ranks have no role: servers and learners do not come out even"
        print(f"rudra: {text}; `rudra topology` shows who is where", file=sys.stderr, flush=True)
    return job.resolved(learners=learners, threads_per_rank=threads), plan


class _Session:
    """Everything from the resolved job to the end of the run, on one rank."""

    def __init__(self, comm: "MPI.Comm", job: Job, plan: Plan) -> None:
        self._comm, self._job, self._plan = comm, job, plan
        self._roles = plan.on_rank(comm.rank)
        self._keeps_results = plan.statistics in self._roles
        self._executors: dict[int, Executor] = {}
        self._writer: Any = None
        self._progress: Any = None
        self._rank: Rank | None = None

    def prepare(self, output: Path, progress: dict[str, Any], overwrite: bool) -> int | None:
        """Loads data, builds the model, creates the file: None, or the exit code of the first rank that could not."""
        for step in (self._load, self._build, lambda: self._open(output, progress, overwrite)):
            error = self._agree(step)
            if error is not None:
                return error
        return None

    def _agree(self, step: Callable[[], None]) -> int | None:
        report: tuple[int, str] | None = None
        try:
            step()
        except RudraError as error:
            report = (error.exit_code, f"rudra: {error}")
        except Exception as error:
            line = f"rudra: {self._name} failed at start-up: {type(error).__name__}: {error}"
            report = (1, f"{line}\n{traceback.format_exc()}")
        self._meet()
        reports: list[tuple[int, str] | None] = self._comm.allgather(report)
        first = next((r for r in reports if r is not None), None)
        if first is None:
            return None
        if reports.index(first) == self._comm.rank:
            print(first[1], file=sys.stderr, flush=True)
        return first[0]

    @property
    def _name(self) -> str:
        names = ", ".join(self._plan.roles[i].name for i in self._roles) or "a rank without a role"
        return f"{names} (rank {self._comm.rank})"

    def _load(self) -> None:
        import torch

        from rudra import data

        kinds = {self._plan.roles[i].kind for i in self._roles}
        learns, serves = "learner" in kinds, bool(kinds & {"parameter server", "tree server"})
        torch.set_num_threads(self._job.cluster.threads_per_rank or 1 if learns or serves else 1)
        torch.set_flush_denormal(self._job.cluster.flush_denormals)
        if learns:
            _keep_freed_memory()
        if self._keeps_results and not learns:
            os.nice(10)  # training goes first
        self._splits: tuple[data.Samples | None, data.Samples | None] = (None, None)
        if learns or self._keeps_results:
            train, test, self._info = data.load(self._job.data, train=learns, test=self._keeps_results)
            self._splits = (train, test)

    def _build(self) -> None:
        source = self._plan.roles[self._plan.statistics].world_rank
        self._info = self._comm.bcast(getattr(self, "_info", None), source)
        if self._roles:
            from rudra.data import Split

            # Where all samples lie in memory, a mini-batch takes less time than its hand-over by an input thread.
            prefetch = not isinstance(self._splits[0], Split)
            self._executors = make_executors(
                self._job, self._plan, self._roles, self._splits, self._info, prefetch=prefetch
            )

    def _open(self, output: Path, progress: dict[str, Any], overwrite: bool) -> None:
        from mpi4py import MPI

        from rudra.flat import sha256

        server = self._plan.roles[self._plan.server].world_rank
        weights = self._executors[self._plan.server].buffer("weights").array if self._comm.rank == server else None
        digest: str = self._comm.bcast(None if weights is None else sha256(weights), server)
        hosts: list[str] = self._comm.allgather(socket.gethostname())
        kinds: list[dict[str, str]] = self._comm.allgather(arithmetic())
        if not self._keeps_results:
            return
        executor = self._executors[self._plan.statistics]
        self._writer = make_writer(
            output,
            self._job,
            executor.layout,
            executor.size,
            digest,
            overwrite,
            plan=self._plan,
            driver="mpi",
            training_samples=self._info.training_samples,
            classes=self._info.classes,
            hosts=hosts,
            **{name: "; ".join(sorted({kind[name] for kind in kinds})) for name in kinds[0]},
            mpi_library=MPI.Get_library_version().split("\n")[0].strip("\0 "),
        )
        self._progress = Progress(self._job, self._info.training_samples, **progress)

    def run(self) -> int:
        """Drives the roles; returns the exit code, or ends the whole job."""
        samples = self._info.training_samples
        with suppress(AttributeError, OSError):  # glibc: give back what building the model took
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        for executor in self._executors.values():
            executor.prepare()
        machines = {i: make_machine(i, self._job, self._plan, samples) for i in self._roles}
        recorder = None
        if self._keeps_results:
            recorder = Recorder(self._writer, self._progress, lambda r, b: self._executors[r].buffer(b).array)
        self._meet()
        faults = self._job.faults
        computes = any(self._plan.roles[i].kind != "statistics server" for i in self._roles)
        busy = _sum_on_node(self._comm, int(computes))  # the statistics server gives way
        self._rank = rank = Rank(
            self._comm,
            self._plan,
            machines,
            self._executors,
            recorder,
            warn_after_s=faults.warn_after_s,
            fail_after_s=faults.fail_after_s,
            spins=busy <= cores(),
            halves=self._job.cluster.wire == "float16",
        )
        if self._keeps_results:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._interrupt)
            _end_softly_with_launcher()
        try:
            rank.run()
            for executor in self._executors.values():
                executor.close()
            self._meet()
            return 0
        except Ended:
            asked = rank.interrupted in {signal.SIGUSR1, signal.SIGINT}
            reason = "somebody stopped it" if asked else "the launcher ended it: a rank died, or it was cancelled"
            self._save("interrupted", reason)
            if asked:
                self._comm.Abort(1)
            os._exit(1)  # the launcher is ending everybody, or is gone: nobody is there to be told
        except KeyboardInterrupt:
            time.sleep(GRACE_S)  # the statistics server saves the results and ends everybody
            self._comm.Abort(1)
        except Reported as error:
            self._give_up(error.exit_code, str(error))
        except RudraError as error:
            self._give_up(error.exit_code, f"rudra: {self._name}: {error}")
        except BaseException as error:
            line = f"rudra: {self._name} failed: {type(error).__name__}: {error}"
            self._give_up(1, f"{line}\n{traceback.format_exc()}")
        return 1

    def _meet(self) -> None:
        """Waits for all ranks without burning a core, and not in silence."""
        request = self._comm.Ibarrier()
        began, warn_s = time.monotonic(), self._job.faults.warn_after_s
        while not request.Test():
            time.sleep(1e-3)
            waited = time.monotonic() - began
            if waited >= warn_s:
                warn_s *= 2
                if self._comm.rank < 2:  # one of the two waits, unless both keep the others waiting
                    text = f"rudra: {self._name} has waited {waited:.0f} s for other ranks to get ready or to finish"
                    print(text, file=sys.stderr, flush=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._rank is not None:
            self._rank.interrupted = number

    def _save(self, status: str, reason: str) -> None:
        with suppress(Exception):
            self._progress.close()
        with suppress(Exception):
            self._writer.fail(status, reason)

    def _give_up(self, code: int, text: str) -> None:
        """Ends every rank. The statistics server saves the results and speaks; others leave that to it for a while."""
        if self._keeps_results:
            self._save("failed", text.partition("\n")[0].removeprefix("rudra: "))
        else:
            to = self._plan.roles[self._plan.statistics].world_rank
            report = f"{code} {text}".encode()
            request = self._comm.Isend(report, to, FAILURE_TAG)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                request.Test()
                time.sleep(1e-3)
        print(text, file=sys.stderr, flush=True)
        self._comm.Abort(code)


def _sum_on_node(comm: "MPI.Comm", value: int) -> int:
    """Sum over the ranks of this node; all ranks call this together, so never in a step that may fail on one."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    total: int = node.allreduce(value)
    node.Free()
    return total


def _end_softly_with_launcher() -> None:
    """Linux: if the launcher ends or is killed first, this rank is asked to end, in place of being killed at once."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next step, instead of faulting hundreds of pages in again each time."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: as large as glibc allows
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
