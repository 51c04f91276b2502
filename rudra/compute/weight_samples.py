"""Samples of an owner's weights after each update. Records keep their digests."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number, Pending
from rudra.compute.vectors import Buffer
from rudra.core.digest import sample, sample_length
from rudra.core.layout import Part


class Coming(NamedTuple):
    """Sample that comes from a device.

    Attributes:
        pending: Work that copies it, and that gives the numbers which come with it.
        taken: Returns the sample as `WeightSamples.now` does. Call it once, after the work.
    """

    pending: Pending
    taken: Callable[[], list[bytes]]


class WeightSamples:
    """Samples of weights, or of each stretch of a part of them.

    Args:
        size: Number of elements of all weights.
        part: Part that the role owns. None: all weights.
        device: Device of the weights.
    """

    def __init__(self, size: int, part: Part | None, device: torch.device) -> None:
        whole = slice(0, size)
        self._size = size
        stretches = [(whole, whole)] if part is None else zip(part.within, part.stretches, strict=True)
        self._stretches = [(here, int(stretch.start)) for here, stretch in stretches]
        self._kind = kind_of(device)
        self._stream = self._kind.stream(device)
        self._rooms: list[torch.Tensor] = []  # main memory that no sample uses

    def _places(self, timestamp: int) -> list[slice]:
        """Returns the sampled elements of each stretch."""
        found = ((here, sample(timestamp, self._size, first)) for here, first in self._stretches)
        return [slice(here.start + those.start, here.stop, those.step) for here, those in found]

    def now(self, weights: Buffer, timestamp: int) -> list[bytes]:
        """Returns the sample of each stretch, float32."""
        return [weights.sampled(place) for place in self._places(timestamp)]

    def later(self, weights: torch.Tensor, timestamp: int, numbers: Sequence[Number]) -> Coming:
        """Begins to copy a sample to main memory, together with other numbers. The weights may change at once."""
        pieces = [weights[place] for place in self._places(timestamp)]
        there, ends = torch.cat(pieces), [*accumulate(map(len, pieces))]
        room = self._rooms.pop() if self._rooms else self._kind.main_memory(4 * self._most)
        here = room.view(torch.float32)[: len(there)]

        def copy() -> Sequence[Number]:
            here.copy_(there, non_blocking=True)
            return numbers

        def taken() -> list[bytes]:
            found = [here[first:end].numpy().tobytes() for first, end in pairwise([0, *ends])]
            self._rooms.append(room)
            return found

        return Coming(self._stream.submit(copy), taken)

    @property
    def _most(self) -> int:
        """Largest number of elements of a sample."""
        return sum(sample_length(self._size, here.stop - here.start) for here, _ in self._stretches)


class CountedSamples:
    """Samples of whole weights that a device takes by its own counter, so that it can repeat the work.

    Args:
        size: Number of elements of the weights.
        most: Most updates in a row.
        device: Device of the weights.

    Attributes:
        taken: (most, …) float32 on the device, samples of the weights after each update.
        timestamp: (1,) int64 on the device, timestamp of the weights after the next update.
    """

    def __init__(self, size: int, most: int, device: torch.device) -> None:
        self._size, self._apart = size, sample(0, size).step
        self._at = torch.arange(0, size, self._apart, device=device)
        self.taken = torch.zeros(most, len(self._at), device=device)
        self.timestamp, self._number = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def begin(self, timestamp: int) -> None:
        """Begins with the weights of a timestamp."""
        self.timestamp.fill_(timestamp)
        self._number.zero_()

    def take(self, weights: torch.Tensor, after: int = 0) -> None:
        """Takes the sample of an update, after others in the same work. `go_on` counts them."""
        at = (self._at + (self.timestamp + after) % self._apart).clamp(max=self._size - 1)
        self.taken.index_copy_(0, self._number + after, weights.index_select(0, at)[None])

    def go_on(self, updates: int) -> None:
        """Counts updates."""
        self._number += updates
        self.timestamp += updates

    def of(self, taken: torch.Tensor, place: int, timestamp: int) -> bytes:
        """Returns the sample of weights, from `taken` in main memory, as `WeightSamples.now` does."""
        count = len(range(*sample(timestamp, self._size).indices(self._size)))
        return taken[place, :count].numpy().tobytes()
