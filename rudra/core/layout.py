"""The flat vector: where each tensor of a model lies in it."""

from dataclasses import dataclass
from typing import Literal

EntryKind = Literal["parameter", "buffer", "counter"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements
    size: int  # elements
    kind: EntryKind
