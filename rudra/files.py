"""Atomic writing of files, with the user's umask, and without replacing a file unless requested."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rudra.errors import ResultsError

SWEEP_INDEX = "sweep.json"
"""Name of the file that describes which runs of a directory are the points of a sweep."""

DENSEST = 1100
"""Largest ratio of decompressed to compressed bytes, which is the limit of deflate."""


def cache_directory() -> Path:
    """Returns the user's directory of measurements, which any of them may delete. It need not exist.

    Without a home directory it is a place where nothing is found and nothing can be written.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rudra"
    except RuntimeError:  # no HOME, and no user with this number, as in some containers
        return Path(os.devnull) / "rudra"


def check_output(path: Path, force: bool) -> None:
    """Raises ResultsError if no file can be created at `path`. `force` allows replacing an existing file."""
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
    """Yields a file to write, which replaces `path` when it is complete. Until then an existing file stays.

    Raises:
        ResultsError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    direct = os.path.exists(target) and not os.path.isfile(target)  # a device or a pipe is not replaced
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


def make_directory(directory: Path, hint: str = "") -> None:
    """Makes a directory if it is missing.

    Args:
        directory: the directory.
        hint: end of the error.

    Raises:
        ResultsError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{directory}: cannot write there: {error.strerror}{hint}") from None


@contextmanager
def locked(directory: Path, what: str) -> Iterator[None]:
    """Makes a directory if it is missing, and locks it against others that use it.

    Args:
        directory: the directory.
        what: name of its user, such as "sweep", for the error.

    Raises:
        ResultsError: it cannot be made or written, or another process uses it.
    """
    make_directory(directory)
    try:
        file = (directory / ".lock").open("a+")
    except OSError as error:
        raise ResultsError(f"{directory}: cannot write there: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResultsError(
                f"{directory}: another {what} is running there; wait, or give another --output"
            ) from None
        yield


def is_own(descriptor: int) -> bool:
    """Whether an open file is a regular file of this user that no other user can write."""
    about = os.fstat(descriptor)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "fuse.sshfs"}
"""File systems whose writes another node may see in a different order."""


def file_system(path: Path, mounts: str | None = None) -> str:
    """Returns the type of the file system of a path. Empty: unknown.

    Args:
        path: existing path.
        mounts: mount table in the format of `/proc/self/mountinfo`, which is the default.
    """
    place, best, found = os.path.realpath(path), "", ""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    for line in mounts.splitlines():
        where, _, what = line.partition(" - ")
        point = where.split()[4].encode().decode("unicode_escape")  # the file writes blanks as \\040
        below = place == point or place.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, found = point, what.split()[0]
    return found
