"""Reader of CIFAR-10's Python batches, which never runs code in them."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rudra.data.readers.common import DAMAGE, SPLITS, Arrays, check_labels, content_of, no_options, path_of, read
from rudra.data.sources import Dense
from rudra.errors import DataError, one_line
from rudra.job.tables import DataTable

_BATCH = 10_000  # number of images in each file
_LARGEST = 1 << 26  # maximum bytes of a file, twice the actual size


def read_cifar10(table: DataTable, wanted: Collection[str]) -> Arrays:
    """CIFAR-10's Python batches: a directory of them (plain or .xz), one above it, or cifar-10-python.tar.gz.

    Batches after `train_limit` are not opened, because decoding .xz takes seconds. If no split is wanted, no file is
    opened and no path is needed, because the size of the set is known.
    """
    no_options(table)
    train = [f"data_batch_{i}" for i in range(1, 6)]
    counts = {"train": len(train) * _BATCH, "test": _BATCH}
    if not wanted:
        return Arrays((3, 32, 32), table.classes or 10, 1.0, counts)
    source = _source(path_of(table))
    if table.train_limit is not None:
        train = train[: -(-table.train_limit // _BATCH)]
    names = [name for split, files in (("train", train), ("test", ["test_batch"])) if split in wanted for name in files]
    contents = _contents(source, names)
    arrays = Arrays((3, 32, 32), table.classes or 10, 1.0, counts)
    for split in SPLITS:
        own = [name for name in names if (name == "test_batch") == (split == "test")]
        if parts := [_batch(contents.pop(name), f"{source}: {name}", arrays.classes) for name in own]:
            images, labels = zip(*parts, strict=True)
            arrays.pairs[split] = Dense(np.concatenate(images)), Dense(np.concatenate(labels))
    return arrays


def _source(path: Path) -> Path:
    """Returns the archive, or the directory of the batches."""
    archive, inner = "cifar-10-python.tar.gz", "cifar-10-batches-py"
    if os.path.isfile(path):
        return path
    for place in (path, path / inner):
        names = [f"{name}{suffix}" for name in ("data_batch_1", "test_batch") for suffix in ("", ".xz")]
        if any(os.path.isfile(place / name) for name in names):
            return place
    if os.path.isfile(path / archive):
        return path / archive
    raise DataError(f"{path}: there is no data_batch_1 or data_batch_1.xz, no directory {inner} and no {archive}")


def _contents(source: Path, names: list[str]) -> dict[str, bytearray]:
    if os.path.isdir(source):
        files = {name: source / name if os.path.isfile(source / name) else source / f"{name}.xz" for name in names}
        for name, file in files.items():
            if not os.path.isfile(file):
                raise DataError(f"{source}: there is no file {name} or {name}.xz")
        return {name: content_of(file, _LARGEST) for name, file in files.items()}
    contents: dict[str, bytearray] = {}
    try:
        with tarfile.open(source) as archive:
            end = 0
            for member in archive:  # one pass, because going back in a gzip stream decodes it again
                if member.offset_data <= end or member.size < 0:
                    raise tarfile.ReadError("its members overlap")  # otherwise they might be read forever
                end = member.offset_data
                name = Path(member.name).name
                if name in names and member.isreg() and (stream := archive.extractfile(member)) is not None:
                    contents[name] = read(stream, _LARGEST)
    except (*DAMAGE, KeyError, IndexError, struct.error) as error:
        raise DataError(f"{source}: cannot be read, perhaps truncated or corrupt: {one_line(error)}") from None
    for name in names:
        if name not in contents:
            raise DataError(f"{source}: there is no member {name}")
    return contents


def _batch(content: bytearray, where: str, classes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        data, listed = batch[b"data"].array, batch[b"labels"]
        if not isinstance(listed, list) or not all(isinstance(label, int) for label in listed):
            raise DataError("its labels are not a list of whole numbers")
        labels = np.array(listed, np.int64)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle may raise any exception
        raise DataError(f"{where}: not a CIFAR-10 batch, perhaps truncated or corrupt: {one_line(error)}") from None
    if data.dtype != np.uint8 or data.shape != (_BATCH, 3072):
        raise DataError(f"{where}: has {data.dtype} data of shape {data.shape}, not uint8 ({_BATCH}, 3072)")
    if labels.shape != (len(data),):
        raise DataError(f"{where}: {labels.size} labels for {len(data)} images")
    check_labels(labels, classes, where)
    return data.reshape(-1, 3, 32, 32), labels


class _Dtype:
    """Replacement of `numpy.dtype`: types of numbers, without fields or objects."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.dtype = np.dtype(_text(name))
        if self.dtype.kind not in "buif":
            raise DataError(f"its pickle holds an array of {self.dtype}, and only numbers are allowed")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = _text(state[1])
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Replacement of a pickled array, which takes its bytes as they are. NumPy's own loading does not run."""

    def __init__(self, *_: object) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")


def _text(name: Any) -> str:
    """Returns a name from a pickle. Python 2 wrote bytes, Python 3 writes text."""
    return name.decode("ascii") if isinstance(name, bytes) else str(name)


def _encode(text: str, encoding: str | bytes) -> bytes:
    """Replaces `_codecs.encode`, the function for bytes in old pickle protocols of Python 3."""
    if _text(encoding) != "latin1":
        raise DataError(f"its pickle holds bytes in the encoding {encoding!r}, and only latin1 is allowed")
    return text.encode("latin1")


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler of numbers, bytes, texts, lists, dictionaries and arrays of numbers. It cannot call anything else.

    It extends Python's unpickler in Python. A damaged number in a pickle can make the unpickler in C allocate any
    amount of memory.
    """

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): "numpy.ndarray",  # only used as an argument of _reconstruct, so a text is enough
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise DataError(f"its pickle asks for {module}.{name}, which a CIFAR-10 batch never needs")
        return self._ALLOWED[module, name]


READERS = {"cifar10": read_cifar10}
