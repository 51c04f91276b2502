"""Reader of MNIST's format."""

import math
import struct
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rudra.data.readers.common import Arrays, check_labels, content_of, first_of, no_options, path_of
from rudra.data.sources import Dense
from rudra.errors import DataError
from rudra.job.tables import DataTable


def read_idx(table: DataTable, wanted: Collection[str]) -> Arrays:
    """MNIST, Fashion-MNIST and other sets in their format, plain or compressed with gzip."""
    no_options(table)
    directory = path_of(table)
    arrays = Arrays((), table.classes or 10, 1 / 255)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images_file = first_of(directory, f"{prefix}-images-idx3-ubyte")
        labels_file = first_of(directory, f"{prefix}-labels-idx1-ubyte")
        count, *shape = _header(images_file, 2051)
        (labelled,) = _header(labels_file, 2049)
        if count != labelled:
            raise DataError(f"{labels_file}: {labelled} labels for the {count} images of {images_file.name}")
        if arrays.input_shape not in ((), (1, *shape)):
            raise DataError(f"{images_file}: images of {shape[0]}x{shape[1]}, a different size from the training set")
        arrays.input_shape = (1, *shape)
        arrays.counts[split] = count
        if split in wanted:
            images = _body(images_file, (count, 1, *shape))
            labels = _body(labels_file, (count,)).astype(np.int64)
            check_labels(labels, arrays.classes, str(labels_file))
            arrays.pairs[split] = Dense(images), Dense(labels)
    return arrays


def _header(file: Path, magic: int) -> list[int]:
    dimensions = magic & 0xFF
    size = 4 * (1 + dimensions)
    header = content_of(file, size)
    if len(header) < size:
        raise DataError(f"{file}: truncated: {len(header)} bytes, but the header needs {size}")
    found, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise DataError(f"{file}: begins with {found}, but an IDX file of this kind begins with {magic}")
    return shape


def _body(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    header = 8 if len(shape) == 1 else 16
    expected = math.prod(shape)
    content = content_of(file, header + expected + 1)
    if len(content) - header > expected:
        raise DataError(f"{file}: too long: its header says {expected} bytes of data, but there are more")
    if len(content) - header < expected:
        raise DataError(f"{file}: truncated: {len(content) - header} bytes of data, its header says {expected}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


READERS = {"idx": read_idx}
