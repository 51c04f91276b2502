"""Tensors of a result file in the types of the model."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from rudra.compute.statedict import StateEntry
from rudra.errors import ResultsError


def tensors_of(named: Sequence[StateEntry], path: Path) -> dict[str, torch.Tensor]:
    """Returns a result file's tensors by name, in the model's types and in their own memory. Tied names share a tensor.

    Raises:
        ResultsError: A value is not a tensor of its type.
    """
    own = {each.tensor: _tensor(each, path) for each in named}
    return {each.name: own[each.tensor] for each in named}


def _tensor(named: StateEntry, path: Path) -> torch.Tensor:
    """Returns a copy as a tensor of the model's type."""
    dtype = getattr(torch, named.dtype, None)
    with suppress(TypeError, ValueError):  # types that torch does not have
        tensor = torch.from_numpy(np.array(named.value))
        if isinstance(dtype, torch.dtype) and (
            tensor.dtype is dtype or (tensor.dtype is torch.float32 and dtype.is_floating_point)
        ):
            return tensor.to(dtype)
    raise ResultsError(f"{path}: damaged: {named.tensor} is not a tensor of type '{named.dtype}'")
