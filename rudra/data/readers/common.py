"""Common parts of readers: their results, and compressed files whose damage is reported in one readable line."""

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import math
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Collection, Iterator
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
"""Exceptions from reading a damaged file."""

_PIECE = 1 << 22  # bytes to decompress at a time
_COMPRESSED = 1 << 16  # bytes to decompress at a time if little data may become much
_LONGEST = 1 << 28  # maximum bytes of a line
_NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class _Zstandard(io.RawIOBase):
    """Content of all frames of a .zst file. zstandard's own reader does not notice a truncated file."""

    def __init__(self, file: Path, mode: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{file}: needs zstandard: pip install 'rudra[csv]'") from None
        self._source, self._library = file.open("rb"), zstandard
        self._frame: Any = None  # current frame
        self._left, self._found = b"", b""  # not decompressed yet; decompressed, and not read yet

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
    """Result of a reader, before the limits of the job are applied.

    Inputs are (N, *input_shape). Targets are int64 (N,) for class labels, float32 0 or 1 (N, classes) for several
    labels per sample, int64 (N, T) for sequences, and floating-point (N,) or (N, classes) for regression.

    Attributes:
        input_shape: Shape of one sample.
        classes: Number of outputs of the model for a target.
        scale: Factor of the inputs if the job gives none.
        density: Fraction of the inputs' numbers that is stored, if the others are 0. None: all are stored.
        counts: Split -> number of samples, whether the split was read or not. A missing test set has no entry.
        pairs: Split -> inputs and targets, for splits that were read.
    """

    input_shape: tuple[int, ...]
    classes: int
    scale: float
    density: float | None = field(default=None, kw_only=True)
    counts: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, tuple[Source, Source]] = field(default_factory=dict)


def check_labels(labels: npt.NDArray[np.int64], classes: int, where: str) -> None:
    """Raises DataError that names the first label outside 0 … classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(f"{where}: sample {first} has label {labels[first]}; valid: 0 to {classes - 1}")


def class_count(table: DataTable, found: int, where: str) -> int:
    """Returns the job's number of classes, by default the number found in the data.

    Raises:
        ConfigError: The job's number is too small.
        DataError: There is only one class.
    """
    if table.classes is not None and table.classes < found:
        raise ConfigError(f"[data] classes: {table.classes}, but {where} has {found}")
    if max(found, table.classes or 0) < 2:
        raise DataError(f"{where}: all targets are the same")
    return table.classes or found


def no_options(table: DataTable) -> None:
    """Raises ConfigError if the job has options."""
    if table.options:
        raise ConfigError(f"[data] {table.name} takes no options, not {', '.join(table.options)}")


def path_of(table: DataTable) -> Path:
    """Returns the file or directory of a job's data."""
    if table.path is None:
        raise DataError(f"[data] name = {table.name} needs path, the place of its files")
    if not os.path.exists(table.path):
        raise DataError(f"{table.path}: no such file or directory; --set data.path=PLACE says where the data is")
    return table.path


def files_of(table: DataTable, test: str | None) -> dict[str, Path]:
    """Returns the training file of a job's data and, if it has a name, the test file next to it."""
    train = path_of(table)
    return {"train": train} if test is None else {"train": train, "test": train.parent / test}


def existing(file: Path) -> Path:
    """Returns the path if it is a regular file. Opening a pipe would block."""
    if not os.path.isfile(file):
        raise DataError(f"{file}: {'is a directory, not a file' if os.path.isdir(file) else 'no such file'}")
    return file


def entries_in(directory: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory, by name.

    Raises:
        DataError: The directory cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{directory}: cannot be read: {error.strerror or error}") from None


def first_of(directory: Path, name: str) -> Path:
    """Returns the file of a name, uncompressed if possible, otherwise compressed with gzip."""
    names = [name, f"{name}.gz"]
    for candidate in names:
        if os.path.isfile(directory / candidate):
            return directory / candidate
    raise DataError(f"{directory}: there is no file {' or '.join(names)}")


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file's decompressed content.

    Raises:
        DataError: The file cannot be read, or its compressed stream is truncated or damaged.
    """
    try:
        with _OPENERS.get(file.suffix, open)(existing(file), "rb") as stream:
            yield stream
    except DAMAGE as error:
        raise DataError(f"{file}: cannot be read, perhaps truncated or corrupt: {one_line(error)}") from None


def content_of(file: Path, size: int = sys.maxsize) -> bytearray:
    """Returns up to `size` bytes of decompressed content. Memory grows only with the actual content.

    Raises:
        DataError: As in `opened`.
    """
    with opened(file) as stream:
        return read(stream, size)


def read(stream: IO[bytes], size: int) -> bytearray:
    """Returns up to `size` remaining bytes of a stream."""
    found = bytearray()
    while len(found) < size and (piece := stream.read(min(_PIECE, size - len(found)))):
        found += piece
    return found


def blocks(file: Path) -> Iterator[bytes]:
    """Yields decompressed content without a byte order mark, in pieces of some megabytes that end at the end of a line.

    Raises:
        DataError: As in `opened`, or a line has more than 256 MiB.
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
    """Parses numbers separated by white space. Returns None, or fewer numbers than words, if a word is not a number."""
    if not text.strip():
        return np.empty(0)
    try:
        return np.fromstring(text, sep=" ")
    except ValueError:
        return None


def is_number(text: bytes, largest: float = math.inf) -> bool:
    """Returns whether a word is a decimal number, at most `largest` in magnitude."""
    return _NUMBER.fullmatch(text) is not None and abs(float(text)) <= largest


def some(names: Collection[str]) -> str:
    """Lists the first of many names for an error message."""
    return ", ".join(itertools.islice(names, 20)) + (", …" if len(names) > 20 else "")


def shown(text: bytes) -> str:
    """Formats a word of a file for an error message."""
    readable = text.decode("utf-8", "replace")
    return repr(readable if len(readable) <= 40 else readable[:37] + "...")
