"""Random changes to training images: part of the deterministic drawing of samples, and a pure function of a key."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra.errors import ConfigError
from rudra.job.tables import AugmentTable
from rudra.plugins import choose


class Augmentation:
    """Changes to the inputs of a mini-batch before training.

    Raises:
        ConfigError: The user's callable does not exist.
    """

    def __init__(self, table: AugmentTable) -> None:
        self._crop, self._flip = table.crop, table.flip
        self._own: Callable[..., Any] | None = None
        if table.name is not None:
            own = choose("[augment] name", table.name, {})
            if not callable(own):
                raise ConfigError(f"[augment] name: {table.name} is a {type(own).__name__} and cannot be called")
            self._own = partial(own, **table.options)

    @property
    def idle(self) -> bool:
        """Whether there are no changes."""
        return not (self._crop or self._flip or self._own)

    def __call__(self, inputs: Any, key: int) -> Any:
        """Returns the changed inputs as a new object.

        Args:
            inputs: (count, C, H, W) float32 if images are cropped or flipped, or anything for a callable.
            key: Key that determines the changes, together with the job.
        """
        if self._crop or self._flip:
            if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4:
                shape = tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else "of several tensors"
                raise ConfigError(f"[augment] crop, flip: for images (channels, height, width), not inputs {shape}")
            images, inputs = inputs, torch.empty_like(inputs)  # torch's memory always has the same alignment
            _shift(images.numpy(), inputs.numpy(), self._crop, self._flip, key)
        if self._own is not None:
            inputs = self._own(inputs, torch.Generator().manual_seed(key))
        return inputs


def _shift(images: npt.NDArray[np.float32], result: npt.NDArray[np.float32], crop: int, flip: bool, key: int) -> None:
    """Shifts images by up to `crop` pixels in each direction, fills with zeros, and mirrors half of the images."""
    count, _, height, width = images.shape
    draws = np.random.Philox(key=key).random_raw(3 * count).reshape(count, 3)
    downs, rights = ((draws[:, place] >> np.uint64(32)) * np.uint64(2 * crop + 1) >> np.uint64(32) for place in (0, 1))
    mirrored = (draws[:, 2] >> np.uint64(63)).astype(bool) & flip
    padded = np.zeros((*images.shape[:2], height + 2 * crop, width + 2 * crop), np.float32)
    padded[:, :, crop : crop + height, crop : crop + width] = images
    for place, (down, right, mirror) in enumerate(zip(downs.tolist(), rights.tolist(), mirrored.tolist(), strict=True)):
        window = padded[place, :, down : down + height, right : right + width]
        result[place] = window[:, :, ::-1] if mirror else window
