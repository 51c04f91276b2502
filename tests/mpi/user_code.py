"""What a user brings: models and data of their own, good and bad."""

import os
import random
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

CLASSES = 10


class Digits(Dataset[Any]):
    """Random points of ten clusters; `late_s` delays mini-batches at random, so gradients arrive in any order."""

    classes = CLASSES

    def __init__(self, samples: int, late_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        centres = torch.randn(CLASSES, 20, generator=generator)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.inputs = centres[self.labels] + 0.1 * torch.randn(samples, 20, generator=generator)
        self.late_s = late_s

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        if self.late_s:
            time.sleep(random.SystemRandom().uniform(0, self.late_s))
        return [self[index] for index in indices]


def delayed() -> tuple[Digits, Digits]:
    return Digits(240, late_s=0.02), Digits(60)


def prompt() -> tuple[Digits, Digits]:
    return Digits(240), Digits(60)


def endless() -> tuple[Digits, Digits]:
    return Digits(2000, late_s=0.01), Digits(60)


def wrong_label() -> tuple[Digits, Digits]:
    data = Digits(240)
    data.labels[100] = 11
    return data, Digits(60)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, CLASSES))


def wide() -> nn.Module:
    return nn.Linear(20, 7)


class Trap(nn.Module):
    """Springs in the `after`-th training step of the rank that is learner 1 of three."""

    def __init__(self, after: int, deed: str) -> None:
        super().__init__()
        self.inner, self.after, self.deed, self.steps = network(), after, deed, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > self.after and os.environ.get("OMPI_COMM_WORLD_RANK") == "3":
            if self.deed == "raise":
                raise ValueError("the user's own bug")
            if self.deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "hang":
                time.sleep(1000)
        result: torch.Tensor = self.inner(inputs)
        return result


def raising() -> nn.Module:
    return Trap(50, "raise")


def dying() -> nn.Module:
    return Trap(100, "kill")


def hanging() -> nn.Module:
    return Trap(20, "hang")
