"""The machine of this process: cores, memory, processor. Also ties the process to its parent's end."""

import ctypes
import os
import platform
import signal
import sys
from contextlib import suppress
from pathlib import Path

RANK_BYTES = 30 << 20
"""Memory of each rank before it has a model: a fork of a process with torch, and MPI's own memory (measured with Open
MPI 5 on Linux: 31 to 37 MB)."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # not after a fork, which must load nothing


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Linux: has the kernel send this process a signal when its parent ends. It may be a `preexec_fn`."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)


def memory_file(name: str) -> int:
    """Returns a descriptor of a new file without a name, which only processes of this user can open.

    Raises:
        OSError, AttributeError: the system has no such files.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(file, 0o600)
    return file


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_mask() -> int:
    """Returns the cores that this process may use, each as a bit."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(cores())
    return sum(1 << core for core in usable)


def processor() -> str:
    """Returns the name of this machine's processor, as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def free_memory() -> int:
    """Returns the bytes that processes may still use here, limited by the machine's memory and the control group."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = [int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024]
    with suppress(OSError, ValueError, IndexError):
        found.append(max(0, _group_memory("max") - _group_memory("current")))
    return min(found)


def memory_limit() -> int:
    """Returns the bytes of memory that this machine has, or its control group may use."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, IndexError):
        found.append(_group_memory("max"))
    return min(found)


def _group_memory(name: str) -> int:
    """Returns a number of the memory controller of this control group.

    Raises:
        OSError, ValueError, IndexError: There is no control group of version 2, or it has no limit.
    """
    group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text(encoding="utf-8").split("::/")[1].strip()
    return int((group / f"memory.{name}").read_text())
