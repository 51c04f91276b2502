"""Training and test samples: what a mini-batch is made of, and where the samples come from.

`load` gives a job's data: one of the sets that Rudra reads itself (see `rudra.readers`), or the user's own datasets.
Every split answers `batch(indices)` in the same way, and two calls with the same indices give the same bits.
"""

import random
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from rudra import trees
from rudra.config import DataTable
from rudra.errors import ConfigError, DataError
from rudra.plugins import call, resolve
from rudra.readers import READERS, SPLITS, Arrays, check_labels
from rudra.trees import mapped

Batch = tuple[Any, Any]
"""Inputs and targets: tensors whose first dimension is the sample's, or tuples and dictionaries of such."""


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What a job's data looks like, known to ranks that read none of it.

    Attributes:
        name: of the data.
        training_samples: with the job's limit applied, as is the next.
        test_samples: likewise.
        input_shape: of one sample; of several inputs a tuple or dictionary of shapes.
        classes: that there are; labels of a multi-label set, numbers of a regression's target.
        example: a batch of one sample, of zeros, where it is not float32 inputs with an int64 label.
    """

    name: str
    training_samples: int
    test_samples: int
    input_shape: Any
    classes: int
    example: Batch | None = None

    @property
    def sample(self) -> Batch:
        """A batch of one sample, of zeros."""
        return self.example or (torch.zeros(1, *self.input_shape), torch.zeros(1, dtype=torch.int64))


TARGETS = ("label", "labels", "target", "targets")
"""What the target is called in items that are dictionaries, unless the job says."""


class Samples(Protocol):
    """A split, as learners and the statistics server use it.

    Attributes:
        random: whether drawing a sample draws random numbers, too, from the generators that everybody uses.
    """

    @property
    def random(self) -> bool: ...

    def __len__(self) -> int: ...

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Inputs and targets of the given samples, fresh and contiguous: float32, or int64 for whole numbers."""


class Split(Dataset[Batch]):
    """Samples in memory, converted when they are drawn.

    Args:
        inputs: (N, C, H, W) uint8 or float32.
        labels: (N,) int64.
        mean: (C, H, W) float32, subtracted from each input; or None.
        scale: factor on the inputs after that.
    """

    random = False

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
    """The user's own map-style dataset: items are pairs (input, target), or dictionaries with the target among them.

    An input or target may be a tensor, an array, a number, or a tuple or dictionary of such.

    Args:
        dataset: has a length, and gives items by number; `__getitems__` is used where it is offered.
        classes: labels must be 0 … classes - 1; None: they are no labels.
        limit: use only the first samples.
        target: which entry of a dictionary is the target.
        name: "training" or "test", for error texts.

    Attributes:
        random: whether drawing a sample draws random numbers, too, as random cropping does.

    Raises:
        ConfigError: it is no such dataset.
    """

    def __init__(
        self,
        dataset: Any,
        classes: int | None,
        *,
        limit: int | None = None,
        target: str | None = None,
        name: str = "training",
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
            raise ConfigError(f"[data] the {name} set, a {type(dataset).__name__}, has no length or no items by number")
        self.dataset: Any = dataset
        self.classes = classes
        self.name = name
        self._target = target
        self.length = min(len(dataset), len(dataset) if limit is None else limit)
        before = _random_states()
        if self.length:
            self._items([0])
        self.random = _random_states() != before

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """As `Samples.batch`.

        Raises:
            DataError: an item is no pair of an input and a target, or a label is out of range.
        """
        wanted = indices.tolist()
        items = self._items(wanted)
        try:
            inputs, target = default_collate([self._pair(item, wanted) for item in items])
            inputs, target = mapped(_plain, inputs), mapped(_plain, target)
        except (TypeError, AttributeError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{self.name} samples {wanted[:4]}… do not make a batch of tensors: {what}") from None
        if isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.shape[1:] == (1,):
            target = target[:, 0]
        if self.classes is not None and isinstance(target, torch.Tensor) and target.dtype == torch.int64:
            self._check_labels(target, wanted)
        return inputs, target

    def _items(self, wanted: list[int]) -> Sequence[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        items: Sequence[Any] = many(wanted) if many is not None else [self.dataset[index] for index in wanted]
        return items

    def _pair(self, item: Any, wanted: list[int]) -> tuple[Any, Any]:
        if isinstance(item, Mapping):
            key = self._target or next((name for name in TARGETS if name in item), "")
            if key not in item or len(item) < 2:
                known = f"its entries: {', '.join(map(str, item))}; [data] target says which is the target"
                raise DataError(f"{self.name} sample {wanted[0]} has no target {self._target or 'label'}: {known}")
            inputs = {name: value for name, value in item.items() if name != key}
            return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), item[key]
        if isinstance(item, Sequence) and len(item) == 2:
            return item[0], item[1]
        raise DataError(f"{self.name} sample {wanted[0]} is not a pair (input, target)")

    def _check_labels(self, labels: torch.Tensor, wanted: list[int]) -> None:
        assert self.classes is not None
        outside = ((labels < 0) | (labels >= self.classes)).reshape(len(labels), -1).any(1).nonzero()
        if len(outside):
            first = int(outside[0])
            label, valid = labels[first].reshape(-1).tolist(), f"valid: 0 to {self.classes - 1}"
            raise DataError(f"{self.name} sample {wanted[first]} has label {label[0]}; {valid} ([data] classes)")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Pictures in bytes and all floating-point numbers as float32, other whole numbers, such as tokens, as int64."""
    whole = not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.bool)
    return tensor.to(torch.int64 if whole else torch.float32).contiguous()


def _random_states() -> tuple[Any, ...]:
    """Of the generators that datasets commonly draw from."""
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


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
    training = UserSplit(pair[0], table.classes, limit=table.train_limit, target=table.target)
    testing = UserSplit(pair[1], table.classes, limit=table.test_limit, target=table.target, name="test")
    if not len(training) or not len(testing):
        raise DataError(f"[data] {name}: the training or the test set has no sample")
    inputs, target = training.batch(np.zeros(1, np.int64))
    classes = table.classes or _classes(name, pair[0], target)
    if trees.first(target).dtype == torch.int64:
        training.classes = testing.classes = classes
    shape = mapped(lambda tensor: tuple(tensor.shape[1:]), inputs)
    example = mapped(torch.zeros_like, inputs), mapped(torch.zeros_like, target)
    info = DataInfo(name, len(training), len(testing), shape, classes, example)
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


def _classes(name: str, dataset: Any, target: Any) -> int:
    """Number of classes, from what datasets commonly tell about themselves; of numbers in a target that is no label."""
    if trees.first(target).dtype != torch.int64:
        return int(trees.first(target)[0].numel())
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
