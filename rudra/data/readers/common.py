"""What readers share: what they give, and files of any compression whose damage is one readable line."""

import bz2
import codecs
import gzip
import io
import lzma
import math
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rudra.data.sources import Source
from rudra.errors import ConfigError, DataError, one_line
from rudra.job.tables import DataTable

SPLITS = ("train", "test")
DAMAGE = (OSError, EOFError, ValueError, MemoryError, zlib.error, lzma.LZMAError, tarfile.TarError)
"""What reading a damaged file raises."""

_PIECE = 1 << 22  # bytes that are decompressed at a time
_COMPRESSED = 1 << 16  # bytes that are decompressed at a time where little may become much
_LONGEST = 1 << 28  # bytes of a line
_NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class _Zstandard(io.RawIOBase):
    """Content of a .zst file, of all its frames; zstandard's own reader takes a file that was cut for a whole one."""

    def __init__(self, file: Path, mode: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{file}: needs zstandard: pip install 'rudra[csv]'") from None
        self._source, self._library = file.open("rb"), zstandard
        self._frame: Any = None  # under way
        self._left, self._found = b"", b""  # not decompressed yet; decompressed, and not asked for yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._found:
            self._left = self._left or self._source.read(_COMPRESSED)
            if not self._left:
                if self._frame is not None:
                    raise EOFError("the last frame is cut")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._found = self._frame.decompress(self._left)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._left = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._found))
        buffer[:count], self._found = self._found[:count], self._found[count:]
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OPENERS[".zst"] = lambda file, mode: io.BufferedReader(_Zstandard(file, mode), _COMPRESSED)


@dataclass(slots=True)
class Arrays:
    """What a reader found, the limits of the job not yet applied.

    Inputs are (N, *input_shape). Targets are class labels int64 (N,); of several labels at once float32 0 or 1
    (N, classes); of sequences int64 (N, T); of regression floating-point (N,) or (N, classes).

    Attributes:
        input_shape: of one sample.
        classes: numbers that the model gives for a target.
        scale: factor that the job gets if it names none.
        density: share of the inputs' numbers that is stored, where the others are 0; None: all are.
        counts: split -> samples, whether it was read or not; no test where there is none.
        pairs: split -> inputs and targets, for those that were read.
    """

    input_shape: tuple[int, ...]
    classes: int
    scale: float
    density: float | None = field(default=None, kw_only=True)
    counts: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, tuple[Source, Source]] = field(default_factory=dict)


def check_labels(labels: npt.NDArray[np.int64], classes: int, where: str) -> None:
    """Raises DataError naming the first label that is outside 0 … classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(f"{where}: sample {first} has label {labels[first]}; valid: 0 to {classes - 1}")


def class_count(table: DataTable, found: int, where: str) -> int:
    """The job's number of classes, by default as many as were found.

    Raises:
        ConfigError: the job's are too few.
        DataError: there is only one.
    """
    if table.classes is not None and table.classes < found:
        raise ConfigError(f"[data] classes: {table.classes}, but {where} has {found}")
    if max(found, table.classes or 0) < 2:
        raise DataError(f"{where}: all targets are the same")
    return table.classes or found


def no_options(table: DataTable) -> None:
    """Raises ConfigError where there are options."""
    if table.options:
        raise ConfigError(f"[data] {table.name} takes no options, not {', '.join(table.options)}")


def path_of(table: DataTable) -> Path:
    """The file or directory of a job's data."""
    if table.path is None:
        raise DataError(f"[data] name = {table.name} needs path, the place of its files")
    if not os.path.exists(table.path):
        raise DataError(f"{table.path}: no such file or directory; --set data.path=PLACE says where the data is")
    return table.path


def existing(file: Path) -> Path:
    """The file, if it is one: a pipe would be waited for."""
    if not os.path.isfile(file):
        raise DataError(f"{file}: {'is a directory, not a file' if os.path.isdir(file) else 'no such file'}")
    return file


def entries_in(directory: Path) -> list[os.DirEntry[str]]:
    """What a directory holds, by name.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{directory}: cannot be read: {error.strerror or error}") from None


def first_of(directory: Path, name: str) -> Path:
    """The file of that name, plain or else compressed with gzip."""
    names = [name, f"{name}.gz"]
    for candidate in names:
        if os.path.isfile(directory / candidate):
            return directory / candidate
    raise DataError(f"{directory}: there is no file {' or '.join(names)}")


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """A file's decompressed content.

    Raises:
        DataError: the file cannot be read, or its compressed stream is cut or damaged.
    """
    try:
        with _OPENERS.get(file.suffix, open)(existing(file), "rb") as stream:
            yield stream
    except DAMAGE as error:
        raise DataError(f"{file}: cannot be read, perhaps truncated or corrupt: {one_line(error)}") from None


def content_of(file: Path, size: int = sys.maxsize) -> bytearray:
    """Decompressed content, as far as its first `size` bytes; no more memory is taken than there is content.

    Raises:
        DataError: as of `opened`.
    """
    with opened(file) as stream:
        return read(stream, size)


def read(stream: IO[bytes], size: int) -> bytearray:
    """What is left of a stream, as far as its first `size` bytes."""
    found = bytearray()
    while len(found) < size and (piece := stream.read(min(_PIECE, size - len(found)))):
        found += piece
    return found


def blocks(file: Path) -> Iterator[bytes]:
    """Decompressed content without a byte order mark, in pieces of some megabytes that end where a line ends.

    Raises:
        DataError: as of `opened`; or a line has more than 256 MiB.
    """
    with opened(file) as stream:
        rest = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        while piece := stream.read(_PIECE):
            head, newline, tail = piece.rpartition(b"\n")
            if newline:
                yield rest + head + newline
                rest = tail
            else:
                rest += tail
            if len(rest) > _LONGEST:
                raise DataError(f"{file}: has a line of more than {_LONGEST:,} bytes: is it a text file?")
    if rest:
        yield rest


def numbers_of(text: bytes) -> npt.NDArray[np.float64] | None:
    """All numbers of a text with white space between them; None, or fewer than there are words, where one is none."""
    if not text.strip():
        return np.empty(0)
    try:
        return np.fromstring(text, sep=" ")
    except ValueError:
        return None


def is_number(text: bytes, largest: float = math.inf) -> bool:
    """Whether a word is a decimal number, and not beyond the largest."""
    return _NUMBER.fullmatch(text) is not None and abs(float(text)) <= largest


def shown(text: bytes) -> str:
    """A word of a file, for an error's text."""
    readable = text.decode("utf-8", "replace")
    return repr(readable if len(readable) <= 40 else readable[:37] + "...")
