"""Vectors of roles and their memory: own memory, memory of another process, or content that is deferred."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.averaging import CACHE_LINE
from rudra.compute.device.cuda import lock_pages, page_locked
from rudra.compute.device.devices import finish
from rudra.compute.device.kind import CPU
from rudra.compute.half import from_half, to_half
from rudra.compute.rows import RowFormat, RowGradient
from rudra.core.digest import digest_of, sample
from rudra.core.messages import Message
from rudra.core.wire import decode, encode
from rudra.probe import probed

EXPONENT = 2
"""Bytes between a float16 tensor and its message. They hold the exponent of the power of two that scales the tensor."""

Memory = Callable[[int], npt.NDArray[np.uint8] | None]
"""Allocates `length` bytes of written zeros for a buffer. None: no memory is left, so the buffer allocates its own."""

Take = Callable[[slice], torch.Tensor]
"""Returns a slice of a vector, float32, valid until the next call. Slices are requested in ascending order, with at
most `CHUNK` elements each, and start at multiples of `CACHE_LINE`."""


class Buffer:
    """A vector followed by room for a message's header and rows: one piece of memory, one transfer.

    Args:
        size: Number of floats in the vector.
        tail: Number of bytes after the vector.
        device: Device of the vector.
        pinned: Whether memory is page-locked, so that a GPU copies it at full speed and in parallel with other work.
        memory: Allocator for a buffer in main memory.

    Attributes:
        readers: Number of readers in other processes. The buffer must not change until they have finished.
        borrowed: Whether the memory belongs to another process and is read-only.
        wire: (size * 4 + tail,) uint8, the bytes to send, empty on a GPU, where no buffer is sent.
        vector: (size,) float32, the tensor.
        version: Number that changes whenever the vector is received, averaged, updated or restored.
    """

    readers = 0
    borrowed = False

    def __init__(
        self,
        size: int,
        tail: int,
        device: torch.device = CPU,
        *,
        pinned: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.version = 0
        self._memory = memory
        if device.type != "cpu":
            self.wire = np.empty(0, np.uint8)
            self.vector = torch.zeros(size, device=device)
            self._array: npt.NDArray[np.float32] | None = None
            return
        # NumPy asks for huge pages, which make transfers between processes a third faster than torch's memory does.
        # Zeros are written, not only promised: transfers into untouched memory are many times slower.
        self.wire = self._bytes(size * 4 + tail, pinned=pinned)
        self._array = self.wire[: size * 4].view(np.float32)
        self.vector = torch.from_numpy(self._array)
        self._tail = self.wire[size * 4 :].data

    def _bytes(self, length: int, *, pinned: bool = False) -> npt.NDArray[np.uint8]:
        memory = None if self._memory is None else self._memory(length + CACHE_LINE)
        if memory is None:
            memory = page_locked(length + CACHE_LINE) if pinned else np.full(length + CACHE_LINE, 0, np.uint8)
        elif pinned:
            lock_pages(memory)
        first = -memory.ctypes.data % CACHE_LINE
        return memory[first : first + length]

    @property
    def gradient(self) -> torch.Tensor | RowGradient:
        """Gradient memory that executors fill, average and apply."""
        return self.vector

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """Tensor in main memory: the same memory on a CPU, a copy from a GPU."""
        return self.vector.numpy(force=True) if self._array is None else self._array

    def sampled(self, which: slice) -> bytes:
        """Returns some elements, float32."""
        # NumPy if possible: every microsecond counts here, and torch takes twice as many.
        taken = self.vector[which].numpy(force=True) if self._array is None else self._array[which]
        return taken.tobytes()

    @probed
    def digest(self, timestamp: int) -> int:
        """Returns a 64-bit digest that distinguishes weights of one timestamp (`rudra.core.digest`)."""
        return digest_of(self.sampled(sample(timestamp, len(self.vector))))

    def write(self, message: Message) -> npt.NDArray[np.uint8]:
        """Writes a message after the tensor. Returns the bytes to send, without the unused rest of the tail."""
        data_ = encode(message)
        self._tail[: len(data_)] = data_
        return self.wire[: len(self.wire) - len(self._tail) + len(data_)]

    def read(self) -> Message:
        """Returns the message after a received vector."""
        self.version += 1
        return decode(self._tail)

    def take_half(self, half: torch.Tensor) -> None:
        """Copies another buffer's float16 tensor: (size * 2 + 2,) uint8."""
        floats = len(self.vector) * 2
        exponent = half[floats : floats + EXPONENT].view(torch.int16)
        from_half(half[:floats].view(torch.float16), int(exponent[0]), self.vector)

    @cached_property
    def half(self) -> npt.NDArray[np.uint8]:
        """Memory for the tensor as float16, its exponent, and a message: (size * 2 + 2 + tail,) uint8."""
        return self._bytes(len(self.vector) * 2 + EXPONENT + len(self._tail))

    @cached_property
    def _halves(self) -> tuple[torch.Tensor, npt.NDArray[np.int16], memoryview]:
        """Three parts of `half`: tensor, exponent and message."""
        floats = len(self.vector) * 2
        numbers = torch.from_numpy(self.half[:floats].view(np.float16))
        return numbers, self.half[floats : floats + EXPONENT].view(np.int16), self.half[floats + EXPONENT :].data

    def write_half(self, message: Message) -> npt.NDArray[np.uint8]:
        """Writes a message as `write` does, with the tensor as float16."""
        (numbers, exponent, tail), data_ = self._halves, encode(message)
        exponent[0] = to_half(self.vector, numbers)
        tail[: len(data_)] = data_
        return self.half[: len(self.half) - len(tail) + len(data_)]

    def read_half(self) -> Message:
        """Takes over a tensor received as float16."""
        self.version += 1
        self.take_half(torch.from_numpy(self.half))
        return decode(self._halves[2])


class BorrowedBuffer(Buffer):
    """A read-only vector in the memory of another process, or of another executor.

    Args:
        vector: (size,) float32.
        give_back: Called when the vector is no longer needed here.
        form: Row format, if the vector is a gradient in rows.
    """

    borrowed = True

    def __init__(self, vector: torch.Tensor, give_back: Callable[[], None], form: RowFormat | None = None) -> None:
        self.version = 0
        self.vector = vector
        self._array = vector.numpy() if vector.is_cpu else None
        self.give_back = give_back
        self._form = form

    @property
    def gradient(self) -> torch.Tensor | RowGradient:
        return self.vector if self._form is None else RowGradient(self.vector, self._form)


class RowBuffer(Buffer):
    """A gradient in rows after the room for a message: the used parts of both are one piece of memory.

    Args:
        form: Row format of the gradient.
        tail: Bytes of the room for a message.
        memory: Allocator for the buffer.

    Attributes:
        vector: (form.floats,) float32, all the memory of the gradient.
    """

    def __init__(self, form: RowFormat, tail: int, memory: Memory | None = None) -> None:
        self.version = 0
        self._memory = memory
        self.wire = self._bytes(tail + form.floats * 4)
        self._tail = self.wire[:tail].data
        self._array = self.wire[tail:].view(np.float32)
        self.vector = torch.from_numpy(self._array)
        self._rows = RowGradient(self.vector, form)

    @property
    def gradient(self) -> RowGradient:
        return self._rows

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """Used part of the vector, in main memory."""
        assert self._array is not None
        return self._array[: self._rows.used]

    def write(self, message: Message) -> npt.NDArray[np.uint8]:
        data_ = encode(message)
        self._tail[: len(data_)] = data_
        return self.wire[: len(self._tail) + 4 * self._rows.used]


class DirectBuffer(Buffer):
    """A buffer on the GPU of its role. MPI reads and writes it there.

    Attributes:
        wire: (size * 4 + tail,) uint8, a tensor.
    """

    wire: torch.Tensor  # type: ignore[assignment]

    def __init__(self, size: int, tail: int, device: torch.device) -> None:
        self.version = 0
        self.wire = torch.zeros(size * 4 + tail, dtype=torch.uint8, device=device)
        self.vector = self.wire[: size * 4].view(torch.float32)
        self._array = None

    def write(self, message: Message) -> torch.Tensor:  # type: ignore[override]
        data_ = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        first = len(self.vector) * 4
        self.wire[first : first + len(data_)] = data_
        finish(self.wire.device)
        return self.wire[: first + len(data_)]

    def read(self) -> Message:
        self.version += 1
        return decode(self.wire[len(self.vector) * 4 :].numpy(force=True).data)


class Deferred(NamedTuple):
    """Content of a buffer that is computed once somebody needs it.

    Attributes:
        take: Computes the content slice by slice.
        of: Names of the buffers that the content depends on.
        fill: Fills the whole buffer, if there is a faster way than slice by slice.
    """

    take: Take
    of: tuple[str, ...]
    fill: Callable[[], None] | None
