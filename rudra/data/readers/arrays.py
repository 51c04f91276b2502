"""Readers of arrays in NumPy's .npz files, which are read at once, and in HDF5 files, which are read when samples are
drawn."""

import math
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rudra.data.readers.common import SPLITS, Arrays, class_count, existing, path_of, read, some
from rudra.data.sources import Dense, Source, Stored, are_tokens, data_sets
from rudra.errors import DataError, RudraError, one_line
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

Header = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of an array."""

_BLOCK = 1 << 16  # rows to check at a time


class NpzOptions(Table):
    x_train: str = Field("x_train", description="name of the training inputs, as are the next of others")
    y_train: str = "y_train"
    x_test: str = "x_test"
    y_test: str = "y_test"
    regression: bool = Field(False, description="whole numbers are not classes")


class Hdf5Options(NpzOptions):
    cache_bytes: int = Field(1 << 28, ge=0, description="how much of decoded chunks to keep, for each data set")


class _File(Protocol):
    """File with named arrays."""

    path: Path
    names: list[str]

    def header(self, name: str) -> Header: ...

    def source(self, name: str, shape: tuple[int, ...]) -> Source:
        """Returns the rows of an array, checked for the shape of one row."""


class _Npz:
    """A .npz file. `header` and `source` raise DataError if it is damaged. No content is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except Exception as error:  # damage may raise any exception, here and below
            raise self._damage(error) from None
        self.names = [name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy")]

    def header(self, name: str) -> Header:
        return self._read(name)[0]

    def source(self, name: str, shape: tuple[int, ...]) -> Source:
        array = self._read(name, content=True)[1]
        return Dense(array.reshape(len(array), *shape))

    def _read(self, name: str, content: bool = False) -> tuple[Header, NDArray[Any]]:
        """Returns type and shape of an array, and the array itself if `content` is set."""
        try:
            info = self._archive.getinfo(f"{name}.npy")
            with self._archive.open(info) as stream:
                form = np.lib.format
                old = form.read_magic(stream) == (1, 0)
                shape, fortran, dtype = (form.read_array_header_1_0 if old else form.read_array_header_2_0)(stream)
                if dtype.kind not in "buif" or not shape:
                    raise DataError(f"{self.path}: {name}: has no rows of numbers, but {dtype} of shape {shape}")
                expected = math.prod(shape) * dtype.itemsize
                if info.file_size - stream.tell() != expected:
                    raise ValueError(f"{info.file_size - stream.tell()} bytes, but its header says {expected}")
                if not content:
                    return (shape, dtype), np.empty(0)
                flat = np.frombuffer(read(stream, expected + 1), dtype)  # to the end, where the checksum is
                return (shape, dtype), np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"))
        except RudraError:
            raise
        except Exception as error:
            raise self._damage(error, name) from None

    def _damage(self, error: Exception, name: str | None = None) -> DataError:
        where = f"{self.path}: {name}" if name else str(self.path)
        return DataError(f"{where}: cannot be read, perhaps truncated or corrupt: {one_line(error)}")


class _Hdf5:
    """HDF5 file."""

    def __init__(self, path: Path, cache_bytes: int) -> None:
        self.path, self._cache_bytes = path, cache_bytes
        self.names = data_sets(path)

    def header(self, name: str) -> Header:
        found = Stored(self.path, name)
        return found.shape, found.dtype

    def source(self, name: str, shape: tuple[int, ...]) -> Source:
        return Stored(self.path, name, sample_shape=shape, cache_bytes=self._cache_bytes)


def read_npz(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A file that `numpy.savez` or `savez_compressed` wrote."""
    options = checked(NpzOptions, table.options, "data", "options")
    return _arrays(table, options, _Npz(existing(path_of(table))), wanted)


def read_hdf5(table: DataTable, wanted: Collection[str]) -> Arrays:
    """An HDF5 file: inputs and long targets stay there."""
    options = checked(Hdf5Options, table.options, "data", "options")
    return _arrays(table, options, _Hdf5(existing(path_of(table)), options.cache_bytes), wanted)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Arrays of one split, by name and header."""

    inputs: str
    targets: str
    x: Header
    y: Header


def _arrays(table: DataTable, options: NpzOptions, file: _File, wanted: Collection[str]) -> Arrays:
    """Returns the arrays x_train, y_train, and if present x_test and y_test of a file."""
    pairs = {split: pair for split in SPLITS if (pair := _pair(options, file, split)) is not None}
    train = pairs["train"]
    kind = _kind(train, options.regression, file)
    shape, dtype = train.x[0][1:], train.x[1]
    image = dtype.kind in "iu" and len(shape) > 1
    if image and len(shape) == 2:
        shape = (1, *shape)  # a grey image has one channel
    arrays = Arrays(shape, 0, 1 / 255 if image and dtype == np.uint8 else 1.0)
    for split, pair in pairs.items():
        _check_alike(train, pair, file)
        arrays.counts[split] = pair.x[0][0]
        if split in wanted:
            arrays.pairs[split] = file.source(pair.inputs, shape), _targets(pair, kind, file)
    if kind in {"regression", "labels"}:
        arrays.classes = math.prod(train.y[0][1:])
    elif table.classes is not None and kind == "classes":  # `load` checks the labels
        arrays.classes = table.classes
    else:
        arrays.classes = class_count(table, 1 + _largest(pairs, kind, arrays, file), str(file.path))
    return arrays


def _pair(options: NpzOptions, file: _File, split: str) -> _Pair | None:
    """Returns a split's arrays, or None if neither is present, and neither is required."""
    keys = {f"x_{split}", f"y_{split}"}
    names = {key: getattr(options, key) for key in sorted(keys)}
    needed = split == "train" or keys & options.model_fields_set or set(names.values()) & set(file.names)
    if not needed:
        return None
    for key, name in names.items():
        if name not in file.names:
            there = some(file.names) or "none"
            raise DataError(f"{file.path}: there is no array '{name}' ([data.options] {key}); there are: {there}")
    inputs, targets = names.values()
    return _Pair(inputs, targets, file.header(inputs), file.header(targets))


def _kind(pair: _Pair, regression: bool, file: _File) -> str:
    """Returns the kind of the targets."""
    (x, x_type), (y, y_type) = pair.x, pair.y
    if regression or y_type.kind == "f":
        kind = "regression" if len(y) <= 2 else None
    elif len(y) == 1 or y[1:] == (1,):
        kind = "classes"
    elif x == y and are_tokens(x, x_type):
        kind = "sequences"
    else:
        kind = "labels" if len(y) == 2 else None
    if kind is None:
        valid = "(N,), (N, k), or the shape of tokens"
        raise DataError(f"{file.path}: {pair.targets} has {y_type} of shape {y}; valid: {valid}")
    return kind


def _check_alike(train: _Pair, pair: _Pair, file: _File) -> None:
    """Raises DataError if a split's arrays differ in length, or their rows differ from the training set's rows."""
    shape, rows = pair.x[0], pair.y[0][0]
    if len(shape) < 2:
        raise DataError(f"{file.path}: {pair.inputs} has shape {shape}; valid: (N, …), one row for each sample")
    if shape[0] != rows:
        raise DataError(f"{file.path}: {pair.targets} has {rows} rows for the {shape[0]} of {pair.inputs}")
    for name, found, first in ((pair.inputs, pair.x, train.x), (pair.targets, pair.y, train.y)):
        if _row(found, name == pair.inputs) != _row(first, name == pair.inputs):
            text = f"rows of {found[1]} {found[0][1:]}, but the training set has {first[1]} {first[0][1:]}"
            raise DataError(f"{file.path}: {name} has {text}")


def _row(header: Header, inputs: bool) -> tuple[Any, ...]:
    """Returns the common properties of all rows. The size of their numbers does not matter."""
    shape, dtype = header
    return (*shape[1:], dtype.kind == "f", inputs and are_tokens(shape, dtype), inputs and dtype == np.uint8)


def _targets(pair: _Pair, kind: str, file: _File) -> Source:
    shape, dtype = pair.y
    source = file.source(pair.targets, shape[1:])
    if kind == "sequences" or (kind == "regression" and dtype.kind == "f"):
        return source
    values = source.rows(np.arange(shape[0]))
    if kind == "regression":
        return Dense(values.astype(np.float32))
    if kind == "classes":
        return Dense(values.reshape(-1).astype(np.int64))
    wrong = np.argwhere((values != 0) & (values != 1))
    if len(wrong):
        row, column = wrong[0].tolist()
        text = f"has {values[row, column]} in row {row}, column {column}; valid in several columns of labels: 0 and 1"
        raise DataError(f"{file.path}: {pair.targets} {text}")
    return Dense(values.astype(bool))


def _largest(pairs: dict[str, _Pair], kind: str, arrays: Arrays, file: _File) -> int:
    """Returns the largest class or token.

    Raises:
        DataError: A number is negative, and is not a token that training ignores.
    """
    largest = 0
    for split, pair in pairs.items():
        kept = arrays.pairs.get(split)
        sources = {pair.targets: kept[1] if kept else _targets(pair, kind, file)}
        if kind == "sequences":
            sources[pair.inputs] = kept[0] if kept else file.source(pair.inputs, arrays.input_shape)
        for name, source in sources.items():
            for first in range(0, source.shape[0], _BLOCK):
                values = source.rows(np.arange(first, min(first + _BLOCK, source.shape[0])))
                largest = max(largest, int(values.max(initial=0)))
                masked = kind == "sequences" and name == pair.targets  # negative tokens are ignored in training
                if values.min(initial=0) < 0 and not masked:
                    raise DataError(f"{file.path}: {name} has {values.min()}; valid: 0 and above")
    return largest


READERS = {"npz": read_npz, "hdf5": read_hdf5}
