from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rudra.config import ModelTable
from rudra.data import DataInfo
from rudra.models import build
from rudra.networks import _LocalNorm


def make(name: str, *input_shape: int, classes: int = 10, **options: Any) -> nn.Module:
    """One of the networks as a job gets it, with the weights of seed 0."""
    return build(ModelTable(name=name, options=options), DataInfo("data", 1, 1, input_shape, classes), 0)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_alexnet_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = make("alexnet", 3, 224, 224, classes=1000)
        output = model(torch.zeros(2, 3, 256, 256))
    assert parameters(model) == 72_221_944
    assert round(parameters(model) * 4 / 1e6) == 289
    assert tuple(output.shape) == (2, 1000)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.5, 0.5]


def test_cifar10_full_starts_as_caffe_does() -> None:
    model = make("cifar10_full", 3, 32, 32)
    deviations = [float(p.detach().std()) for p in model.parameters() if p.dim() > 1]
    np.testing.assert_allclose(deviations, [1e-4, 1e-2, 1e-2, 1e-2], rtol=0.05)
    assert not any(p.detach().any() for p in model.parameters() if p.dim() == 1)


def test_cifar10_full_can_start_learning() -> None:
    """Its tiny first weights give no signal unless inputs are in the range 0…255."""
    model = make("cifar10_full", 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(-128, 128, (8, 3, 4, 4), generator=generator).float()
    x, y = functional.interpolate(blocks, size=(32, 32)), torch.arange(8)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(10), abs=0.01)
    assert losses[-1] < 1.5


def test_local_norm_is_caffes_formula() -> None:
    x = torch.randn(2, 3, 6, 6) * 100
    mean = functional.avg_pool2d(x * x, 3, stride=1, padding=1)
    torch.testing.assert_close(_LocalNorm()(x), x / (1 + 5e-5 * mean) ** 0.75)
