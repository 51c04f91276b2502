"""Gradients of a chain of linear layers, without torch's autograd.

Most of a small network's step is autograd's bookkeeping: with three layers of 64 units and one sample, 210 µs, but
only 50 of arithmetic. Here the same kernels run in the same order, and each gradient is written directly to its
destination. So the results are bitwise identical to autograd (tests compare them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rudra.compute.sparse import SparseLinear, SparseRows, gradient_of, product
from rudra.compute.tasks import Classification, Task
from rudra.data.sparse import is_sparse

_aten = torch.ops.aten

_BACKWARD: dict[type[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]] = {
    nn.Sigmoid: (torch.sigmoid, _aten.sigmoid_backward.default),
    nn.Tanh: (torch.tanh, _aten.tanh_backward.default),
    nn.ReLU: (torch.relu, lambda gradient, output: _aten.threshold_backward.default(gradient, output, 0)),
}
"""Functions of an activation: its output, and the gradient of its input from output and output gradient."""


class Chain:
    """Linear layers with activations between them, on a CPU.

    Args:
        activations: Activation after each layer but the last.
        biases: Whether each layer has a bias.
        flattens: Whether inputs are first reshaped to (μ, features).
        task: Task that defines the loss.
        sparse: Whether the first layer is for sparse inputs.
    """

    def __init__(
        self,
        activations: Sequence[type[nn.Module]],
        biases: Sequence[bool],
        flattens: bool,
        task: Task,
        *,
        sparse: bool = False,
    ) -> None:
        self._sparse = sparse
        self._activations = [_BACKWARD[kind] for kind in activations]
        self._biases, self._flattens, self._task = tuple(biases), flattens, task
        self._plain = type(task) is Classification and task.plain
        self._one = torch.ones(())

    @classmethod
    def of(cls, module: nn.Module, parameters: Sequence[torch.Tensor], task: Task) -> Chain | None:
        """Converts a module to a chain. Returns None if it has other layers, or if hooks observe its layers.

        Args:
            module: Module to convert.
            parameters: Trained parameters, in order.
            task: Task that defines the loss.
        """
        if type(module) is not nn.Sequential or not len(module) or _watched(module):
            return None
        layers = list(module)
        first = layers[0]
        flattens = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
        layers = layers[flattens or type(first) is nn.Identity :]  # sparse inputs use Identity instead of Flatten
        linear, between = layers[::2], layers[1::2]
        if any(map(_watched, [first, *layers])) or any(type(layer) not in _BACKWARD for layer in between):
            return None
        sparse = bool(linear) and type(linear[0]) is SparseLinear
        if len(linear) != len(between) + 1 or any(type(layer) is not nn.Linear for layer in linear[sparse:]):
            return None
        own = [tensor for layer in linear for tensor in (layer.weight, layer.bias) if tensor is not None]
        if list(map(id, own)) != list(map(id, parameters)) or own[0].device.type != "cpu":
            return None
        biases = [layer.bias is not None for layer in linear]
        return cls([type(layer) for layer in between], biases, flattens, task, sparse=sparse)

    def takes(self, inputs: Any) -> bool:
        """Whether the chain supports these inputs."""
        if self._sparse:
            return is_sparse(inputs) and inputs.dtype == torch.float32 and not inputs.requires_grad
        return (
            type(inputs) is torch.Tensor
            and inputs.dtype == torch.float32
            and not inputs.requires_grad
            and (inputs.dim() == 2 or (self._flattens and inputs.dim() > 2))
        )

    @torch.no_grad()
    def forward(
        self,
        inputs: torch.Tensor,
        weights: Sequence[torch.Tensor],
        needs: Callable[[int, int], None] | None = None,
    ) -> list[torch.Tensor]:
        """Computes the input of each layer, and the output of the last one.

        Args:
            inputs: (μ, …) float32.
            weights: Weight of each layer, and its bias if it has one.
            needs: Called before each layer with the range of its places in `weights`, which are not read before.
        """
        reached = inputs.flatten(1) if self._flattens and not self._sparse else inputs
        parts = (inputs.crow_indices(), inputs.col_indices(), inputs.values()) if self._sparse else ()
        seen, place = [reached], 0
        for number, (weight, bias) in enumerate(self._layers(weights)):
            if needs is not None:
                needs(place, place + 1 + self._biases[number])
            place += 1 + self._biases[number]
            if parts and not number:
                reached = product(*parts, weight, bias)
            else:
                reached = nn.functional.linear(reached, weight, bias)
            if number < len(self._activations):
                reached = self._activations[number][0](reached)
            seen.append(reached)
        return seen

    def _layers(self, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Returns weight and bias of each layer."""
        values = iter(weights)
        return [(next(values), next(values) if bias else None) for bias in self._biases]

    @torch.no_grad()
    def gradient(
        self,
        inputs: torch.Tensor,
        target: Any,
        weights: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        ready: Callable[[int, int], None] | None = None,
        seen: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, SparseRows | None]:
        """Computes the gradient of the mean loss.

        Args:
            inputs: (μ, …) float32.
            target: (μ, …), in the format of the task.
            weights: As for `forward`. They are read twice.
            out: Tensors of the same shapes that receive all gradients, except for a sparse layer's weight.
            ready: Called after each layer, the last one first, with the range of its places in `out`.
            seen: Result of `forward` for these inputs and weights, if it is known.

        Returns:
            The output of the last layer, the mean loss, and the gradient of a sparse layer's weight.
        """
        layers = self._layers(weights)
        parts = (inputs.crow_indices(), inputs.col_indices(), inputs.values()) if self._sparse else ()
        *seen, output = seen or self.forward(inputs, weights)
        loss, gradient = self._loss(output, target)
        place = len(out)
        for number in range(len(layers) - 1, -1, -1):
            stop = place
            if self._biases[number]:
                place -= 1
                torch.sum(gradient, 0, out=out[place])
            place -= 1
            if parts and not number:
                return output, loss, gradient_of(*parts, gradient)
            torch.mm(gradient.t(), seen[number], out=out[place])
            if ready is not None:
                ready(place, stop)
            if number:
                gradient = self._activations[number - 1][1](gradient.mm(layers[number][0]), seen[number])
        return output, loss, None

    def _loss(self, output: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the mean loss and its gradient."""
        if self._plain and output.dim() == 2:
            logarithms = torch._log_softmax(output, 1, False)
            try:
                loss, total = _aten.nll_loss_forward.default(logarithms, target, None, 1, -100)
            except IndexError:
                return self._task.loss(output, target), output  # raises the task's own error
            gradient = _aten.nll_loss_backward.default(self._one, logarithms, target, None, 1, -100, total)
            return loss, torch._log_softmax_backward_data(gradient, logarithms, 1, torch.float32)
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            loss = self._task.loss(self._task.compared(leaf), target)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient


def _watched(module: nn.Module) -> bool:
    """Whether hooks observe or change the computation of a module."""
    return "forward" in vars(module) or any(
        vars(module).get(f"_{hooks}")
        for hooks in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    )
