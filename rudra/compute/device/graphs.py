"""Graphs: work that a device has recorded, and repeats without the host's code between its operations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb

_ABOUT_NOTHING = ("torch.", "rudra.compute.device.")


class Graph(ABC):
    """Recorded work. It reads and writes the same memory each time.

    Args:
        is_valid: Returns whether the work may be repeated. If not, it must be recorded again.

    Attributes:
        is_valid: As passed in.
    """

    def __init__(self, is_valid: Callable[[], bool]) -> None:
        self.is_valid = is_valid

    @abstractmethod
    def replay(self) -> None:
        """Appends the work to the stream that the host uses now."""


class Lanes:
    """Lanes of work that is recorded. The work of one lane is done in order. The base class does all work in order.

    Lane 0 is where the recorded work begins and ends.
    """

    def do(self, lane: int, work: Callable[[], object], after: Sequence[int] = ()) -> None:
        """Does work on a lane.

        Args:
            lane: Number of the lane.
            work: Uses the device.
            after: Lanes whose earlier work must be done before.
        """
        work()

    def join(self) -> None:
        """Lets the rest of the recorded work begin after all lanes."""


class NotRecordedError(Exception):
    """Work cannot be repeated. The text says why."""


def waited(error: BaseException) -> str:
    """Returns the reason that work cannot be repeated, and the place in its code, for an error while it was recorded.

    The place is never in torch, or in this package. The reason is the error that came first.
    """
    while error.__context__ is not None:
        error = error.__context__
    frames = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(frame.f_code.co_filename, line) for module, frame, line in frames if not module.startswith(_ABOUT_NOTHING)]
    reason = str(error).partition("\n")[0].strip().rstrip(".")
    return f"{reason} (at {Path(own[-1][0]).name}:{own[-1][1]})" if own else reason
