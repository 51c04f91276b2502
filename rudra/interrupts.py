"""Handling of Ctrl-C while the command's Python is still importing and nothing needs an orderly end or a message."""

import os
import signal
from types import FrameType


def leave_at_once() -> None:
    """Lets Ctrl-C end this process at once, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Lets Ctrl-C raise an exception again, as is Python's default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(1)
