"""Layers of users: forward passes that may wait for weights and be repeated, and all ways around that are refused."""

import inspect
import math
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from rudra.compute.plain_code import is_plain

WIDTH, PASSES = 4, [0]


def scaled(inputs: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return inputs * by / math.sqrt(WIDTH)


def noted(inputs: torch.Tensor) -> torch.Tensor:
    PASSES[0] += 1
    return inputs


def doubled(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    scripted = torch.jit.script(doubled)
    scripted_layer = torch.jit.script(nn.Linear(2, 2))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain, self.shape, self.seen = nn.Parameter(torch.ones(WIDTH)), (-1, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("order", torch.arange(WIDTH))
        self.kept: list[torch.Tensor] = []
        self.held = torch.zeros(WIDTH)


class Plain(Base):
    def forward(self, inputs: torch.Tensor, *, times: int = 2) -> Any:
        """Has what most layers have."""
        reached: torch.Tensor = inputs.view(self.shape).float()
        for layer in self.layers:
            reached = reached + torch.relu(layer(reached))
        reached += self._gained(reached)
        if self.training and reached.shape[0] > 1:
            reached = F.dropout(reached, 0.5, self.training)
        rest = [scaled(gelu(reached), by=2.0) for _ in range(times)]
        tied = F.linear(reached, self.first.weight, self.first.bias)
        return torch.cat([*rest, tied[:, :2], torch.zeros(len(reached), 1)], dim=-1), self.mean.sum()

    def _gained(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.gain + self.layers[0](inputs)


class Renamed(nn.Linear):
    """Torch's forward pass."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


@pytest.mark.parametrize("kind", [Plain, Renamed, nn.LSTM, nn.MultiheadAttention])
def test_plain_layers_are_plain(kind: Any) -> None:
    layer = kind(WIDTH, 2) if kind in (nn.LSTM, nn.MultiheadAttention) else kind()
    assert is_plain(layer)
    if kind is Plain:
        layer(torch.ones(3, WIDTH))


class Counts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.seen


class CountsElsewhere(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noted(x)


class Keeps(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        return x


class ChangesATensor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.held.add_(1)


class ChangesAnOrder(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.order.add_(1)


class DrawsInPython(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class DrawsByNumPy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand())


class Seeds(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x * torch.rand(1)


class UsesScripts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * scripted(self.gain)


class UsesThreads(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        threading.Thread(target=self.first, args=(x,)).start()
        return x


class UsesItsOwnFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * Doubled.apply(self.gain)  # type: ignore[no-untyped-call]


class UsesOperators(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mul(x, self.gain)  # type: ignore[no-any-return]


class UsesDLPack(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.from_dlpack(self.gain.detach()).sum())  # type: ignore[arg-type]


class UsesAddresses(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (id(self.gain) % 2)


class UsesCheckpoints(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.first, x, use_reentrant=False)


class UsesOtherWeights(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.func.functional_call(self.first, {"weight": self.first.weight * 2}, (x,))


class UsesNoGradient(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * self.gain


class Decorated(Base):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class IsCalledItsOwnWay(Base):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        PASSES[0] += 1
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class HasAProperty(Base):
    @property
    def one(self) -> float:
        PASSES[0] += 1
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one


class GivesItselfAway(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len([self])


class HasATensorsName(Base):
    """Another layer may take its method for a tensor's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def flatten(self) -> None:
        PASSES[0] += 1


class ReplacesALayer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0] = self.first
        return x


class PassesAFunctionOn(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called = scaled
        return called(x)


class ReplacesAPartOfTorchs(nn.Conv1d):
    def _conv_forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        PASSES[0] += 1
        return x


ESCAPES = [
    *(Counts, CountsElsewhere, Keeps, ChangesATensor, ChangesAnOrder, DrawsInPython, DrawsByNumPy, Seeds, UsesScripts),
    *(UsesThreads, UsesItsOwnFunction, UsesOperators, UsesDLPack, UsesAddresses, UsesCheckpoints, UsesOtherWeights),
    *(UsesNoGradient, Decorated, IsCalledItsOwnWay, HasAProperty, GivesItselfAway, ReplacesAPartOfTorchs),
    *(HasATensorsName, ReplacesALayer, PassesAFunctionOn),
]


@pytest.mark.parametrize("kind", ESCAPES)
def test_other_layers_are_not(kind: Any) -> None:
    assert not is_plain(kind(WIDTH, WIDTH, 1) if issubclass(kind, nn.Conv1d) else kind())


def test_code_whose_file_has_changed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain(Plain())
    source = inspect.getsource(Plain.forward)
    monkeypatch.setattr("inspect.getsource", lambda code: source.replace("torch.relu", "torch.tanh"))
    assert not is_plain(Plain())


def test_torchs_layers_are_not_if_they_are_scripted_or_compiled_or_call_users_code() -> None:
    assert not is_plain(scripted_layer)
    assert not is_plain(nn.TransformerEncoderLayer(WIDTH, 2, activation=noted))
    layer = nn.Linear(WIDTH, WIDTH)
    layer._compiled_call_impl = layer.forward  # as by layer.compile(), which takes long
    assert not is_plain(layer)
