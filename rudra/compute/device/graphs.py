"""Graphs: work that a device has recorded, and repeats without the host's code between its operations."""

from abc import ABC, abstractmethod
from pathlib import Path
from traceback import walk_tb

_ABOUT_NOTHING = ("torch.", "rudra.compute.device.")


class Graph(ABC):
    """Recorded work. It reads and writes the same memory each time."""

    @property
    def valid(self) -> bool:
        """Whether it may be repeated. If not, it must be recorded again."""
        return True

    @abstractmethod
    def replay(self) -> None:
        """Appends the work to the stream that the host uses now."""


class NotRecordedError(Exception):
    """Work cannot be repeated. The text says why."""


def waited(error: BaseException) -> str:
    """Returns the reason that work cannot be repeated, and the place in its code, for an error while it was recorded.

    Torch's own code, and that of devices, is no such place. The error that came first is the reason.
    """
    while error.__context__ is not None:
        error = error.__context__
    frames = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(frame.f_code.co_filename, line) for module, frame, line in frames if not module.startswith(_ABOUT_NOTHING)]
    reason = str(error).partition("\n")[0].strip().rstrip(".")
    return f"{reason} (at {Path(own[-1][0]).name}:{own[-1][1]})" if own else reason
