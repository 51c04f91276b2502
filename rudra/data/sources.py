"""Where samples lie: arrays in memory or in files, of which any rows can be had.

A `Source` is one array of a data set. What it gives are fresh arrays, the same for the same indices whenever, by
whatever thread and in whatever order they are asked for. Sources can be pickled: those of files by the files' names.
"""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rudra.errors import DataError, one_line
from rudra.files import DENSEST

Rows = NDArray[Any]
Indices = NDArray[np.int64]

_BLOCK_BYTES = 1 << 20  # that are read at a time where a file has no chunks
_BILINEAR = 2  # Pillow's number for it


class Source(Protocol):
    """One array of a data set, wherever it lies.

    Attributes:
        shape: (N, …).
        dtype: of the rows.
        in_memory: whether rows are had without reading a file.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def in_memory(self) -> bool: ...

    def rows(self, indices: Indices) -> Rows:
        """Rows (count, …), fresh and contiguous.

        Args:
            indices: (count,) int64 in 0 … N - 1, in any order; one may come several times.

        Raises:
            DataError: a file cannot be read.
        """


def are_tokens(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether inputs (N, …) are numbers of tokens, not to be calculated with.

    Whole numbers are tokens in rows of one dimension, unless they are bytes. In rows of more dimensions they are the
    pixels of pictures.
    """
    return dtype.kind in "iu" and dtype != np.uint8 and len(shape) == 2


class Dense:
    """An array in memory.

    Args:
        array: (N, …) numbers; kept, not copied.
    """

    in_memory = True

    def __init__(self, array: Rows) -> None:
        self.array = np.asarray(array)  # a memmap would make its rows memmaps
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def rows(self, indices: Indices) -> Rows:
        return self.array.take(indices, axis=0)


class Sparse:
    """A matrix of which most is 0, in compressed rows (CSR); rows become dense when they are drawn.

    Args:
        values: (stored,) float32.
        columns: (stored,) int32 in 0 … width - 1, each at most once in a row.
        starts: (N + 1,) int64: row i holds the elements starts[i] … starts[i + 1] - 1.
        width: columns of the matrix.
    """

    in_memory = True
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(
        self, values: NDArray[np.float32], columns: NDArray[np.int32], starts: NDArray[np.int64], width: int
    ) -> None:
        self.values, self.columns, self.starts = values, columns, starts
        self.shape = (len(starts) - 1, width)

    @property
    def density(self) -> float:
        """The share of its numbers that is stored."""
        return len(self.values) / max(1, math.prod(self.shape))

    def rows(self, indices: Indices) -> Rows:
        result = np.zeros((len(indices), self.shape[1]), np.float32)
        lengths, stored = self._stored(indices)
        places = self.columns[stored] + np.repeat(np.arange(len(indices)) * self.shape[1], lengths)
        result.reshape(-1)[places] = self.values[stored]
        return result

    def compressed(self, indices: Indices) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """The same rows as they are stored: where each starts and the last ends, columns, and values; all fresh."""
        lengths, stored = self._stored(indices)
        starts = np.zeros(len(indices) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        return starts, self.columns[stored], self.values[stored]

    def _stored(self, indices: Indices) -> tuple[Indices, Indices]:
        """How many elements each row has, and the places of all of them."""
        first = self.starts[indices]
        lengths = self.starts[indices + 1] - first
        ends = np.cumsum(lengths)
        return lengths, np.arange(lengths.sum()) + np.repeat(first - (ends - lengths), lengths)


class TokenWindows:
    """Pieces of one length out of a text, one after the other.

    Args:
        text: (characters,) unsigned integers: numbers of characters in a vocabulary.
        length: T, characters of a row.
        offset: where row 0 begins; row i begins i·T later.
        count: N, rows; by default as many as there are whole ones.

    Raises:
        ValueError: the text has not so many rows.
    """

    in_memory = True
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self, text: Rows, length: int, offset: int = 0, count: int | None = None) -> None:
        self.text, self.length, self.offset = text, length, offset
        whole = max(0, len(text) - offset) // length
        self.shape = (whole if count is None else count, length)
        if self.shape[0] > whole:
            raise ValueError(f"{len(text)} characters have no {count} windows of {length} from {offset}")

    def rows(self, indices: Indices) -> Rows:
        return sliding_window_view(self.text, self.length)[indices * self.length + self.offset].astype(np.int64)


class Stored:
    """A data set of an HDF5 file, read when its rows are drawn. Any thread may draw.

    One that is neither chunked nor compressed is mapped into memory. Of others, what a batch needs of a chunk is taken
    out of it at once, and the chunks that were decoded last are kept.

    Args:
        path: of the file.
        name: of the data set, within it.
        sample_shape: of one row, if it is not the file's; as many elements.
        cache_bytes: how much of decoded chunks to keep; the last one is kept in any case.

    Raises:
        DataError: no such file or data set; it holds no numbers, or none of its own; the file is damaged.
    """

    in_memory = False

    def __init__(
        self, path: Path, name: str, *, sample_shape: tuple[int, ...] | None = None, cache_bytes: int = 1 << 28
    ) -> None:
        self._arguments = (path, name, sample_shape, cache_bytes)
        self._where = f"{path}: {name}"
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Rows] = OrderedDict()
        self._room = cache_bytes  # less what the blocks take
        try:
            self._data, self._mapped = self._opened(path, name)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._where}: cannot be read, perhaps damaged: {one_line(error)}") from None
        chunks = self._data.chunks if self._mapped is None else None
        stored = self._data.shape
        self.dtype: np.dtype[Any] = np.dtype(self._data.dtype.str)  # without what h5py notes in it
        self.shape: tuple[int, ...] = stored if sample_shape is None else (stored[0], *sample_shape)
        row_bytes = self.dtype.itemsize * math.prod(stored[1:])
        self._step: int = chunks[0] if chunks else max(1, _BLOCK_BYTES // max(1, row_bytes))

    def _opened(self, path: Path, name: str) -> tuple[Any, Rows | None]:
        """The data set, and its array if it can be mapped."""
        import h5py  # most jobs do without, and it takes time

        file = h5py.File(path, "r", locking="best-effort", rdcc_nbytes=0)  # what was decoded is kept here
        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"{self._where}: there is no such data set")
        if found.is_virtual or found.external or found.file.filename != file.filename:
            raise DataError(f"{self._where}: its values lie in other files, which is not supported")
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
        """The rows of one chunk, decoded."""
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
        return _reopened, self._arguments


def _reopened(path: Path, name: str, sample_shape: tuple[int, ...] | None, cache_bytes: int) -> Stored:
    return Stored(path, name, sample_shape=sample_shape, cache_bytes=cache_bytes)


def data_sets(path: Path) -> list[str]:
    """Names of the data sets of an HDF5 file.

    Raises:
        DataError: it is none, or damaged.
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
    """Pictures in files, decoded when they are drawn.

    The middle square of each becomes size x size pixels: its shorter side is scaled, and the longer one is cropped.

    Args:
        files: paths of JPEG, PNG and other files that Pillow reads.
        size: of the pictures that are made.
        threads: that decode at a time; Pillow lets go of the GIL.
    """

    in_memory = False
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
        """Pixels (size, size, 3)."""
        wanted = (self.size, self.size)
        with picture(self.files[index]) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"its pixels are {image.mode}, not 8 bits")
            image.draft(None, wanted)  # a JPEG decodes faster to a half, a quarter … of its size
            width, height = image.size
            side = min(image.size)
            left, top = (width - side) // 2, (height - side) // 2
            # A palette may have transparent colours, of which Pillow warns if they go straight to RGB.
            colours = image.convert("RGBA" if image.mode == "P" else "RGB").convert("RGB")
            box = (left, top, left + side, top + side)
            return np.asarray(colours.resize(wanted, resample=_BILINEAR, box=box))

    def __reduce__(self) -> tuple[Any, ...]:
        return Images, self._arguments


@contextmanager
def picture(file: str) -> Iterator[Any]:
    """An image file, opened by Pillow.

    Raises:
        DataError: it is none, or damaged, now or in what is done with it.
    """
    from PIL import Image

    try:
        if not os.path.isfile(file):  # a pipe would be waited for
            raise ValueError("no such file")
        with Image.open(file) as image:
            yield image
    except Exception as error:  # decoders raise almost anything
        raise DataError(f"{file}: cannot be decoded, perhaps damaged: {one_line(error)}") from None
