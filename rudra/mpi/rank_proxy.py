"""Proxy of a rank: the small process that mpirun starts, and that stands for a fork of the fork server.

This file runs as a script, once for each rank. So it imports little, and nothing outside the standard library. If it
reaches no fork server, as on another node, its process becomes the rank itself. See `rudra.mpi.forkserver`.
"""

import ctypes
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that a proxy passes on to its rank."""

ORPHANED_S = 10.0
"""Time that a rank may take to end after mpirun has ended, before its proxy kills it."""

STANDS_FOR = "for-"
"""Prefix of the name of a proxy's process. The number of the rank's process follows. There is no space: SLURM (plugin
proctrack/linuxproc) would not find the process, and could not signal it."""

KILLED_LINE, LEFT_LINE = b"\x1ekilled %d %d\n", b"\x1eleft %d\n"
"""Lines that a proxy writes on standard error for the launcher. The first names a killed rank and the signal. The
second names a rank that failed in another way, such as by a signal that was passed on."""

STATUS = struct.Struct("i")
"""Number of a rank's process, then its status at its end: the fork server's two answers."""

WORKER = (sys.executable, "-P", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "worker.py"))
"""Command of a rank, without its arguments."""

_CREDENTIALS = struct.Struct("3i")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the process at the other end of a connection, and its user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process, user


def stand_for(address: str, arguments: list[str]) -> None:
    """Requests a rank and ends when the rank ends. Returns only if no fork server can be reached."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # passed on, so that the rank can end in order
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())  # a signal right before a blocking call does not interrupt the call
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as server:
        told = b""
        with suppress(OSError):
            server.connect(f"\0{address}")
            if peer(server)[1] == os.geteuid():
                socket.send_fds(server, [os.fsencode("\0".join(arguments))], [0, 1, 2])
                told = server.recv(STATUS.size)
        if not told:
            _no_longer_passed_on()
            with suppress(BlockingIOError):
                for caught in woken.recv(4096):
                    os.kill(os.getpid(), caught)
            return
        (rank,), parent = STATUS.unpack(told), os.getppid()
        libc.prctl(_PR_SET_NAME, f"{STANDS_FOR}{rank}".encode())
        passed_on = set[int]()
        left_s = None  # until mpirun has ended, it ends a rank that does not end itself
        while True:
            ready, *_ = select.select([server, woken], [], [], left_s)
            if server in ready:
                break
            numbers = list(woken.recv(4096)) if ready else [signal.SIGKILL]
            if signal.SIGTERM in numbers:
                numbers.append(signal.SIGCONT)  # so that a stopped rank receives the request to end
            passed_on.update(numbers)
            with suppress(ProcessLookupError):
                for each in numbers:
                    os.kill(rank, each)
            if os.getppid() != parent:
                left_s = ORPHANED_S
        told = server.recv(STATUS.size)
    _no_longer_passed_on()
    code = os.waitstatus_to_exitcode(STATUS.unpack(told)[0]) if told else -signal.SIGKILL
    if code and (world_rank := os.environ.get("OMPI_COMM_WORLD_RANK", "").encode()).isdigit():
        killed = code < 0 and -code not in passed_on
        with suppress(OSError):
            os.write(2, KILLED_LINE % (int(world_rank), -code) if killed else LEFT_LINE % int(world_rank))
    if code < 0:
        import resource  # only few proxies need it

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one, if any
        os.kill(os.getpid(), -code)
    os._exit(code)


def _no_longer_passed_on() -> None:
    signal.set_wakeup_fd(-1)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    address, *command = sys.argv[1:]
    stand_for(address, command[len(WORKER) :])
    os.execv(command[0], command)
