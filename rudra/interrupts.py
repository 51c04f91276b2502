"""Ctrl-C while the command's Python still imports: nothing has begun that needs an end in order, or a word."""

import os
import signal
from types import FrameType


def leave_at_once() -> None:
    """From now on Ctrl-C ends this process, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """From now on Ctrl-C is an exception as ever."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(1)
