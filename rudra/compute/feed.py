"""Mini-batches on their way to a device with its own memory, while the device computes others.

They pass through a double buffer in page-locked memory. A stream of its own copies each half to the device. The host
waits only before it uses a half again, until the last copy of this half is done.
"""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from rudra.compute.device.kind import DeviceKind
from rudra.compute.device.streams import Done, Pending, Stream
from rudra.core.work import Work
from rudra.data.samples import Batch
from rudra.data.trees import leaves, mapped

Minibatch = tuple[int, Work]
"""Step and samples that determine a mini-batch."""

_LINE = 64  # torch aligns tensors to this number of bytes


class Drawn(NamedTuple):
    """Mini-batches that were drawn together, as dense tensors.

    Attributes:
        content: The tensors.
        rows: Rows of each mini-batch in these tensors.
    """

    content: Any
    rows: Mapping[Minibatch, slice]


class Given(NamedTuple):
    """Mini-batch that is on its way.

    Attributes:
        minibatch: Step and samples.
        content: Tensors on the device.
        rows: Rows of the mini-batch in these tensors.
        copied: Work that must be done before they are read.
        half: Half of the double buffer. `half.used` is the last work that reads it.
    """

    minibatch: Minibatch
    content: Any
    rows: slice
    copied: Pending
    half: "_Half"


class _Half:
    """Half of a double buffer: memory in main memory and on the device.

    Attributes:
        sent: Mini-batches in the memory on the device.
        copied: Copy from main memory.
        used: Last work that reads the copy.
    """

    def __init__(self, kind: DeviceKind, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._here = self._there = torch.empty(0, dtype=torch.uint8)
        self.sent = Drawn((), {})
        self.copied: Pending = Done([])
        self.used: Pending = Done([])

    def fill(self, drawn: Drawn, copies: Stream) -> None:
        """Begins to copy mini-batches to the device."""
        self.copied.numbers()
        content = drawn.content
        ends = [0, *accumulate(-(-tensor.nbytes // _LINE) * _LINE for tensor in leaves(content))]
        if ends[-1] > len(self._here):
            self._grow(ends[-1])
        here, there = self._here[: ends[-1]], self._there[: ends[-1]]
        mapped(lambda part, tensor: part.copy_(tensor), _placed(content, here, ends), content)
        self.sent = Drawn(_placed(content, there, ends), drawn.rows)

        def copy() -> tuple[()]:
            there.copy_(here, non_blocking=True)
            return ()

        self.copied = copies.submit(copy, after=(self.used,))

    def _grow(self, length: int) -> None:
        self.used.numbers()
        self._here = self._kind.main_memory(length)
        self._there = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._kind.finish(self._device)  # earlier work may have used this memory


def _placed(content: Any, memory: torch.Tensor, ends: list[int]) -> Any:
    """Returns tensors of the shapes and types of `content`, one behind the other in a memory."""
    firsts = iter(ends)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        first = next(firsts)
        return memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return mapped(place, content)


class Feed:
    """Source of one learner's mini-batches on its device.

    Args:
        draw: Draws a mini-batch in main memory, perhaps together with others.
        finish: Returns the samples of a mini-batch on the device, from the tensors that were sent and its rows.
        kind: Kind of the device.
        device: Device of the learner.
    """

    def __init__(
        self,
        draw: Callable[[int, Work], Drawn],
        finish: Callable[[Any, slice], Batch],
        kind: DeviceKind,
        device: torch.device,
    ) -> None:
        self._draw, self._finish = draw, finish
        self._halves = deque(_Half(kind, device) for _ in range(2))  # the one that was filled last is in front
        self._copies = kind.stream(device, own=True)

    def take(self, step: int, work: Work) -> Given:
        """Returns a mini-batch, which is sent now if it is not on its way.

        The caller must set `half.used` before it takes or sends other mini-batches.
        """
        wanted = step, work
        half = next((half for half in self._halves if wanted in half.sent.rows), None) or self._send(wanted)
        return Given(wanted, half.sent.content, half.sent.rows[wanted], half.copied, half)

    def finish(self, given: Given) -> Batch:
        """Returns the samples of a mini-batch, which is on the device."""
        return self._finish(given.content, given.rows)

    def send_ahead(self, step: int, work: Work) -> None:
        """Sends a mini-batch if it is not on its way."""
        if all((step, work) not in half.sent.rows for half in self._halves):
            self._send((step, work))

    def _send(self, wanted: Minibatch) -> _Half:
        drawn = self._draw(*wanted)
        self._halves.rotate()
        self._halves[0].fill(drawn, self._copies)
        return self._halves[0]
