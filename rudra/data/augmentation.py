"""Random changes to training images: part of the deterministic drawing of samples, and a pure function of a key."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from rudra.errors import ConfigError
from rudra.job.tables import AugmentTable
from rudra.plugins import choose


class Augmentation:
    """Changes to the inputs of a mini-batch before training.

    Attributes:
        moves: Whether images are cropped or flipped.
        own: User's callable. None: there is none.

    Raises:
        ConfigError: The user's callable does not exist.
    """

    def __init__(self, table: AugmentTable) -> None:
        self._crop = table.crop
        self.moves = bool(table.crop or table.flip)
        self._ways = np.array([2 * table.crop + 1, 2 * table.crop + 1, 1 + table.flip], np.uint64)
        self._generator = np.random.Philox(key=0)
        self._fresh = self._generator.state
        self.own: Callable[..., Any] | None = None
        if table.name is not None:
            own = choose("[augment] name", table.name, {})
            if not callable(own):
                raise ConfigError(f"[augment] name: {table.name} is a {type(own).__name__} and cannot be called")
            self.own = partial(own, **table.options)

    @property
    def idle(self) -> bool:
        """Whether there are no changes."""
        return not (self.moves or self.own)

    def __call__(self, inputs: Any, key: int) -> Any:
        """Returns the changed inputs as a new object.

        Args:
            inputs: (count, C, H, W) float32 in main memory if images are cropped or flipped, or anything for a
                callable.
            key: Key that determines the changes, together with the job.
        """
        if self.moves:
            self.check(inputs)
            result = torch.empty_like(inputs)  # torch's memory always has the same alignment
            _move(inputs.numpy(), result.numpy(), self._crop, self.shifts([key], len(inputs)))
            inputs = result
        if self.own is not None:
            inputs = self.own(inputs, torch.Generator().manual_seed(key))
        return inputs

    def check(self, inputs: Any) -> None:
        """Raises ConfigError if the job crops or flips images, and the inputs are no images."""
        if self.moves and not (isinstance(inputs, torch.Tensor) and inputs.dim() == 4):
            shape = tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else "of several tensors"
            raise ConfigError(f"[augment] crop, flip: for images (channels, height, width), not inputs {shape}")

    def shifts(self, keys: Sequence[int], count: int) -> npt.NDArray[np.int64]:
        """Draws the movements of images.

        Args:
            keys: Key of each mini-batch.
            count: Number of images in a mini-batch.

        Returns:
            (len(keys) * count, 3) int64: pixels down and pixels right, 0 … 2 * crop, and 1 for a mirrored image.
        """
        draws = np.empty((len(keys), 3 * count), np.uint64)
        for row, key in zip(draws, keys, strict=True):
            self._fresh["state"]["key"][0] = key
            self._generator.state = self._fresh  # much faster than a new generator
            row[:] = self._generator.random_raw(3 * count)
        return ((draws.reshape(-1, 3) >> np.uint64(32)) * self._ways >> np.uint64(32)).astype(np.int64)

    def moved(self, images: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Returns images shifted by up to `crop` pixels in each direction, filled with zeros, some of them mirrored.

        It is a gather on any device. The result is bitwise the same as in main memory.

        Args:
            images: (count, C, H, W) float32.
            shifts: (count, 3) int64 from `shifts`, on the device of the images.
        """
        count, channels, height, width = images.shape
        crop, (down, right, mirror) = self._crop, shifts.unbind(1)
        mirrored = mirror.bool()
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        right = torch.where(mirrored, 2 * crop - right, right)
        padded = pad(images, (crop, crop, crop, crop))
        plane, row, _ = padded.stride()[1:]
        planes = torch.arange(count * channels, device=images.device).view(count, channels, 1) * plane
        rows = torch.arange(height, device=images.device) * row
        first = planes + (down * row + right)[:, None, None] + rows
        runs = padded.as_strided((padded.numel() - width + 1, width), (1, 1))  # run i begins with number i
        return runs.index_select(0, first.view(-1)).view(images.shape)


def _move(
    images: npt.NDArray[np.float32], result: npt.NDArray[np.float32], crop: int, shifts: npt.NDArray[np.int64]
) -> None:
    """Moves images in main memory, where copies of windows, one by one, are faster than a gather of all numbers."""
    height, width = images.shape[2:]
    padded = np.zeros((*images.shape[:2], height + 2 * crop, width + 2 * crop), np.float32)
    padded[:, :, crop : crop + height, crop : crop + width] = images
    for place, (down, right, mirror) in enumerate(shifts.tolist()):
        window = padded[place, :, down : down + height, right : right + width]
        result[place] = window[:, :, ::-1] if mirror else window
