"""Proxies and the ranks they stand for: what a rank gets of its proxy, and that both end alike, however that is."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rudra.mpi.doorbell import RINGS, Doorbell
from rudra.mpi.forkserver import fork_server, process_of
from rudra.mpi.rank_proxy import KILLED_LINE, LEFT_LINE
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

WORKER = """
import os, random, signal, socket, sys, time
sys.path.insert(0, {root!r})
server = os.getpid()
if "--serve" in sys.argv:
    if {broken}:
        sys.exit(1)
    import numpy.random
    from rudra.mpi.forkserver import launcher, serve
    sys.argv[1:] = serve(*(socket.socket(fileno=int(number)) for number in sys.argv[-2:]))
assert sys.argv[1:] == ["the", "arguments"]
"""


@contextmanager
def rank(
    directory: Path, body: str, *, broken: bool = False, count: int = 1, **more: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Proxies of ranks that run `body`."""
    script = directory / "worker.py"
    script.write_text(WORKER.format(root=str(Path(__file__).parents[2]), broken=broken) + body)
    with fork_server([sys.executable, "-P", str(script)]) as command:
        more |= {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
        more["env"] = {**os.environ, "MINE": "ä=b", "OMPI_COMM_WORLD_RANK": "7"}
        processes = [subprocess.Popen([*command, "the", "arguments"], **more) for _ in range(count)]
        yield processes
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("os._exit(255)", 255),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_proxy_ends_as_its_rank(tmp_path: Path, body: str, code: int, broken: bool) -> None:
    with rank(tmp_path, body, broken=broken) as (proxy,):
        assert proxy.wait(30) == code


HAS = """
import resource
print(os.environ["MINE"], sys.stdin.readline(), os.getcwd(), oct(os.umask(0)))
print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.nice(0), os.getpid() != server)
"""


@pytest.mark.parametrize("broken", [False, True], ids=["served", "by itself"])
def test_a_rank_is_as_if_started_in_its_proxys_place(tmp_path: Path, broken: bool) -> None:
    (place := tmp_path / "ä").mkdir()
    core = min(os.sched_getaffinity(0))

    def set_up() -> None:
        os.chdir(place)
        os.umask(0o137)
        os.nice(3)
        os.sched_setaffinity(0, {core})
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with rank(tmp_path, HAS, broken=broken, preexec_fn=set_up) as (proxy,):
        said = proxy.communicate("told", 30)[0].splitlines()
    assert said == [f"ä=b told {place} 0o137", f"{{{core}}} 100 {os.nice(0) + 3} {not broken}"]


def test_a_rank_knows_who_started_its_proxy_and_has_luck_of_its_own(tmp_path: Path) -> None:
    body = "print(launcher(), random.random(), numpy.random.random())"
    with rank(tmp_path, body, count=2) as proxies:
        said = [proxy.communicate(timeout=120)[0].split() for proxy in proxies]
    assert {words[0] for words in said} == {str(os.getpid())}
    assert len({number for words in said for number in words[1:]}) == 4


@pytest.mark.parametrize(
    ("strike", "code", "word"),
    [
        (lambda proxy, rank: os.kill(proxy, signal.SIGKILL), -signal.SIGKILL, b""),
        (lambda proxy, rank: os.kill(rank, signal.SIGKILL), -signal.SIGKILL, KILLED_LINE % (7, 9)),
        (lambda proxy, rank: os.kill(parent(rank), signal.SIGKILL), -signal.SIGKILL, KILLED_LINE % (7, 9)),
        (lambda proxy, rank: os.kill(proxy, signal.SIGTERM), -signal.SIGTERM, LEFT_LINE % 7),
    ],
    ids=["proxy", "rank", "fork server", "proxy, softly"],
)
def test_none_of_them_outlives_another(
    tmp_path: Path, strike: Callable[[int, int], None], code: int, word: bytes
) -> None:
    """Who was killed by others than the launcher is told to that."""
    body = "import ctypes; ctypes.CDLL(None).prctl(1, signal.SIGKILL); print('there', flush=True); time.sleep(60)"
    said = tmp_path / "said"
    with said.open("wb") as stderr, rank(tmp_path, body, stderr=stderr) as (proxy,):
        assert proxy.stdout.readline() == "there\n"
        assert eventually(lambda: process_of(proxy.pid) != proxy.pid, 30), "the proxy hears of it a moment later"
        process = process_of(proxy.pid)
        strike(proxy.pid, process)
        assert proxy.wait(30) == code
        assert eventually(lambda: not Path(f"/proc/{process}").exists(), 30)
    assert said.read_bytes() == word


def test_a_signal_to_the_proxy_is_the_ranks(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(5)); print('there', flush=True); time.sleep(60)"
    with rank(tmp_path, body) as (proxy,):
        proxy.stdout.readline()
        proxy.send_signal(signal.SIGUSR1)
        assert proxy.wait(30) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_fork_server_hangs_up_on_another_user(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER.format(root=str(Path(__file__).parents[2]), broken=False))
    ask = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
os.setuid(65534 if sys.argv[2] == "other" else 0)
server.connect("\\0" + sys.argv[1])
try:
    socket.send_fds(server, [b"the\\0arguments"], [0, 1, 2])
    print(len(server.recv(4)))
except OSError:
    print(0)
"""
    with fork_server([sys.executable, "-P", str(tmp_path / "worker.py")]) as command:
        asked = [sys.executable, "-c", ask, command[4]]  # its address
        said = [subprocess.run([*asked, who], capture_output=True, check=True).stdout for who in ("same", "other")]
    assert said == [b"4\n", b"0\n"]


def test_a_doorbell_that_is_rung_without_end_lets_its_rank_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Doorbell("test", os.getpid(), [os.getpid()])
    rings = 0

    def recv(_: int) -> bytes:
        nonlocal rings
        rings += 1
        assert rings <= RINGS, "a wait does not end"
        return b"\1"

    bell.ring(os.getpid())
    with monkeypatch.context() as patched:
        patched.setattr(bell, "_bell", SimpleNamespace(fileno=bell._bell.fileno, recv=recv))  # type: ignore[union-attr]
        bell.wait(1)
    assert rings == RINGS
    bell.close()


def test_the_fork_server_ends_with_what_it_was_for(tmp_path: Path) -> None:
    with rank(tmp_path, "print(os.getppid(), flush=True); time.sleep(60)") as (proxy,):
        server = int(proxy.stdout.readline())
    assert not Path(f"/proc/{server}").exists()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_fork_server_asks_no_gpu_before_it_forks() -> None:
    """A process whose parent has asked CUDA for its devices cannot use them."""
    code = """
import torch.cuda

def asked(*_, **__):
    raise AssertionError("CUDA is asked")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, asked)
torch._C._cuda_init = torch._C._cuda_getDeviceCount = asked
from rudra.worker import import_modules
import_modules()
assert "rudra.mpi.session" in __import__("sys").modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
