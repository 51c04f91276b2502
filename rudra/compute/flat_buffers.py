"""Buffers of a module that travel with its weights, such as BatchNorm's running statistics."""

from collections.abc import Sequence

import torch
from torch import nn

from rudra.compute.buffers import buffers_of

_COUNTED = 2**20  # the mean of several float32 is nearest to the right whole number up to here


class FlatBuffers:
    """The floating-point buffers and counters of a module, placed in a flat vector after the parameters.

    A counter is an int64 buffer without dimensions, such as the number of batches that BatchNorm has seen. The vector
    holds its value as a float.

    Args:
        module: Module on one device.
        device: Device of the module.

    Attributes:
        floats: Floating-point buffers.
        counters: Counters.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        travelling = [buffer for buffer in buffers_of(module) if travels(buffer.tensor)]
        self.floats = [buffer for buffer in travelling if buffer.tensor.is_floating_point()]
        self.counters = [buffer for buffer in travelling if _is_counter(buffer.tensor)]
        self._all = [*self.floats, *self.counters]
        self._counts = torch.tensor([int(each.tensor) for each in self.counters], dtype=torch.int64, device=device)
        for counter, place in zip(self.counters, self._counts, strict=True):
            counter.tensor.data = place
        self._placed_at = 0  # address of the vector that holds the floating-point buffers

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers, in the order of the vector."""
        return [buffer.tensor for buffer in self._all]

    def place(self, vector: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Moves the module's buffers to a vector. The module then changes them there, except its counters.

        Args:
            vector: (buffers,) float32, the end of a flat vector.
            views: Views of the buffers in the vector.
        """
        if self.floats and self._placed_at != vector.data_ptr():
            for buffer, view in zip(self.floats, views, strict=False):
                buffer.tensor.data = view
            self._placed_at = vector.data_ptr()
        if count := len(self.counters):
            self._counts.copy_(vector[-count:])

    def collect(self, vector: torch.Tensor | None = None, views: Sequence[torch.Tensor] = ()) -> None:
        """Copies buffers that the module did not change in the vector: counters, and buffers that it replaced.

        Args:
            vector: As for `place`. None: the module's changes are discarded.
            views: Views of the buffers in the vector.
        """
        if vector is not None and (count := len(self.counters)):
            vector[-count:] = self._counts
        for index, buffer in enumerate(self._all):
            if (anew := buffer.replaced()) is not None and vector is not None:
                views[index].copy_(anew.detach())


def travels(buffer: torch.Tensor) -> bool:
    """Whether the flat vector contains the buffer. Sparse and most integer buffers stay in the module."""
    return buffer.layout is torch.strided and (buffer.is_floating_point() or _is_counter(buffer))


def _is_counter(buffer: torch.Tensor) -> bool:
    return buffer.dtype == torch.int64 and buffer.dim() == 0 and abs(int(buffer)) <= _COUNTED
