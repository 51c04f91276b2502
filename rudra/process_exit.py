"""Fast end of a process: Python takes a quarter of a second to remove torch's modules, the kernel takes none.

Import it before any other module that registers an exit handler.
"""

import atexit
import os
import sys

_code: int | None = None


def soon(code: int) -> int:
    """Returns the given exit code. The process will end with it as soon as its threads and exit handlers have ended."""
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
    except (OSError, ValueError):  # the stream has no reader or is closed: Python handles it
        return
    os._exit(_code)
