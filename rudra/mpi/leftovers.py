"""Removes files that killed runs of this user left behind, once it is certain that no process uses them any more.

The kernel grants a write lease on a file only if no process in any container has it open or mapped. A file system
without leases, such as NFS, keeps its leftovers.
"""

import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rudra.mpi.failures import is_stopped, lives
from rudra.mpi.forkserver import LAUNCHED_BY

SHARED_MEMORY = Path("/dev/shm")
YOUNG_S = 30.0
"""Smallest age of a file that may be removed, because its process may be about to open it again."""

_SEGMENT = re.compile(r"sm_segment\..+")  # shared memory of one rank, by Open MPI
_SESSION = re.compile(r"ompi\.(\d+)")  # directory of the mpirun with this process id
_PIECE = re.compile(r"\..+\.ckpt\.saved|\..+-\w+\.launch")  # part of a checkpoint, or file for the start of ranks


def remove_leftovers(results: Path) -> None:
    """Removes the leftovers of this machine, and those in a directory of results.

    Args:
        results: directory for the results of the next run.
    """
    for path in _named(SHARED_MEMORY, _SEGMENT):
        if is_unused(path):
            _remove(path)
    for path in _named(results, _PIECE):
        if is_unused(path):
            _remove(path)
    for path in _named(Path(tempfile.gettempdir()), _SESSION):
        owner = int(path.name.partition(".")[2])
        if not lives(owner) and all(map(is_unused, _files(path))):
            shutil.rmtree(path, ignore_errors=True)
    for process in _orphans():
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def is_unused(path: Path) -> bool:
    """Returns whether this is a file that no process has open, and that is not new."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or time.time() - about.st_mtime < YOUNG_S:
            return False
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _named(directory: Path, name: re.Pattern[str]) -> Iterator[Path]:
    """Yields this user's files in a directory whose names match."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                if name.fullmatch(path.name) and path.lstat().st_uid == os.geteuid():
                    yield path


def _files(directory: Path) -> list[Path]:
    """Returns the files in a directory and below. Another process may remove some of them at the same time."""
    return [Path(place) / name for place, _, names in os.walk(directory) for name in names]


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _orphans() -> Iterator[int]:
    """Yields stopped fork servers, and stopped children of fork servers, whose launcher has ended unnoticed.

    Only processes in this process's own PID namespace count, because launchers' process ids are comparable only there.
    """
    own_space = os.readlink("/proc/self/ns/pid")
    for place in Path("/proc").glob("[0-9]*"):
        process = int(place.name)
        with suppress(OSError, ValueError):
            if place.stat().st_uid != os.geteuid() or not is_stopped(process):
                continue
            if os.readlink(place / "ns" / "pid") != own_space or b"--serve" not in (place / "cmdline").read_bytes():
                continue
            marks = [each for each in (place / "environ").read_bytes().split(b"\0") if each.startswith(_MARK)]
            if marks and not any(lives(int(mark[len(_MARK) :])) for mark in marks):
                yield process


_MARK = f"{LAUNCHED_BY}=".encode()
