"""Small networks, each with what some tests need: dropout, buffers, layers of some size."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from point_data import CLASSES
from torch import nn

from rudra.compute.executor import Executor


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, CLASSES))


def broad() -> nn.Module:
    """A third of a megabyte: weights arrive in pieces."""
    return nn.Sequential(nn.Linear(20, 3000), nn.Tanh(), nn.Linear(3000, CLASSES))


def dropping() -> nn.Module:
    """Has all that a restart could forget: dropout, and buffers that learning changes."""
    return nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Dropout(0.3), nn.Linear(50, CLASSES))


def normed() -> nn.Module:
    """Has buffers and dropout at both ends."""
    first, last = (nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Dropout(0.2)), (nn.BatchNorm1d(50), nn.Linear(50, CLASSES))
    return nn.Sequential(*first, nn.Tanh(), nn.Dropout(0.3), *last)


def even_digits() -> nn.Module:
    """Its weights are whole cache lines, so that one kernel updates all of them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False))


def broad_digits(*_: Any) -> nn.Module:
    """For images of digits, with enough work for a GPU."""
    inner = (nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(2048, 10))


def normed_digits(*_: Any) -> nn.Module:
    """For images of digits, with buffers and dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Dropout(0.2), nn.Linear(50, 10)
    )


def regular() -> nn.Module:
    """As `network`, with dropout, but without statistics of batches, which may be single samples."""
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Dropout(0.3), nn.Linear(50, CLASSES))


def forgetful() -> nn.Module:
    """As `regular`, with a layer that is large enough to write its gradient itself."""
    first, second = (nn.Linear(20, 400), nn.Tanh(), nn.Dropout(0.3)), (nn.Linear(400, 200), nn.Tanh(), nn.Dropout(0.2))
    return nn.Sequential(*first, *second, nn.Linear(200, CLASSES))


def convolving() -> nn.Module:
    """A convolution and dropout, with gradients by autograd."""
    first = nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)
    return nn.Sequential(*first, nn.Linear(160, 100), nn.Tanh(), nn.Linear(100, CLASSES))


def everything() -> nn.Module:
    """Dropout, and BatchNorm's statistics, which travel as buffers."""
    return nn.Sequential(
        nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 300), nn.Tanh(), nn.Dropout(),
        nn.Linear(300, CLASSES),
    )  # fmt: skip


def skewed() -> nn.Module:
    """Most parameters are at the end."""
    return nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 200), nn.Dropout(0.3), nn.Linear(200, CLASSES))


def wide() -> nn.Module:
    return nn.Linear(20, 7)


def counted(input_shape: Any, classes: int, told: str) -> nn.Module:
    """A network of 20, 9 and ten numbers; each rank notes in a directory what tensors it sends."""
    send = Executor.send

    def noted(executor: Any, name: str, message: Any, to: int, **how: Any) -> Any:
        wire = send(executor, name, message, to, **how)
        with (Path(told) / f"{os.getpid()}").open("a") as file:
            file.write(f"{message.kind.name} {4 * executor.size_of(name)}\n")
        return wire

    if Executor.send.__name__ == "send":
        Executor.send = noted  # type: ignore[method-assign]
    return nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, classes))


class Latent(nn.Module):
    """Each forward pass takes a fixed time, as if its operations were too short for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        output: torch.Tensor = self.layers(inputs)
        return output


class Regrouping(nn.Module):
    """Buffers that are not changed in place but made anew, and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(20, 10), nn.BatchNorm1d(10, momentum=None)
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("order", torch.arange(10).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls = self.calls + 1
        return (self.norm(x)[:, self.order] - self.mean.detach()) / self.calls  # type: ignore[no-any-return]


class Assorted(nn.Module):
    """All kinds of entries that a state_dict may have, and a buffer that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(20, 16), nn.BatchNorm1d(16, momentum=None)
        self.once, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.once.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.brief = nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False)
        self.alias = self.brief
        self.last = nn.Linear(16, CLASSES)
        self.register_buffer("mask", torch.arange(16) % 5 > 0)
        self.register_buffer("a/b", torch.tensor([1 + 2j, 3]))
        self.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("passing", torch.full((3,), 7.0), persistent=False)
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:  # made anew, not changed in place
            self.level, self.seen = 0.9 * self.level + 0.1 * inputs.mean(), self.seen + 1
        hidden = torch.relu(self.norm(self.first(inputs)))
        hidden = hidden + torch.tanh(self.frozen(self.again(torch.tanh(self.once(hidden))) * self.mask))
        hidden = hidden + self.scale * self.brief(hidden.bfloat16()).float()
        result: torch.Tensor = self.last(hidden + self.level + 1 / (1 + self.seen))
        return result
