"""The user's own datasets, their items and collate function, and checks of their mini-batches."""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from rudra.data import trees
from rudra.data.samples import KINDS, Batch, Conversion
from rudra.data.sampling import random_states
from rudra.data.sources import Rows
from rudra.data.thread import Ask, in_data_thread
from rudra.data.trees import as_tensor, mapped
from rudra.errors import ConfigError, DataError

TARGETS = ("label", "labels", "target", "targets")
"""Names of the target in items that are dictionaries, unless the job gives one."""


class UserSplit:
    """The user's own map-style dataset. Items are pairs (input, target), or dictionaries with the target as an entry.

    An input or target may be a tensor, an array, a number, or a tuple or dictionary of these.

    Args:
        dataset: Dataset with a length and items by number. `__getitems__` is used if available.
        classes: Labels must be 0 … classes - 1. None: the targets are not labels.
        ignored: Label that is also valid, because the loss ignores it.
        limit: Number of first samples to use.
        target: Entry of a dictionary that is the target.
        collate: Function that makes a mini-batch of a list of items: a pair of inputs and targets, or a dictionary, by
            default torch's `default_collate`.
        name: "training" or "test", for error texts.
        ask: Function that draws samples from the dataset in the thread that made it.

    Attributes:
        random: Whether drawing a sample also draws random numbers, for example for random cropping.

    Raises:
        ConfigError: The object is not such a dataset.
    """

    def __init__(
        self,
        dataset: Any,
        classes: int | None,
        *,
        ignored: int | None = None,
        limit: int | None = None,
        target: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "training",
        ask: Ask = in_data_thread,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
            raise ConfigError(f"[data] the {name} set, a {type(dataset).__name__}, has no length or no items by number")
        self.dataset: Any = dataset
        self.classes, self._ignored = classes, ignored
        self.name = name
        self.ask = ask
        self._target, self._collate = target, collate
        self._tensors: tuple[torch.Tensor, ...] = () if collate else _tensors_of(dataset)
        self.length = min(len(dataset), len(dataset) if limit is None else limit)
        before = random_states()
        if self.length:
            self._drawn([0])
        self.random = random_states() != before

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Draws a mini-batch as `Samples.batch` does.

        Raises:
            DataError: An item is not a pair of an input and a target, or a label is out of range.
        """
        return self._batch(indices) if self._tensors else self.ask(self._batch, indices)

    def _batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        wanted = indices.tolist()
        drawn: Any = None if self._tensors else self._drawn(wanted)
        try:
            if self._tensors:
                inputs, target = (tensor[torch.from_numpy(indices)] for tensor in self._tensors)
            elif self._collate is None:
                inputs, target = default_collate([self._pair(item, wanted) for item in drawn])
            else:
                inputs, target = self._pair(drawn, wanted)
            inputs, target = _converted(inputs, target)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{self.name} samples {wanted[:4]}… do not make a batch of tensors: {what}") from None
        self._check_counts({"input": inputs, "target": target}, wanted)
        if not self._tensors:
            self._check_labels(target, wanted)
        return inputs, target

    def check_labels(self) -> None:
        """Raises DataError for the first label out of range, if all are in memory. Others are checked when drawn."""
        if self._tensors:
            _, labels = _converted(self._tensors[0][:0], self._tensors[1][: self.length])
            self._check_labels(labels, range(self.length))

    def stored(self) -> tuple[Rows, Rows] | None:
        """Returns inputs and targets as they are in memory. None: they are not in memory as arrays."""
        if not self._tensors or any(tensor.dtype not in KINDS.values() for tensor in self._tensors):
            return None
        inputs, targets = (tensor.numpy(force=True) for tensor in self._tensors)
        return inputs, targets

    def conversion(self, device: torch.device) -> Conversion:
        """Returns a function that converts stored rows on a device as `batch` does."""
        return _converted

    def _drawn(self, wanted: list[int]) -> Any:
        """Returns the items, or the collated batch. Exceptions of the user's code are passed on."""
        many = getattr(self.dataset, "__getitems__", None)
        items = list(many(wanted)) if many is not None else [self.dataset[index] for index in wanted]
        return items if self._collate is None else self._collate(items)

    def _pair(self, item: Any, wanted: list[int]) -> tuple[Any, Any]:
        if isinstance(item, Mapping):
            key = self._target or next((name for name in TARGETS if name in item), "")
            if key not in item or len(item) < 2:
                known = f"its entries: {', '.join(map(str, item))}; [data] target says which is the target"
                raise DataError(f"{self.name} sample {wanted[0]} has no target {self._target or 'label'}: {known}")
            inputs = {name: as_tensor(value) for name, value in item.items() if name != key}
            return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), as_tensor(item[key])
        if isinstance(item, Sequence) and len(item) == 2:
            return as_tensor(item[0]), as_tensor(item[1])
        raise DataError(f"{self.name} sample {wanted[0]} is not a pair (input, target)")

    def _check_counts(self, batch: Any, wanted: list[int]) -> None:
        """Raises DataError that names the first tensor whose first dimension is not the number of samples."""
        for name, tensor in trees.named(batch):
            if tensor.shape[:1] != (len(wanted),):
                given = f"{name} of shape {tuple(tensor.shape)} for {len(wanted)} samples"
                valid = f"its first dimension must be the number of samples, {len(wanted)}"
                raise DataError(f"{self.name} samples {wanted[:4]}…: [data] collate gave {given}; {valid}")

    def _check_labels(self, labels: Any, wanted: Sequence[int]) -> None:
        if self.classes is None or not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64:
            return
        outside = labels >= self.classes
        if labels.dim() == 1:  # in sequences, negative labels are ignored
            outside |= labels < 0
        if self._ignored is not None:
            outside &= labels != self._ignored
        if outside.any():
            first = outside.nonzero()[0]
            what, valid = f"label {int(labels[tuple(first)])}", f"valid: 0 to {self.classes - 1}"
            raise DataError(f"{self.name} sample {wanted[int(first[0])]} has {what}; {valid} ([data] classes)")


def _converted(inputs: Any, target: Any) -> Batch:
    """Converts a mini-batch of the user's tensors. One label for each sample needs no dimension of its own."""
    inputs, target = mapped(_input, inputs), mapped(_target, target)
    if isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.shape[1:] == (1,):
        target = target[:, 0]
    return inputs, target


def _tensors_of(dataset: object) -> tuple[torch.Tensor, ...]:
    """Returns inputs and targets of torch's `TensorDataset`, whose items are drawn together. Empty for other sets."""
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return ()
    return dataset.tensors if all(tensor.layout is torch.strided for tensor in dataset.tensors) else ()


def _input(tensor: Any) -> torch.Tensor:
    """Converts a user's tensor to an input of a model.

    Booleans and complex numbers keep their types, because masks and signals lose their meaning as other numbers. Images
    in whole numbers of 8 or 16 bits and floating-point numbers become float32. Other whole numbers, such as tokens,
    become int64.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the input {str(tensor)[:30]!r} is not a number")
    if tensor.dtype == torch.bool:
        kind = torch.bool
    elif tensor.is_complex():
        kind = torch.complex64
    else:
        picture = tensor.dtype == torch.uint8 or (tensor.dtype.itemsize <= 2 and tensor.dim() > 2)
        kind = torch.float32 if picture or tensor.is_floating_point() else torch.int64
    return tensor.to(kind).contiguous()


def _target(tensor: Any) -> torch.Tensor:
    """Converts a user's tensor to a target of a task: bytes, booleans and floating-point numbers to float32, others to
    int64."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the target {str(tensor)[:30]!r} is not a number; labels are whole numbers >= 0")
    if tensor.is_complex():
        raise TypeError("a target is complex; valid: real numbers, such as its real and imaginary part")
    whole = not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.bool)
    return tensor.to(torch.int64 if whole else torch.float32).contiguous()
