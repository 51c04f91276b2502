"""A learner's step compiled by torch.compile: loss and gradient in few kernels.

Compiled code returns gradients in new memory. In a classic network, most of this memory belongs to a few large linear
layers. Their gradients are computed outside, directly in the flat vector. The compiled code returns the layer's inputs
and the gradient of its outputs, as the gradient of a zero ("probe") that is added to them.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rudra.compute.buffers import tried
from rudra.compute.tasks import Task
from rudra.data.trees import called, first, mapped, moved
from rudra.errors import ConfigError

_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 20, "cpp_wrapper": True}
"""Options of Inductor for CPUs: many operations are fused before a result goes to memory, which suits small
mini-batches, and no Python code runs between kernels."""


class _Probed:
    """Forward of a large linear layer. The gradient of its weight is computed outside."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.inputs: torch.Tensor | None = None
        self.probe: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.probe is None or not torch.is_grad_enabled():
            return functional.linear(inputs, self.layer.weight, self.layer.bias)
        self.inputs = inputs.detach()
        return functional.linear(inputs, self.layer.weight.detach(), self.layer.bias) + self.probe


class CompiledStep:
    """Loss, output and gradient of a module in training mode, for batches of one size.

    Args:
        module: Module of a `FlatModel`.
        task: Task that defines the loss.
        parameters: Parameters that need gradients, in the order of the flat vector.
        large: Smallest number of elements of a linear layer's weight whose gradient is computed outside. None: the
            compiled code returns the loss, and its `backward` the gradients, so that hooks and checkpoints work as in
            torch.

    Attributes:
        whole: Whether one piece of code computes loss and gradient. A call of this object runs it.
        loss: (inputs, target) -> loss and output, for autograd to differentiate.

    Raises:
        ConfigError: The parameters are in main memory, and there is no C++ compiler.
    """

    def __init__(self, module: nn.Module, task: Task, parameters: Sequence[torch.Tensor], large: int | None) -> None:
        compiler = os.environ.get("CXX", "g++").split()[0]
        if parameters[0].device.type == "cpu" and shutil.which(compiler) is None:
            text = f"there is no C++ compiler here ({compiler}), which torch.compile needs"
            raise ConfigError(f"[training] compile = true: {text}; install g++, or leave compile out")
        import torch._dynamo.config as dynamo
        import torch._inductor.config as inductor  # both imports are slow

        if hasattr(inductor, "deterministic"):  # newer versions of torch have it
            inductor.deterministic = torch.are_deterministic_algorithms_enabled()
        inductor.compile_threads = 1  # in this process: worker processes next to MPI ranks cause trouble
        self._module, self._task = module, task
        self._parameters = list(parameters)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = tuple(names[id(parameter)] for parameter in parameters)
        self._large = large or 0
        self._probed: dict[int, _Probed] = {}  # by index of the weight
        self._batch = 0  # number of samples that the probes fit
        dynamo.fail_on_recompile_limit_hit = True  # else torch computes eagerly, and only its log says so
        options = _OPTIONS if self._parameters[0].device.type == "cpu" else None
        traces = hasattr(dynamo, "trace_autograd_ops")
        if traces:
            dynamo.trace_autograd_ops = True  # a loss may contain a gradient, for instance a penalty
        whole = large is not None and traces  # one piece for loss and gradient

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            """Copies a function with a new code object: torch compiles at most eight versions for each code object."""
            own = FunctionType(function.__code__.replace(), globals(), function.__name__)
            return torch.compile(MethodType(own, self), dynamic=False, options=options)

        self.whole = whole
        self._compute: Callable[..., Any] = compiled(CompiledStep._step) if whole else self._step
        self.loss: Callable[..., Any] = self._loss if whole else compiled(CompiledStep._loss)

    def __call__(
        self, inputs: Any, target: Any, views: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, Any]:
        """Returns loss and output of a batch, and writes gradients to `views`, shaped as the parameters."""
        inputs, target = moved(inputs, device), moved(target, device)
        if self._batch != len(first(target)):
            self._place_probes(inputs, target)
        loss, output, gradients, layer_inputs = self._compute(inputs, target)
        sources, targets = [], []
        for index, (gradient, view) in enumerate(zip(gradients, views, strict=False)):
            if gradient is None:
                view.zero_()
            elif index in self._probed:
                torch.mm(gradient.t(), layer_inputs[index], out=view)
            else:
                sources.append(gradient)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)
        return loss, output

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Makes the module compute as in plain torch until the block ends."""
        probes = [(probed, probed.probe) for probed in self._probed.values()]
        for probed, _ in probes:
            probed.probe = None
        try:
            yield
        finally:
            for probed, probe in probes:
                probed.probe = probe

    def _loss(self, inputs: Any, target: Any) -> tuple[torch.Tensor, Any]:
        output = self._task.compared(called(self._module, inputs))
        return self._task.loss(output, target), output

    def _step(
        self, inputs: Any, target: Any
    ) -> tuple[torch.Tensor, Any, Sequence[torch.Tensor | None], dict[int, torch.Tensor]]:
        """Returns loss, output, gradients, and the inputs of the layers with probes."""
        loss, output = self._loss(inputs, target)
        wanted: list[Any] = [
            self._probed[index].probe if index in self._probed else self._module.get_parameter(name)
            for index, name in enumerate(self._names)
        ]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        layer_inputs: dict[int, Any] = {index: probed.inputs for index, probed in self._probed.items()}
        return loss.detach(), mapped(_detached, output), gradients, layer_inputs

    def _place_probes(self, inputs: Any, target: Any) -> None:
        """Finds the large linear layers that are used once, on a matrix, and the shapes of their probes."""
        self._batch = len(first(target))
        shapes: dict[nn.Linear, list[torch.Size]] = {}
        layers = self._large_layers()
        for _, layer in layers:
            vars(layer).pop("forward", None)
        hooks = [
            layer.register_forward_hook(lambda layer, _, output: shapes.setdefault(layer, []).append(output.shape))
            for _, layer in layers
        ]
        tried(self._module, inputs)
        for hook in hooks:
            hook.remove()
        self._probed = {}
        for index, layer in layers:
            used = shapes.get(layer, [])
            if len(used) == 1 and len(used[0]) == 2:
                probed = self._probed[index] = _Probed(layer)
                probed.probe = torch.zeros(used[0], device=layer.weight.device, requires_grad=True)
                layer.forward = probed  # type: ignore[method-assign, assignment]

    def _large_layers(self) -> list[tuple[int, nn.Linear]]:
        """Returns linear layers whose weight no other layer uses, with the index of that weight."""
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        owners: dict[int, int] = {}
        for module in self._module.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        return [
            (places[id(layer.weight)], layer)
            for layer in self._module.modules()
            if type(layer) is nn.Linear
            and layer.weight.numel() >= self._large
            and id(layer.weight) in places
            and owners[id(layer.weight)] == 1
        ]


def _detached(leaf: Any) -> Any:
    """Detaches tensors from autograd. Other values in outputs do not change."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
