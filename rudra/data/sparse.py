"""Sparse inputs: mini-batches as torch's CSR tensors, with operations that torch does not have for them."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rudra.data.trees import named

DENSEST = 0.1
"""Largest density of inputs that stay sparse by default. Above it, dense products are much faster."""


def rows_of(
    starts: NDArray[np.int32], columns: NDArray[np.int32], values: NDArray[np.float32], width: int
) -> torch.Tensor:
    """Returns a mini-batch in compressed rows. It refers to the arrays without copying.

    Args:
        starts: (count + 1,) int32: row i has the elements starts[i] … starts[i + 1] - 1.
        columns: (stored,) int32, each at most once in a row.
        values: (stored,) float32.
        width: Number of columns.
    """
    return _made(torch.from_numpy(starts), torch.from_numpy(columns), torch.from_numpy(values), width)


def _made(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    shape = (len(starts) - 1, width)
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


with warnings.catch_warnings():  # torch warns once per process: users cannot act on it
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    _made(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0), 1)


def is_sparse(tensor: Any) -> bool:
    """Returns whether a value is a tensor in compressed rows."""
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_csr


def all_dense(tree: Any) -> bool:
    """Returns whether all tensors are plain arrays of numbers."""
    return all(tensor.layout is torch.strided for _, tensor in named(tree))


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the stored values and their indices."""
    if not is_sparse(tensor):
        return tensor.nbytes
    return sum(part.nbytes for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))


def split(tensor: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Splits a tensor into pieces of `size` rows. The number of rows must be a multiple of `size`."""
    if not is_sparse(tensor):
        return torch.split(tensor, size)
    starts, columns, values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    cuts = starts[::size].tolist()
    return [
        _made(starts[i * size : (i + 1) * size + 1] - first, columns[first:last], values[first:last], tensor.shape[1])
        for i, (first, last) in enumerate(pairwise(cuts))
    ]


def stretch(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Returns the rows from `first` to before `last`, without a copy of the values."""
    if not is_sparse(tensor):
        return tensor[first:last]
    starts, columns, values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    begin, end = int(starts[first]), int(starts[last])
    return _made(starts[first : last + 1] - begin, columns[begin:end], values[begin:end], tensor.shape[1])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the rows of all tensors."""
    if not is_sparse(tensors[0]):
        return torch.cat(list(tensors))
    columns, values = (torch.cat([getattr(t, part)() for t in tensors]) for part in ("col_indices", "values"))
    lengths = torch.cat([tensor.crow_indices().diff() for tensor in tensors])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
    return _made(starts, columns, values, tensors[0].shape[1])


def nothing(count: int, width: int) -> torch.Tensor:
    """Returns `count` rows without stored elements."""
    empty = torch.zeros(0, dtype=torch.int32)
    return _made(torch.zeros(count + 1, dtype=torch.int32), empty, torch.zeros(0), width)


def finite_rows(tensor: torch.Tensor) -> NDArray[np.bool_]:
    """Returns for any tensor which rows have only finite numbers, (count,)."""
    if not is_sparse(tensor):
        found: NDArray[np.bool_] = tensor.isfinite().reshape(len(tensor), -1).all(1).numpy(force=True)
        return found
    wrong = (~tensor.values().isfinite()).cumsum(0)
    before = torch.cat([wrong.new_zeros(1), wrong])[tensor.crow_indices().long()]
    return (before.diff() == 0).numpy(force=True)
