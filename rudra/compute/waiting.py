"""Forward passes whose weights arrive while they run."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NotInTime(Exception):
    """A forward pass cannot wait any longer for its weights."""


Needs = Callable[[slice], None]
"""Called with a slice of the weights. It returns when the slice is complete."""


class Waiting(TorchFunctionMode):
    """Context in which each torch function waits for the weights among its arguments, and among tensors in lists.

    Tied weights, views of weights and any control flow are covered, because the memory of an argument decides.

    Args:
        weights: (size,) float32, the memory of all weights.
        needs: Called with the slice of each argument in that memory, before the function runs.
    """

    def __init__(self, weights: torch.Tensor, needs: Needs) -> None:
        super().__init__()
        self._begin, self._end = weights.data_ptr(), weights.data_ptr() + 4 * len(weights)
        self._needs = needs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._wait(args)
        self._wait(kwargs.values())
        return func(*args, **kwargs)

    def _wait(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                if argument.layout is torch.strided and self._begin <= (place := argument.data_ptr()) < self._end:
                    first = (place - self._begin) // 4
                    self._needs(slice(first, first + _extent(argument)))
            elif isinstance(argument, list | tuple):
                self._wait(argument)
            elif isinstance(argument, dict):
                self._wait(argument.values())


def _extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the first one of a tensor to the last one, in memory."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
