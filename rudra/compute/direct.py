"""Large linear layers whose weight's gradient is written to where it is wanted.

Such layers hold nearly all of a classic network. Copying their gradients costs more than anything else that Rudra does
in a step: fresh memory, a pass over it, and at AlexNet's size a whole model of memory more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LARGE = 2**16
"""Elements of a layer's weight from which writing its gradient in place pays."""


class _LinearInto(torch.autograd.Function):
    """torch's linear layer, except that the gradient of its weight is written to where it is wanted."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.target = target
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs = gradient.mm(weight) if ctx.needs_input_grad[0] else None
        to_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        torch.mm(gradient.t(), inputs, out=ctx.target)
        return to_inputs, ctx.target.view_as(ctx.target), to_bias, None


class DirectLinear:
    """The forward of one large linear layer in a model of plain layers.

    Attributes:
        target: (outputs, inputs) float32, where the next pass writes the gradient of the weight; None: to fresh memory.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.target: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        target, self.target = self.target, None
        if target is None or inputs.dim() != 2 or not torch.is_grad_enabled():
            return functional.linear(inputs, self.layer.weight, self.layer.bias)
        output: torch.Tensor = _LinearInto.apply(  # type: ignore[no-untyped-call]
            inputs, self.layer.weight, self.layer.bias, target
        )
        return output


def direct_layers(module: nn.Module, parameters: Sequence[torch.Tensor]) -> dict[int, DirectLinear]:
    """Replaces the forward of a model's large linear layers.

    Args:
        module: a model of plain layers, each used once.
        parameters: those that are trained, in order.

    Returns:
        The replaced forwards, by the index of their weight.
    """
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    direct: dict[int, DirectLinear] = {}
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= LARGE and id(layer.weight) in places:
            index = places[id(layer.weight)]
            direct[index] = DirectLinear(layer)
            layer.forward = direct[index]  # type: ignore[method-assign, assignment]
    return direct
