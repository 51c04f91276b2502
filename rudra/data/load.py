"""Training and test samples: the content of mini-batches, and the origin of samples.

`load` returns a job's data: a set that Rudra reads itself (`rudra.data.readers`), or the user's own datasets. Every
split has `batch(indices)`, and two calls with the same indices give bitwise identical results.
"""

import copy
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.data import trees
from rudra.data.readers import READERS, SPLITS, Arrays, Reader, check_labels
from rudra.data.samples import Batch, Samples, Split, Subset, whole_of
from rudra.data.sampling import TEST_SPLIT, VALIDATION_SPLIT, hold_out, seeded
from rudra.data.sources import Dense, Source, are_tokens
from rudra.data.sparse import DENSEST, nothing
from rudra.data.thread import Ask, at_once, in_data_thread
from rudra.data.trees import mapped
from rudra.data.users import UserSplit
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable
from rudra.plugins import call, choose


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Description of a job's data, known also to ranks that do not read it.

    Attributes:
        name: Name of the data.
        training_samples: Number of training samples within the job's limit.
        test_samples: Number of test samples within the job's limit.
        input_shape: Shape of one sample's input, or for several inputs a tuple or dictionary of shapes.
        classes: Number of classes, of labels in a multi-label set, or of numbers in a regression's target.
        example: Batch of one real sample, the same on all ranks, or None if no samples were read.
        sparse: Whether inputs are in compressed rows, torch's CSR tensors.
    """

    name: str
    training_samples: int
    test_samples: int
    input_shape: Any
    classes: int
    example: Batch | None = field(default=None, compare=False)
    sparse: bool = False

    @property
    def sample(self) -> Batch:
        """Returns a batch of one sample. Without an example it has zeros: float32 inputs and an int64 label."""
        if self.example is not None:
            return self.example
        inputs = nothing(1, *self.input_shape) if self.sparse else torch.zeros(1, *self.input_shape)
        return inputs, torch.zeros(1, dtype=torch.int64)


_BLOCK = 1 << 20  # numbers to process at a time


def in_memory(samples: Samples | None) -> bool:
    """Returns whether samples are drawn without files or user code, faster than a hand-over to an input thread."""
    whole = whole_of(samples)
    return isinstance(whole, Split) and whole.inputs.in_memory and whole.targets.in_memory


def asked_at_once(samples: Samples) -> bool:
    """Returns whether samples must be drawn in the training thread, so that no input thread can prepare them."""
    whole = whole_of(samples)
    return samples.random or (isinstance(whole, UserSplit) and whole.ask is at_once)


class Data(NamedTuple):
    """Data of a job, as far as requested.

    Attributes:
        training: Samples for learners.
        test: Samples for the statistics server.
        info: Description of the data.
        validation: Samples of the user, or held out of the training set. They are evaluated like the test set.
    """

    training: Samples | None
    test: Samples | None
    info: DataInfo
    validation: Samples | None = None

    def part(self, *, train: bool, test: bool) -> "Data":
        """Returns the parts of the data for learners, the statistics server, or both."""
        validation = self.validation if test else None
        return Data(self.training if train else None, self.test if test else None, self.info, validation)

    @property
    def tests(self) -> dict[str, Samples]:
        """Returns the samples for evaluations, by split."""
        return {n: s for n, s in (("test", self.test), ("validation", self.validation)) if s is not None}


def load(table: DataTable, *, train: bool = True, test: bool = True, seed: int = 0, ignored: int | None = None) -> Data:
    """Loads a job's data.

    Args:
        table: Data table of the job.
        train: Whether to load the training split. If not, it is read only for the description, the
            mean for the test set, or a held-out part.
        test: Whether to load the test split, and the validation split.
        seed: Seed of the job, which selects held-out samples unless the table has a seed for that.
        ignored: Label that the loss ignores. It may be outside the classes of the user's own datasets.

    Raises:
        ConfigError: The data set or an option does not exist, a test set is missing or given twice, or the number of
            classes of the user's datasets is unknown.
        DataError: A file is missing or damaged, or its labels are out of range.
    """
    seed = seed if table.split_seed is None else table.split_seed
    if isinstance(table.name, str) and ":" not in table.name:
        reader = choose("[data] name", table.name, READERS)
        found = _load_shipped(table, reader, train, test, seed)
    else:
        found = _load_own(table, seed, ignored)
    if table.validation_split is not None:
        kept, held = hold_out(seed, VALIDATION_SPLIT, found.info.training_samples, table.validation_split)
        found = found._replace(info=replace(found.info, training_samples=len(kept)))
        if (whole := found.training) is not None:
            found = found._replace(training=Subset(whole, kept), validation=Subset(found.validation or whole, held))
    return found.part(train=train, test=test)


def _load_shipped(table: DataTable, reader: Reader, train: bool, test: bool, seed: int) -> Data:
    if table.collate is not None:
        raise ConfigError(f"[data] collate is for datasets of your own; the samples of {table.name} are alike")
    asked = {split for split, given in zip(SPLITS, (train, test), strict=True) if given}
    if test and table.validation_split is not None:
        asked.add("train")
    # parts of the training set that evaluation needs
    of_training = table.test_split is not None or table.standardise or table.subtract_mean is not False
    arrays = reader(table, {"train", *asked} if test and of_training else asked)
    if table.classes not in (None, arrays.classes):
        raise ConfigError(f"[data] classes: {table.classes}, but {table.name} has {arrays.classes} here")
    stays = _stays_sparse(table, arrays)
    counts, kept = _counted(table, arrays, seed)
    for split, (_, targets) in arrays.pairs.items():
        if isinstance(targets, Dense) and targets.dtype == np.int64 and targets.array.ndim == 1:
            check_labels(targets.array, arrays.classes, f"{table.path or table.name} ({split})")
    info = DataInfo(table.name, counts["train"], counts["test"], arrays.input_shape, arrays.classes, sparse=stays)
    if not asked:
        return Data(None, None, info)
    inputs = next(iter(arrays.pairs.values()))[0]
    if table.scale is not None and are_tokens(inputs.shape, inputs.dtype):
        raise ConfigError(f"[data] scale: the inputs of {table.name} are tokens, which cannot be scaled")
    mean: Any = None
    scale: Any = arrays.scale if table.scale is None else table.scale
    if table.standardise:
        mean, scale = _standard(table, arrays.pairs["train"][0], kept["train"], seed)
    elif _has_mean(table, inputs):
        mean = _mean(arrays.pairs["train"][0], kept["train"])
    splits: dict[str, Samples] = {}
    for split in asked:
        if table.test_split is None:
            splits[split] = Split(*arrays.pairs[split], mean, scale, limit=counts[split], sparse=stays)
        else:
            splits[split] = Subset(Split(*arrays.pairs["train"], mean, scale, sparse=stays), kept[split])
    example = _example(splits["train" if train else "test"])
    return Data(splits.get("train"), splits.get("test"), replace(info, example=example))


def _example(samples: Samples) -> Batch:
    """Returns the first sample as a batch. If drawing is random, it is the same on all ranks."""
    with seeded(0):
        return samples.batch(np.zeros(1, np.int64))


def _stays_sparse(table: DataTable, arrays: Arrays) -> bool:
    """Returns whether mini-batches are sparse, like the data.

    Raises:
        ConfigError: The job requires sparse mini-batches, but the data do not allow them.
    """
    if table.sparse == "auto":
        return arrays.density is not None and arrays.density <= DENSEST and not table.standardise
    if table.sparse and arrays.density is None:
        raise ConfigError(f"[data] sparse = true: the inputs of {table.name} are dense; valid: false, 'auto'")
    if table.sparse and table.standardise:
        valid = "valid: false, or data.sparse = false"
        raise ConfigError(f"[data] standardise = true changes zeros to other numbers; {valid}")
    return bool(table.sparse)


def _counted(table: DataTable, arrays: Arrays, seed: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Returns the number of samples of each split, and their indices in the split (with `test_split`, in the training
    set).

    Raises:
        ConfigError: There is no test set, or `test_split` would make a second one.
        DataError: A split is empty.
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
    """Returns whether the mean is subtracted. Raises ConfigError if it cannot be."""
    tokens = are_tokens(inputs.shape, inputs.dtype)
    dense = isinstance(inputs, Dense) and not tokens
    if table.subtract_mean is None:
        return dense and inputs.dtype == np.uint8 and len(inputs.shape) > 2
    if table.subtract_mean and not dense:
        what = "tokens" if tokens else "sparse" if inputs.in_memory else "read as they are drawn"
        raise ConfigError(f"[data] subtract_mean: the inputs of {table.name} are {what}; valid: false")
    return table.subtract_mean


def _mean(inputs: Source, chosen: Any) -> npt.NDArray[np.float32]:
    """Returns the mean of the chosen inputs. Sums of bytes are exact, so the mean depends on neither order nor
    blocks."""
    assert isinstance(inputs, Dense)
    values = inputs.array[chosen]
    total = values.sum(axis=0, dtype=np.int64 if inputs.dtype == np.uint8 else np.float64)
    mean: npt.NDArray[np.float32] = (total / len(values)).astype(np.float32)
    return mean


def _standard(
    table: DataTable, inputs: Source, chosen: Any, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """Returns mean and factor that standardise the chosen inputs, without samples held out for validation.

    Columns whose values float32 cannot distinguish keep their deviation of 0.

    Returns:
        Mean, and the reciprocal of the deviation, each (columns,).

    Raises:
        ConfigError: The inputs are not a table of numbers.
    """
    if are_tokens(inputs.shape, inputs.dtype) or len(inputs.shape) != 2:
        what = "tokens" if are_tokens(inputs.shape, inputs.dtype) else f"arrays of shape {inputs.shape[1:]}"
        text = f"the inputs of {table.name} are {what}, not a table of numbers"
        raise ConfigError(f"[data] standardise: {text}; valid: false")
    rows = np.arange(inputs.shape[0])[chosen]
    if table.validation_split is not None:
        rows = rows[hold_out(seed, VALIDATION_SPLIT, len(rows), table.validation_split)[0]]
    rows.sort()
    step = max(1, _BLOCK // inputs.shape[1])
    mean, squares = np.zeros((2, inputs.shape[1]))
    for first in range(0, len(rows), step):  # in blocks, so that files are read once and in order
        block = inputs.rows(rows[first : first + step]).astype(np.float64)
        own = block.mean(axis=0)
        share = len(block) / (first + len(block))
        squares += ((block - own) ** 2).sum(axis=0) + (own - mean) ** 2 * first * share
        mean += (own - mean) * share
    deviation = np.sqrt(squares / len(rows))
    float32 = np.finfo(np.float32)
    constant = deviation <= np.maximum(float32.eps * np.abs(mean), float32.tiny)
    return mean, (1 / np.where(constant, 1, deviation)).astype(np.float32)


def _load_own(table: DataTable, seed: int, ignored: int | None) -> Data:
    """Loads the user's own datasets in the data thread, or here if they were given as objects made here."""
    try:
        return in_data_thread(_load_users, table, seed, ignored, in_data_thread)
    except Exception:
        if isinstance(table.name, str) or callable(table.name):
            raise
        return _load_users(table, seed, ignored, at_once)


def _load_users(table: DataTable, seed: int, ignored: int | None, ask: Ask) -> Data:
    if table.scale is not None:
        raise ConfigError("[data] scale is for the data sets that Rudra reads; your own dataset scales its inputs")
    if table.standardise:
        raise ConfigError("[data] standardise is for the tables that Rudra reads; your own dataset scales its inputs")
    if table.sparse is True:
        raise ConfigError("[data] sparse = true: your own dataset makes its mini-batches; valid: false")
    collate = _collate(table)
    name, given = _users_pair(table)
    paired = isinstance(given, tuple | list) and len(given) in (2, 3)
    if paired == (table.test_split is not None):
        wanted = "two datasets, (training, test), or three, (training, validation, test)"
        wanted = wanted if table.test_split is None else "one dataset, as test_split is set"
        raise ConfigError(f"[data] {name}: must give {wanted}")
    first, *validating, second = given if paired else (given, given)
    if validating and table.validation_split is not None:
        raise ConfigError(f"[data] validation_split: {name} gives a validation set already; valid: no validation_split")
    split = partial(UserSplit, ignored=ignored, target=table.target, collate=collate, ask=ask)
    whole, testing = split(first, table.classes), split(second, table.classes, limit=table.test_limit, name="test")
    if not len(whole) or not len(testing):
        raise DataError(f"[data] {name}: the training or the test set has no sample")
    example = _example(whole)
    classes = table.classes or _classes(name, first, example[1], ignored)
    if trees.first(example[1]).dtype == torch.int64:
        whole.classes = testing.classes = classes
    validation = split(validating[0], whole.classes, name="validation") if validating else None
    if validation is not None and not len(validation):
        raise DataError(f"[data] {name}: the validation set has no sample")
    if table.validation_split is not None:
        as_tested = split(_as_tested(first, second), whole.classes, limit=table.train_limit, name="validation")
        validation = as_tested if paired else None
    own = split(first, whole.classes, limit=table.train_limit)
    for each in filter(None, (own if paired else whole, testing, validation)):
        each.check_labels()
    training: Samples = own
    test: Samples = testing
    if not paired:
        assert table.test_split is not None
        kept, held = hold_out(seed, TEST_SPLIT, len(whole), table.test_split)
        training, test = Subset(whole, kept[: table.train_limit]), Subset(whole, held[: table.test_limit])
    shape = mapped(lambda tensor: tuple(tensor.shape[1:]), example[0])
    return Data(training, test, DataInfo(name, len(training), len(test), shape, classes, example), validation)


def _as_tested(training: Any, test: Any) -> Any:
    """Returns the training set with the test set's attribute `transform`, for evaluation, if both sets have one.

    This is done only for sets of one class, because they give the attribute the same meaning.
    """
    if type(training) is not type(test) or "transform" not in getattr(training, "__dict__", {}):
        return training
    found = copy.copy(training)
    found.transform = test.transform
    return found


def _collate(table: DataTable) -> Callable[[list[Any]], Any] | None:
    """Returns the user's own function that makes a mini-batch of items."""
    made = choose("[data] collate", table.collate, {})
    if made is not None and not callable(made):
        raise ConfigError(f"[data] collate: {table.collate} is a {type(made).__name__} and cannot be called")
    return made  # type: ignore[no-any-return]


def _users_pair(table: DataTable) -> tuple[str, Any]:
    """Returns a name for messages, and the user's value if it is a valid pair of datasets."""
    if not isinstance(table.name, str) and not callable(table.name):
        return "datasets given in code", table.name
    made = choose("[data] name", table.name, {})
    name = table.name if isinstance(table.name, str) else getattr(table.name, "__qualname__", repr(table.name))
    if not callable(made):
        return name, made
    with seeded(0):  # random data is the same on every node, whatever the job's seed
        return name, call(made, f"[data] {name}", table.options, {} if table.path is None else {"path": table.path})


def _classes(name: str, dataset: Any, target: Any, ignored: int | None) -> int:
    """Returns the number of classes from common attributes of datasets, or the number of values in a target without
    labels."""
    if trees.first(target).dtype != torch.int64:
        return int(trees.first(target)[0].numel())
    told = getattr(dataset, "classes", None)
    if isinstance(told, int):
        return told
    if isinstance(told, Sized):
        return len(told)
    for attribute in ("targets", "labels"):
        largest = _largest_label(getattr(dataset, attribute, None), ignored)
        if largest is not None:
            return largest + 1
    raise ConfigError(f"[data] {name}: the training set does not say how many classes it has; set data.classes")


def _largest_label(labels: Any, ignored: int | None) -> int | None:
    """Returns the largest label in a list, array or dictionary, except the ignored one. None: no whole numbers."""
    try:
        found = np.asarray(list(labels.values()) if isinstance(labels, Mapping) else labels)
        whole = found.dtype.kind in "iuf" and bool((found == np.floor(found)).all())
    except (TypeError, ValueError, RuntimeError):  # such as rows of different lengths
        return None
    found = found if ignored is None else found[found != ignored]
    return int(found.max()) if whole and found.size else None
