"""Samples by number: splits of a data set that Rudra reads, and subsets of any samples."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from rudra.data.sources import Rows, Source, Sparse, are_tokens
from rudra.data.sparse import rows_of

Batch = tuple[Any, Any]
"""Inputs and targets: tensors whose first dimension is the sample, or tuples and dictionaries of such tensors."""

Conversion = Callable[[torch.Tensor, torch.Tensor], Batch]
"""Function from stored inputs and targets to a mini-batch."""

KINDS = {
    np.dtype(kind): getattr(torch, kind)
    for kind in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
"""Types of numbers that torch gathers on any device."""


class Samples(Protocol):
    """Split, as learners and the statistics server use it.

    Attributes:
        random: Whether drawing a sample also draws random numbers, from the global generators.
    """

    @property
    def random(self) -> bool: ...

    def __len__(self) -> int: ...

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Returns inputs (count, *input_shape) and targets (count, …) of the given samples, newly made and contiguous.

        Inputs are float32, or int64 if they are tokens. Inputs that stay sparse are a CSR tensor with int32 indices.
        Inputs of a user's dataset may also be boolean or complex64. Targets are (count,) int64 if they are class
        labels.
        """


class Split(Dataset[Batch]):
    """Samples of a data set that Rudra reads, converted when drawn.

    Inputs that are tokens (`are_tokens`) become int64, and all other inputs float32. Targets that are whole numbers
    become int64, and all others float32.

    Args:
        inputs: Inputs (N, …).
        targets: Targets (N,) or (N, …).
        mean: Mean to subtract from each input: float32, float64 if deviations may be relatively small, or None.
        scale: Factor applied after subtraction, one for all or for each number of an input. Not used for tokens.
        limit: Number of first samples to use.
        sparse: Whether inputs, which are then `Sparse`, stay sparse. They have no mean, and one scale.
    """

    random = False

    def __init__(
        self,
        inputs: Source,
        targets: Source,
        mean: npt.NDArray[np.float32] | npt.NDArray[np.float64] | None = None,
        scale: float | npt.NDArray[np.float32] = 1.0,
        *,
        limit: int | None = None,
        sparse: bool = False,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.sparse = sparse
        self.mean = mean
        self.scale = scale if isinstance(scale, np.ndarray) else np.float32(scale)
        self._scaled = bool(np.any(self.scale != 1))
        self.length = inputs.shape[0] if limit is None else min(limit, inputs.shape[0])
        self._tokens = are_tokens(inputs.shape, inputs.dtype)

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        targets = self.targets.rows(indices)
        whole = targets.dtype.kind in "iu"
        labels = torch.from_numpy(targets.astype(np.int64 if whole else np.float32, copy=False))
        if self.sparse:
            assert isinstance(self.inputs, Sparse)
            starts, columns, values = self.inputs.compressed(indices)
            if self._scaled:
                values *= self.scale
            return rows_of(starts, columns, values, self.inputs.shape[1]), labels
        rows = self.inputs.rows(indices)
        if self._tokens:
            return torch.from_numpy(rows.astype(np.int64, copy=False)), labels
        # NumPy, because this runs in the input thread: NumPy releases the GIL as torch does, but starts no second team
        # of threads in competition with the learner's gradient. The memory is torch's, because its alignment is always
        # the same.
        inputs = torch.empty(rows.shape, dtype=torch.float32)
        converted = inputs.numpy()
        if self.mean is not None:
            np.subtract(rows, self.mean, out=converted)
            if self._scaled:
                np.multiply(converted, self.scale, out=converted)
        elif self._scaled:
            np.multiply(rows, self.scale, out=converted)
        else:
            np.copyto(converted, rows)
        return inputs, labels

    def stored(self) -> tuple[Rows, Rows] | None:
        """Returns inputs and targets as they are in memory. None: they are not in memory as arrays."""
        inputs, targets = self.inputs.stored, self.targets.stored
        return None if inputs is None or targets is None else (inputs, targets)

    def conversion(self, device: torch.device) -> Conversion:
        """Returns a function that converts stored rows on a device as `batch` does, bitwise identical."""
        kinds = [self.inputs.dtype, *([] if self.mean is None else [self.mean.dtype])]
        if self.mean is None and self._scaled:
            kinds.append(self.scale.dtype)
        exact = KINDS[np.result_type(*kinds)]
        mean = None if self.mean is None else torch.tensor(self.mean, device=device)
        scale = torch.tensor(self.scale, device=device) if self._scaled else None
        labels = torch.int64 if self.targets.dtype.kind in "iu" else torch.float32

        def convert(rows: torch.Tensor, targets: torch.Tensor) -> Batch:
            if self._tokens:
                return rows.to(torch.int64), targets.to(labels)
            inputs = rows.to(exact)
            if mean is not None:
                inputs = (inputs - mean).float()
            if scale is not None:
                inputs = inputs * scale
            return inputs.float(), targets.to(labels)

        return convert

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.batch(np.array([index]))
        return inputs[0], labels[0]


class Subset(Dataset[Batch]):
    """Subset of other samples, without copies.

    Args:
        samples: Samples to select from.
        indices: (count,) int64: selected samples, in their new order.
    """

    def __init__(self, samples: Samples, indices: npt.NDArray[np.int64]) -> None:
        self.samples, self.indices, self.random = samples, indices, samples.random

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        return self.samples.batch(self.indices[indices])

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.batch(np.array([index]))
        return inputs[0], labels[0]


def whole_of(samples: Samples | None) -> Samples | None:
    """Returns the samples that a subset was selected from, perhaps through other subsets."""
    while isinstance(samples, Subset):
        samples = samples.samples
    return samples


def indices_of_whole(samples: Samples, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the indices that samples have in `whole_of(samples)`."""
    while isinstance(samples, Subset):
        indices = samples.indices[indices]
        samples = samples.samples
    return indices
