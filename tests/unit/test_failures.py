"""Ranks that die early: who is missed, and what the others make of it where all set up together."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rudra.errors import DataError
from rudra.mpi import failures
from rudra.mpi.failures import RollCall
from tests.waiting import eventually


class MpiError(Exception):
    """As mpi4py's."""

    def Get_error_class(self) -> int:
        return int(self.args[0])


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks that are dead, of three; this one is 1."""
    ranks: set[int] = set()
    world = SimpleNamespace(size=3, rank=1)
    kinds = {"ERR_PROC_FAILED": 75, "ERR_PROC_FAILED_PENDING": 76, "ERR_REVOKED": 77}
    stub = SimpleNamespace(Exception=MpiError, COMM_WORLD=world, **kinds)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", stub)
    monkeypatch.setattr("mpi4py.MPI", stub, raising=False)
    found = SimpleNamespace(dead=ranks, look=lambda: bool(ranks), active=True)
    monkeypatch.setattr(failures, "Losses", lambda _: found)
    monkeypatch.setattr(failures, "launcher", lambda: os.getpid())
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    for name in ("SPEAKS_S", "LEARNS_S", "AGAIN_S"):
        monkeypatch.setattr(failures, name, 0.0)

    def end(_: Any, code: int, *, lost: bool) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(failures, "end_everybody", end)
    return ranks


# What half an object gave, in runs whose ranks were killed while all told each other of their start.
HALVES = [ValueError("unsupported pickle protocol: 215"), EOFError(), KeyError(3), MpiError(75)]


@pytest.mark.parametrize("error", HALVES, ids=lambda error: type(error).__name__)
def test_whatever_comes_of_a_dying_rank_is_one_line(
    error: Exception, dead: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    dead.add(0)
    with pytest.raises(SystemExit) as end, failures.abort_on_dead_rank():
        raise error
    assert end.value.code == 1
    assert "rank 0 died before training began" in capsys.readouterr().err


@pytest.mark.parametrize("error", HALVES[:3], ids=lambda error: type(error).__name__)
def test_where_nobody_died_the_error_is_what_it_is(error: Exception, dead: set[int]) -> None:
    assert not dead
    with pytest.raises(type(error)), failures.abort_on_dead_rank():
        raise error


@pytest.mark.parametrize("error", [DataError("no such file"), MpiError(1)])
def test_an_error_that_says_what_it_is_stays(error: Exception, dead: set[int]) -> None:
    dead.add(0)
    with pytest.raises(type(error)), failures.abort_on_dead_rank():
        raise error


STARTS = """
import os, subprocess, sys, time
here, *lives = sys.argv[1:]
for rank, word in enumerate(lives):
    if word != "-":
        about = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": here}
        name = f"open('/proc/self/comm', 'w').write('for-{word}'); " if word.isdigit() else ""
        script = f"import os, time; {name}os.system('echo there'); time.sleep(60)"
        subprocess.Popen([sys.executable, "-S", "-c", script], env={**os.environ, **about})
time.sleep(60)
"""


@contextmanager
def launcher(here: int, *ranks: str) -> Iterator[int]:
    """A process that starts ranks: "runs", a proxy that stands for the process of that number, or "-", never seen."""
    command = [sys.executable, "-S", "-c", STARTS, str(here), *ranks]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for rank in ranks:
            assert rank == "-" or process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def looked(roll: RollCall, times: int = 2) -> tuple[set[int], set[int], int]:
    for _ in range(times):
        roll.look()
    return roll.alive, roll.dead, roll.unseen


def test_a_rank_is_as_dead_as_its_own_process() -> None:
    """Its proxy may not have been told yet, and nobody may have taken note of the end."""
    rank = subprocess.Popen(["sleep", "60"])
    with launcher(2, "runs", str(rank.pid)) as pid:
        roll = RollCall(pid, 2)
        assert looked(roll) == ({0, 1}, set(), 0)
        rank.send_signal(signal.SIGKILL)
        assert eventually(lambda: not failures.lives(rank.pid))
        assert set(failures.started_below(pid)) == {0, 1}, "the proxy is there, and the process waits to be reaped"
        assert looked(roll, 1) == ({0}, set(), 0), "one look may miss somebody"
        assert looked(roll, 1) == ({0}, {1}, 0)
        rank.wait()
        assert looked(roll, 1) == ({0}, {1}, 0)


@pytest.mark.parametrize(("ranks", "dead", "unseen"), [(3, {1}, 1), (9, set(), 1)])
def test_who_was_never_seen_counts_when_all_must_have_come(
    ranks: int, dead: set[int], unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several nodes nobody knows its name."""
    with launcher(3, "runs", "-", "runs") as pid:
        roll = RollCall(pid, ranks)
        assert looked(roll) == ({0, 2}, set(), 0), "it may come"
        monkeypatch.setattr(failures, "APPEAR_S", 0.0)
        assert looked(roll := RollCall(pid, ranks)) == ({0, 2}, dead, unseen)
        assert looked(RollCall(pid, ranks, here=3, come=True)) == ({0, 2}, dead, unseen)
    assert looked(roll)[0] == set()


def test_who_is_missed_once_and_comes_back_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher(2, "runs", "runs") as pid:
        roll = RollCall(pid, 2)
        looked(roll)
        with monkeypatch.context() as context:
            context.setattr(failures, "started_below", lambda _: {})
            assert looked(roll, 1) == (set(), set(), 0)
        assert looked(roll, 1) == ({0, 1}, set(), 0)


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_watcher_of_a_node_looks_again_before_it_speaks(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two have died, one a little later than the other."""
    for name, value in {"RANK": 0, "SIZE": 4, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setattr(failures, "AGAIN_S", 0.0)
    started, end = os.pipe()
    with launcher(4, "runs", "runs", "runs", "runs") as pid:
        ranks, looks = failures.started_below(pid), 0

        def below(_: int) -> dict[int, int]:
            nonlocal looks
            looks += 1
            if looks > 8:
                os.write(end, b"!")  # MPI has started
            there = {1: {0, 1, 2, 3}, 2: {0, 1, 3}, 3: {0, 1, 3}}.get(looks, {0, 1, 2, 3} if comes_back else {0, 1})
            return {rank: ranks[rank] for rank in there}

        monkeypatch.setattr(failures, "started_below", below)
        monkeypatch.setattr(failures, "WATCH_S", 0.01)
        failures._watch(pid, started, patience_s=0.01)
        ended = eventually(lambda: not failures.lives(pid), 0.0 if comes_back else 30.0)
    said = capsys.readouterr().err
    assert (said, ended) == (
        ("", False) if comes_back else ("rudra: rank 2, rank 3 died before training began\n", True)
    )
    os.close(started), os.close(end)


def test_the_launcher_is_told_to_end_when_it_has_read_the_last_words() -> None:
    """A rank's standard error is a pipe, of which the launcher reads the end late."""
    read, write = os.pipe()
    script = "import os\nfrom rudra.mpi import failures; failures.HEARD_S = 60\n"
    script += "os.write(2, b'last words'); failures.heard(); os.write(1, b'!')"
    heard, told = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=write, stdout=told)
    os.close(write), os.close(told)
    select.select([read], [], [], 60)
    early = bool(select.select([heard], [], [], 0.5)[0])
    began = time.monotonic()
    assert os.read(read, 100) == b"last words"
    assert os.read(heard, 1) == b"!"
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    os.close(read), os.close(heard)
    assert (early, process.returncode) == (False, 0)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("namespace", "launched_by", "there"),
    [
        ("prterun-{here}-{self}@1", 1, True),  # a container whose first process is mpirun
        ("prterun-{here}-{nobody}@1", 1, False),  # init took the ranks in
        ("prterun-{here}-{nobody}@1", "self", False),  # as another process may, such as a user's systemd
        ("prterun-elsewhere-{nobody}@1", "self", True),  # below a daemon of another node's mpirun
        ("prterun-elsewhere-{nobody}@1", 1, False),
        ("", "self", True),  # another MPI
        ("", 1, False),
    ],
)
def test_init_is_no_launcher_although_it_takes_ranks_in(
    monkeypatch: pytest.MonkeyPatch, namespace: str, launched_by: int | str, *, there: bool
) -> None:
    about = {"here": socket.gethostname(), "self": os.getpid(), "nobody": 4_999_999}
    monkeypatch.setenv("PMIX_NAMESPACE", namespace.format(**about))
    assert failures.launcher_lives(os.getpid() if isinstance(launched_by, str) else launched_by) == there
