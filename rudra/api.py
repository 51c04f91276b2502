"""Runs and simulates jobs from Python. The command line is a thin layer over this module."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from rudra.errors import ConfigError, ResultsError, RunError
from rudra.job.job import Job
from rudra.log import log
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.prepare.resolve import resolve, resolve_virtual
from rudra.prepare.start import StartRequest, decide
from rudra.results import checkpoint
from rudra.results.reader import Results, check_output, open_results
from rudra.results.writer import checked_name, default_outputs, remove_if_empty

ProgressMode = Literal["bar", "lines", "quiet"]
Carry = Literal["weights", "state", "all"]


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

    In a process that mpirun or srun started, this rank takes its part in the job, and every rank must make the same
    call. In any other process `run` starts mpirun with as many ranks as the job needs.

    Args:
        job: job to run.
        output: path of the result file, which ends in `.h5`. None: a new name made of the job's name and the time, and
            the last checkpoint is removed when the run finishes.
        force: whether to replace an existing file.
        resume: checkpoint to continue from. True: the checkpoint of `output` if there is one, and otherwise the start.
            A path: a checkpoint, or a result file with a checkpoint. The result file keeps the rows that were recorded
            up to the checkpoint.
        from_: checkpoint or result file of another run that provides the initial state.
        carry: state to take from `from_`. `"weights"`: only the weights, as with `training.warm_start`. `"all"`:
            weights, optimiser state, epochs, samples and the recorded rows. `"state"`: all of these, but no rows. The
            model, data and optimiser of the checkpoint must fit. Protocol, topology and learners may differ.
        progress: `"bar"`, `"lines"` or `"quiet"`. None: a bar on a terminal, and plain lines elsewhere.
        verbose: whether to show the output of mpirun and MPI, if `run` started mpirun and the run failed.

    Returns:
        The results, open for reading, on every rank that makes the call.

    Raises:
        ConfigError: the job or an argument is not usable.
        LaunchError: MPI or its launcher is missing or broken.
        ResultsError: the result file exists or cannot be written.
        RunError: the ranks failed or stopped, and have printed the reason on standard error. `exit_code`: 1 if the run
            failed, 2 if the user made a mistake, and 3 if the run was stopped and can be resumed.
        RudraError: any other mistake, such as missing data (`DataError`) or a damaged checkpoint (`CheckpointError`).
    """
    from rudra.mpi.launch import world_size  # imported late, because it makes MPI wait for an explicit start

    shown = _progress(progress)
    asked = _asked(output, force, from_, carry, resume=resume if isinstance(resume, bool) else Path(resume))
    if world_size() is None:
        code, path = _launched(job, asked, shown, verbose=verbose)
    else:
        from rudra.mpi.start import start_mpi

        start_mpi()
        from rudra.mpi.session import run_ranks

        code, path = run_ranks(job, asked, progress=shown)
    if code:
        raise RanksFailed(job.name, code)
    return open_results(path)


def _asked(
    output: str | Path | None, force: bool, from_: str | Path | None, carry: Carry, *, resume: bool | Path = False
) -> StartRequest:
    if carry not in get_args(Carry):
        raise ConfigError(f"carry = {carry!r}; valid: {', '.join(get_args(Carry))}")
    origin = None if from_ is None else Path(from_)
    weights = origin if carry == "weights" else None
    given = None if output is None else Path(output)
    return StartRequest(given, resume, force, None if weights else origin, carry != "state", weights)


def _launched(written: Job, asked: StartRequest, progress: dict[str, Any], *, verbose: bool) -> tuple[int, Path]:
    """Starts the ranks of a run, and restarts them if the job says so. Returns the exit code and the result file."""
    from rudra.mpi.launch import launch
    from rudra.preflight import check

    start = decide(written, asked)
    path = start.output
    try:
        if start.text:
            log.info(start.text)
        if start.finished:
            return 0, path
        check_output(path, start.overwrite or start.checkpoint is not None)
        job, plan = resolve(written, start.decided, cores=cores())
        check(job, plan, begins=start.checkpoint is None)
        names = [plan.names_on(rank) for rank in range(plan.ranks)]
        if progress["mode"] != "quiet":  # each rank imports torch: this takes seconds if there are few cores for them
            print(f"{job.name}: starting {plan.ranks} ranks", file=sys.stderr, flush=True)
        restarts = job.fault_tolerance.restarts
        for restart in range(restarts + 1):
            payload = {"job": job, "start": start, "progress": progress, "launched": True}
            outcome = launch(
                job,
                path,
                roles=names,
                payload=payload,
                verbose=verbose,
                survivable=True,
                fresh=start.checkpoint is None,
            )
            if outcome.code:
                _wait_for_results(path)
                checkpoint.discard_piece(checkpoint.path_of(path))
            if not outcome.lost or restart == restarts:
                break
            again = asked._replace(output=path, resume=True, force=False, temporary=start.temporary)
            start = decide(job, again)
            log.warning(f"restart {restart + 1} of {restarts}: {start.text}")
        return outcome.code, path
    finally:
        if asked.output is None:
            remove_if_empty(path)


def simulate(
    job: Job,
    *,
    output: str | Path | None = None,
    force: bool = False,
    from_: str | Path | None = None,
    carry: Carry = "weights",
    progress: ProgressMode | None = None,
) -> Results:
    """Trains a job in this process and in virtual time, and returns when the simulation has ended.

    The simulation computes the same gradients as a run on ranks. The times in its results are virtual: they come from
    the job's table `[simulation]`. Repeated simulations of a job are bitwise identical.

    Args:
        job: job to simulate. Any number of learners fits into one process.
        output: path of the result file, which ends in `.h5`. None: a new name made of the job's name and the time.
        force: whether to replace an existing file.
        from_: checkpoint or result file of another run or simulation that provides the initial state.
        carry: state to take from `from_`, as for `run`.
        progress: `"bar"`, `"lines"` or `"quiet"`. None: a bar on a terminal, and plain lines elsewhere.

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
        asked = _asked(path, force or output is None, from_, carry)
        _simulate(job, asked._replace(temporary=output is None), _progress(progress))
    return open_results(path)


def _simulate(written: Job, asked: StartRequest, progress: dict[str, Any]) -> None:
    """Simulates a job and writes its result file."""
    from rudra.compute.device.placement import virtual_kind
    from rudra.simulation.recorded import simulate

    assert asked.output is not None
    check_output(asked.output, asked.force)
    measured, job = cost_files.source(written), cost_files.load(written)
    if (origin := asked.origin or asked.weights) is not None and not job.simulation.tensors:
        raise ConfigError(f"--from {origin}: [simulation] tensors = false has no weights; use tensors = true")
    start = decide(job, asked)
    if start.text and progress["mode"] != "quiet":
        log.info(start.text)
    job = job.with_(**start.decided) if start.decided else job
    if job.simulation.tensors:
        device = virtual_kind(job.cluster.device, window=job.hogbatch.shares_weights)
    elif job.hooks:
        raise ConfigError("[hooks]: [simulation] tensors = false trains nothing, so no hook is called; valid: no hooks")
    elif job.decisions.given:
        raise ConfigError(
            "[decisions] call is not supported with [simulation] tensors = false, which trains nothing; remove it"
        )
    else:
        job, device = job.without_tests(), "cpu"
    resolved = resolve_virtual(job, device=device, cores=cores())
    simulate(resolved, start, measured=measured, progress=progress)


def _wait_for_results(path: Path, at_most_s: float = 2.0) -> None:
    """Waits for the statistics server to close its file: mpirun does not always wait for it when a rank has died."""
    deadline = time.monotonic() + at_most_s
    while path.is_file() and path.stat().st_size and time.monotonic() < deadline:
        with suppress(ResultsError), open_results(path) as results:
            if results.status != "running":
                return
        time.sleep(0.05)


class RanksFailed(RunError):
    """A failed run whose ranks have printed the reason on standard error."""

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
