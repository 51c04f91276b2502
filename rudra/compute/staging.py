"""Copies of buffers on the device that computes, where the buffers themselves are in main memory."""

from functools import cached_property

import torch

from rudra.compute.vectors import Buffer


class Staging:
    """Vectors on the device where a role computes, while its buffers lie in main memory, where MPI reads and writes.

    Args:
        size: of a vector.
        device: that computes; a CPU will do, too.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._held: tuple[Buffer, int] | None = None

    @cached_property
    def gradient(self) -> torch.Tensor:
        """Room for a gradient, (size,) float32."""
        return torch.zeros(self.size, device=self.device)

    @cached_property
    def _weights(self) -> torch.Tensor:
        return torch.zeros(self.size, device=self.device)

    def weights(self, buffer: Buffer) -> torch.Tensor:
        """A buffer's vector, (size,) float32, which is copied if it is not here yet; good until the next one.

        The device may be reading the buffer still: it must not change until what was computed of it has come back.
        """
        if self._held != (buffer, buffer.version):
            self.copied(buffer.vector)
            self._held = buffer, buffer.version
        return self._weights

    def copied(self, vector: torch.Tensor) -> torch.Tensor:
        """A copy of weights in main memory, (size,) float32, as good for as long."""
        self._held = None
        return self._weights.copy_(vector, non_blocking=True)
