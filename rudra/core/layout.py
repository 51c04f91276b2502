"""Flat vector of the weights: the place of each tensor, and the parts of several owners."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

NamedVectors = Mapping[str, NDArray[np.float32]]
"""Vectors of a role for a checkpoint: one-dimensional arrays by name."""

T = TypeVar("T")

EntryKind = Literal["parameter", "buffer", "counter"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements
    size: int  # elements
    kind: EntryKind


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a flat vector that one of several owners holds: stretches of the vector, stored one after the other.

    Owners take turns. In the whole vector the first stretches of all owners come before their second stretches
    (`interleaved`).

    Attributes:
        stretches: Stretches of the vector, in ascending order.
    """

    stretches: tuple[slice, ...]

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)

    @property
    def within(self) -> tuple[slice, ...]:
        """Places of the stretches in the memory of the owner."""
        ends = accumulate((each.stop - each.start for each in self.stretches), initial=0)
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    def part(self, which: slice) -> "Part":
        """Returns a part of this part, for another owner."""
        pairs = zip(self.within, self.stretches, strict=True)
        cut = [
            (max(place.start, which.start) - place.start, min(place.stop, which.stop) - place.start, own.start)
            for place, own in pairs
        ]
        return Part(tuple(slice(first + start, first + stop) for start, stop, first in cut if start < stop))

    def __contains__(self, entry: Entry) -> bool:
        """Returns whether the part contains a tensor."""
        return any(each.start <= entry.offset < each.stop for each in self.stretches)


def interleaved(owners: Iterable[Sequence[T]]) -> list[T]:
    """Returns the parts of several owners stretch by stretch, in the order of the whole vector."""
    return [each for those in zip_longest(*owners) for each in those if each is not None]


class Placed(NamedTuple):
    """Sizes of the pieces of a model whose last layers are at a stage server, relative to the whole model.

    Attributes:
        front: Floats of the first layers, as a fraction of the vector.
        crossing: Floats that a mini-batch sends in each direction, as a fraction of the vector.
        back: Operations of the last layers, as a fraction of the operations of a mini-batch.
        buffers: Floats of the first layers that are not parameters, as a fraction of the vector.
    """

    front: float = 0.5
    crossing: float = 0.0
    back: float = 0.5
    buffers: float = 0.0
