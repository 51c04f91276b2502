"""Has a run whose ranks are all on this machine listen on the loopback interface only.

Open MPI's mpirun listens on all interfaces for its daemons on other nodes, whatever it is told. Where there are none,
the launcher, which is its parent, takes a copy of each such socket and binds it to the loopback interface.
"""

import ctypes
import os
import socket
import sys
from contextlib import suppress

_PIDFD_GETFD = 438  # on all architectures
_INTERNET = {socket.AF_INET, socket.AF_INET6}


def listen_on_loopback(process: int) -> None:
    """Binds what a process listens on to the loopback interface, as far as the kernel lets this one do so.

    Args:
        process: of this user; the kernel may want it to be a child of this one.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # it has ended
        handle = os.pidfd_open(process)
        try:
            for number in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):  # it was closed meanwhile, or an old kernel, or one that forbids it
                    if os.readlink(f"/proc/{process}/fd/{number}").startswith("socket:"):
                        _bind_to_loopback(handle, int(number))
        finally:
            os.close(handle)


def _bind_to_loopback(process: int, number: int) -> None:
    """Does so with one socket, by its descriptor in the process."""
    copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        return
    with socket.socket(fileno=copy) as found:
        listens = found.family in _INTERNET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and not found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\0"):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
