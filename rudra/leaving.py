"""The end of a process: Python takes a quarter of a second to put torch's modules away, the kernel none.

To be imported before anything else that wants to be told of the end.
"""

import atexit
import os
import sys

_code: int | None = None


def soon(code: int) -> int:
    """The exit code given, with which this process ends as soon as its threads and exit handlers have."""
    global _code
    _code = code
    return code


@atexit.register
def _end() -> None:
    if _code is None:
        return
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):  # nobody reads it, or it is closed: Python knows what to do
        return
    os._exit(_code)
