"""The user's own datasets: their items, their collate function, and what makes a valid mini-batch of them."""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from rudra.data import trees
from rudra.data.samples import Batch
from rudra.data.sampling import random_states
from rudra.data.thread import Ask, in_data_thread
from rudra.data.trees import as_tensor, mapped
from rudra.errors import ConfigError, DataError

TARGETS = ("label", "labels", "target", "targets")
"""What the target is called in items that are dictionaries, unless the job says."""


class UserSplit:
    """The user's own map-style dataset: items are pairs (input, target), or dictionaries with the target among them.

    An input or target may be a tensor, an array, a number, or a tuple or dictionary of such.

    Args:
        dataset: has a length, and gives items by number; `__getitems__` is used where it is offered.
        classes: labels must be 0 … classes - 1; None: they are no labels.
        ignored: label that is also valid, because the loss ignores it.
        limit: use only the first samples.
        target: which entry of a dictionary is the target.
        collate: makes a mini-batch of a list of items: a pair of inputs and targets, or a dictionary; torch's
            `default_collate` where there is none.
        name: "training" or "test", for error texts.
        ask: has the dataset draw samples, in the thread that made it.

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
        """As `Samples.batch`.

        Raises:
            DataError: an item is no pair of an input and a target, or a label is out of range.
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
            inputs, target = mapped(_input, inputs), mapped(_target, target)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{self.name} samples {wanted[:4]}… do not make a batch of tensors: {what}") from None
        self._check_counts({"input": inputs, "target": target}, wanted)
        if isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.shape[1:] == (1,):
            target = target[:, 0]
        if self.classes is not None and isinstance(target, torch.Tensor) and target.dtype == torch.int64:
            self._check_labels(target, wanted)
        return inputs, target

    def _drawn(self, wanted: list[int]) -> Any:
        """The items, or what the user makes of them; what his code raises comes through."""
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
        """Raises DataError naming the first tensor whose first dimension is not the sample's."""
        for name, tensor in trees.named(batch):
            if tensor.shape[:1] != (len(wanted),):
                given = f"{name} of shape {tuple(tensor.shape)} for {len(wanted)} samples"
                valid = f"its first dimension must be the number of samples, {len(wanted)}"
                raise DataError(f"{self.name} samples {wanted[:4]}…: [data] collate gave {given}; {valid}")

    def _check_labels(self, labels: torch.Tensor, wanted: list[int]) -> None:
        assert self.classes is not None
        outside = labels >= self.classes
        if labels.dim() == 1:  # in sequences, what is below 0 is not learned
            outside |= labels < 0
        if self._ignored is not None:
            outside &= labels != self._ignored
        if outside.any():
            first = outside.nonzero()[0]
            what, valid = f"label {int(labels[tuple(first)])}", f"valid: 0 to {self.classes - 1}"
            raise DataError(f"{self.name} sample {wanted[int(first[0])]} has {what}; {valid} ([data] classes)")


def _tensors_of(dataset: object) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of torch's own set of tensors, of which items are taken together; else nothing."""
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return ()
    return dataset.tensors if all(tensor.layout is torch.strided for tensor in dataset.tensors) else ()


def _input(tensor: Any) -> torch.Tensor:
    """What a model gets of the user's tensor.

    Booleans and complex numbers stay such, because masks and signals lose their meaning as other numbers. Pictures in
    whole numbers of 8 or 16 bits and floating-point numbers become float32, other whole numbers, such as tokens, int64.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{str(tensor)[:30]!r} is not a number")
    if tensor.dtype == torch.bool:
        kind = torch.bool
    elif tensor.is_complex():
        kind = torch.complex64
    else:
        picture = tensor.dtype == torch.uint8 or (tensor.dtype.itemsize <= 2 and tensor.dim() > 2)
        kind = torch.float32 if picture or tensor.is_floating_point() else torch.int64
    return tensor.to(kind).contiguous()


def _target(tensor: Any) -> torch.Tensor:
    """What a task gets of the user's tensor: bytes, booleans and floating-point numbers as float32, others as int64."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{str(tensor)[:30]!r} is not a number")
    if tensor.is_complex():
        raise TypeError("a target is complex; valid: real numbers, such as its real and imaginary part")
    whole = not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.bool)
    return tensor.to(torch.int64 if whole else torch.float32).contiguous()
