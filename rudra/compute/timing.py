"""The layers of a model, each timed in the steps of its training, and what they hold and give.

Forward, the clock is read between layers; backward, whenever the gradient of what a layer gave is known.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rudra.compute.cuts import LayerChain
from rudra.core.placement import Layer


class TimedChain(nn.Module):
    """A model that notes when each of its layers has begun and ended.

    Args:
        chain: of the model.
        device: where it computes.

    Attributes:
        every: it notes the times of each layer, or of one in so many, which tells what notes cost.
        notes: of the latest step, forward and backward.
    """

    def __init__(self, chain: LayerChain, device: torch.device) -> None:
        super().__init__()
        self.model = chain.model
        self._layers, self._cuda = chain.layers, device.type == "cuda"
        self._alone = not self._cuda and torch.get_num_threads() == 1
        self._forward: list[float] = []  # before each layer, and behind the last
        self._backward: dict[int, float] = {}  # when the gradient of a layer's output was known
        self._over = 0.0  # when that of the first parameter was
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
        """Has the gradient of the first parameter noted, too, which comes last: it ends the layers' part of a step."""
        first = next(p for layer in self._layers for p in layer.parameters() if p.requires_grad)
        first.register_hook(self._computed)  # type: ignore[no-untyped-call]

    def now(self) -> float:
        """Seconds, when all that was asked for is computed: of this thread alone where it does everything itself.

        What else a shared machine does meanwhile then does not count.
        """
        if self._cuda:
            torch.cuda.synchronize()
        return time.thread_time() if self._alone else time.perf_counter()

    def parts(self, began: float, ended: float) -> list[float]:
        """Seconds of the latest step: each layer forward, each backward, the loss, and what remains."""
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
    """A model that autograd takes the gradient of, also where a learner would do without."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.model(*args, **keywords)


def layers_of(chain: LayerChain) -> tuple[Layer, ...]:
    """What a model's layers hold and give, without times."""
    admissible = chain.admissible()
    return tuple(
        Layer(name, kind_of(layer), size, _output_bytes(chain, index), cut=index in admissible)
        for index, (name, layer, size) in enumerate(zip(chain.names, chain.layers, _held(chain), strict=True), 1)
    )


def _held(chain: LayerChain) -> Iterator[int]:
    """Bytes of the parameters that each layer trains; those that several share belong to the first."""
    seen: set[int] = set()
    for layer in chain.layers:
        new = {id(p): p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad}
        yield sum(size for key, size in new.items() if key not in seen)
        seen |= new.keys()


def _output_bytes(chain: LayerChain, index: int) -> int:
    """Of one sample, where the back has so many layers in front of it."""
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
    """What kind a layer is; a block is of the first kind here that it has anything of."""
    inside = list(layer.modules())
    for kind, types in _KINDS.items():
        if any(isinstance(module, types) for module in inside):
            return kind
    return "pool" if any("Pool" in type(module).__name__ for module in inside) else ""
