"""The flat vector: where each tensor of a model lies in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
