"""Real mpirun: what reaches the user, which exit code, and that nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pages import files, page
from processes import WITHOUT_LIBFABRIC, below, gone, mpirun_of, ranks_of

from rudra.mpi.forkserver import SERVER
from tests import forks
from tests.waiting import eventually

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["server", "learner 0", "learner 1"]
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from rudra.job.job import Job
from rudra.errors import RudraError
from rudra.mpi.launch import launch

def rank_main():
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank = comm.rank
    print(f"pid {{os.getpid()}}", file=sys.stderr)
    comm.Barrier()
    if rank == 0:
        print("ready", file=sys.stderr)
{body}
    comm.Barrier()
    return 0

try:
    sys.exit(launch(Job(name="demo"), Path("out.h5"), roles={roles!r}, payload=rank_main, survivable={survivable}).code)
except RudraError as error:
    print(f"rudra: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(
    directory: Path, body: str, env: dict[str, str] | None = None, *, survivable: bool = False, anew: bool = False
) -> subprocess.Popen[bytes]:
    """Launches three ranks that run `body`, from a script as a user would write it, which may import anew."""
    script = directory / "script.py"
    body = textwrap.indent(body, " " * 4)
    script.write_text(SCRIPT.format(root=str(ROOT), body=body, roles=ROLES, survivable=survivable))
    return subprocess.Popen(
        [sys.executable, script.name] if anew else forks.script(script.name),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=env,
    )


def finish(process: subprocess.Popen[bytes], said: bytes = b"") -> tuple[int, list[str], list[int]]:
    """Waits for the end, less long than ranks sleep: exit code, lines on standard error, and the ids of the ranks."""
    try:
        _, rest = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    lines = (said + rest).decode().split("\n")
    pids = [int(line.removeprefix("pid ")) for line in lines if re.fullmatch(r"pid \d+", line)]
    return process.returncode, [line for line in lines if line and not line.startswith("pid ")], pids


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    assert process.stderr is not None
    said = b""
    while text not in said:
        piece = os.read(process.stderr.fileno(), 1 << 16)
        assert piece, f"ended without saying {text!r}: {said!r}"
        said += piece
    return said


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("pass", 0, None),
        ("if rank == 2: os._exit(2)", 2, "rudra: rank 2 (learner 1) exited with code 2"),
        ("if rank == 2: os._exit(7)", 1, "rudra: rank 2 (learner 1) exited with code 7"),
        ("if rank == 0: comm.Abort(2)", 2, "rudra: rank 0 (server) ended the run"),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "rudra: rank 1 (learner 0) was killed by signal 9 (SIGKILL); is there enough memory?",
        ),
        ("if rank == 1:\n    print('rudra: rank 1: bad', file=sys.stderr)\n    comm.Abort(1)", 1, "rudra: rank 1: bad"),
    ],
)
def test_one_line_says_how_a_run_ended(tmp_path: Path, body: str, code: int, line: str | None) -> None:
    returned, lines, pids = finish(start(tmp_path, body))
    lines.remove("ready")
    assert (returned, lines) == (code, [line] if line else [])
    assert len(pids) == len(ROLES)
    assert gone(pids)
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


def test_a_progress_bar_is_passed_on_before_its_line_ends(tmp_path: Path) -> None:
    body = r"""
if rank == 0:
    sys.stderr.write("\rbar 1"); sys.stderr.flush()
    sys.stderr.write("\rbar 2"); sys.stderr.flush()
    while not Path("seen").exists(): time.sleep(0.01)
    sys.stderr.write("\rbar 3\n")
"""
    process = start(tmp_path, body)
    said = read_until(process, b"\rbar 1\rbar 2")
    (tmp_path / "seen").touch()
    _, rest = process.communicate(timeout=200)
    assert process.returncode == 0
    assert re.sub(rb"pid \d+\n", b"", said + rest) == b"ready\n\rbar 1\rbar 2\rbar 3\n"


@pytest.mark.parametrize(("number", "results"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupt_reaches_every_rank_and_ends_the_run(tmp_path: Path, number: int, results: bool) -> None:
    body = f"""
try:
    comm.Barrier()  # from here on all of them are inside
    if rank == 0: print("computing", file=sys.stderr)
    time.sleep(600)
except KeyboardInterrupt:
    Path("out.h5").touch() if {results} and rank == 0 else None
    Path(f"stopped-{{rank}}").touch()
    comm.Barrier()  # all of them got it
    sys.exit(1)
"""
    process = start(tmp_path, body)
    said = read_until(process, b"computing\n")
    while said.count(b"pid ") < len(ROLES):
        said += read_until(process, b"pid ")
    process.send_signal(number)
    code, lines, pids = finish(process, said)
    kept = "it had no checkpoint yet; results so far: out.h5" if results else "it had no results yet"
    assert code == 1
    assert sorted(lines) == sorted(["ready", "computing", f"rudra: demo: interrupted; {kept}"])
    assert len(list(tmp_path.glob("stopped-*"))) == len(ROLES)
    assert gone(pids)


def test_a_second_interrupt_does_not_wait_for_the_ranks(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *_: print('asked', file=sys.stderr))\ncomm.Barrier()\n"
    body += (
        "print('computing', file=sys.stderr)\nend = time.monotonic() + 600\nwhile time.monotonic() < end: time.sleep(1)"
    )
    process = start(tmp_path, body)
    said = read_until(process, b"computing\n")
    process.send_signal(signal.SIGINT)
    said += read_until(process, b"asked\n")
    process.send_signal(signal.SIGINT)
    code, _, pids = finish(process, said)
    assert code == 1
    assert gone(pids)


@pytest.mark.parametrize(
    ("victim", "number", "checkpoint"),
    [
        ("launcher", signal.SIGKILL, False),
        ("mpirun", signal.SIGKILL, False),
        ("mpirun", signal.SIGTERM, True),
        ("mpirun", signal.SIGINT, False),
        ("mpirun", signal.SIGHUP, True),
    ],
)
def test_nothing_outlives_a_launcher_or_mpirun_that_is_ended_from_outside(
    tmp_path: Path, victim: str, number: signal.Signals, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if victim == "launcher":
        monkeypatch.delenv("RUDRA_FORK_SERVER")  # it has one of its own, which ends too
    process = start(tmp_path, "time.sleep(600)", anew=victim == "launcher")
    said = b""
    while said.count(b"pid ") < len(ROLES) or b"ready" not in said:
        said += read_until(process, b"\n")
    everything = below(process.pid)
    if checkpoint:
        (tmp_path / "out.ckpt").touch()
    os.kill(process.pid if victim == "launcher" else mpirun_of(process), number)
    code, lines, pids = finish(process, said)
    how = "killed by signal 9 (SIGKILL)" if number == signal.SIGKILL else "ended from outside"
    then = "to resume from its last checkpoint: rudra resume out.h5" if checkpoint else "it had no results yet"
    if victim == "launcher":
        assert (code, lines) == (-number, ["ready"])
    else:
        assert (code, lines) == (3 if checkpoint else 1, ["ready", f"rudra: demo: mpirun was {how}; {then}"])
    assert gone([*pids, *everything])
    assert {file.name for file in tmp_path.iterdir()} <= {"script.py", "out.ckpt"}, "ranks have read what was for them"


def test_without_its_fork_server_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUDRA_FORK_SERVER")
    process = start(tmp_path, "time.sleep(600)")
    said = b""
    while said.count(b"pid ") < len(ROLES) or b"ready" not in said:
        said += read_until(process, b"\n")
    (rank, *_) = (pid for pid in ranks_of(process).values())
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    code, (_, line), pids = finish(process, said)
    assert code == 1
    assert re.match(r"rudra: rank \d \(.*\) was killed by signal 9 \(SIGKILL\); is there enough memory\?$", line)
    assert gone(pids)


def imports(library: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether a rank has loaded a library."""
    found = False
    for pid in ranks_of(process).values():
        with suppress(OSError):
            found |= library in Path(f"/proc/{pid}/maps").read_text()
    return found


MOMENTS: dict[str, Callable[[subprocess.Popen[bytes]], bool]] = {
    "before import": lambda process: True,
    "in MPI_Init": lambda process: imports("libmpi", process),
    "later in MPI_Init": lambda process: imports("mca_btl", process) or imports("libfabric", process),
}


@pytest.mark.parametrize(
    ("ranks", "moment"),
    [
        ([0, 1, 2], "before import"),
        ([0, 1, 2], "later in MPI_Init"),
        ([0, 1], "in MPI_Init"),
        ([2], "later in MPI_Init"),
    ],
)
def test_ranks_that_are_killed_while_mpi_starts_are_not_waited_for(
    tmp_path: Path, ranks: list[int], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WITHOUT_LIBFABRIC[0])  # else MPI has started before anybody sees that it starts
    process = start(tmp_path, "time.sleep(600)", survivable=True)
    there = eventually(lambda: len(ranks_of(process)) == len(ROLES) and MOMENTS[moment](process), every_s=0.005)
    assert there
    pids = ranks_of(process)
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    code, lines, _ = finish(process)
    assert code == 1
    (line,) = lines
    if len(ranks) < len(ROLES):
        # They are killed one after the other: mpirun may have ended all because of the first.
        named = re.fullmatch(r"rudra: (rank \d \([^)]+\)(?:, rank \d \([^)]+\))*) died before training began", line)
        assert named, line
        assert {int(rank) for rank in re.findall(r"rank (\d)", named[1])} <= {*ranks}, line
    else:  # mpirun may end before all were found dead
        assert line.endswith(" died before training began")
    assert gone(list(pids.values()))


def test_when_all_ranks_are_killed_at_once_somebody_says_so(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(600)", survivable=True)
    said = b""
    while said.count(b"pid ") < len(ROLES) or b"ready" not in said:
        said += read_until(process, b"\n")
    for pid in ranks_of(process).values():
        os.kill(pid, signal.SIGKILL)
    code, lines, pids = finish(process, said)
    assert (code, lines) == (1, ["ready", "rudra: all ranks died"])
    assert gone(pids)


def test_an_interrupt_before_mpi_has_started_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WITHOUT_LIBFABRIC[0])
    process = start(tmp_path, "time.sleep(600)", survivable=True)
    assert eventually(lambda: ranks_of(process), every_s=0.005)
    pids = below(process.pid)
    process.send_signal(signal.SIGINT)
    assert finish(process)[:2] == (1, ["rudra: demo: interrupted; it had no results yet"])
    assert gone(pids)


def test_an_mpi_library_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != SERVER}  # which has loaded a library
    process = start(tmp_path, "pass", env={**env, "MPI4PY_LIBMPI": "/no/such/library"}, anew=True)
    code, lines, _ = finish(process)
    assert code == 2
    assert len(lines) == 1
    assert re.match(r"rudra: MPI cannot be used: .*`rudra doctor` says more", lines[0])


def test_a_job_that_the_ranks_cannot_load_is_shown_once(tmp_path: Path) -> None:
    script = SCRIPT.format(root=str(ROOT), body="    pass", roles=ROLES, survivable=False).replace(
        "payload=rank_main", "payload=Broken()"
    )
    broken = "class Broken:\n    def __reduce__(self): return (int, ('abc',))\n"
    (tmp_path / "script.py").write_text(broken + script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, timeout=200, check=False)
    assert done.returncode == 1
    assert done.stderr.count(b"rudra: ") == 1
    assert done.stderr.startswith(b"rudra: rank 0 (server) cannot load the job: ValueError: ")
    assert done.stderr.count(b"Traceback") == 1


def test_the_example_of_the_python_page(tmp_path: Path) -> None:
    (tmp_path / "spirals.py").write_text(files(page("python.md"))["spirals.py"])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    del env[WITHOUT_LIBFABRIC[0]]
    done = subprocess.run(
        [sys.executable, "spirals.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    error, staleness = done.stdout.split()
    assert float(error) < 0.4
    assert int(staleness) >= 1
    assert (tmp_path / "spirals.h5").is_file()
