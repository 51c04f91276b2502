"""Data and a model for campaigns on real ranks, in a module of its own, so that the launcher does not need torch."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from rudra.compute.networks import mlp


class Points(Dataset[Any]):
    """Two clusters; a mini-batch takes a moment, as in life."""

    classes = 2

    def __init__(self, samples: int) -> None:
        self.inputs = torch.arange(samples * 8.0).reshape(samples, 8).sin()
        self.labels = (self.inputs[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        time.sleep(0.003)
        return [self[index] for index in indices]


def points() -> tuple[Points, Points]:
    """Data that is there at once."""
    return Points(320), Points(40)


def checked_mlp(input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Makes an mlp, and lets the rank check the tensors that neighbours lend it; ranks call this before they send."""
    from rudra.mpi import leases  # not in the launcher: this starts MPI

    leases.CHECKED = True
    return mlp(input_shape, classes, **options)
