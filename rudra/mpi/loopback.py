"""Has a run whose ranks are all on this machine listen on the loopback interface only.

Open MPI listens on all interfaces, whatever it is told: mpirun for its daemons on other nodes, and ranks for the ranks
there. Where there are no other nodes, each rank binds its own sockets to the loopback interface once MPI has started.
The launcher, which is mpirun's parent, takes a copy of each socket of mpirun and does the same.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

_INCLUDE, _EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"

_PIDFD_GETFD = 438  # on all architectures
_INTERNET = {socket.AF_INET, socket.AF_INET6}


def is_one_machine(env: Mapping[str, str]) -> bool:
    """Whether all ranks of a run are on this machine, as Open MPI's variables of one of them have it."""
    here = env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return here is not None and here == env.get("OMPI_COMM_WORLD_SIZE")


def choose_loopback(env: MutableMapping[str, str]) -> bool:
    """Has Open MPI connect ranks by the loopback interface, if all are on this machine; whether it does.

    Args:
        env: of a rank whose MPI has not started; a choice of the user's stays.
    """
    if not is_one_machine(env) or _INCLUDE in env or _EXCLUDE in env:
        return False
    env[_INCLUDE] = "lo"
    return True


def listen_on_loopback(process: int) -> None:
    """Binds what a process listens on to the loopback interface, as far as the kernel lets this one do so.

    Args:
        process: this one, or another of this user; the kernel may want that to be a child of this one.
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
