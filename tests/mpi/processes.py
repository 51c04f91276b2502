"""Runs in processes of their own: starting them, watching how far they are, and finding their ranks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py

import rudra
from rudra.errors import RudraError
from rudra.mpi.failures import lives, ranks_below
from rudra.mpi.forkserver import process_of
from rudra.mpi.launch import find_mpirun
from rudra.results import checkpoint
from tests import forks
from tests.waiting import eventually

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AHEAD = 10
"""Mini-batches that learners may be ahead of what a test waits for; then they wait for it, however slow it is."""

WITHOUT_LIBFABRIC = "OMPI_MCA_btl", "^ofi"
"""A variable of Open MPI and its value."""

SCRIPT = """
import sys
from rudra.cli.main import main
from rudra.mpi import failures, launch
{}
sys.exit(main(sys.argv[1:]))
"""


def start(*arguments: str | Path, before: str = "pass", **environment: str) -> subprocess.Popen[str]:
    """Starts the command, which executes a line of Python `before`; with variables of its own it imports anew."""
    path = os.pathsep.join([str(ROOT), str(HERE)])
    command = [sys.executable, "-c", SCRIPT.format(before)] if environment else forks.rudra(before)
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "RUDRA_TEST_GATE": str(_gate(arguments)), **environment},
    )


def _gate(words: Sequence[Any]) -> Path:
    """A file that holds the learners of a run while it is there: see `point_data.pass_gate`."""
    return next((Path(word).with_suffix(".gate") for word in words if str(word).endswith(".h5")), Path("no such gate"))


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a run that nobody holds any more."""
    _gate(process.args).unlink(missing_ok=True)  # type: ignore[arg-type]
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    return process.returncode, out, err


def mpirun(
    ranks: int, *arguments: str, anew: bool = False, before: str = "pass", options: Sequence[str] = ()
) -> tuple[int, str, str]:
    """The command under a launcher that the user started: forks that execute a line, or processes that import anew."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launcher = [str(find_mpirun()), *root, "--oversubscribe", "--bind-to", "none", *options, "-n", str(ranks)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    if anew:
        del env[WITHOUT_LIBFABRIC[0]]
    process = subprocess.Popen(
        [*launcher, *([sys.executable, "-m", "rudra"] if anew else forks.rudra(before)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    return finish(process)


def updates(path: Path, table: str = "updates") -> int:
    """How many, or rows of another table, a file that may be written to holds."""
    with suppress(RudraError), rudra.open_results(path) as results:
        return len(getattr(results, table))
    return 0


def replays(path: Path) -> bool:
    """Whether a run is repeated bit for bit."""
    return rudra.replay(path, quiet=True).difference is None


def restarts(path: Path) -> int:
    """How many beginnings a result file tells of, also of one that is no more: so often a run has been resumed next."""
    with suppress(RudraError), rudra.open_results(path) as results:
        return 1 + int((results.events["kind"] == b"restart").sum())
    return 0


def _peek(path: Path, *tables: str) -> list[Any]:
    """Rows of tables of a file that may be written to; none while they cannot be read.

    `rudra.open_results` looks at all that is in a file. That takes 10 ms, and runs are waited for all the time.
    """
    with suppress(OSError, KeyError, RuntimeError), h5py.File(path, "r", swmr=True, locking=False) as file:
        return [file[table][:] for table in tables]
    return [()] * len(tables)


def _come(path: Path, count: int, table: str, parts: int) -> bool:
    """Whether so many rows are there, the last of them of this part of the run."""
    events, rows = _peek(path, "events", table)
    if len(rows) < count:
        return False
    again = events[events["kind"] == b"restart"]
    if len(again) < parts:
        return False
    return parts == 0 or table != "updates" or int(rows["timestamp"][-1]) > int(again["timestamp"][-1])


def _kept(path: Path, parts: int) -> bool:
    """Whether there is a checkpoint of this part of a run, which tells of its beginning."""
    if not parts:
        return path.with_suffix(".ckpt").exists()
    (events,) = _peek(path, "events")
    kinds = events["kind"].tolist() if len(events) else []
    return b"checkpoint" in kinds[len(kinds) - kinds[::-1].index(b"restart") :] if b"restart" in kinds else False


def _done(output: Path) -> int:
    """Updates of the checkpoint from which a run that has just been started again goes on."""
    with suppress(RudraError):
        return checkpoint.read(checkpoint.path_of(output))[0].position.timestamp
    return 0


def wait_for_updates(
    process: subprocess.Popen[str],
    output: Path,
    count: int,
    table: str = "updates",
    *,
    parts: int = 0,
    kept: bool = False,
) -> None:
    """Until a run has made so many updates, or recorded so many rows of another table, or has ended.

    Until its test calls `finish`, it does not get much further.

    Args:
        process: the command.
        output: its result file.
        count: of rows.
        table: whose.
        parts: how often it had been begun before, of which the file may still tell; it must have gone on.
        kept: there must be a checkpoint of this part, too.
    """
    if table == "updates":
        _hold(process, count - (_done(output) if parts else 0))
    else:
        _gate(process.args).unlink(missing_ok=True)  # type: ignore[arg-type]

    more = _allowance(process)

    def come() -> bool:
        more()
        return _come(output, count, table, parts) and (not kept or _kept(output, parts))

    came = eventually(lambda: process.poll() is not None or come())
    if not came:
        code, _, err = finish(process)
        raise AssertionError(f"fewer than {count} {table} came before it was let go, which ended with {code}: {err}")


def _hold(process: subprocess.Popen[str], batches: int) -> None:
    """Lets each learner of a run get no more mini-batches than these and a few, until its test calls `finish`."""
    gate = _gate(process.args)  # type: ignore[arg-type]
    gate.with_suffix(".new").write_text(str(batches + AHEAD))
    gate.with_suffix(".new").rename(gate)


def _allowance(process: subprocess.Popen[str]) -> Callable[[], None]:
    """Returns what to call all the time: each learner that is held gets one more mini-batch every two seconds.

    A rank that waits for a mini-batch calls no MPI. It may notice no death, and its last messages may wait in MPI,
    because the rank that they go to was slow.
    """
    gate, since = _gate(process.args), time.monotonic()  # type: ignore[arg-type]

    def more() -> None:
        nonlocal since
        if time.monotonic() > since + 2:
            since = time.monotonic()
            with suppress(OSError, ValueError):  # nobody holds the run
                _hold(process, int(gate.read_text()) - AHEAD + 1)

    return more


def wait_for_deaths(process: subprocess.Popen[str], output: Path, count: int = 1, *, steps: int | None = None) -> None:
    """Waits until a run has recorded the deaths of ranks, which a busy machine notices late, or has ended.

    A run that nobody holds may end before anybody notices.

    Args:
        process: the command.
        output: its result file.
        count: of roles that died.
        steps: training steps after which a learner dies by itself. None: `wait_for_updates` holds the run already.
    """
    if steps is not None:
        _hold(process, steps)

    more = _allowance(process)

    def recorded() -> bool:
        more()
        (events,) = _peek(output, "events")
        return len(events) > 0 and int((events["kind"] == b"lost").sum()) >= count

    assert eventually(lambda: process.poll() is not None or recorded()), "nobody noticed"


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    pid = process_of(pid)
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [found for child in map(int, children) for found in (child, *below(child))]
    return []


def ranks_of(process: "subprocess.Popen[Any]") -> dict[int, int]:
    """World rank -> process, of all that a launch started; read again, for a list misses one if another leaves."""
    found: dict[int, int] = {}
    for _ in range(3):
        found |= ranks_below(process_of(process.pid))
    return found


def mpirun_of(process: "subprocess.Popen[Any]") -> int:
    """The mpirun that a launch started; looked for again, for a list of processes misses one if another leaves."""
    found: set[int] = set()

    def there() -> bool:
        for pid in below(process.pid):
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{pid}/comm").read_text() == "prterun\n":
                    found.add(pid)
        return bool(found)

    assert eventually(there)
    (mpirun,) = found
    return mpirun


def gone(pids: list[int], within_s: float = 40.0) -> bool:
    """Whether all processes end within that time."""
    return eventually(lambda: not any(map(lives, pids)), within_s)


def run_until(job: Path, output: Path, update: int, number: int) -> tuple[int, str]:
    """Starts or resumes a run, and sends it a signal when it has come so far."""
    parts = restarts(output)
    process = start("run", job, "--output", output, "--resume")
    wait_for_updates(process, output, update, parts=parts, kept=True)
    ranks = below(process.pid)
    process.send_signal(number)
    code, _, err = finish(process)
    assert gone(ranks)
    return code, err


def ours(err: str) -> list[str]:
    """Without what is said of gradients of a rank that gets no core for a while."""
    return [line for line in err.splitlines() if line.startswith("rudra: ") and " were stale by " not in line]
