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
from rudra.sampling import TEST_SPLIT, hold_out
from rudra.sources import Dense, Source, are_tokens

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
        """Inputs (count, *input_shape) and targets (count, …) of the given samples, fresh and contiguous.

        Inputs are float32, or int64 where they are tokens; targets are (count,) int64 where they are class labels.
        """


class Split(Dataset[Batch]):
    """Samples of a data set that Rudra reads, converted when they are drawn.

    Bytes and floating-point numbers become float32 inputs. Other whole numbers stay what they are, the numbers of
    tokens, as int64. Targets become int64 or float32 in the same way, but bytes are whole numbers there.

    Args:
        inputs: (N, …).
        targets: (N,) or (N, …).
        mean: of one input, float32, subtracted from each; or None.
        scale: factor on the inputs after that; not on tokens.
        limit: use only the first samples.
    """

    def __init__(
        self,
        inputs: Source,
        targets: Source,
        mean: npt.NDArray[np.float32] | None = None,
        scale: float = 1.0,
        *,
        limit: int | None = None,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.mean = mean
        self.scale = np.float32(scale)
        self.length = inputs.shape[0] if limit is None else min(limit, inputs.shape[0])
        self._tokens = are_tokens(inputs.dtype)

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        rows = self.inputs.rows(indices)
        targets = self.targets.rows(indices)
        whole = targets.dtype.kind in "iu"
        labels = torch.from_numpy(targets.astype(np.int64 if whole else np.float32, copy=False))
        if self._tokens:
            return torch.from_numpy(rows.astype(np.int64, copy=False)), labels
        # NumPy, because this runs in the input thread: it lets go of the GIL as torch does, but starts no second team
        # of worker threads beside those of the learner's gradient. torch's memory, because it is aligned always alike.
        inputs = torch.empty(rows.shape, dtype=torch.float32)
        converted = inputs.numpy()
        if self.mean is not None:
            np.subtract(rows, self.mean, out=converted)
            if self.scale != 1:
                np.multiply(converted, self.scale, out=converted)
        elif self.scale != 1:
            np.multiply(rows, self.scale, out=converted)
        else:
            np.copyto(converted, rows)
        return inputs, labels

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.batch(np.array([index]))
        return inputs[0], labels[0]


class Subset(Dataset[Batch]):
    """Some of other samples, which it does not copy.

    Args:
        samples: those.
        indices: (count,) int64: which of them, in their new order.
    """

    def __init__(self, samples: Samples, indices: npt.NDArray[np.int64]) -> None:
        self.samples, self.indices = samples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        return self.samples.batch(self.indices[indices])

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.batch(np.array([index]))
        return inputs[0], labels[0]


def in_memory(samples: Samples | None) -> bool:
    """Whether samples are drawn without files or the user's code: in less time than an input thread's hand-over."""
    while isinstance(samples, Subset):
        samples = samples.samples
    return isinstance(samples, Split) and samples.inputs.in_memory and samples.targets.in_memory


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


def load(
    table: DataTable, *, train: bool = True, test: bool = True, seed: int = 0
) -> tuple[Samples | None, Samples | None, DataInfo]:
    """A job's data.

    Args:
        table: which data, where, and how much of it.
        train: give the training split; without it no more is read than the description or the test's mean needs.
        test: give the test split.
        seed: of the job; chooses what `test_split` holds out.

    Returns:
        Training split, test split (None where not asked for), and the description of both.

    Raises:
        ConfigError: no such data set, an option that it does not have, a test set that is missing or there twice, or
            the user's datasets do not tell the number of classes.
        DataError: a file is missing, damaged, or its labels are out of range.
    """
    if isinstance(table.name, str) and ":" not in table.name:
        if table.name not in READERS:
            valid = f"{', '.join(READERS)} or package.module:callable"
            raise ConfigError(f"[data] unknown name '{table.name}'; valid: {valid}")
        return _load_shipped(table, train, test, seed)
    if table.test_split is not None:
        raise ConfigError("[data] test_split is for data without a test set; your own callable gives one")
    return _load_users(table, train, test)


def _load_shipped(
    table: DataTable, train: bool, test: bool, seed: int
) -> tuple[Samples | None, Samples | None, DataInfo]:
    asked = {split for split, given in zip(SPLITS, (train, test), strict=True) if given}
    of_training = table.test_split is not None or table.subtract_mean is not False  # what the test needs of it
    arrays = READERS[table.name](table, {"train", *asked} if test and of_training else asked)
    if table.classes not in (None, arrays.classes):
        raise ConfigError(f"[data] classes: {table.classes}, but {table.name} has {arrays.classes} here")
    counts, kept = _counted(table, arrays, seed)
    for split, (_, targets) in arrays.pairs.items():
        if isinstance(targets, Dense) and targets.dtype == np.int64 and targets.array.ndim == 1:
            check_labels(targets.array, arrays.classes, f"{table.path or table.name} ({split})")
    info = DataInfo(table.name, counts["train"], counts["test"], arrays.input_shape, arrays.classes)
    if not asked:
        return None, None, info
    inputs = next(iter(arrays.pairs.values()))[0]
    if table.scale is not None and are_tokens(inputs.dtype):
        raise ConfigError(f"[data] scale: the inputs of {table.name} are tokens, not to be multiplied")
    mean = None
    if _has_mean(table, inputs):
        mean = _mean(arrays.pairs["train"][0], kept["train"])
    scale = arrays.scale if table.scale is None else table.scale
    splits: dict[str, Samples] = {}
    for split in asked:
        if table.test_split is None:
            splits[split] = Split(*arrays.pairs[split], mean, scale, limit=counts[split])
        else:
            splits[split] = Subset(Split(*arrays.pairs["train"], mean, scale), kept[split])
    return splits.get("train"), splits.get("test"), info


def _counted(table: DataTable, arrays: Arrays, seed: int) -> tuple[dict[str, int], dict[str, Any]]:
    """How many samples a job uses of each split, and which: of the split, or of the training set with `test_split`.

    Raises:
        ConfigError: there is no test set, or `test_split` would be a second one.
        DataError: a split is empty.
    """
    where = table.path or f"[data] {table.name}"
    limits = {"train": table.train_limit, "test": table.test_limit}
    counts, kept = dict(arrays.counts), dict[str, Any]()
    if table.test_split is not None:
        if "test" in counts:
            raise ConfigError(f"[data] test_split is for data without a test set; {table.name} has one here")
        kept = dict(zip(SPLITS, hold_out(seed, TEST_SPLIT, counts["train"], table.test_split), strict=True))
        counts = {split: len(indices) for split, indices in kept.items()}
    elif "test" not in counts:
        raise ConfigError(f"{where}: has no test set; set data.test_split, as 0.2, to hold one out")
    counts = {split: min(count, limits[split] or count) for split, count in counts.items()}
    if 0 in counts.values():
        raise DataError(f"{where}: the training or the test set has no sample")
    return counts, {split: kept[split][:count] if kept else slice(count) for split, count in counts.items()}


def _has_mean(table: DataTable, inputs: Source) -> bool:
    """Whether the mean is subtracted. Raises ConfigError where it cannot be."""
    dense = isinstance(inputs, Dense) and not are_tokens(inputs.dtype)
    if table.subtract_mean is None:
        return dense and inputs.dtype == np.uint8 and len(inputs.shape) > 2
    if table.subtract_mean and not dense:
        what = "tokens" if are_tokens(inputs.dtype) else "sparse" if inputs.in_memory else "read as they are drawn"
        raise ConfigError(f"[data] subtract_mean: the inputs of {table.name} are {what}; valid: false")
    return table.subtract_mean


def _mean(inputs: Source, chosen: Any) -> npt.NDArray[np.float32]:
    """Mean of the chosen inputs; of bytes from exact sums, so that it depends on neither order nor blocks."""
    assert isinstance(inputs, Dense)
    values = inputs.array[chosen]
    total = values.sum(axis=0, dtype=np.int64 if inputs.dtype == np.uint8 else np.float64)
    mean: npt.NDArray[np.float32] = (total / len(values)).astype(np.float32)
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
