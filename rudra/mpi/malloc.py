"""What glibc is told of memory: what to keep for the next step, and when to give back what is free."""

import ctypes
from contextlib import suppress


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next step, instead of faulting hundreds of pages in again each time."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: as large as glibc allows
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def give_back_freed_memory() -> None:
    """Lets glibc return what is free to the system."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
