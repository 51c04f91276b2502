"""A model's `state_dict` in a result file: its names, and where each tensor is.

`/weights/names` has a row for each name, in torch's order. A tensor that is trained has an entry of its name in
`/weights/layout`; any other is a data set of its own in the group `/weights/fixed`, with the values that it had at the
start. Tied tensors have several names, all of them with the first one as their tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class StateEntry(NamedTuple):
    """One name in a `state_dict`.

    Attributes:
        name: in the `state_dict`.
        tensor: its tensor's own name.
        dtype: torch's name of its type, such as "float32".
        value: the tensor in its own shape, of the same type if NumPy has it, else as float32, which holds all numbers
            of bfloat16 and the like. None for one that is trained, on the way to the file.
    """

    name: str
    tensor: str
    dtype: str
    value: NDArray[Any] | None = None


def key(tensor: str) -> str:
    """Name of a tensor's data set; HDF5 would take a slash for a group."""
    return tensor.replace("/", "%2F")


def rows_of(state: Sequence[StateEntry]) -> NDArray[np.void]:
    """The rows of `/weights/names`."""
    texts = [tuple(text.encode() for text in named[:3]) for named in state]
    lengths = [max([1, *map(len, column)]) for column in zip(*texts, strict=True)] or [1, 1, 1]
    columns = zip(StateEntry._fields, lengths, strict=False)
    return np.array(texts, [(name, f"S{length}") for name, length in columns])
