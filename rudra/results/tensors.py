"""A result file's tensors, each in the type that the model has."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from rudra.compute.statedict import StateEntry
from rudra.errors import ResultsError


def tensors_of(named: Sequence[StateEntry], path: Path) -> dict[str, torch.Tensor]:
    """A result file's tensors by their names, each in the model's type and in memory of its own; tied ones are one.

    Raises:
        ResultsError: a value is no tensor of that type.
    """
    own = {each.tensor: _tensor(each, path) for each in named}
    return {each.name: own[each.tensor] for each in named}


def _tensor(named: StateEntry, path: Path) -> torch.Tensor:
    """A tensor of its own, in the model's type."""
    dtype = getattr(torch, named.dtype, None)
    with suppress(TypeError, ValueError):  # types that torch does not have
        tensor = torch.from_numpy(np.array(named.value))
        if isinstance(dtype, torch.dtype) and (
            tensor.dtype is dtype or (tensor.dtype is torch.float32 and dtype.is_floating_point)
        ):
            return tensor.to(dtype)
    raise ResultsError(f"{path}: damaged: {named.tensor} is not a tensor of type '{named.dtype}'")
