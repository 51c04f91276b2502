"""The networks that Rudra ships.

Each factory gets the shape of one input, the number of classes, and the options of the job.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rudra.errors import ConfigError


def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def lenet(
    input_shape: Sequence[int], classes: int, channels: tuple[int, int] = (20, 50), hidden: int = 500
) -> nn.Module:
    """Caffe's LeNet: 431,080 parameters on 28x28x1 and ten classes.

    Inputs below 20x20 get 3x3 convolutions that keep the size, and only one pooling, behind the second.
    """
    depth, height, width = _image("lenet", input_shape, least=4)
    small = min(height, width) < 20
    kernel, padding = (3, 1) if small else (5, 0)
    first_pool: nn.Module = nn.Identity() if small else nn.MaxPool2d(2, ceil_mode=True)
    convolutions = nn.Sequential(
        nn.Conv2d(depth, channels[0], kernel, padding=padding),
        first_pool,
        nn.Conv2d(channels[0], channels[1], kernel, padding=padding),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
    )
    features = _features(convolutions, input_shape)
    model = nn.Sequential(*convolutions, nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = math.sqrt(3 / layer.weight[0].numel())  # Caffe's "xavier": by the inputs of a neuron alone
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


class _LocalNorm(nn.Module):
    """Caffe's response normalisation within each channel: x / (1 + alpha * mean of x² around it) ** 0.75."""

    def __init__(self, size: int = 3, alpha: float = 5e-5) -> None:
        super().__init__()
        self.size, self.alpha = size, alpha

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # A depthwise convolution takes a third of the time of torch's pooling, and two roots less than a power.
        channels = inputs.shape[1]
        weight = inputs.new_full((channels, 1, self.size, self.size), self.alpha / self.size**2)
        root = torch.rsqrt(1 + functional.conv2d(inputs * inputs, weight, padding=self.size // 2, groups=channels))
        return inputs * root * root.sqrt()


def cifar10_full(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Caffe's cifar10_full: 89,578 parameters on 32x32x3 and ten classes.

    It expects inputs of 0…255 minus the mean: its first weights are tiny for that reason.

    Source: Rudra §4.2, which names the network but no detail; these are Caffe's.
    """
    depth, _, _ = _image("cifar10_full", input_shape, least=16)
    convolutions = nn.Sequential(
        nn.Conv2d(depth, 32, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        _LocalNorm(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        _LocalNorm(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
    )
    model = nn.Sequential(*convolutions, nn.Linear(_features(convolutions, input_shape), classes))
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer, deviation in zip(layers, (1e-4, 1e-2, 1e-2, 1e-2), strict=True):
        nn.init.normal_(layer.weight, std=deviation)
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def alexnet(input_shape: Sequence[int], classes: int, width: int = 4616, dropout: float = 0.5) -> nn.Module:
    """AlexNet: five convolutions, three fully connected layers, dropout behind the first two of these.

    72,221,944 parameters (288.9 MB) with 1000 classes, for any input of 3x63x63 or more; 3x224x224 is usual.

    Source: Rudra §4.3, which gives about 72 M parameters and 289 MB but no widths. The convolutions here are the
    published ones in one group; `width`, of the fully connected layers, is chosen for that size instead of 4096.
    """
    depth, _, _ = _image("alexnet", input_shape, least=63)
    return nn.Sequential(
        nn.Conv2d(depth, 96, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, classes),
    )


MODELS: dict[str, Callable[..., Any]] = {"mlp": mlp, "lenet": lenet, "cifar10_full": cifar10_full, "alexnet": alexnet}


def _image(name: str, input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        wanted = f"(channels, height, width) of {least}x{least} or more"
        raise ConfigError(f"[model] {name} takes images {wanted}, not inputs of shape {tuple(input_shape)}")
    depth, height, width = input_shape
    return depth, height, width


def _features(layers: nn.Module, input_shape: Sequence[int]) -> int:
    """Outputs of the layers for one sample."""
    with torch.no_grad():
        return int(layers(torch.zeros(1, *input_shape)).shape[1])
