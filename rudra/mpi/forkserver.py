"""Fork server: the ranks of this node are forks of one process that has imported everything, which saves imports.

mpirun starts a small proxy process per rank (`rudra.mpi.rank_proxy`). The proxy asks the fork server for a rank, and
hands over its standard streams and environment. It then passes signals on, and ends when the rank ends. If there is no
fork server, as on another node, the proxy becomes the rank itself.

The fork server listens on an abstract socket, which has no mode. So each end asks the kernel for the user of the other
end (`SO_PEERCRED`) before it reads or sends anything, and closes the connection if the users differ.
"""

import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rudra.mpi import rank_proxy
from rudra.mpi.rank_proxy import STANDS_FOR, STATUS, WORKER, peer

ENDS_S = 3.0
"""Time that the fork server may take to end after its ranks should have ended."""

_PROXY, SERVER = "RUDRA_PROXY", "RUDRA_FORK_SERVER"  # variables of ranks, and of processes that may use a fork server
LAUNCHED_BY = "RUDRA_LAUNCHED_BY"
"""Environment variable of a fork server: number of the process that started it."""

_ARGUMENTS_BYTES = 1 << 16


@contextmanager
def fork_server(worker: Sequence[str] = WORKER) -> Iterator[list[str]]:
    """Runs a fork server inside the context, for this process and its children. Uses an existing one if there is one.

    Args:
        worker: command of a rank, without its arguments. With `--serve` and two descriptors it is the command of the
            fork server.

    Yields:
        The command for mpirun to start, without the arguments of a rank.
    """
    address, _, whose = os.environ.get(SERVER, "").partition(" ")
    if sys.platform != "linux":
        yield [*worker]
    elif whose == " ".join(worker):
        yield _proxy(address, worker)
    else:
        with _started(worker) as address:
            os.environ[SERVER] = f"{address} {' '.join(worker)}"
            try:
                yield _proxy(address, worker)
            finally:
                os.environ.pop(SERVER, None)


def _proxy(address: str, worker: Sequence[str]) -> list[str]:
    return [sys.executable, "-S", "-P", rank_proxy.__file__, address, *worker]


@contextmanager
def _started(worker: Sequence[str]) -> Iterator[str]:
    """Starts a fork server and yields its address."""
    address = f"rudra-{uuid.uuid4().hex}"
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        kept = (listener.fileno(), theirs.fileno())
        about = {LAUNCHED_BY: str(os.getpid()), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        server = subprocess.Popen(
            [*worker, "--serve", *map(str, kept)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # if it fails, the ranks try the same themselves and report the reason
            env={**os.environ, **about},
            pass_fds=kept,
            start_new_session=True,
        )
        listener.close()
        theirs.close()
        try:
            yield address
        finally:
            ours.close()
            try:  # it ends with the last of its ranks
                server.wait(ENDS_S)
            except subprocess.TimeoutExpired:  # it is stopped, or one of them is
                server.kill()
                server.wait()


def serve(listener: socket.socket, launcher: socket.socket) -> list[str]:
    """Forks a rank for each proxy that asks. Returns only in the ranks, with their arguments.

    Args:
        listener: socket for connections of proxies.
        launcher: socket that reaches its end when no more ranks will be requested.
    """
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    proxies: dict[int, socket.socket] = {}  # process of the rank -> connection to its proxy
    with selectors.DefaultSelector() as selector:
        for source in (woken, listener, launcher):
            selector.register(source, selectors.EVENT_READ)
        waits = True
        while waits or proxies:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
                for rank, status in _ended():
                    proxy = proxies.pop(rank)
                    if proxy in selector.get_map():
                        selector.unregister(proxy)
                    _answer(proxy, status)
                    proxy.close()
            for rank, proxy in proxies.items():
                if proxy in ready:  # a proxy sends nothing here: it has died
                    selector.unregister(proxy)
                    os.kill(rank, signal.SIGKILL)
            if launcher in ready:
                selector.unregister(launcher)
                waits = False
            if listener in ready and (asked := _asked(listener)) is not None:
                proxy, arguments, place = asked
                if not (rank := os.fork()):
                    break
                for stream in place.streams:
                    os.close(stream)
                proxies[rank] = proxy
                selector.register(proxy, selectors.EVENT_READ)
                _answer(proxy, rank)
        else:
            os._exit(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for held in (woken, wakes, listener, launcher, proxy, *proxies.values()):
        held.close()  # a process that waits for the end of one of them must not wait for this process
    _take(place)
    return arguments


class _Place(NamedTuple):
    """Properties of a proxy that its rank takes over.

    Attributes:
        proxy: process of the proxy.
        streams: descriptors of standard input, output and error.
        environment: environment variables and their values.
        umask: mode mask for new files.
    """

    proxy: int
    streams: list[int]
    environment: dict[bytes, bytes]
    umask: int


def _asked(listener: socket.socket) -> tuple[socket.socket, list[str], _Place] | None:
    """Accepts a proxy. Returns it with the rank's arguments and place, or None for a foreign user or a failed read."""
    proxy, _ = listener.accept()
    process, user = peer(proxy)
    streams: list[int] = []
    if user == os.geteuid():
        with suppress(OSError, StopIteration):
            text, streams, _, _ = socket.recv_fds(proxy, _ARGUMENTS_BYTES, 3)
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            environment = {name: value for name, _, value in (text.partition(b"=") for text in variables) if name}
            status = Path(f"/proc/{process}/status").read_text().splitlines()
            umask = int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
            if len(streams) == 3:
                return proxy, os.fsdecode(text).split("\0"), _Place(process, streams, environment, umask)
    for stream in streams:
        os.close(stream)
    proxy.close()  # the proxy then becomes the rank itself
    return None


def _answer(proxy: socket.socket, number: int) -> None:
    with suppress(OSError):  # it has died, which the loop notices next
        proxy.sendall(STATUS.pack(number))


def _ended() -> Iterator[tuple[int, int]]:
    """Yields the processes that have ended, and their statuses."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _take(place: _Place) -> None:
    """Gives this process the proxy's environment, directory, limits and streams, and a new random state."""
    os.environb.clear()
    os.environb.update(place.environment)
    os.environ[_PROXY] = str(place.proxy)
    os.umask(place.umask)
    os.chdir(f"/proc/{place.proxy}/cwd")
    os.sched_setaffinity(0, os.sched_getaffinity(place.proxy))
    for name in filter(re.compile("RLIMIT_").match, dir(resource)):
        with suppress(OSError, ValueError):  # without privileges limits can only be lowered
            resource.setrlimit(getattr(resource, name), resource.prlimit(place.proxy, getattr(resource, name)))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, place.proxy))
    for number, stream in enumerate(place.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:  # Python's own generator reseeds itself
        sys.modules["numpy.random"].seed()


def launcher() -> int:
    """Returns the process that started this rank or its proxy, or the adopting process if that one has ended."""
    proxy = os.environ.get(_PROXY)
    if proxy is None:
        return os.getppid()
    with suppress(OSError):
        return int(Path(f"/proc/{proxy}/stat").read_text().rpartition(")")[2].split()[1])
    return 1


def process_of(started: int) -> int:
    """Returns the process of a rank, given the process that mpirun started for it."""
    with suppress(OSError, ValueError):
        name = Path(f"/proc/{started}/comm").read_text()
        if name.startswith(STANDS_FOR):
            return int(name.removeprefix(STANDS_FOR))
    return started
