"""Timing of a model's layers during training steps, and sizes of their parameters and outputs.

In the forward pass, the clock is read between layers. In the backward pass, it is read when the gradient of a layer's
output is ready.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rudra.compute.cuts import LayerChain
from rudra.compute.device.devices import finish
from rudra.core.placement import Layer


def clock(device: torch.device) -> Callable[[], float]:
    """Returns a function that gives seconds after all requested work on a device is complete.

    They are this thread's CPU time if it does all the work itself. CPU time excludes the work of other processes on a
    shared machine.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time

    def now() -> float:
        finish(device)
        return time.perf_counter()

    return now


class TimedChain(nn.Module):
    """A model that records when each of its layers begins and ends.

    Args:
        chain: Model as a chain of layers.
        device: Device that computes.

    Attributes:
        every: Interval of timed layers: 1 times every layer, n times one in n. Together they show the timing's cost.
        notes: Times of the latest step, forward and backward.
        now: Clock.
    """

    def __init__(self, chain: LayerChain, device: torch.device) -> None:
        super().__init__()
        self.model = chain.model
        self._layers, self.now = chain.layers, clock(device)
        self._forward: list[float] = []  # before each layer, and after the last
        self._backward: dict[int, float] = {}  # when the gradient of a layer's output was ready
        self._over = 0.0  # when the gradient of the first parameter was ready
        self.every, self.notes = 1, 0

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self._backward.clear()
        self._forward, self.notes = [self.now()], 0
        value = self._layers[0](*args, **keywords)
        for index, layer in enumerate(self._layers):
            value = layer(value) if index else value
            if index % self.every:
                continue
            self._forward.append(self.now())
            self.notes += 1
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(partial(self._known, index))  # type: ignore[no-untyped-call]
                self.notes += 1
        return value

    def listen(self) -> None:
        """Records when the first parameter's gradient is ready. It comes last and ends the layers' part of a step."""
        first = next(p for layer in self._layers for p in layer.parameters() if p.requires_grad)
        first.register_hook(self._computed)  # type: ignore[no-untyped-call]

    def parts(self, began: float, ended: float) -> list[float]:
        """Returns seconds of the latest step: each layer forward, each backward, the loss, and the rest."""
        count = len(self._layers)
        forward = [after - before for before, after in zip(self._forward, self._forward[1:], strict=False)]
        known = [self._backward.get(index) for index in range(count)]
        backward, over = [0.0] * count, self._over
        for index in range(count):
            begun = known[index]
            if begun is not None:
                backward[index], over = max(0.0, over - begun), begun
        loss_s = max(0.0, over - self._forward[-1])
        return [*forward, *backward, loss_s, ended - began - sum(forward) - sum(backward) - loss_s]

    def _known(self, index: int, _: torch.Tensor) -> None:
        self._backward[index] = self.now()

    def _computed(self, _: torch.Tensor) -> None:
        self._over = self.now()


class Through(nn.Module):
    """A model whose gradient autograd computes, even if a learner would use faster code."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.model(*args, **keywords)


def layers_of(chain: LayerChain) -> tuple[Layer, ...]:
    """Returns the sizes of a model's layers and their outputs, without times."""
    admissible = chain.admissible()
    return tuple(
        Layer(name, kind_of(layer), size, _output_bytes(chain, index), cut=index in admissible)
        for index, (name, layer, size) in enumerate(zip(chain.names, chain.layers, _held(chain), strict=True), 1)
    )


def _held(chain: LayerChain) -> Iterator[int]:
    """Yields the bytes of each layer's trained parameters. Shared parameters count for their first layer."""
    seen: set[int] = set()
    for layer in chain.layers:
        new = {id(p): p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad}
        yield sum(size for key, size in new.items() if key not in seen)
        seen |= new.keys()


def _output_bytes(chain: LayerChain, index: int) -> int:
    """Returns the output bytes for one sample if `index` layers are in front of the back."""
    if index == len(chain.layers):
        return 0
    crossing = chain.crossings[index - 1]
    if crossing.shape is None or crossing.dtype is None:
        return 0
    return math.prod(crossing.shape[1:]) * crossing.dtype.itemsize


_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "convolution": (nn.modules.conv._ConvNd,),
    "recurrent": (nn.RNNBase,),
    "linear": (nn.Linear, nn.Bilinear, nn.MultiheadAttention),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
}


def kind_of(layer: nn.Module) -> str:
    """Returns the kind of a layer. For a block it is the first kind in this list that it contains."""
    inside = list(layer.modules())
    for kind, types in _KINDS.items():
        if any(isinstance(module, types) for module in inside):
            return kind
    return "pool" if any("Pool" in type(module).__name__ for module in inside) else ""
