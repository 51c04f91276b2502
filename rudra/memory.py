"""Memory of this process: how much it has, what glibc keeps for the next step, and when memory is returned."""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

GROWTH = 256 << 20
"""Bytes by which a process may grow before the objects of earlier runs are collected."""

_collected: dict[str, int] = {}


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, instead of faulting hundreds of pages in again each time."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: as large as glibc allows
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def give_back_freed_memory() -> None:
    """Makes glibc return free memory to the system."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def memory_bytes(name: str) -> int:
    """Returns a memory counter of Linux for this process, "VmRSS" (current) or "VmHWM" (peak), or 0 if unavailable."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024
    return 0


def bytes_text(size: int) -> str:
    """Returns a number of bytes with three digits, in MB or GB."""
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


def free_earlier_runs() -> None:
    """Frees the tensors of earlier runs in this process, which refer to each other, if it has grown by `GROWTH`.

    Python's collector counts objects, not bytes. Without this a process that trains many jobs keeps several of them.
    The first call only looks how large the process is.
    """
    size = memory_bytes("VmRSS")
    if size > _collected.setdefault("at", size) + GROWTH:
        gc.collect()
        give_back_freed_memory()
        _collected["at"] = memory_bytes("VmRSS")
