"""Running and simulating jobs from Python; the command line is a thin skin of this."""

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

from rudra.errors import ConfigError, Interrupted, ResultsError, RunError
from rudra.job.job import Job
from rudra.job.samples import check_minibatch
from rudra.job.simulation import DEFAULTS
from rudra.log import log
from rudra.machine import cores
from rudra.results import checkpoint
from rudra.results.reader import Results, check_output, open_results
from rudra.results.resume import StartDecision, decide
from rudra.results.writer import checked_name, default_outputs

ProgressMode = Literal["bar", "lines", "quiet"]
Carry = Literal["weights", "all"]


def run(
    job: Job,
    *,
    output: str | Path | None = None,
    force: bool = False,
    resume: bool | str | Path = False,
    from_: str | Path | None = None,
    carry: Carry = "weights",
    progress: ProgressMode | None = None,
    verbose: bool = False,
) -> Results:
    """Trains a job on MPI ranks, and returns when the run has ended.

    In a process that mpirun or srun started, this rank takes its part in the job; every rank must make the same
    call. In any other process `run` starts mpirun with as many ranks as the job needs.

    Args:
        job: what to run.
        output: path of the result file, which ends in `.h5`; None: a new name made of the job's name and the time, and
            the last checkpoint is removed when the run finishes.
        force: whether to replace an existing file.
        resume: checkpoint to continue from. True: that of `output`, if there is one, else from the start. A path: that
            checkpoint, or the one of that result file. The result file keeps what was recorded up to the checkpoint.
        from_: checkpoint or result file of another run, with which this one begins; not where it continues.
        carry: what it begins with. `"weights"`: the weights alone, as `training.warm_start` has it. `"all"`: weights,
            optimiser state, epochs, samples and the recorded rows, of a checkpoint whose model, data, learners and
            optimiser fit.
        progress: `"bar"`, `"lines"` or `"quiet"`; None: a bar on a terminal, and plain lines elsewhere.
        verbose: whether to show what mpirun and MPI printed, if `run` started mpirun and the run failed.

    Returns:
        The results, open for reading, on every rank that makes the call.

    Raises:
        ConfigError: the job or an argument is not usable.
        LaunchError: MPI or its launcher is missing or broken.
        ResultsError: the result file exists or cannot be written.
        RunError: the ranks did not end well, and have printed the reason on standard error. `exit_code` is 1 where the
            run failed, 2 where the user made a mistake, and 3 where the run was stopped and can be resumed.
        RudraError: any other mistake, such as missing data (`DataError`) or a damaged checkpoint (`CheckpointError`).
    """
    from rudra.mpi.launch import world_size  # not before: it has MPI wait for us to start it

    shown = _progress(progress)
    named = None if output is None else Path(output)
    wanted = resume if isinstance(resume, bool) else Path(resume)
    if carry not in get_args(Carry):
        raise ConfigError(f"carry = {carry!r}; valid: {', '.join(get_args(Carry))}")
    if from_ is not None and carry == "weights":
        job = job.with_(training={"warm_start": Path(from_)})
    origin = Path(from_) if from_ is not None and carry == "all" else None
    if world_size() is not None:
        from rudra.mpi.start import start_mpi

        start_mpi()
        from rudra.mpi.session import run_ranks

        code, path = run_ranks(
            job, output=named, progress=shown, overwrite=force, resume=wanted, origin=origin, choose_cut=_choose_cut
        )
    else:
        with default_outputs(job.name) as name:
            begin = decide(job, named, wanted, force=force, named=name, origin=origin)
            path = begin.output
            if begin.text:
                log.info(begin.text)
            if begin.finished:
                return open_results(path)
            check_output(path, begin.overwrite or begin.checkpoint is not None)
            code = _launched(job, begin, origin, shown, verbose=verbose)
    if code:
        raise RanksFailed(job.name, code)
    return open_results(path)


def _choose_cut(job: Job, ranks: int | None = None) -> str | None:
    """`rudra.simulation.placing.choose_cut`; imports torch, which who starts ranks usually does without."""
    from rudra.simulation.placing import choose_cut

    return choose_cut(job, ranks)


def _launched(job: Job, begin: StartDecision, origin: Path | None, shown: dict[str, Any], *, verbose: bool) -> int:
    """Starts the ranks, and again where the job says so; the exit code."""
    from rudra.mpi.launch import launch
    from rudra.preflight import check

    path, job = begin.output, job.with_(**(begin.decided or {})).resolved(cores=cores())
    if job.placement.by_rule:
        job = job.with_(placement={"cut": _choose_cut(job)})
    plan = job.plan()
    names = [", ".join(plan.roles[i].name for i in plan.on_rank(rank)) for rank in range(plan.ranks)]
    check(job, plan, begins=begin.checkpoint is None)
    if shown["mode"] != "quiet":  # each imports torch, which takes seconds where there are fewer cores than ranks
        print(f"{job.name}: starting {plan.ranks} ranks", file=sys.stderr, flush=True)
    for restart in range(job.fault_tolerance.restarts + 1):
        resume = False if begin.branched else begin.checkpoint or False
        more: dict[str, Any] = {"overwrite": begin.overwrite, "resume": resume, "origin": origin, "launched": True}
        more["temporary"] = begin.temporary
        payload = {"job": job, "output": path, "progress": shown, **more}
        outcome = launch(job, path, roles=names, payload=payload, verbose=verbose, survivable=True)
        if outcome.code:
            _wait_for_results(path)
            checkpoint.discard_piece(checkpoint.path_of(path))
        if not outcome.lost or restart == job.fault_tolerance.restarts:
            break
        about: dict[str, Any] = {"force": False, "origin": origin, "temporary": begin.temporary}
        begin = decide(job, path, True, named=lambda: path, **about)
        log.warning(f"restart {restart + 1} of {job.fault_tolerance.restarts}: {begin.text}")
    return outcome.code


def simulate(
    job: Job, *, output: str | Path | None = None, force: bool = False, progress: ProgressMode | None = None
) -> Results:
    """Trains a job in this process and in virtual time, and returns when the simulation has ended.

    The simulation computes the same gradients as a run on ranks. The times in its results are virtual: they come from
    the job's table `[simulation]`. The same job gives the same bits each time.

    Args:
        job: what to simulate; any number of learners fits into one process.
        output: path of the result file, which ends in `.h5`; None: a new name made of the job's name and the time.
        force: whether to replace an existing file.
        progress: `"bar"`, `"lines"` or `"quiet"`; None: a bar on a terminal, and plain lines elsewhere.

    Returns:
        The results, open for reading.

    Raises:
        ConfigError: the job or an argument is not usable.
        DataError: the data is missing, damaged, or does not fit the model.
        ResultsError: the result file exists or cannot be written.
        RunError: the simulation failed, for instance because a loss was not finite.
    """
    with default_outputs(job.name) as name:
        path = name() if output is None else checked_name(Path(output))
        _simulate(job, path, force or output is None, progress)
    return open_results(path)


def _simulate(job: Job, path: Path, force: bool, progress: ProgressMode | None) -> None:
    """Simulates a job and writes its result file; `force` allows to replace an existing one."""
    from rudra.compute.executor import torch_as_in
    from rudra.core.wire import tail_bytes
    from rudra.results.progress import Progress
    from rudra.results.recorder import Recorder, make_writer
    from rudra.simulation import costs
    from rudra.simulation.assembly import assemble
    from rudra.simulation.cluster import find_device, make_cluster
    from rudra.simulation.placing import placed

    check_output(path, force)
    measured = costs.source(job)
    job = placed(costs.load(job.resolved(cores=cores())))
    if job.simulation.tensors:
        job = job.with_(cluster={"device": find_device(job).type})
    elif job.hooks:
        raise ConfigError(
            "[hooks]: [simulation] tensors = false trains nothing, so nothing calls them; valid: no hooks"
        )
    else:
        job = job.without_tests().with_(cluster={"device": "cpu"})
    plan = job.plan(costs.places(job))
    job = costs.shared(job, plan)
    with torch_as_in(job):
        cluster = make_cluster(job, plan)
        job = cluster.job
        check_minibatch(job, cluster.info.training_samples)
        samples, hooked = cluster.info.training_samples, cluster.executors.get(plan.statistics)
        for executor in cluster.executors.values():
            if executor.hooks is not None:
                executor.hooks.output = path.stem
        unsaved = job.with_(results={"checkpoint_every": "never", "keep_checkpoints": "never"})
        writer = make_writer(
            path,
            job,
            cluster.layout,
            cluster.size,
            cluster.initial_sha256,
            force,
            plan=plan,
            state_dict=cluster.state_dict,
            step_bytes=cluster.step_bytes,
            driver="simulation",
            costs=measured or DEFAULTS,
            training_samples=samples,
            **_of_data(cluster.fingerprints),
            classes=cluster.info.classes,
            hosts=[socket.gethostname()],
        )
        checkpoint.discard(checkpoint.path_of(path), kept=True)  # of a run that this one replaces
        with writer:
            shown = Progress(job, samples, **_progress(progress))
            recorder = Recorder(writer, shown, cluster.weights, hooks=hooked.hooks if hooked else None)
            size_bytes = cluster.size * 4 + tail_bytes(1)
            simulation = assemble(
                unsaved,
                plan,
                cluster.tensors,
                recorder,
                training_samples=samples,
                size_bytes=size_bytes,
                placed=cluster.placed,
            )
            if (text := simulation.costs.guessed) and progress != "quiet":
                log.info(f"{job.name}: {text}")
            try:
                with _told_to_end():
                    simulation.run()
                    for executor in cluster.executors.values():
                        executor.close()
            finally:
                shown.close()


def _of_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a simulation's result file says of its data; warns where it cannot be repeated."""
    from rudra.data.fingerprint import REPEATABLE, plain, unrepeatable

    if not (why := unrepeatable(found)):
        return {"data_fingerprints": json.dumps(plain(found))} if found else {}
    log.warning(f"{why}: {REPEATABLE}")
    return {"data_fingerprints": json.dumps(plain(found)), "replayable": False, "not_replayable": why}


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM is a Ctrl-C, so that the file says how the run ended; needs the main thread, does nothing elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _wait_for_results(path: Path, at_most_s: float = 2.0) -> None:
    """Gives the statistics server time to close its file: mpirun does not always wait for it when a rank has died."""
    deadline = time.monotonic() + at_most_s
    while path.is_file() and path.stat().st_size and time.monotonic() < deadline:
        with suppress(ResultsError), open_results(path) as results:
            if results.status != "running":
                return
        time.sleep(0.05)


class RanksFailed(RunError):
    """A run that ended badly, and whose ranks have said why on stderr."""

    said = True

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: the run ended with exit code {code}; the line on stderr says why")
        self.exit_code = code


def _progress(mode: ProgressMode | None) -> dict[str, Any]:
    terminal = sys.stderr.isatty()
    columns = None
    if terminal:
        import shutil

        columns = shutil.get_terminal_size().columns
    return {"mode": mode or ("bar" if terminal else "lines"), "columns": columns}
