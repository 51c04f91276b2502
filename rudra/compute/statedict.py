"""A model's `state_dict` in a result file: its names, and the place of each tensor.

`/weights/names` has a row for each name, in torch's order. A trained tensor has an entry under its name in
`/weights/layout`. Any other tensor is a data set in the group `/weights/fixed`, with its values at the start. Tied
tensors have several names. The tensor of each is the first of these names.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.core.layout import Entry

if TYPE_CHECKING:
    import torch
    from torch import nn


class StateEntry(NamedTuple):
    """One name in a `state_dict`.

    Attributes:
        name: Name in the `state_dict`.
        tensor: Main name of the tensor.
        dtype: Name of its type in torch, such as "float32".
        value: Tensor in its own shape, of the same type if NumPy has it, else as float32, which holds all numbers of
            bfloat16 and similar types. None for a trained tensor that is not yet in the file.
    """

    name: str
    tensor: str
    dtype: str
    value: NDArray[Any] | None = None


def key(tensor: str) -> str:
    """Returns the name of a tensor's data set. HDF5 would interpret a slash as a group."""
    return tensor.replace("/", "%2F")


def rows_of(state: Sequence[StateEntry]) -> NDArray[np.void]:
    """Returns the rows of `/weights/names`."""
    texts = [tuple(text.encode() for text in named[:3]) for named in state]
    lengths = [max([1, *map(len, column)]) for column in zip(*texts, strict=True)] or [1, 1, 1]
    columns = zip(StateEntry._fields, lengths, strict=False)
    return np.array(texts, [(name, f"S{length}") for name, length in columns])


def entries_of(module: "nn.Module", layout: Sequence[Entry]) -> tuple[StateEntry, ...]:
    """Returns the entries of a module's `state_dict`, except additions by its own hooks and extra states.

    Args:
        module: The module. Its parameters are not copied.
        layout: Entries of its flat vector. Tensors that are not in the vector have their current values.
    """
    import torch

    flat = {entry.name for entry in layout}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = {id(tensor): name for name, tensor in tensors if tensor.layout is torch.strided}
    return tuple(
        StateEntry(name, own[id(t)], str(t.dtype).removeprefix("torch."), None if own[id(t)] in flat else _values(t))
        for name, t in module.state_dict(keep_vars=True).items()
        if id(t) in own
    )


def _values(tensor: "torch.Tensor") -> NDArray[Any]:
    """Converts a tensor to NumPy. Types that NumPy lacks, such as bfloat16, become float32."""
    import torch

    found = tensor.detach().cpu()
    try:
        values: NDArray[Any] = found.numpy()
    except TypeError:
        values = found.float().numpy()
    return values if isinstance(tensor, torch.nn.Parameter) else values.copy()
