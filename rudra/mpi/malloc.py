"""Settings of glibc's memory allocator: which freed memory it keeps for the next step, and when it returns memory."""

import ctypes
from contextlib import suppress


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
