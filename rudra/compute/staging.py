"""Copies of buffers on the device that computes. The buffers themselves are in main memory."""

from functools import cached_property

import torch

from rudra.compute.vectors import Buffer


class Staging:
    """Vectors on the device where a role computes. Its buffers are in main memory, where MPI reads and writes.

    Args:
        size: Number of floats in a vector.
        device: Device that computes, may be a CPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._held: tuple[Buffer, int] | None = None

    @cached_property
    def gradient(self) -> torch.Tensor:
        """Memory for a gradient, (size,) float32."""
        return torch.zeros(self.size, device=self.device)

    @cached_property
    def _weights(self) -> torch.Tensor:
        return torch.zeros(self.size, device=self.device)

    def weights(self, buffer: Buffer) -> torch.Tensor:
        """Returns a buffer's vector on the device, (size,) float32, valid until the next call. Copies it if needed.

        The copy may still be in progress: the buffer must not change until the result of the computation has been
        copied back.
        """
        if self._held != (buffer, buffer.version):
            self.copied(buffer.vector)
            self._held = buffer, buffer.version
        return self._weights

    def receive(self, buffer: Buffer, part: slice) -> tuple[()]:
        """Copies a part of weights that arrive in a buffer."""
        self._weights[part].copy_(buffer.vector[part], non_blocking=True)
        return ()

    def received(self, buffer: Buffer, version: int) -> None:
        """Notes that all parts are copied, or will be copied before the next computation.

        Args:
            buffer: The buffer.
            version: Version that it has when all parts are there.
        """
        self._held = buffer, version

    def copied(self, vector: torch.Tensor) -> torch.Tensor:
        """Copies weights from main memory, (size,) float32, valid until the next call of `copied` or `weights`."""
        self._held = None
        return self._weights.copy_(vector, non_blocking=True)
