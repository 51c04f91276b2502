"""Readers of the data sets that Rudra knows: files to arrays, and every damage to one readable line.

A reader takes the data table and which splits are wanted, and gives `Arrays`: uint8 inputs (N, C, H, W) and int64
labels (N,) per split, and the number of samples of each split whether it was read or not.
"""

import gzip
import importlib.util
import io
import lzma
import math
import os
import pickle
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt

from rudra.config import DataTable
from rudra.errors import DataError

Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

SPLITS = ("train", "test")
_CIFAR_BATCH = 10_000  # images in each file
_LARGEST = 1 << 26  # bytes of a CIFAR-10 batch, which has half as many, and of the digits
_PIECE = 1 << 24  # bytes that are decompressed at a time
_DAMAGE = (OSError, EOFError, ValueError, MemoryError, zlib.error, lzma.LZMAError, tarfile.TarError)


@dataclass(slots=True)
class Arrays:
    """What a reader found, the limits of the job not yet applied."""

    input_shape: tuple[int, ...]
    classes: int
    scale: float  # factor that the job gets if it names none
    counts: dict[str, int] = field(default_factory=dict)  # split -> samples
    pairs: dict[str, Pair] = field(default_factory=dict)  # split -> arrays, for those that were read


def read_digits(table: DataTable, wanted: Iterable[str]) -> Arrays:
    """8x8 handwritten digits out of scikit-learn; every fifth sample of each class is for the test.

    scikit-learn's data file is read directly: importing the library takes each rank more than a second.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("[data] name = digits needs scikit-learn: pip install 'rudra[digits]'")
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    content = io.BytesIO(_content(_existing(file), _LARGEST))
    try:
        with warnings.catch_warnings(action="error"):
            rows = np.loadtxt(content, delimiter=",", dtype=np.uint8).reshape(-1, 65)
    except (ValueError, UserWarning) as error:
        raise DataError(f"{file}: no table of digits: {_one_line(error)}") from None
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    check_labels(labels, 10, str(file))
    held_out = np.zeros(len(rows), bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    arrays = Arrays((1, 8, 8), table.classes or 10, 1 / 16)
    for split, chosen in (("train", ~held_out), ("test", held_out)):
        arrays.counts[split] = int(chosen.sum())
        if split in wanted:
            arrays.pairs[split] = images[chosen], labels[chosen]
    return arrays


def read_idx(table: DataTable, wanted: Iterable[str]) -> Arrays:
    """MNIST, Fashion-MNIST and other sets in their format, plain or compressed with gzip."""
    directory = _directory(table)
    arrays = Arrays((), table.classes or 10, 1 / 255)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images_file = _first_of(directory, f"{prefix}-images-idx3-ubyte")
        labels_file = _first_of(directory, f"{prefix}-labels-idx1-ubyte")
        count, *shape = _idx_header(images_file, 2051)
        (labelled,) = _idx_header(labels_file, 2049)
        if count != labelled:
            raise DataError(f"{labels_file}: {labelled} labels for the {count} images of {images_file.name}")
        if arrays.input_shape not in ((), (1, *shape)):
            raise DataError(f"{images_file}: images of {shape[0]}x{shape[1]}, unlike those of the training set")
        arrays.input_shape = (1, *shape)
        arrays.counts[split] = count
        if split in wanted:
            images = _idx_body(images_file, (count, 1, *shape))
            labels = _idx_body(labels_file, (count,)).astype(np.int64)
            check_labels(labels, arrays.classes, str(labels_file))
            arrays.pairs[split] = images, labels
    return arrays


def read_cifar10(table: DataTable, wanted: Iterable[str]) -> Arrays:
    """CIFAR-10's Python batches: a directory of them (plain or .xz), one above it, or cifar-10-python.tar.gz.

    Batches behind `train_limit` are not opened, because decoding .xz takes seconds. Without a split nothing is, and no
    path is needed: a prediction knows the set's size.
    """
    train = [f"data_batch_{i}" for i in range(1, 6)]
    counts = {"train": len(train) * _CIFAR_BATCH, "test": _CIFAR_BATCH}
    if not wanted:
        return Arrays((3, 32, 32), table.classes or 10, 1.0, counts)
    source = _cifar_source(_directory(table))
    if table.train_limit is not None:
        train = train[: -(-table.train_limit // _CIFAR_BATCH)]
    names = [name for split, files in (("train", train), ("test", ["test_batch"])) if split in wanted for name in files]
    contents = _cifar_contents(source, names)
    arrays = Arrays((3, 32, 32), table.classes or 10, 1.0, counts)
    for split in SPLITS:
        parts = [
            _cifar_batch(contents.pop(name), f"{source}: {name}", arrays.classes)
            for name in names
            if (name == "test_batch") == (split == "test")
        ]
        if parts:
            arrays.pairs[split] = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return arrays


READERS: dict[str, Callable[[DataTable, Iterable[str]], Arrays]] = {
    "digits": read_digits,
    "idx": read_idx,
    "cifar10": read_cifar10,
}


def check_labels(labels: npt.NDArray[np.int64], classes: int, where: str) -> None:
    """Raises DataError naming the first label that is outside 0 … classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(f"{where}: sample {first} has label {labels[first]}; valid: 0 to {classes - 1}")


def _directory(table: DataTable) -> Path:
    if table.path is None:
        raise DataError(f"[data] name = {table.name} needs path, the place of its files")
    if not os.path.exists(table.path):
        raise DataError(f"{table.path}: no such file or directory ([data] path)")
    return table.path


def _existing(file: Path) -> Path:
    if not os.path.isfile(file):
        raise DataError(f"{file}: no such file")
    return file


def _first_of(directory: Path, name: str) -> Path:
    names = [name, f"{name}.gz"]
    for candidate in names:
        if os.path.isfile(directory / candidate):
            return directory / candidate
    raise DataError(f"{directory}: there is no file {' or '.join(names)}")


def _content(file: Path, size: int) -> bytes:
    """Decompressed content, as far as its first `size` bytes; no more memory is taken than there is content.

    Raises:
        DataError: the file cannot be read, or its compressed stream is cut or damaged.
    """
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    try:
        with opener(file, "rb") as stream:
            return _read(stream, size)
    except _DAMAGE as error:
        raise DataError(f"{file}: cannot be read, perhaps truncated or corrupt: {_one_line(error)}") from None


def _read(stream: IO[bytes], size: int) -> bytes:
    content = bytearray()
    while len(content) < size and (piece := stream.read(min(_PIECE, size - len(content)))):
        content += piece
    return bytes(content)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _idx_header(file: Path, magic: int) -> list[int]:
    dimensions = magic & 0xFF
    size = 4 * (1 + dimensions)
    header = _content(file, size)
    if len(header) < size:
        raise DataError(f"{file}: truncated: {len(header)} bytes, and the header alone has {size}")
    found, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise DataError(f"{file}: begins with {found}, where an IDX file of this kind has {magic}")
    return shape


def _idx_body(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    header = 8 if len(shape) == 1 else 16
    expected = math.prod(shape)
    content = _content(file, header + expected + 1)
    if len(content) - header > expected:
        raise DataError(f"{file}: too long: its header says {expected} bytes of data, and there are more")
    if len(content) - header < expected:
        raise DataError(f"{file}: truncated: {len(content) - header} bytes of data, its header says {expected}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _cifar_source(path: Path) -> Path:
    """The archive, or the directory that holds the batches."""
    archive, inner = "cifar-10-python.tar.gz", "cifar-10-batches-py"
    if os.path.isfile(path):
        return path
    for place in (path, path / inner):
        if any(
            os.path.isfile(place / f"{name}{suffix}")
            for name in ("data_batch_1", "test_batch")
            for suffix in ("", ".xz")
        ):
            return place
    if os.path.isfile(path / archive):
        return path / archive
    raise DataError(f"{path}: there is no data_batch_1 or data_batch_1.xz, no directory {inner} and no {archive}")


def _cifar_contents(source: Path, names: list[str]) -> dict[str, bytes]:
    if os.path.isdir(source):
        files = {name: source / name if os.path.isfile(source / name) else source / f"{name}.xz" for name in names}
        for name, file in files.items():
            if not os.path.isfile(file):
                raise DataError(f"{source}: there is no file {name} or {name}.xz")
        return {name: _content(file, _LARGEST) for name, file in files.items()}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(source) as archive:
            end = 0
            for member in archive:  # one pass: going back in a gzip stream decodes it again
                if member.offset_data <= end or member.size < 0:
                    raise tarfile.ReadError("its members overlap")  # and might so be read for ever
                end = member.offset_data
                name = Path(member.name).name
                if name in names and member.isreg() and (stream := archive.extractfile(member)) is not None:
                    contents[name] = _read(stream, _LARGEST)
    except (*_DAMAGE, KeyError, IndexError, struct.error) as error:
        raise DataError(f"{source}: cannot be read, perhaps truncated or corrupt: {_one_line(error)}") from None
    for name in names:
        if name not in contents:
            raise DataError(f"{source}: there is no member {name}")
    return contents


def _cifar_batch(content: bytes, where: str, classes: int) -> Pair:
    try:
        batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        data, listed = batch[b"data"].array, batch[b"labels"]
        if not isinstance(listed, list) or not all(isinstance(label, int) for label in listed):
            raise DataError("its labels are no list of whole numbers")
        labels = np.array(listed, np.int64)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"{where}: no CIFAR-10 batch, perhaps truncated or corrupt: {_one_line(error)}") from None
    if data.dtype != np.uint8 or data.shape != (_CIFAR_BATCH, 3072):
        raise DataError(f"{where}: has {data.dtype} data of shape {data.shape}, not uint8 ({_CIFAR_BATCH}, 3072)")
    if labels.shape != (len(data),):
        raise DataError(f"{where}: {labels.size} labels for {len(data)} images")
    check_labels(labels, classes, where)
    return data.reshape(-1, 3, 32, 32), labels


class _Dtype:
    """Stands in for `numpy.dtype`: a number's type, and nothing with fields or objects."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.dtype = np.dtype(_text(name))
        if self.dtype.kind not in "buif":
            raise DataError(f"its pickle holds an array of {self.dtype}, and only numbers are allowed")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = _text(state[1])
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands in for a pickled array: its bytes are taken as they are, none of NumPy's own loading runs."""

    def __init__(self, *_: object) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")


def _text(name: Any) -> str:
    """A name out of a pickle: Python 2 wrote bytes, Python 3 writes text."""
    return name.decode("ascii") if isinstance(name, bytes) else str(name)


def _encode(text: str, encoding: str | bytes) -> bytes:
    """Stands in for `_codecs.encode`, by which Python 3 writes bytes in old pickle protocols."""
    if _text(encoding) != "latin1":
        raise DataError(f"its pickle holds bytes in the encoding {encoding!r}, and only latin1 is allowed")
    return text.encode("latin1")


class _PlainUnpickler(pickle._Unpickler):
    """Loads numbers, bytes, texts, lists, dictionaries and arrays of numbers, and can call nothing else.

    Python's own one in Python: that in C takes as much memory as a damaged number in a pickle asks for.
    """

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): "numpy.ndarray",  # only ever an argument of _reconstruct, so a text will do
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise DataError(f"its pickle asks for {module}.{name}, which a CIFAR-10 batch never needs")
        return self._ALLOWED[module, name]
