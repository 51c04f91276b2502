"""The flat vector: where each tensor of a model lies in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

NamedVectors = Mapping[str, NDArray[np.float32]]
"""What a role keeps for a checkpoint: one-dimensional, by name."""

EntryKind = Literal["parameter", "buffer", "counter"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements
    size: int  # elements
    kind: EntryKind


class Placed(NamedTuple):
    """How large the pieces are of a model whose last layers are with a stage server, compared with the whole.

    Attributes:
        front: floats of the first layers, as a part of the vector's.
        crossing: floats that cross for a mini-batch, each way, compared with the vector's.
        back: operations of the last layers, as a part of a mini-batch's.
    """

    front: float = 0.5
    crossing: float = 0.0
    back: float = 0.5
