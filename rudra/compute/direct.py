"""Large linear layers that write the gradient of their weight directly to its destination.

Such layers hold nearly all parameters of a classic network. Copying their gradients costs more than any other work that
Rudra adds to a step: new memory, a pass over it, and at AlexNet's size the memory of one more model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LARGE = 2**16
"""Smallest number of weight elements of a layer whose gradient is written in place."""


class _LinearInto(torch.autograd.Function):
    """torch's linear layer, except that the gradient of its weight is written to a given tensor."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: "DirectLinear"
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs = gradient.mm(weight) if ctx.needs_input_grad[0] else None
        to_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        target = ctx.layer.target
        torch.mm(gradient.t(), inputs, out=target)
        return to_inputs, target.view_as(target), to_bias, None


class DirectLinear:
    """Forward of a large linear layer in a model of plain layers.

    Attributes:
        target: (outputs, inputs) float32, receives the weight's gradient in the next backward pass.
        writes: Whether the backward pass of the next forward pass writes to `target`, and not to new memory.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.target = torch.empty(0)
        self.writes = False

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        writes, self.writes = self.writes, False
        if not writes or inputs.dim() != 2 or not torch.is_grad_enabled():
            return functional.linear(inputs, self.layer.weight, self.layer.bias)
        output: torch.Tensor = _LinearInto.apply(  # type: ignore[no-untyped-call]
            inputs, self.layer.weight, self.layer.bias, self
        )
        return output


def direct_layers(module: nn.Module, parameters: Sequence[torch.Tensor]) -> dict[int, DirectLinear]:
    """Replaces the forward of a model's large linear layers.

    Args:
        module: Model of plain layers, each used once.
        parameters: Trained parameters, in order.

    Returns:
        The new forwards, by the index of their weight.
    """
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    direct: dict[int, DirectLinear] = {}
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= LARGE and id(layer.weight) in places:
            index = places[id(layer.weight)]
            direct[index] = DirectLinear(layer)
            layer.forward = direct[index]  # type: ignore[method-assign, assignment]
    return direct
