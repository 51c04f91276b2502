"""The one way in which tests wait for what other processes do, which can only be polled.

Limits here and in tests are for what hangs, and none says how fast something is: the machine may be busy.
"""

import time
from collections.abc import Callable


def eventually(comes: Callable[[], object], within_s: float = 240.0, every_s: float = 0.05) -> bool:
    """Whether a condition holds within that time; returns as soon as it does."""
    end = time.monotonic() + within_s
    while not comes():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True
