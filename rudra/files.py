"""Files that commands write: whole or not at all, with the user's umask, and never in another's place unasked."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rudra.errors import ResultsError

SWEEP_INDEX = "sweep.json"
"""Tells which runs of a directory are the points of a sweep."""

DENSEST = 1100
"""Bytes that a byte of a file may become: deflate does no better."""


def check_output(path: Path, force: bool) -> None:
    """Raises ResultsError if no file can be made at `path`; `force` allows to replace one."""
    directory = path.parent
    if not os.path.isdir(directory):
        raise ResultsError(f"{path}: directory {directory} does not exist")
    if os.path.isdir(path):
        raise ResultsError(f"{path}: is a directory; give the name of a file")
    if os.path.lexists(path) and not force:
        raise ResultsError(f"{path}: exists; give another name or --force")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ResultsError(f"{path}: directory {directory.resolve()} is not writable")


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which becomes `path` when all is written; what was there before stays until then.

    Raises:
        ResultsError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    direct = os.path.exists(target) and not os.path.isfile(target)  # a device or a pipe is written, not replaced
    part = target if direct else target.with_name(f".{target.name[:200]}-{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        if not direct:
            part.replace(target)
    except OSError as error:
        raise ResultsError(f"{path}: cannot write: {error.strerror or error}") from None
    finally:
        if not direct:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def is_own(descriptor: int) -> bool:
    """Whether an open file is a plain one of this user, and nobody else can write it."""
    about = os.fstat(descriptor)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "fuse.sshfs"}
"""File systems on which another node may see writes in another order than they were made."""


def file_system(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that a path is on; empty where nobody can tell.

    Args:
        path: an existing one.
        mounts: as in `/proc/self/mountinfo`, which is the default.
    """
    place, best, found = os.path.realpath(path), "", ""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    for line in mounts.splitlines():
        where, _, what = line.partition(" - ")
        point = where.split()[4].encode().decode("unicode_escape")  # blanks stand as \\040
        below = place == point or place.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, found = point, what.split()[0]
    return found
