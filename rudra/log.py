"""Messages of Rudra during a run or a command: records of Python's logger "rudra", by default on standard error.

An application that wants the records replaces the logger's handler. A record's `role` and `rank` describe its sender.
They are "" and None outside of ranks. Progress, and the last line of a command, are no records, because the
user requested them.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class _Lines(logging.Handler):
    """Handler that writes to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # standard error has no reader any more: the run continues
            print(self.format(record), file=sys.stderr, flush=True)


class _Speaker(logging.Filter):
    role: str = ""
    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__ = {"role": self.role, "rank": self.rank, **record.__dict__}
        return True


_speaker = _Speaker()
_lines = _Lines()
_lines.setFormatter(logging.Formatter("rudra: %(message)s"))

log = logging.getLogger("rudra")
log.setLevel(logging.INFO)
log.propagate = False  # otherwise an application that logs to standard error would repeat it
log.addFilter(_speaker)
log.addHandler(_lines)


@contextmanager
def only_errors() -> Iterator[None]:
    """Leaves out records below the level of errors, of runs whose results are only a step to an answer."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def speak_as(rank: int, role: str = "") -> None:
    """Marks the following records of this process with that role and rank."""
    _speaker.rank, _speaker.role = rank, role
