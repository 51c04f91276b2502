"""Result file that is open for reading. Its content is checked before it is used.

The writer uses HDF5's single-writer, multiple-reader (SWMR) mode from the start. In this mode neither data sets nor
attributes can be added, so all of them exist from the start, and variable data is in data sets. Flushed data survives
a killed writer. The file of a killed or running writer opens only in SWMR mode: `CheckedFile` does so, or by hand
`h5py.File(path, "r", swmr=True, locking=False)`.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from rudra.core.actions import TableName
from rudra.core.messages import Rows
from rudra.core.records import AVERAGE, EVENT, METRIC, STAGE, UPDATE_NORM
from rudra.errors import ResultsError, printable
from rudra.results import validation
from rudra.results.writer import DATASETS, FORMAT_VERSION, NORMS, OBJECTS, reason_of

# HDF5 doubles its pause after each of (by default) 100 attempts to read damaged metadata in SWMR mode, so practically
# never ends.
_READ_ATTEMPTS = 28


READABLE = tuple(range(5, FORMAT_VERSION + 1))
"""Versions of the format that can be read."""


class CheckedFile:
    """Result file that is open for reading.

    All methods that read raise ResultsError if the file is damaged or closed.

    Args:
        path: Path of the file.

    Attributes:
        path: Path of the file.
        live: Whether the file was open for writing when it was opened: its run continues, or was killed.
        attributes: Attributes of the file: name -> value.
        job: The job as it was run: table -> key -> value.
        has_norms: Whether the file has norms of gradients.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self.live = _open(path)
        try:
            with self.reading():
                values = validation.plain_attributes(self._file.attrs)
                self.attributes: dict[str, Any] = {name: decoded(value) for name, value in values.items()}
                missing = [name for name in OBJECTS if name not in self._file]
            version = self.attributes.get("format_version")
            if version is None:
                raise ResultsError(f"{path}: not a result file of Rudra")
            if version not in READABLE:
                known = f"{READABLE[0]} to {READABLE[-1]}"
                raise ResultsError(f"{path}: has format version {version}; this Rudra reads {known}")
            absent = validation.lacking(version)
            self.has_norms = not set(NORMS) <= {*missing}
            absent |= frozenset() if self.has_norms else frozenset(NORMS)
            if missing := [name for name in missing if name not in absent]:
                raise ResultsError(f"{path}: damaged: {', '.join(missing)} missing")
            self.attributes = validation.attributes(self.attributes, path)
            self.job = validation.job(self.attributes.get("job", "{}"), path)
            with self.reading():
                self._absent = absent
                for name in (name for name in DATASETS if name not in absent):
                    if self._file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
                        raise ValueError(f"/{name} is a link")
                    validation.dataset(self._file[name], name)
        except ResultsError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def refresh(self) -> None:
        """Opens the file again, unless it is `live`."""
        if not self.live:
            self._file.close()
            self._file, self.live = _open(self.path)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns any exception of HDF5 and NumPy into ResultsError."""
        try:
            yield
        except ResultsError:
            raise
        except Exception as error:  # a damaged file can cause almost any
            raise ResultsError(f"{self.path}: damaged or closed: {reason_of(error)}") from None

    def read(self, name: str) -> NDArray[Any]:
        """Returns all of a data set."""
        if name in self._absent:
            return np.zeros(0, validation.DTYPES[name])
        with self.reading():
            dataset = self._dataset(name)
            dtype, shape = dataset.dtype, dataset.shape
            validation.fits(math.prod(shape) * dtype.itemsize, name, self.path.stat().st_size)
            values = np.zeros(shape, dtype)
            if values.size:
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
            return self._checked(name, values)

    def row(self, name: str, place: int) -> NDArray[Any]:
        """Returns one row of a matrix."""
        with self.reading():
            dataset = self._dataset(name)
            validation.fits(dataset.shape[1] * dataset.dtype.itemsize, name, self.path.stat().st_size)
            found: NDArray[Any] = dataset[place]
            return found

    def last(self, name: TableName) -> tuple[int, Any]:
        """Returns the number of rows of a table, and its last row. An empty table has no last row."""
        with self.reading():
            dataset = self._dataset(name)
            count = len(dataset)
            return count, dataset[count - 1] if count else None

    def fixed(self, tensor: str) -> NDArray[Any]:
        """Returns the values of a tensor that is not trained."""
        with self.reading():
            return validation.fixed(self._file, tensor, self.path.stat().st_size)

    def _dataset(self, name: str) -> h5py.Dataset:
        """Returns a data set with the rows that its file has now."""
        dataset = self._file[name]
        if self.live:
            dataset.id.refresh()
        return dataset

    def _checked(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        wanted = validation.DTYPES.get(name)
        if wanted is not None and values.dtype != wanted:
            values = self._completed(name, values, wanted)
        found = validation.rows(name, values, self.attributes.get("learners"))
        if name == "updates" and self.attributes["format_version"] == 5:  # format 5 counts epochs from 0
            found["epoch"] += 1
        return found

    def _completed(self, name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns rows of an older format (`validation.older`) with all columns. Times that it did not separate are
        0."""
        found = np.zeros(values.shape, dtype)
        for column in {*(values.dtype.names or ())} & {*(dtype.names or ())}:
            found[column] = values[column]
        if name == "gradients":
            found["stream"] = values["learner"]
            found["first"] = values["step"] * self.attributes["minibatch_size"]
        return found

    def length(self, name: TableName) -> int:
        if name in self._absent:
            return 0
        with self.reading():
            dataset = self._dataset(name)
            validation.fits(dataset.nbytes, name, self.path.stat().st_size)
            return len(dataset)

    def pieces(self, name: TableName, rows: int, start: int) -> Iterator[Rows]:
        """Yields the rows of a table in pieces of at most `rows` rows, from row `start` on."""
        for first in range(start, self.length(name), rows):
            with self.reading():
                piece = self._checked(name, self._file[name][first : first + rows])
            yield piece[_filled(piece)]

    def recorded(self, name: TableName) -> Rows:
        """Returns the rows of a table without empty rows at its end, which a truncated file may have."""
        rows = self.read(name)
        filled = np.flatnonzero(_filled(rows))
        return rows[: filled[-1] + 1 if filled.size else 0]


def _filled(rows: Rows) -> NDArray[np.bool_]:
    """Returns which rows have content."""
    told = {EVENT: "kind", METRIC: "name", AVERAGE: "timestamp", STAGE: "timestamp", UPDATE_NORM: "timestamp"}.get(
        rows.dtype, "samples"
    )
    filled: NDArray[np.bool_] = rows[told] != np.zeros((), rows.dtype[told])
    return filled


def _open(path: Path) -> tuple[h5py.File, bool]:
    """Opens a file for reading. The second value says whether no writer has closed the file."""
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # opening a pipe would block
            raise ResultsError(f"{path}: not a result file of Rudra")
        with path.open("rb") as file:
            head = file.read(12)
        if not head:
            raise ResultsError(f"{path}: is empty: its run has not created it yet, or ended before it could")
        if len(head) < 12 or not head.startswith(b"\x89HDF\r\n\x1a\n"):
            raise ResultsError(f"{path}: not a result file of Rudra")
        if head[8] >= 3 and head[11] & 1:  # HDF5's own mark, set from a file's creation until it is closed
            return _open_swmr(path), True
        return h5py.File(path, "r", locking="best-effort"), False
    except FileNotFoundError:
        raise ResultsError(f"{path}: no such result file") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise ResultsError(f"{path}: cannot read: {reason_of(error)}") from None


def _open_swmr(path: Path) -> h5py.File:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    set_attempts = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts  # h5py does not offer this function
    set_attempts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    set_attempts(access.id, _READ_ATTEMPTS)
    flags = h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ
    return h5py.File(h5py.h5f.open(os.fsencode(path), flags, access))


def decoded(value: Any) -> Any:
    """Returns a plain Python value for a value from HDF5."""
    if isinstance(value, bytes):
        return printable(value.decode("utf-8", "replace"))
    array = np.asarray(value)
    if array.dtype.kind != "S":
        return array.tolist()
    texts = np.char.decode(array, "utf-8", "replace").tolist()
    return [printable(text) for text in texts] if isinstance(texts, list) else printable(texts)
