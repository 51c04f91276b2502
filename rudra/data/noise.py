"""Noise instead of images, for jobs that measure only time."""

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """Data set of noise with 10 classes, of any length, in the memory of a few samples.

    Args:
        shape: Shape of one sample.
        samples: Length of the data set.
        pool: Number of different samples, which repeat.
    """

    def __init__(self, shape: Sequence[int], samples: int, pool: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(pool, *shape, generator=generator)
        self._labels = torch.randint(10, (pool,), generator=generator).tolist()
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._inputs[index % len(self._labels)], self._labels[index % len(self._labels)]


def noise(shape: Sequence[int], samples: int = 50_000, pool: int = 512) -> tuple[Noise, Noise]:
    """Makes a training set, and a test set of 256 samples, with the arguments of `Noise`."""
    return Noise(shape, samples, pool), Noise(shape, 256, pool)
