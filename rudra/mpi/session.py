"""One rank's part in a job: fit the job to the ranks there are, set up together, run, and end well or badly.

Set-up is agreed on: if one rank cannot load its data or build its model, all of them end, and one line says why.
"""

import ctypes
import gc
import json
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from mpi4py import MPI

from rudra.compute import devices
from rudra.compute.averaging import CHUNK
from rudra.compute.executor import Executor
from rudra.compute.first_gradient import settled
from rudra.compute.hogwild import give_window, shape_of
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.compute.schedule import phases_of
from rudra.core.events import WEIGHTS
from rudra.core.layout import NamedVectors
from rudra.core.phases import phase_at
from rudra.core.training_state import TrainingState
from rudra.core.work import by_speed, speeds_text
from rudra.data.fingerprint import REPEATABLE, Fingerprint, fingerprints, from_plain, plain, unrepeatable
from rudra.data.load import Data, in_memory, load
from rudra.errors import CheckpointError, ConfigError, DataError, HookError, RudraError, RunError, TopologyError
from rudra.job.job import Job
from rudra.job.samples import check_minibatch
from rudra.log import log, speak_as
from rudra.machine import cores, end_with_parent
from rudra.mpi import failures
from rudra.mpi.arena import Arena
from rudra.mpi.driver import GENERATIONS, Ended, Rank, Reported
from rudra.mpi.failures import SPEAKS_S, abort_on_dead_rank, end_everybody, outcome, outlive, survivable
from rudra.mpi.forkserver import launcher
from rudra.mpi.node_memory import share
from rudra.mpi.patience import Patience
from rudra.mpi.relay import TRAINING_LINE, exit_line
from rudra.mpi.shared_window import share_window
from rudra.mpi.start import gpu_aware, start_mpi
from rudra.mpi.tags import FAILURE_TAG
from rudra.mpi.trial import Trial
from rudra.results import checkpoint
from rudra.results.carry import Carried, carried, moved
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.progress import Progress
from rudra.results.reader import open_results
from rudra.results.recorder import Recorder, arithmetic, make_writer, python_objects
from rudra.results.resume import StartDecision, decide, finished
from rudra.results.summary import tests
from rudra.results.warm_start import final_weights, shapes
from rudra.results.writer import default_outputs, remove_if_empty
from rudra.roles import Machine, make_in_phase
from rudra.roles.checkpoint_cycle import name_of
from rudra.roles.ledger import Owner
from rudra.roles.statistics import StatisticsServer
from rudra.trust import signed
from topologies import Plan

T = TypeVar("T")

RESERVED = 24
"""Buffers for each role, with their forms as float16, for which neighbours leave room in their address spaces."""

GRACE_S = 5.0
"""How long a failing rank leaves the statistics server to save the results, an ending one all to stop in order."""

PART_S = 1.0
"""How long ranks have to end by themselves, or to say why, before others end them."""

SEEN_S = 60.0
"""How long a file that one rank has replaced may look as before to another."""

SAVE_S = 0.4
"""mpirun may be ending everybody, who are killed a second after they were told; so the statistics server brings what
there is to the disk after this time."""

_SAME = "valid: the same in every process, not in the order of a set of texts or of an unsorted directory"

ENDED = "the launcher ended it: a rank died, or it was cancelled"
"""Why a run has ended that was not left the time to stop in order."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop, on whichever rank; before there are roles it ends the rank, which the others notice."""


def run_ranks(
    job: Job,
    *,
    output: Path | None,
    progress: dict[str, Any],
    overwrite: bool,
    resume: Path | bool = False,
    origin: Path | None = None,
    temporary: bool = False,
    launched: bool = False,
    comm: MPI.Comm | None = None,
    choose_cut: Callable[[Job, int | None], str | None] | None = None,
) -> tuple[int, Path]:
    """Runs this rank's part of a job, to the end.

    Args:
        job: as given; learners and threads are resolved here from the ranks there are.
        output: result file, written by the statistics server's rank; None: named after the job and the time.
        progress: keyword arguments `mode` and `columns` of the progress bar.
        overwrite: whether an existing file may be replaced.
        resume: a checkpoint or result file to go on from; True: that of `output`, if there is one.
        origin: a checkpoint of another run, with all of which this one begins, unless it goes on.
        temporary: the user did not name `output`: the last checkpoint is removed when the run finishes.
        launched: `rudra.mpi.launch` started this rank, and will say what is to be said of a run that was ended.
        comm: of the ranks that run it; by default all.
        choose_cut: says for a job and a number of ranks which layer the job's rule for placement chooses; needed only
            where the job has one.

    Returns:
        The exit code: 0, 1 (the run failed), 2 (a mistake in the job or the launch) or 3 (it was stopped as somebody
        asked, and can be resumed); and the result file.
    """
    with abort_on_dead_rank(), _on_stops(signal.SIG_DFL, after=signal.SIG_IGN if launched else None):
        about: dict[str, Any] = {"force": overwrite, "origin": origin, "temporary": temporary}
        with default_outputs(job.name) as named:  # only rank 0 asks for one
            begin = partial(decide, job, output, resume, named=named, **about)
            return _run_ranks(job, output, progress, begin, launched, (comm or MPI.COMM_WORLD).Dup(), choose_cut)


def run_all(runs: Sequence[tuple[Job, Path]]) -> int:
    """Runs several jobs, one after the other, on as many of the ranks as each needs.

    Args:
        runs: jobs that name their learners, each with its result file; beside that `.done` appears when it is over.

    Returns:
        The exit code: 0, or that of the first run that did not go well.
    """
    world = MPI.COMM_WORLD
    for job, path in runs:
        comm = world.Split(0 if world.rank < job.plan().ranks else MPI.UNDEFINED)
        code = 0
        if comm != MPI.COMM_NULL:
            code = run_ranks(job, output=path, progress={"mode": "quiet"}, overwrite=False, comm=comm)[0]
            comm.Free()
        rest(world)
        if code := int(world.allreduce(code, MPI.MAX)):
            return code
        if world.rank == 0:
            path.with_suffix(".done").touch()
    return 0


def _run_ranks(
    job: Job,
    output: Path | None,
    progress: dict[str, Any],
    decision: Callable[[], StartDecision],
    launched: bool,
    comm: MPI.Comm,
    choose_cut: Callable[[Job, int | None], str | None] | None,
) -> tuple[int, Path]:
    speak_as(comm.rank)
    begin = _decided(comm, decision)
    if isinstance(begin, int):
        return begin, output or Path()
    if begin.text and comm.rank == 0 and not launched:
        log.info(begin.text)
    if begin.finished:
        return 0, begin.output
    by_rule, job = job.placement.by_rule, job.with_(**(begin.decided or {}))
    if job.placement.by_rule and choose_cut is not None:
        cut = _decided(comm, partial(choose_cut, job, comm.size))
        if isinstance(cut, int):
            return cut, begin.output
        job = job.with_(placement={"cut": cut})
    try:
        job, plan, device = _resolve(job, comm, spare=by_rule and not job.placement.given)
    except RudraError as error:
        if comm.rank == 0:
            log.error(error)
        return error.exit_code, begin.output
    session = _Session(comm, job, plan, begin, device, launched=launched)
    code = session.prepare(progress)
    code = session.run() if code is None else code
    if not launched:
        del session
        gc.collect()  # the next run may need the memory before Python finds the cycles that hold it
    if not failures.outlived:
        comm.Free()
    return code, begin.output


def _decided(comm: MPI.Comm, decision: Callable[[], T]) -> T | int:
    """What rank 0 decides, on every rank; or the exit code, if it cannot, and says why."""
    found: T | int = 0
    if comm.rank == 0:
        try:
            found = decision()
        except RudraError as error:
            found = error.exit_code
            log.error(error)
        except BaseException as error:  # the others must not wait for an answer
            found = 1
            log.error(f"rank 0 failed at start-up: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    rest(comm)
    agreed: T | int = comm.bcast(found)
    return agreed


def found_by_rank0(find: Callable[[], T]) -> T:
    """What rank 0 finds in files, on every rank, before a run; other ranks need no key to trust the files.

    Args:
        find: returns something that can be pickled, and may add directories to `sys.path`, also for the other ranks.

    Raises:
        RudraError: rank 0 raised it.
    """
    start_mpi()
    comm, places = MPI.COMM_WORLD, list[str]()
    found: T | RudraError | None = None
    if comm.rank == 0:
        try:
            found = find()
        except RudraError as error:
            found = error
        places = sys.path
    with abort_on_dead_rank():
        rest(comm)
        found, places = comm.bcast((found, places))
    if isinstance(found, RudraError):
        raise found
    sys.path += [place for place in places if place not in sys.path]
    agreed: T = found
    return agreed


def _resolve(job: Job, comm: MPI.Comm, *, spare: bool = False) -> tuple[Job, Plan, torch.device]:
    """Fits the job to the ranks there are; every rank comes to the same result, and to where it computes itself.

    `spare` ranks, started for stage servers that there are not, may be left over.
    """
    topology = job.make_topology()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    places: list[int] = comm.allgather(node.bcast(comm.rank))
    node.Free()
    if spare and job.cluster.learners is not None and job.plan().ranks == comm.size - job.placement.servers:
        places = places[: -job.placement.servers]
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
    gpus = 0 if job.cluster.device == "cpu" else devices.gpus_here()
    seen: list[tuple[int, str]] = comm.allgather((gpus, socket.gethostname()))
    on_cpu = job.hogbatch.learners_on_cpu(plan)
    kind = devices.agreed(job.cluster.device, plan, [count for count, _ in seen], [host for _, host in seen], on_cpu)
    device = devices.CPU if kind == "cpu" else devices.of_rank(comm.rank, plan, places, gpus, on_cpu)
    if job.cluster.gpu_aware_mpi and kind == "cuda" and False in (told := comm.allgather(bool(gpu_aware()))):
        rank = told.index(False)
        who = f"the MPI library of rank {rank} on {seen[rank][1]} does not report GPU support"
        raise ConfigError(f"[cluster] gpu_aware_mpi: {who}; valid there: false")
    kinds = [plan.roles[i].kind_traits for i in plan.on_rank(comm.rank)]
    computes = any(kind.trains or kind.concludes for kind in kinds)  # one gradient at a time
    threads = max(1, cores() // max(1, _sum_on_node(comm, int(computes))))
    threads = job.cluster.threads_per_rank or comm.allreduce(threads, MPI.MIN)
    if comm.rank == 0 and (idle := comm.size - len({role.world_rank for role in plan.roles})):
        text = f"{idle} of {comm.size} ranks have no role: servers and learners cannot use exactly that many"
        log.warning(f"{text}; `rudra topology` shows who is where")
    job = job.with_(cluster={"device": kind})
    return job.resolved(learners=learners, threads_per_rank=threads), plan, device


class _Session:
    """Everything from the resolved job to the end of the run, on one rank."""

    def __init__(
        self, comm: MPI.Comm, job: Job, plan: Plan, begin: StartDecision, device: torch.device, *, launched: bool
    ) -> None:
        self._comm, self._job, self._plan, self._begin, self._launched = comm, job, plan, begin, launched
        self._device = device
        self._roles = plan.on_rank(comm.rank)
        self._keeps_results = plan.statistics in self._roles
        failures.roles = [", ".join(plan.roles[i].name for i in plan.on_rank(rank)) for rank in range(comm.size)]
        speak_as(comm.rank, ", ".join(self._names))
        self._executors: dict[int, Executor] = {}
        self._writer: Any = None
        self._progress: Any = None
        self._rank: Rank | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._before: Any = None  # the learners' account of an earlier part
        self._told = False  # to stop
        self._asked = False  # by somebody, who is not the launcher
        self._secured = False  # what there is, should this rank be killed in a moment
        self._launcher = launcher()

    def prepare(self, progress: dict[str, Any]) -> int | None:
        """Loads data, builds the model, creates the file: None, or the exit code of the first rank that could not."""
        measured = (self._try, self._time, self._divide) if self._job.cluster.shares == "auto" else ()
        ready = (self._build, self._restore, self._meet_neighbours, self._share_window, lambda: self._open(progress))
        tried = (self._settle, self._take_settled)
        for step in (self._load, self._share, self._compare_data, *tried, *measured, *ready):
            error = self._agree(step)
            if error is not None:
                return error
        return None

    def _agree(self, step: Callable[[], None]) -> int | None:
        report: tuple[int, str] | None = None
        try:
            step()
        except RudraError as error:
            report = (error.exit_code, str(error))
        except BaseException as error:  # the user's code may raise SystemExit, too
            line = f"{self._name} failed at start-up: {type(error).__name__}: {error}"
            report = (1, f"{line}\n{traceback.format_exc()}")
        self._meet()
        reports: list[tuple[int, str] | None] = self._comm.allgather(report)
        first = next((r for r in reports if r is not None), None)
        if first is None:
            return None
        if reports.index(first) == self._comm.rank:
            log.error(first[1])
        return first[0]

    @property
    def _name(self) -> str:
        return self._title(self._comm.rank)

    @property
    def _names(self) -> list[str]:
        return [self._plan.roles[i].name for i in self._roles]

    def _load(self) -> None:
        kinds = [self._plan.roles[i].kind_traits for i in self._roles]
        learns = any(kind.trains or kind.concludes for kind in kinds)
        serves = any(kind.serves for kind in kinds)
        torch.set_num_threads(self._job.cluster.threads_per_rank or 1 if learns or serves else 1)
        torch.set_flush_denormal(self._job.cluster.flush_denormals)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # for whatever does not name one: the user's model, pinned memory
        if learns:
            keep_freed_memory()
        if self._keeps_results and not learns:
            os.nice(max(0, 10 - os.nice(0)))  # training goes first; a run before this one may have said so
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._needs = learns, self._keeps_results or (learns and self._job.training.evaluate == "workers")
        needs: list[tuple[bool, bool]] = self._node.allgather(self._needs)
        self._loader = next((rank for rank, need in enumerate(needs) if any(need)), 0)
        self._sharing = sum(map(any, needs)) > 1
        self._data: Data | None = None
        self._prints: dict[str, Fingerprint] = {}  # of data that this rank has loaded
        if self._node.rank == self._loader and any(self._needs):
            train, test = (any(need) for need in zip(*needs, strict=True))
            self._data = self._load_data(train=train, test=test)
            self._prints = fingerprints(self._data)

    def _load_data(self, *, train: bool, test: bool) -> Data:
        job = self._job
        return load(job.data, train=train, test=test, seed=job.training.seed, ignored=job.task.ignored)

    def _share(self) -> None:
        """Gives every rank of the node what one of them has loaded, without a copy."""
        if self._sharing:
            self._data = share(self._node, self._loader, self._data)
        train, test = self._needs
        if not train and not test:
            self._data = None
        elif self._data is None:
            self._data = self._load_data(train=train, test=test)
            self._prints = fingerprints(self._data)
        else:
            self._data = self._data.part(train=train, test=test)

    def _settle(self) -> None:
        """Tries the first gradient on the rank of the first learner, which decides for all ranks."""
        decides = self._plan.roles[self._plan.learners[0]].world_rank
        if self._comm.rank == decides and (self._begin.checkpoint is None or self._job.training.gradients == "auto"):
            assert self._data is not None
            self._job = settled(self._job, self._plan, self._data, self._device)

    def _take_settled(self) -> None:
        """Takes over what that rank has decided."""
        decides = self._plan.roles[self._plan.learners[0]].world_rank
        self._job = self._job.with_(training={"gradients": self._comm.bcast(self._job.training.gradients, decides)})

    def _compare_data(self) -> None:
        """Makes sure that all ranks have the same data, which are those of the run that this one resumes.

        Raises:
            DataError, CheckpointError: they differ.
        """
        loaded: list[tuple[str, dict[str, Fingerprint]]] = self._comm.allgather((self._name, self._prints))
        first: dict[str, tuple[str, Fingerprint]] = {}
        for who, prints in loaded:
            for split, mine in prints.items():
                other, theirs = first.setdefault(split, (who, mine))
                if what := mine.difference(theirs):
                    text = f"[data] the {split} set of the {who} differs from that of the {other}: {what}"
                    raise DataError(f"{text}; {_SAME}")
        self._prints = {split: found for split, (_, found) in first.items()}
        for split, then in from_plain(self._begin.fingerprints).items():
            if split in self._prints and (what := self._prints[split].difference(then)):
                text = f"{self._begin.checkpoint}: [data] the {split} set has changed since: {what}"
                raise CheckpointError(f"{text}; {_SAME}")
        self._unrepeatable = unrepeatable(self._prints)
        if self._unrepeatable and self._keeps_results:
            log.warning(f"{self._unrepeatable}: {REPEATABLE}")

    def _try(self) -> None:
        """Gets the learners ready to be timed."""
        self._trial = Trial(self._job, self._plan, self._roles, self._data, self._device)

    def _time(self) -> None:
        """All learners compute at the same time."""
        self._trial.measure(self._comm.allreduce(self._trial.round_s, MPI.MAX))

    def _divide(self) -> None:
        """Gives each learner a share in proportion to its speed; from here on the job is one that names them."""
        parts: list[dict[int, float]] = self._comm.allgather(self._trial.seconds)
        self._trial.close()
        taken = {role: seconds for part in parts for role, seconds in part.items()}
        seconds = [taken[role] for role in self._plan.learners]
        shares = by_speed(seconds)
        if self._keeps_results:
            text = speeds_text(seconds, self._job.training.minibatch_size, shares)
            log.info(f"{self._job.name}: when all compute, {text}")
        self._job = self._job.with_(cluster={"shares": shares})

    def _build(self) -> None:
        source = self._plan.roles[self._plan.statistics].world_rank
        self._info = self._comm.bcast(None if self._data is None else self._data.info, source)
        check_minibatch(self._job, self._info.training_samples)
        self._phases = phases_of(self._job, self._plan, self._info.training_samples)
        self._machines = {i: self._machine(i, self._plan, self._begin.position) for i in self._roles}
        self._arena = Arena()
        self._near = self._job.cluster.node_memory and self._node.size > 1
        if self._roles:
            data = self._data or Data(None, None, self._info)
            self._executors = make_executors(
                self._job,
                self._plan,
                self._roles,
                data,
                prefetch=not in_memory(data.training),
                device=self._device,
                placing=devices.placing(self._device, gpu_aware_mpi=self._job.cluster.gpu_aware_mpi),
                first_weights=final_weights,
                memory=self._arena.allocate if self._near else None,
            )
            for executor in self._executors.values():
                if executor.hooks is not None:
                    executor.hooks.output = self._begin.output.stem
                # A small model is stepped no faster in slices, and threads that share cores meet at the end of each.
                alone = self._job.cluster.threads_per_rank == 1
                executor.fuses = executor.form is None and executor.size > CHUNK and alone

    def _restore(self) -> None:
        """Allocates what training needs, and takes over what a checkpoint holds."""
        with suppress(AttributeError, OSError):  # glibc: give back what building the model took
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        if self._job.training.compile and self._keeps_results:
            log.info(f"{self._job.name}: compiling the gradient's code")
        for role, executor in self._executors.items():
            executor.prepare()
            if self._near and (
                self._plan.traits(role).overlaps or (self._plan.overlapped and role == self._plan.server)
            ):
                executor.reserve(GENERATIONS - 1)
            if self._begin.checkpoint is not None and isinstance(executor, OwnerExecutor):
                state, tensors = checkpoint.read(self._begin.checkpoint)
                if state.position != self._begin.position:
                    raise CheckpointError(f"{state.path}: changed meanwhile: is another run still writing it?")
                executor.restore(tensors)

    def _meet_neighbours(self) -> None:
        """Maps what other ranks of this node have for buffers, and has them map what this one has."""
        reads_gpus = any(executor.direct for executor in self._executors.values())
        if self._near and not self._node.allreduce(reads_gpus, MPI.MAX):
            rooms = sum(
                (executor.largest * 6 + executor.tail + 2 * mmap.ALLOCATIONGRANULARITY) * self._most_buffers(role)
                for role, executor in self._executors.items()
            )
            failure = self._arena.meet(self._node, self._comm.rank, rooms)
            if failure and self._node.rank == 0:
                host = f"node memory cannot be had on {socket.gethostname()}"
                log.warning(f"{host} ({failure}): its ranks exchange messages instead, which is slower")
        self._node.Free()

    def _most_buffers(self, role: int) -> int:
        """That a role may have at a time: a stage server has three for each learner."""
        return RESERVED + 3 * len(self._plan.learners) * self._plan.traits(role).concludes

    def _share_window(self) -> None:
        """Gives the workers of a node, and their coordinator, one memory for the weights, if the job says so."""
        if not self._plan.window:
            return
        plan, world, comm = self._plan, list(range(self._comm.size)), self._comm
        owner, mine = plan.server, [plan.traits(role) for role in self._roles]
        member = any(kind.trains or kind.serves for kind in mine)
        if several := plan.window_leaders:  # each has a window of its own, and the owner of the weights none
            node = next((plan.roles[role].node for role in self._roles if plan.traits(role).trains), MPI.UNDEFINED)
            comm = self._comm.Split(node, self._comm.rank)
            if comm == MPI.COMM_NULL:
                return
            world = comm.allgather(self._comm.rank)
            owner = next(leader for leader in several if plan.roles[leader].node == node)
        executor = self._executors.get(owner)
        shape = None if executor is None else shape_of(self._job, plan, executor.size)
        window, failure = share_window(comm, world.index(plan.roles[owner].world_rank), shape, member=member)
        if several:
            comm.Free()
        if failure:
            raise ConfigError(
                f"[hogbatch] weights = 'shared': its memory cannot be had here ({failure}); valid: server"
            )
        if window is not None:
            give_window(self._executors, window)

    def _open(self, progress: dict[str, Any]) -> None:
        server = self._plan.roles[self._plan.server].world_rank
        own = self._executors[self._plan.server].sha256(WEIGHTS) if self._comm.rank == server else ""
        digest: str = self._comm.bcast(own, server)
        job, source = json.loads(self._job.to_json()), self._plan.roles[self._plan.statistics].world_rank
        own_signature = signed(job, self._begin.run) if self._keeps_results else None
        signature: dict[str, str] = self._comm.bcast(own_signature, source)  # so that one rank alone needs a key
        if self._comm.rank == server:
            layout = shapes(self._executors[self._plan.server].layout)
            objects = ", ".join(python_objects(self._job))
            about: dict[str, Any] = {
                "python_objects": objects,
                "layout": layout,
                "temporary": self._begin.temporary,
                **signature,
            }
            about["data_fingerprints"] = plain(self._prints)
            self._checkpoints = CheckpointWriter(checkpoint.path_of(self._begin.output), job, about)
        hosts: list[str] = self._comm.allgather(socket.gethostname())
        kinds: list[dict[str, str]] = self._comm.allgather(arithmetic())
        if not self._keeps_results:
            return
        with self._carried() as before:
            self._create(progress, before, digest, hosts, kinds, signature)

    @contextmanager
    def _carried(self) -> Iterator[Carried | None]:
        """What the result file, and the statistics server, take over from an earlier part of the run."""
        if self._begin.checkpoint is None:
            yield None
            return
        with open_results(checkpoint.results_of(self._begin.checkpoint)) as results:
            statistics = self._machines[self._plan.statistics]
            assert isinstance(statistics, StatisticsServer)
            found = tests(results, statistics.split, self._begin.position.epoch)
            statistics.recall(found, results.kept_epochs)
            why = self._begin.replanned or moved(results.plan(), self._job, self._plan)
            yield carried(results, self._begin.position, why, self._begin.branched)

    def _create(
        self,
        progress: dict[str, Any],
        before: Carried | None,
        digest: str,
        hosts: list[str],
        kinds: list[dict[str, str]],
        signature: dict[str, str],
    ) -> None:
        """Creates the result file."""
        executor, position = self._executors[self._plan.statistics], self._begin.position
        why = self._unrepeatable
        data = {"replayable": False, "not_replayable": why} if why else {}
        self._writer = make_writer(
            self._begin.output,
            self._job,
            executor.layout,
            executor.size,
            digest,
            self._begin.overwrite,
            plan=self._plan,
            state_dict=executor.state_dict,
            carried=None if before is None else before.rows,
            carried_weights=() if before is None else before.weights,
            kept=None if before is None else before.attributes,
            signature=signature,
            step_bytes=executor.step_bytes,
            driver="mpi",
            training_samples=self._info.training_samples,
            classes=self._info.classes,
            hosts=hosts,
            **{name: "; ".join(sorted({kind[name] for kind in kinds})) for name in kinds[0]},
            data_fingerprints=json.dumps(plain(self._prints)),
            **data,
            mpi_library=MPI.Get_library_version().split("\n")[0].strip("\0 "),
        )
        begun = self._begin.checkpoint
        if begun is None or checkpoint.results_of(begun) != self._begin.output:
            checkpoint.discard(checkpoint.path_of(self._begin.output), kept=True)  # of a run that this one replaces
        elif checkpoint.is_kept(begun):
            checkpoint.step_back(begun)
        executor.state_dict = ()  # nobody asks again, and parameters that are not trained may be large
        self._before = None if before is None else before.learners
        self._progress = Progress(self._job, self._info.training_samples, begun=position.samples, **progress)

    def run(self) -> int:
        """Drives the roles; returns the exit code, or ends the whole job."""
        recorder = None
        if self._keeps_results:
            weights = _floats_of(self._executors)
            about = {"before": self._before, "hooks": self._executors[self._plan.statistics].hooks}
            recorder = Recorder(self._writer, self._progress, weights, wall_clock=True, **about)
        alarm = signal.signal(signal.SIGALRM, self._press)
        with _on_stops(self._interrupt):
            self._meet()
            self._rank = rank = self._make_rank(recorder)
            if self._launched and self._comm.rank == 0:
                os.write(2, TRAINING_LINE)  # from now on each rank looks after its own waits
            if self._keeps_results:
                end_with_parent()  # asked to, in place of being killed at once
            try:
                code = self._serve(rank)
            except Ended:
                if self._keeps_results:
                    reason = "stopped on request" if self._asked else ENDED
                    self._save("interrupted", reason)
                    if not self._launched:
                        log.error(f"{self._job.name}: {reason}; {checkpoint.how_to_resume(self._begin.output)}")
                os._exit(1)  # the launcher is ending everybody, or is gone: nobody is there to be told
            except Reported as error:
                self._give_up(error.exit_code, error.text, lost=error.lost)
            except HookError as error:
                self._give_up(error.exit_code, error.report.removeprefix("rudra: "))
            except RudraError as error:
                lost = isinstance(error, RunError) and error.lost
                self._give_up(error.exit_code, f"{self._name}: {error.report.removeprefix('rudra: ')}", lost=lost)
            except BaseException as error:
                line = f"{self._name} failed: {type(error).__name__}: {error}"
                self._give_up(1, f"{line}\n{traceback.format_exc()}")
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python's own end takes its time
        signal.signal(signal.SIGALRM, alarm)
        return code

    def _make_rank(self, recorder: Recorder | None) -> Rank:
        tolerance = self._job.fault_tolerance
        computes = not all(self._plan.roles[i].kind_traits.tests for i in self._roles)
        busy = _sum_on_node(self._comm, int(computes))
        return Rank(
            self._comm,
            phase_at(self._phases, self._begin.position.epoch).plan,
            self._machines,
            self._executors,
            recorder,
            self._checkpoints,
            self._make_machine,
            self._phases,
            stall_warning_s=tolerance.stall_warning_s,
            stall_limit_s=tolerance.stall_limit_s,
            spins=busy + (not computes) <= cores(),  # the statistics server gives way
            halves=self._job.cluster.gradient_format == "float16",
            arena=self._arena,
        )

    def _serve(self, rank: Rank) -> int:
        """Does this rank's part, to the end; returns the exit code."""
        if self._told:  # while it was made
            rank.stop()
        code = rank.run()
        if not code:
            self._keep_end(rank)
        if self._keeps_results and code:
            log.warning(f"{self._job.name}: stopped; {checkpoint.how_to_resume(self._begin.output)}")
        for executor in self._executors.values():
            executor.close()
        self._arena.close()
        if rank.apart:
            self._part(code)
        if rank.lost and code and not self._keeps_results:
            time.sleep(PART_S)  # the first end with a code ends all, and who keeps the results has something to say
        if rank.lost or not self._depart(rank) or (self._launched and survivable()):
            outlive()
        return code

    def _keep_end(self, rank: Rank) -> None:
        """Leaves a single checkpoint, that of the end, from which more epochs can be trained; without one, none.

        A run whose result file nobody named leaves only the checkpoints that are to be kept.
        """
        plan, states, found = rank.plan, rank.states, list[NamedVectors]()
        results = self._job.results
        leaves = results.checkpoint_interval is not None and not self._begin.temporary
        wanted = leaves or results.kept_interval is not None
        owned = [role for role in plan.keepers if role in self._executors] if wanted else []
        for role in owned:
            executor = self._executors[role]
            assert isinstance(executor, OwnerExecutor)
            if role == plan.server:
                found.append(executor.last_state())
                states.gather(lambda others: found.extend(others or ()))
            else:
                states.give(role, executor.last_state())
        states.finish()
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        owner = self._machines[self._plan.server]
        assert isinstance(owner, Owner)
        try:
            if wanted:  # until it is there, the one before counts
                position, keep = owner.ledger.last_position, results.kept_interval
                name = "" if keep is None else name_of(keep, position.epoch - 1, position.epoch, position.timestamp)
                state = joined(found)
                try:
                    checkpoints.save(position, state)
                except OSError:  # perhaps it fits in the room of the earlier ones
                    checkpoints.discard()
                    checkpoints.save(position, state)
                checkpoints.commit(name)
                checkpoints.discard_previous()
            if not leaves:
                checkpoints.discard()
        except OSError as error:
            log.warning(
                f"{checkpoints.path}: the final checkpoint was not written: {error.strerror or error}; everything else "
                "is complete"
            )

    def _depart(self, rank: Rank) -> bool:
        """Waits until all ranks have done their part; False: one has died, and what it left undone nobody waits for."""
        if rank.look():
            return False
        try:
            request = self._comm.Ibarrier()
        except MPI.Exception:  # one that has died since
            return False

        def over() -> bool:
            rank.pass_on_stop()  # of a rank without a role, which waits here all the time
            return rank.look() or outcome(request) != "no"

        try:
            self._wait(over, "to end after training")
        except RunError as error:  # what is left of the run is theirs, and may never come
            outlive()
            complete = False
            with suppress(RudraError):
                complete = finished(self._begin.output)
            text = f"{error}; its results are {'' if complete else 'not '}complete: {self._begin.output}"
            self._end_all(0 if complete else 1, text)
        return not rank.lost

    def _part(self, code: int) -> None:
        """Ends without those that were dropped, and who may be stopped: the statistics server ends them."""
        outlive()
        if self._keeps_results:
            time.sleep(PART_S)
            if self._launched:
                os.write(2, exit_line(code))
            end_everybody(self._comm, code)

    def _make_machine(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        """A role that begins anew; if it updates weights, from the checkpoint that their owner has just made."""
        executor, path = self._executors[role], checkpoint.path_of(self._begin.output)
        if isinstance(executor, OwnerExecutor) and role != plan.stage:  # which has its own
            deadline = time.monotonic() + SEEN_S
            while (found := checkpoint.read(path))[0].position != position:  # where file systems are slow to tell
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{path}: is not the checkpoint that the first learner wrote for all ranks to continue from"
                    )
                time.sleep(0.1)
            executor.restore(found[1])
        return self._machine(role, plan, position)

    def _machine(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        return make_in_phase(role, self._phases, plan.gone, self._info.training_samples, position)

    def _meet(self) -> None:
        """Waits for all ranks without burning a core, and not in silence."""
        try:
            self._wait(self._comm.Ibarrier().Test, "to get ready")
        except RunError as error:
            self._end_all(1, str(error))

    def _wait(self, over: Callable[[], bool], to: str) -> None:
        """Waits for other ranks, without burning a core.

        Args:
            over: whether the wait is over.
            to: what the other ranks are to do.

        Raises:
            RunError: they did not within the job's limit; the first rank that can raises it.
        """
        tolerance, began = self._job.fault_tolerance, time.monotonic()
        patience = Patience(tolerance.stall_warning_s, tolerance.stall_limit_s)
        while not over():
            time.sleep(1e-3)
            waited = time.monotonic() - began
            if not (due := patience.due(waited)):
                continue
            stopped = failures.stopped_neighbours(self._comm.size) - {self._comm.rank}
            place = self._comm.rank - sum(rank < self._comm.rank for rank in stopped)
            whom = ", ".join(map(self._title, sorted(stopped))) or "other ranks"
            text = f"{self._name} has waited {waited:.0f} s for {whom} {to}"
            if due == "end" and waited >= (tolerance.stall_limit_s or 0.0) + SPEAKS_S * min(place, 3):
                raise RunError(text)
            if due == "report" and place < 2:  # one of the two waits, unless both keep the others waiting
                log.warning(text)

    def _title(self, rank: int) -> str:
        """The roles of a rank, for messages."""
        names = [self._plan.roles[i].name for i in self._plan.on_rank(rank)]
        return f"{', '.join(names) or 'a rank without a role'} (rank {rank})"

    def _end_all(self, code: int, text: str) -> NoReturn:
        """Ends every rank, with one line, where nobody can be asked to."""
        (log.error if code else log.warning)(text)
        if self._begin.temporary:
            remove_if_empty(self._begin.output)
        if self._launched:  # mpirun does not tell its parent
            os.write(2, exit_line(code))
        end_everybody(self._comm, code)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stops the run in order; where the launcher may soon kill everybody, what there is is saved before."""
        self._told = True
        self._asked |= number != signal.SIGTERM
        if self._rank is not None:
            self._rank.stop()
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, SAVE_S if self._keeps_results else GRACE_S)

    def _press(self, number: int, frame: FrameType | None) -> None:
        """Some time has passed since the launcher, or somebody, told this rank to end."""
        alone = launcher() != self._launcher
        if self._rank is None:
            return
        if self._keeps_results and not self._secured and not alone:
            self._secured, self._rank.urgent = True, self._secure
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        elif alone or not survivable():  # else the others go on to stop in order, or notice who is killed
            self._rank.ended = True

    def _secure(self) -> None:
        """Leaves the file as it is to be found if this rank is killed now; the run may go on, and stop in order."""
        self._writer.note("interrupted", ENDED)
        if not self._launched:
            text = f"{self._job.name}: asked to end; if the time is too short for an orderly stop, "
            log.warning(text + checkpoint.how_to_resume(self._begin.output))

    def _save(self, status: str, reason: str) -> None:
        with suppress(Exception):
            self._progress.close()
        with suppress(Exception):
            self._writer.fail(status, reason)

    def _give_up(self, code: int, text: str, *, lost: bool = False) -> NoReturn:
        """Ends every rank. The statistics server saves the results and speaks; others leave that to it for a while."""
        if self._keeps_results:
            self._save("failed", text.partition("\n")[0])
        else:
            to = self._plan.roles[self._plan.statistics].world_rank
            report = f"{code} {int(lost)} {text}".encode()
            request = self._comm.Isend(report, to, FAILURE_TAG)
            heard = self._rank is None or to not in self._rank.lost
            deadline = time.monotonic() + (GRACE_S if heard else 0.0)
            while time.monotonic() < deadline:
                outcome(request)
                time.sleep(1e-3)
        log.error(text)
        if self._launched:  # mpirun does not tell its parent
            os.write(2, exit_line(code, lost=lost))
        end_everybody(self._comm, code)


@contextmanager
def _on_stops(handler: Any, *, after: Any = None) -> Iterator[None]:
    """What a rank does when it is asked to stop; then `after`, or what it did before. What is ignored stays so."""
    before = {number: signal.getsignal(number) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual if after is None else after)


def _floats_of(executors: dict[int, Executor]) -> Callable[[int, str], Any]:
    return lambda role, buffer: executors[role].buffer(buffer).array


def _sum_on_node(comm: MPI.Comm, value: int) -> int:
    """Sum over the ranks of this node; all ranks call this together, so never in a step that may fail on one."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    total: int = node.allreduce(value)
    node.Free()
    return total


def rest(comm: MPI.Comm) -> None:
    """Waits for all ranks, and leaves the core to those that work meanwhile."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next step, instead of faulting hundreds of pages in again each time."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: as large as glibc allows
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
