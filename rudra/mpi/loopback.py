"""Restricts a run on one machine to the loopback interface.

Open MPI listens on all interfaces, whatever its options are: mpirun for its daemons on other nodes, and ranks for ranks
on other nodes. If there are no other nodes, each rank binds its own sockets to the loopback interface after MPI has
started. The launcher, which is mpirun's parent, takes a copy of each socket of mpirun and does the same.
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
    """Returns whether all ranks of a run are on this machine, according to Open MPI's variables in one rank."""
    here = env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return here is not None and here == env.get("OMPI_COMM_WORLD_SIZE")


def choose_loopback(env: MutableMapping[str, str]) -> bool:
    """Makes Open MPI connect ranks by the loopback interface if all are on this machine, and returns whether it does.

    Args:
        env: environment of a rank whose MPI has not started. The user's own choice of interfaces has priority.
    """
    if not is_one_machine(env) or _INCLUDE in env or _EXCLUDE in env:
        return False
    env[_INCLUDE] = "lo"
    return True


def listen_on_loopback(process: int) -> None:
    """Binds the listening sockets of a process to the loopback interface, as far as the kernel allows it.

    Args:
        process: this process or another one of this user. The kernel may require a child of this process.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # it has ended
        handle = os.pidfd_open(process)
        try:
            for number in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):  # the socket was closed, or the kernel is old or forbids it
                    if os.readlink(f"/proc/{process}/fd/{number}").startswith("socket:"):
                        _bind_to_loopback(handle, int(number))
        finally:
            os.close(handle)


def _bind_to_loopback(process: int, number: int) -> None:
    """Binds one listening socket, given by its descriptor in the process, to the loopback interface."""
    copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        return
    with socket.socket(fileno=copy) as found:
        listens = found.family in _INTERNET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and not found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\0"):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
