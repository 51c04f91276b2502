"""The flat vector: where each tensor of a model lies in it, and which parts of it several owners hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

NamedVectors = Mapping[str, NDArray[np.float32]]
"""What a role keeps for a checkpoint: one-dimensional, by name."""

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
    """What one of several owners holds of a flat vector: stretches of it, one behind the other.

    Owners take turns: of the whole vector, the first stretches of all come before the second ones (`interleaved`).

    Attributes:
        stretches: of the vector, in ascending order.
    """

    stretches: tuple[slice, ...]

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)

    @property
    def within(self) -> tuple[slice, ...]:
        """Where the stretches lie in what the owner holds."""
        ends = accumulate((each.stop - each.start for each in self.stretches), initial=0)
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    def part(self, which: slice) -> "Part":
        """A part of what the owner holds, which has another owner then."""
        pairs = zip(self.within, self.stretches, strict=True)
        cut = [
            (max(place.start, which.start) - place.start, min(place.stop, which.stop) - place.start, own.start)
            for place, own in pairs
        ]
        return Part(tuple(slice(first + start, first + stop) for start, stop, first in cut if start < stop))

    def __contains__(self, entry: Entry) -> bool:
        """Whether a tensor lies in it."""
        return any(each.start <= entry.offset < each.stop for each in self.stretches)


def interleaved(owners: Iterable[Sequence[T]]) -> list[T]:
    """What several owners hold, stretch by stretch, in the order of the whole vector."""
    return [each for those in zip_longest(*owners) for each in those if each is not None]


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
