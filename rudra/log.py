"""What Rudra tells while something runs: records of Python's logger "rudra", by default lines on standard error.

An application that wants the records puts a handler of its own in place of the logger's. `role` and `rank` of a record
are those of who speaks, "" and None where that is no rank. Progress, and the line with which a command ends, are no
records: somebody asked for them.
"""

import logging
import sys
from contextlib import suppress


class _Lines(logging.Handler):
    """Writes to what standard error is when there is something to tell."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more: the run goes on
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
log.propagate = False  # or an application that logs to standard error would say it again
log.addFilter(_speaker)
log.addHandler(_lines)


def speak_as(rank: int, role: str = "") -> None:
    """From now on this process speaks as that rank."""
    _speaker.rank, _speaker.role = rank, role
