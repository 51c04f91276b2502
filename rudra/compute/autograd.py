"""Losses and gradients of a module by torch.autograd, for a flat vector of weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rudra.compute.direct import DirectLinear
from rudra.compute.final_gradients import FinalGradients, Ready
from rudra.compute.guard import Untouched, WeightsGuard
from rudra.compute.sparse import rows_of
from rudra.compute.tasks import LossReduction, Task
from rudra.compute.views import NOWHERE, FlatViews
from rudra.core.layout import Entry
from rudra.data.trees import called, moved
from rudra.job.tables import IN_16_BITS


class Forward(NamedTuple):
    """A forward pass whose backward pass follows.

    Attributes:
        output: Output of the module.
        loss: Loss of the output.
        untouched: State of the parameters before the pass.
    """

    output: Any
    loss: torch.Tensor
    untouched: Untouched


class _Given(torch.autograd.Function):
    """A loss whose gradient with respect to its first argument is its second argument.

    For a gradient of an output, `torch.autograd.backward` imports SymPy, which takes each process a third of a second.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


class OwnDraws(TorchFunctionMode):
    """Dropout by torch's rule, with masks from one generator.

    Args:
        generator: The generator.

    Attributes:
        used: Whether a mask has been drawn.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator, self.used = generator, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._dropout if func is functional.dropout else func)(*args, **kwargs or {})

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Stands for `torch.nn.functional.dropout`, whose arguments it has."""
        if not training or not 0 < p < 1:  # torch draws nothing, or refuses p
            return functional.dropout(input, p, training, inplace)
        self.used = True
        kept = torch.empty_like(input).bernoulli_(1 - p, generator=self._generator).div_(1 - p)
        return input.mul_(kept) if inplace else input * kept


class Autograd:
    """Forward and backward passes of a module whose parameters are views of a vector.

    Args:
        module: Module in training mode or evaluation mode.
        task: Task that defines the loss.
        parameters: Trained parameters, in the order of the vector.
        layout: Entries of the vector.
        views: Views of vectors with this layout.
        direct: Large linear layers that write their gradients to the vector, by the index of their weight.
        precision: As for `FlatModel`.

    Attributes:
        guard: Checks that a pass does not change the weights.
        draws: Lets the model draw from a generator of its own. None: it draws from the one of the device.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        parameters: Sequence[torch.Tensor],
        layout: Sequence[Entry],
        views: FlatViews,
        direct: Mapping[int, DirectLinear],
        precision: str,
    ) -> None:
        self._module, self._task, self._direct = module, task, direct
        self._parameters, self._views = parameters, views
        self._places = [slice(e.offset, e.offset + e.size) for e in layout[: len(parameters)]]
        self._device = parameters[0].device
        half = precision in IN_16_BITS
        self._autocast = torch.autocast(self._device.type, getattr(torch, precision)) if half else None
        self.draws: OwnDraws | None = None
        self._final: FinalGradients | None = None  # made at its first use: it adds hooks to all parameters
        self.guard = WeightsGuard(layout, parameters, sum(p.numel() for p in parameters))

    def loss(
        self, module: Callable[..., Any], inputs: Any, target: Any, reduction: LossReduction = "mean"
    ) -> tuple[Any, torch.Tensor]:
        """Computes output and loss of the module or an equivalent function, float32 in any precision."""
        inputs, target = moved(inputs, self._device), moved(target, self._device)
        if self._autocast is None:
            output = self._task.compared(self._output(module, inputs))
            return output, self._task.loss(output, target, reduction)
        with self._autocast:
            output = self._task.compared(self._output(module, inputs))
            output = output.float() if isinstance(output, torch.Tensor) else output
            return output, self._task.loss(output, target, reduction).float()

    def _output(self, module: Callable[..., Any], inputs: Any) -> Any:
        if self.draws is None:
            return called(module, inputs)
        with self.draws:
            return called(module, inputs)

    def forward(
        self,
        weights: torch.Tensor,
        inputs: Any,
        target: Any,
        reduction: LossReduction = "mean",
        compiled: Callable[..., Any] | None = None,
    ) -> Forward:
        """Computes output and loss.

        Args:
            weights: (size,) float32, the vector that the parameters are views of.
            inputs: As for `FlatModel.gradient`.
            target: As for `FlatModel.gradient`.
            reduction: "none": one loss for each sample.
            compiled: Compiled function of the mean loss and the output.
        """
        for layer in self._direct.values():
            layer.writes = True
        self.release()
        untouched = self.guard.before(weights)
        if compiled is None:
            output, loss = self.loss(self._module, inputs, target, reduction)
        else:
            loss, output = compiled(moved(inputs, self._device), moved(target, self._device))
        return Forward(output, loss, untouched)

    def backward(
        self,
        passed: Forward,
        weights: torch.Tensor,
        views: Sequence[torch.Tensor],
        ready: Ready | None = None,
    ) -> list[torch.Tensor | None]:
        """Computes the gradients of a loss, and checks the weights.

        Args:
            passed: Forward pass. Its loss is a single number.
            weights: As for `forward`.
            views: View of each gradient's place. Large linear layers write their gradients there.
            ready: As for `FlatModel.gradient`.

        Returns:
            The gradient of each parameter, which is yet to be copied to its place.
        """
        for index, layer in self._direct.items():
            layer.target = views[index]
        with self._reported(ready, views):
            passed.loss.backward()  # type: ignore[no-untyped-call]
        self.guard.check(passed.untouched, weights, self._views.of(weights))
        return self._taken()

    def backward_from(
        self, output: torch.Tensor, gradient: torch.Tensor, views: Sequence[torch.Tensor], ready: Ready | None = None
    ) -> None:
        """Computes the gradients of an output whose own gradient is known, to their places."""
        self.release()
        with self._reported(ready, views):
            _Given.apply(output, gradient).backward()  # type: ignore[no-untyped-call]
        self.copy(self._taken(), views)

    def release(self) -> None:
        """Clears gradients of an earlier pass, so that the next pass does not add to them."""
        for parameter in self._parameters:
            parameter.grad = None

    def _copy(self, gradient: torch.Tensor | None, view: torch.Tensor) -> None:
        """Copies one gradient, as `copy` does."""
        if view is NOWHERE or gradient is None or gradient.layout is not torch.strided:
            self.copy([gradient], [view])
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)

    def copy(self, gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> None:
        """Copies gradients to views of the flat vector, except gradients that were computed there."""
        sources, targets = [], []
        for gradient, view in zip(gradients, views, strict=False):
            if gradient is view or view is NOWHERE:
                continue
            if gradient is None:
                view.zero_()
            elif gradient.layout is torch.sparse_coo:
                view.zero_().index_add_(0, *rows_of(gradient))
            elif gradient.data_ptr() != view.data_ptr():
                sources.append(gradient)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)

    def _taken(self) -> list[torch.Tensor | None]:
        """Takes the gradient of each parameter. The parameter no longer holds it."""
        found = [parameter.grad for parameter in self._parameters]
        self.release()
        return found

    @contextmanager
    def _reported(self, ready: Ready | None, views: Sequence[torch.Tensor]) -> Iterator[None]:
        """Reports final gradients during a backward pass."""
        if ready is None:
            yield
            return
        if self._final is None:
            self._final = FinalGradients(self._parameters, self._places, self._copy)
        self._final.begin(ready, views)
        try:
            yield
        finally:
            self._final.end()
