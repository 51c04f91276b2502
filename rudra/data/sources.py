"""Sources of samples: arrays in memory or in files, with access to any rows.

A `Source` is one array of a data set. It returns new arrays, and the same rows for the same indices at any time, in any
thread and in any order of calls. Sources can be pickled. Those of files are pickled as the files' names.
"""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rudra.errors import DataError, one_line
from rudra.files import DENSEST

Rows = NDArray[Any]
Indices = NDArray[np.int64]

_BLOCK_BYTES = 1 << 20  # bytes to read at a time if a file has no chunks
_BILINEAR = 2  # Pillow's constant


class Source(Protocol):
    """One array of a data set, in memory or in a file.

    Attributes:
        shape: Shape (N, …) of the array.
        dtype: Type of the rows.
        in_memory: Whether rows are available without reading a file.
        stored: Array in memory whose row i gives row i of the source after a conversion. None: there is none.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def in_memory(self) -> bool: ...

    @property
    def stored(self) -> Rows | None: ...

    def rows(self, indices: Indices) -> Rows:
        """Returns rows (count, …), newly made and contiguous.

        Args:
            indices: (count,) int64 in 0 … N - 1, in any order, with duplicates.

        Raises:
            DataError: A file cannot be read.
        """


def are_tokens(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Returns whether inputs (N, …) are numbers of tokens, which are not used in arithmetic.

    Whole numbers are tokens if rows have one dimension, unless they are bytes. If rows have more dimensions, whole
    numbers are pixels of images.
    """
    return dtype.kind in "iu" and dtype != np.uint8 and len(shape) == 2


class Dense:
    """Array in memory.

    Args:
        array: Numbers (N, …), which are not copied.
    """

    in_memory = True

    def __init__(self, array: Rows) -> None:
        self.array = self.stored = np.asarray(array)  # rows of a memmap would be memmaps
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def rows(self, indices: Indices) -> Rows:
        return self.array.take(indices, axis=0)


class Sparse:
    """Matrix with mostly zeros, in compressed rows (CSR). Rows become dense when drawn.

    Args:
        values: (stored,) float32.
        columns: (stored,) int32 in 0 … width - 1, each at most once in a row.
        starts: (N + 1,) int64: row i holds the elements starts[i] … starts[i + 1] - 1.
        width: Number of columns of the matrix.
    """

    in_memory = True
    stored = None
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(
        self, values: NDArray[np.float32], columns: NDArray[np.int32], starts: NDArray[np.int64], width: int
    ) -> None:
        self.values, self.columns, self.starts = values, columns, starts
        self.shape = (len(starts) - 1, width)

    @property
    def density(self) -> float:
        """Fraction of the matrix's numbers that is stored."""
        return len(self.values) / max(1, math.prod(self.shape))

    def rows(self, indices: Indices) -> Rows:
        result = np.zeros((len(indices), self.shape[1]), np.float32)
        lengths, stored = self._stored(indices)
        places = self.columns[stored] + np.repeat(np.arange(len(indices)) * self.shape[1], lengths)
        result.reshape(-1)[places] = self.values[stored]
        return result

    def compressed(self, indices: Indices) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Returns the rows in stored form: their starts and the last end, columns, and values, all newly made."""
        lengths, stored = self._stored(indices)
        starts = np.zeros(len(indices) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        return starts, self.columns[stored], self.values[stored]

    def _stored(self, indices: Indices) -> tuple[Indices, Indices]:
        """Returns the number of elements of each row, and the indices of all elements."""
        first = self.starts[indices]
        lengths = self.starts[indices + 1] - first
        ends = np.cumsum(lengths)
        return lengths, np.arange(lengths.sum()) + np.repeat(first - (ends - lengths), lengths)


class TokenWindows:
    """Windows of equal length in a text, one after the other.

    Args:
        text: (characters,) unsigned integers: indices of characters in a vocabulary.
        length: Number T of characters in a row.
        offset: Start of row 0. Row i starts i·T later.
        count: Number N of rows, by default as many as fit.

    Raises:
        ValueError: The text does not have `count` rows.
    """

    in_memory = True
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self, text: Rows, length: int, offset: int = 0, count: int | None = None) -> None:
        self.text, self.length, self.offset = text, length, offset
        whole = max(0, len(text) - offset) // length
        self.shape = (whole if count is None else count, length)
        if self.shape[0] > whole:
            raise ValueError(f"{len(text)} characters have no {count} windows of {length} from {offset}")

    @property
    def stored(self) -> Rows:
        return self.text[self.offset :][: math.prod(self.shape)].reshape(self.shape)

    def rows(self, indices: Indices) -> Rows:
        return sliding_window_view(self.text, self.length)[indices * self.length + self.offset].astype(np.int64)


class Stored:
    """Data set of an HDF5 file, read when its rows are drawn. Any thread may draw.

    A data set that is neither chunked nor compressed is mapped into memory. From other data sets, each chunk is decoded
    once per batch, and the latest decoded chunks are kept.

    Args:
        path: Path of the file.
        name: Name of the data set within the file.
        sample_shape: Shape of one row, if it differs from the file's. It must have as many elements.
        cache_bytes: Maximum bytes of decoded chunks to keep. The latest one is always kept.

    Raises:
        DataError: The file or data set does not exist, holds no numbers or refers to other files, or is damaged.
    """

    in_memory = False
    stored = None

    def __init__(
        self, path: Path, name: str, *, sample_shape: tuple[int, ...] | None = None, cache_bytes: int = 1 << 28
    ) -> None:
        self._reopened = partial(Stored, path, name, sample_shape=sample_shape, cache_bytes=cache_bytes)
        self._where = f"{path}: {name}"
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Rows] = OrderedDict()
        self._room = cache_bytes  # minus the bytes of the blocks
        try:
            self._data, self._mapped = self._opened(path, name)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._where}: cannot be read, perhaps damaged: {one_line(error)}") from None
        chunks = self._data.chunks if self._mapped is None else None
        stored = self._data.shape
        self.dtype: np.dtype[Any] = np.dtype(self._data.dtype.str)  # without metadata of h5py
        self.shape: tuple[int, ...] = stored if sample_shape is None else (stored[0], *sample_shape)
        row_bytes = self.dtype.itemsize * math.prod(stored[1:])
        self._step: int = chunks[0] if chunks else max(1, _BLOCK_BYTES // max(1, row_bytes))

    def _opened(self, path: Path, name: str) -> tuple[Any, Rows | None]:
        """Returns the data set, and its array if it can be mapped."""
        import h5py  # most jobs do not need this slow import

        file = h5py.File(path, "r", locking="best-effort", rdcc_nbytes=0)  # this object caches decoded chunks
        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"{self._where}: there is no such data set")
        if found.is_virtual or found.external or found.file.filename != file.filename:
            raise DataError(f"{self._where}: its values are in other files, which is not supported")
        if found.dtype.kind not in "buif" or not found.shape:
            raise DataError(f"{self._where}: has no rows of numbers, but {found.dtype} of shape {found.shape}")
        if found.nbytes > DENSEST * path.stat().st_size:
            raise DataError(f"{self._where}: claims {found.nbytes:,} bytes, in a file of {path.stat().st_size:,}")
        offset = None if found.chunks else found.id.get_offset()
        if offset is None or not found.size:
            return found, None
        mapped = np.memmap(path, found.dtype.str, "r", offset, found.shape)
        return mapped, np.asarray(mapped)

    def rows(self, indices: Indices) -> Rows:
        if self._mapped is not None:
            result = self._mapped.take(indices, axis=0)
        else:
            result = np.empty((len(indices), *self._data.shape[1:]), self.dtype)
            numbers = indices // self._step
            order = np.argsort(numbers, kind="stable")
            cuts = np.flatnonzero(np.diff(numbers[order])) + 1
            with self._lock:
                for places in np.split(order, cuts) if len(order) else ():
                    number = int(numbers[places[0]])
                    result[places] = self._block(number)[indices[places] - number * self._step]
        return result.reshape(len(indices), *self.shape[1:])

    def _block(self, number: int) -> Rows:
        """Returns the decoded rows of one chunk."""
        block = self._blocks.pop(number, None)
        if block is None:
            first = number * self._step
            try:
                block = self._data[first : first + self._step]
            except (OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
                last = min(first + self._step, self.shape[0]) - 1
                what = f"rows {first} to {last} cannot be read, perhaps damaged: {one_line(error)}"
                raise DataError(f"{self._where}: {what}") from None
            self._room -= block.nbytes
        self._blocks[number] = block
        while self._room < 0 and len(self._blocks) > 1:
            self._room += self._blocks.popitem(last=False)[1].nbytes
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopened, ()


def data_sets(path: Path) -> list[str]:
    """Returns the names of the data sets in an HDF5 file.

    Raises:
        DataError: The file is not an HDF5 file, or is damaged.
    """
    import h5py

    found: list[str] = []
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            file.visititems(lambda name, item: found.append(str(name)) if isinstance(item, h5py.Dataset) else None)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read, perhaps damaged: {one_line(error)}") from None
    return found


class Images:
    """Images in files, decoded when drawn.

    The middle square of each image becomes size x size pixels: the shorter side is scaled, the longer one is cropped.

    Args:
        files: Paths of JPEG, PNG and other files that Pillow reads.
        size: Width and height of the resulting images.
        threads: Number of threads that decode in parallel. Pillow releases the GIL.
    """

    in_memory = False
    stored = None
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def __init__(self, files: Sequence[str], size: int, threads: int = 1) -> None:
        self._arguments = (files, size, threads)
        self.files, self.size = files, size
        self.shape = (len(files), 3, size, size)
        self._pool = ThreadPoolExecutor(threads, "rudra-images") if threads > 1 else None

    def rows(self, indices: Indices) -> Rows:
        result = np.empty((len(indices), *self.shape[1:]), np.uint8)
        run = map if self._pool is None else self._pool.map
        for place, picture in enumerate(run(self._decoded, indices.tolist())):
            result[place] = picture.transpose(2, 0, 1)
        return result

    def _decoded(self, index: int) -> Rows:
        """Returns the pixels (size, size, 3)."""
        wanted = (self.size, self.size)
        with picture(self.files[index]) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"its pixels are {image.mode}, not 8 bits")
            image.draft(None, wanted)  # a JPEG decodes faster at a half, a quarter … of its size
            width, height = image.size
            side = min(image.size)
            left, top = (width - side) // 2, (height - side) // 2
            # A palette may have transparent colours, and Pillow warns about a direct conversion to RGB.
            colours = image.convert("RGBA" if image.mode == "P" else "RGB").convert("RGB")
            box = (left, top, left + side, top + side)
            return np.asarray(colours.resize(wanted, resample=_BILINEAR, box=box))

    def __reduce__(self) -> tuple[Any, ...]:
        return Images, self._arguments


@contextmanager
def picture(file: str) -> Iterator[Any]:
    """Opens an image file with Pillow.

    Raises:
        DataError: The file is not an image, or is damaged, as found here or in the context.
    """
    from PIL import Image

    try:
        if not os.path.isfile(file):  # opening a pipe would block
            raise ValueError("no such file")
        with Image.open(file) as image:
            yield image
    except Exception as error:  # decoders may raise any exception
        raise DataError(f"{file}: cannot be decoded, perhaps damaged: {one_line(error)}") from None
