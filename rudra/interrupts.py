"""Handling of Ctrl-C: at once while the command's Python is still importing, later in order. And of SIGTERM like it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def leave_at_once() -> None:
    """Lets Ctrl-C end this process at once, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Lets Ctrl-C raise an exception again, as is Python's default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def terminations() -> Iterator[None]:
    """Lets SIGTERM, as batch systems send it, raise the exception of Ctrl-C. Does nothing outside the main thread."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(1)
