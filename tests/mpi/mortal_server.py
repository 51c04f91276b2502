"""Launches whose server dies while it sends weights."""

import os
import signal
import time
from functools import partial
from typing import Any


def launch_with_mortal_server(sends: int) -> None:
    """Lets the server of the first launch die when it has sent a part of the weights of this send."""
    from rudra.mpi import launch

    plain, fates = launch.launch, [sends]

    def launched(*about: Any, payload: dict[str, Any], **more: Any) -> Any:
        return plain(*about, payload=partial(run_mortal, fates.pop() if fates else -1, payload), **more)

    launch.launch = launched


def run_mortal(sends: int, payload: dict[str, Any]) -> int:
    from rudra.mpi.pull_buckets import WeightBuckets
    from rudra.mpi.session import run_ranks

    plain, left = WeightBuckets.pieces, [sends]

    def pieces(*about: Any) -> Any:
        found = plain(*about)
        left[0] -= bool(found)
        return DeadlyPieces(found) if found and not left[0] else found

    WeightBuckets.pieces = pieces  # type: ignore[method-assign]
    return run_ranks(**payload)[0]


class DeadlyPieces(list[Any]):
    """Pieces of which only some are sent."""

    def __iter__(self) -> Any:
        yield from self[:2]
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
