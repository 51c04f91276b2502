"""Training and test samples: what a mini-batch is made of, and where the samples come from.

`load` gives a job's data: one of the sets that Rudra reads itself (see `rudra.readers`), or the user's own datasets.
Every split answers `batch(indices)` in the same way, and two calls with the same indices give the same bits.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from rudra.config import DataTable
from rudra.errors import ConfigError, DataError
from rudra.plugins import call, resolve
from rudra.readers import READERS, SPLITS, Arrays, check_labels

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What a job's data looks like, known to ranks that read none of it."""

    name: str
    training_samples: int  # with the job's limit applied, as is the next
    test_samples: int
    input_shape: tuple[int, ...]  # of one sample
    classes: int


class Samples(Protocol):
    """A split, as learners and the statistics server use it."""

    def __len__(self) -> int: ...

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Inputs (count, *input_shape) float32 and labels (count,) int64 of the given samples, fresh and contiguous."""


class Split(Dataset[Batch]):
    """Samples in memory, converted when they are drawn.

    Args:
        inputs: (N, C, H, W) uint8 or float32.
        labels: (N,) int64.
        mean: (C, H, W) float32, subtracted from each input; or None.
        scale: factor on the inputs after that.
    """

    def __init__(
        self,
        inputs: npt.NDArray[Any],
        labels: npt.NDArray[np.int64],
        mean: npt.NDArray[np.float32] | None = None,
        scale: float = 1.0,
    ) -> None:
        self.inputs = inputs
        self.labels = labels
        self.mean = np.zeros(inputs.shape[1:], np.float32) if mean is None else mean
        self.scale = np.float32(scale)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        # NumPy, because this runs in the input thread: it lets go of the GIL as torch does, but starts no second team
        # of worker threads beside those of the learner's gradient.
        inputs = torch.empty((len(indices), *self.inputs.shape[1:]), dtype=torch.float32)
        converted = inputs.numpy()
        np.subtract(self.inputs.take(indices, axis=0), self.mean, out=converted)
        if self.scale != 1:
            np.multiply(converted, self.scale, out=converted)
        return inputs, torch.from_numpy(self.labels.take(indices))

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.batch(np.array([index]))
        return inputs[0], labels[0]


class UserSplit:
    """The user's own map-style dataset of (input, label) pairs.

    Args:
        dataset: has a length, and gives items by number; `__getitems__` is used where it is offered.
        classes: labels must be 0 … classes - 1.
        limit: use only the first samples.
        name: "training" or "test", for error texts.

    Raises:
        ConfigError: it is no such dataset.
    """

    def __init__(self, dataset: Any, classes: int, *, limit: int | None = None, name: str = "training") -> None:
        if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
            raise ConfigError(f"[data] the {name} set, a {type(dataset).__name__}, has no length or no items by number")
        self.dataset: Any = dataset
        self.classes = classes
        self.name = name
        self.length = min(len(dataset), len(dataset) if limit is None else limit)

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """As `Samples.batch`.

        Raises:
            DataError: an item is no pair of an input and a label, or a label is out of range.
        """
        wanted = indices.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        items = many(wanted) if many is not None else [self.dataset[index] for index in wanted]
        if not all(isinstance(item, Sequence) and len(item) == 2 for item in items):
            raise DataError(f"{self.name} sample {wanted[0]} is not a pair (input, label)")
        try:
            inputs, labels = default_collate(items)
            inputs = inputs.to(torch.float32).contiguous()
            labels = labels.to(torch.int64).reshape(len(items))
        except (TypeError, AttributeError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{self.name} samples {wanted[:4]}… do not make a batch of tensors: {what}") from None
        outside = ((labels < 0) | (labels >= self.classes)).nonzero()
        if len(outside):
            first = int(outside[0])
            label, valid = int(labels[first]), f"valid: 0 to {self.classes - 1}"
            raise DataError(f"{self.name} sample {wanted[first]} has label {label}; {valid} ([data] classes)")
        return inputs, labels


def load(table: DataTable, *, train: bool = True, test: bool = True) -> tuple[Samples | None, Samples | None, DataInfo]:
    """A job's data.

    Args:
        table: which data, where, and how much of it.
        train: give the training split; without it no more is read than the description or the test's mean needs.
        test: give the test split.

    Returns:
        Training split, test split (None where not asked for), and the description of both.

    Raises:
        ConfigError: no such data set, or the user's datasets do not tell the number of classes.
        DataError: a file is missing, damaged, or its labels are out of range.
    """
    if isinstance(table.name, str) and ":" not in table.name:
        if table.name not in READERS:
            valid = f"{', '.join(READERS)} or package.module:callable"
            raise ConfigError(f"[data] unknown name '{table.name}'; valid: {valid}")
        return _load_shipped(table, train, test)
    return _load_users(table, train, test)


def _load_shipped(table: DataTable, train: bool, test: bool) -> tuple[Split | None, Split | None, DataInfo]:
    if table.options:
        raise ConfigError(f"[data] {table.name} takes no options, not {', '.join(table.options)}")
    wanted = {"train"} if train or (test and table.subtract_mean) else set()
    arrays = READERS[table.name](table, wanted | ({"test"} if test else set()))
    limits = {"train": table.train_limit, "test": table.test_limit}
    counts = {split: min(arrays.counts[split], limits[split] or arrays.counts[split]) for split in SPLITS}
    if 0 in counts.values():
        raise DataError(f"[data] {table.name}: the training or the test set has no sample")
    pairs = {split: (x[: counts[split]], y[: counts[split]]) for split, (x, y) in arrays.pairs.items()}
    for split, (_, labels) in pairs.items():
        check_labels(labels, arrays.classes, f"{table.name} ({split})")
    mean = _mean(pairs["train"][0]) if table.subtract_mean and wanted else None
    scale = arrays.scale if table.scale is None else table.scale
    splits = {split: Split(x, y, mean, scale) for split, (x, y) in pairs.items()}
    return splits.get("train") if train else None, splits.get("test"), _describe(table.name, arrays, counts)


def _describe(name: str, arrays: Arrays, counts: dict[str, int]) -> DataInfo:
    return DataInfo(name, counts["train"], counts["test"], arrays.input_shape, arrays.classes)


def _mean(inputs: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Per-pixel mean (C, H, W); exact sums, so that it depends on neither order nor blocks."""
    total: npt.NDArray[np.int64] = inputs.sum(axis=0, dtype=np.int64)
    mean: npt.NDArray[np.float32] = (total / len(inputs)).astype(np.float32)
    return mean


def _load_users(table: DataTable, train: bool, test: bool) -> tuple[UserSplit | None, UserSplit | None, DataInfo]:
    if table.scale is not None:
        raise ConfigError("[data] scale is for the data sets that Rudra reads; your own dataset scales its inputs")
    name, pair = _users_pair(table)
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"[data] {name}: must give two datasets, (training, test)")
    classes = table.classes or _classes(name, pair[0])
    training = UserSplit(pair[0], classes, limit=table.train_limit)
    testing = UserSplit(pair[1], classes, limit=table.test_limit, name="test")
    if not len(training) or not len(testing):
        raise DataError(f"[data] {name}: the training or the test set has no sample")
    inputs, _ = training.batch(np.zeros(1, np.int64))
    info = DataInfo(name, len(training), len(testing), tuple(inputs.shape[1:]), classes)
    return training if train else None, testing if test else None, info


def _users_pair(table: DataTable) -> tuple[str, Any]:
    """A name for messages, and what the user gave: a pair of datasets, if it is right."""
    if not isinstance(table.name, str) and not callable(table.name):
        return "datasets given in code", table.name
    made: Callable[..., Any] | object = resolve(table.name) if isinstance(table.name, str) else table.name
    name = table.name if isinstance(table.name, str) else getattr(table.name, "__qualname__", repr(table.name))
    if not callable(made):
        return name, made
    return name, call(made, f"[data] {name}", table.options, {} if table.path is None else {"path": table.path})


def _classes(name: str, dataset: Any) -> int:
    """Number of classes, from what datasets commonly tell about themselves."""
    told = getattr(dataset, "classes", None)
    if isinstance(told, int):
        return told
    if isinstance(told, Sized):
        return len(told)
    for attribute in ("targets", "labels"):
        labels = getattr(dataset, attribute, None)
        if labels is not None and len(labels):
            return int(np.max(np.asarray(labels))) + 1
    raise ConfigError(f"[data] {name}: the training set does not tell its classes; set data.classes")
