"""Random changes to training images: part of the deterministic drawing of samples, a pure function of a key."""

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
    """What happens to a mini-batch's inputs before they are learned.

    Args:
        table: of the job.

    Raises:
        ConfigError: the user's callable is not there.
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
        """Whether nothing happens."""
        return not (self._crop or self._flip or self._own)

    def __call__(self, inputs: Any, key: int) -> Any:
        """The changed inputs, fresh.

        Args:
            inputs: (count, C, H, W) float32 where images are cropped or flipped; anything for a callable.
            key: decides, together with the job, what happens.
        """
        if self._crop or self._flip:
            if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4:
                shape = tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else "of several tensors"
                raise ConfigError(f"[augment] crop, flip: for images (channels, height, width), not inputs {shape}")
            images, inputs = inputs, torch.empty_like(inputs)  # torch's memory, because it is aligned always alike
            _shift(images.numpy(), inputs.numpy(), self._crop, self._flip, key)
        if self._own is not None:
            inputs = self._own(inputs, torch.Generator().manual_seed(key))
        return inputs


def _shift(images: npt.NDArray[np.float32], result: npt.NDArray[np.float32], crop: int, flip: bool, key: int) -> None:
    """Moves images by up to `crop` pixels each way, with zeros behind the edges, and mirrors half of them."""
    count, _, height, width = images.shape
    draws = np.random.Philox(key=key).random_raw(3 * count).reshape(count, 3)
    downs, rights = ((draws[:, place] >> np.uint64(32)) * np.uint64(2 * crop + 1) >> np.uint64(32) for place in (0, 1))
    mirrored = (draws[:, 2] >> np.uint64(63)).astype(bool) & flip
    padded = np.zeros((*images.shape[:2], height + 2 * crop, width + 2 * crop), np.float32)
    padded[:, :, crop : crop + height, crop : crop + width] = images
    for place, (down, right, mirror) in enumerate(zip(downs.tolist(), rights.tolist(), mirrored.tolist(), strict=True)):
        window = padded[place, :, down : down + height, right : right + width]
        result[place] = window[:, :, ::-1] if mirror else window
