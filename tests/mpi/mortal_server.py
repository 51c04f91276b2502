"""Launches whose server dies while it sends weights."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any


def launch_with_mortal_server(output: str) -> None:
    """Lets the server of the first launch die in the middle of weights that it sends after its first checkpoint."""
    from rudra.mpi import launch

    plain, fates = launch.launch, [True]

    def launched(*about: Any, payload: dict[str, Any], **more: Any) -> Any:
        run = partial(run_mortal, Path(output).with_suffix(".ckpt")) if fates and fates.pop() else run_ranks
        return plain(*about, payload=partial(run, payload), **more)

    launch.launch = launched


def run_ranks(payload: dict[str, Any]) -> int:
    from rudra.mpi import session

    return session.run_ranks(**payload)[0]


def run_mortal(checkpoint: Path, payload: dict[str, Any]) -> int:
    from rudra.mpi.pull_buckets import WeightBuckets

    plain = WeightBuckets.pieces

    def pieces(*about: Any) -> Any:
        found = plain(*about)
        if found and checkpoint.exists():
            return DeadlyPieces(found)
        time.sleep(0.02)  # the run must not end before its first checkpoint is on a slow disk
        return found

    WeightBuckets.pieces = pieces  # type: ignore[method-assign]
    return run_ranks(payload)


class DeadlyPieces(list[Any]):
    """Pieces of which only some are sent."""

    def __iter__(self) -> Any:
        yield from self[:2]
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
