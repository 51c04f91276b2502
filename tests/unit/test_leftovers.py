"""What runs that were killed left behind: removed if nobody can use it any more, and only then."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rudra.mpi import leftovers
from rudra.mpi.failures import is_stopped, lives
from rudra.mpi.forkserver import LAUNCHED_BY
from rudra.mpi.leftovers import remove_leftovers
from rudra.mpi.loopback import listen_on_loopback
from tests.waiting import eventually

NOBODY = 4_999_999  # no process has a number above 4,194,304


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("shm", "tmp", "results"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path


def made(path: Path, *, old: bool = True) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"left")
    if old:
        os.utime(path, (1, 1))
    return path


LEFT = (
    "shm/sm_segment.host.0.46c60001.0",
    "results/.run.ckpt.saved",
    "results/.run-abc123.launch",
    f"tmp/ompi.{NOBODY}/1/session",
)


@pytest.mark.parametrize("name", LEFT)
def test_a_leftover_is_removed_unless_it_is_open_or_young(place: Path, name: str) -> None:
    path = made(place / name)
    with path.open("rb"):
        remove_leftovers(place / "results")
        assert path.exists()
    os.utime(path)
    remove_leftovers(place / "results")
    assert path.exists()
    os.utime(path, (1, 1))
    remove_leftovers(place / "results")
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["shm/other", "results/run.ckpt", "results/.hidden", "tmp/ompi.{living}/1/session", f"tmp/my.{NOBODY}/file"]
)
def test_what_is_no_leftover_stays(place: Path, name: str) -> None:
    path = made(place / name.format(living=os.getpid()))
    remove_leftovers(place / "results")
    assert path.exists()


@pytest.mark.parametrize("whose", ["the server", "its rank"])
@pytest.mark.parametrize(("launcher", "ends"), [(os.getpid, False), (lambda: NOBODY, True)], ids=["lives", "ended"])
def test_what_is_stopped_of_a_fork_server_is_ended_when_its_launcher_has_ended(
    place: Path, launcher: Callable[[], int], whose: str, ends: bool
) -> None:
    """A rank that is stopped in a run that lives is that run's matter, not of one that starts beside it."""
    script = "import os, time; rank = os.fork(); print(rank or '', end='', flush=True); time.sleep(60)"
    env = {**os.environ, LAUNCHED_BY: str(launcher())}
    server = subprocess.Popen([sys.executable, "-S", "-c", script, "--serve"], env=env, stdout=subprocess.PIPE)
    rank = int(os.read(server.stdout.fileno(), 20))
    victim = server.pid if whose == "the server" else rank
    try:
        os.kill(victim, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(victim) or not lives(victim))  # another test's run may be first
        remove_leftovers(place / "results")
        assert eventually(lambda: not lives(victim), 30 if ends else 0.5) == ends
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        server.kill()
        server.communicate()


def test_what_a_child_listens_on_is_bound_to_the_loopback_interface() -> None:
    script = "import socket, sys\ns = [socket.create_server(('', 0)), socket.create_server(('127.0.0.1', 0))]\n"
    script += "print(s[0].getsockname()[1], flush=True); sys.stdin.read()\n"
    script += "print([each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b'\\0') for each in s])"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(child.stdout.readline())
    listen_on_loopback(child.pid)
    socket.create_connection(("127.0.0.1", port)).close()
    assert child.communicate(timeout=60)[0] == "[b'lo', b'lo']\n"
    listen_on_loopback(child.pid)
