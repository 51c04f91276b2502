"""The form `fused`: gradients of several learners by one vectorised forward pass and one ordinary backward pass.

`torch.func.vmap` computes the forward pass over stacked weights, (m, …) for m learners. The sum of the learners' losses
then has the gradient of each learner as the part of its own weights, because no loss depends on other weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rudra.compute.device.streams import Number
from rudra.compute.flat import FlatModel, figures
from rudra.data.trees import moved


def fused_gradients(
    model: FlatModel,
    weights: Sequence[torch.Tensor],
    inputs: Any,
    target: Any,
    outs: Sequence[torch.Tensor],
    seeds: Sequence[int],
    operations: "Operations | None" = None,
) -> list[tuple[Number, Number]]:
    """Computes the gradients of several learners at once. They may differ from others in the last bits.

    Args:
        model: Model without compiled code.
        weights: Weights of each learner, (size,) float32. A single vector applies to all learners.
        inputs: (learners, μ, …), a tensor or several.
        target: (learners, μ, …).
        outs: (size,) float32 for each learner, filled as by `FlatModel.gradient`. A single vector for several learners
            receives the mean of their gradients and of their buffers, which needs less time.
        seeds: Seed of each learner's dropout, as for `FlatModel.gradient`.
        operations: Operations with rules of their own. None: `Operations` of these seeds.

    Returns:
        Mean loss and number of wrong samples for each learner. A device may still compute them.

    Raises:
        RuntimeError, ValueError: vmap does not support this model.
    """
    model.set_mode(training=True)
    learners, layout, own = len(seeds), model.layout, operations or Operations(seeds, model.device)
    vectors = weights[0][None] if len(weights) == 1 else torch.stack(list(weights))
    joint = len(outs) == 1 and learners > 1
    if len(weights) == 1 and not joint:
        vectors = vectors.expand(learners, -1)
    stacked = [
        part.view(len(vectors), *entry.shape)
        for part, entry in zip(torch.split(vectors, [e.size for e in layout], 1), layout, strict=True)
    ]
    shared = len(vectors) == 1
    trained: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for entry, tensor in zip(layout, stacked, strict=True):
        if entry.kind == "parameter":
            trained[entry.name] = (tensor[0] if shared else tensor).detach().requires_grad_()
        else:
            whole = tensor.expand(learners, *entry.shape)
            buffers[entry.name] = whole.long() if entry.kind == "counter" else whole.clone()

    def one(
        trained: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], inputs: Any, target: Any
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        tensors = {**trained, **buffers}

        def module(*args: Any, **keywords: Any) -> Any:
            return torch.func.functional_call(model.module, tensors, args, keywords)

        with own:
            output, loss = model.autograd.loss(module, inputs, target)
        return loss, output, {name: tensors[name] for name in buffers}

    every = torch.func.vmap(one, in_dims=(None if shared else 0, 0, 0, 0))  # random operations raise an error
    target = moved(target, model.device)
    with torch.enable_grad():
        losses, output, buffers = every(trained, buffers, moved(inputs, model.device), target)
        total = losses.mean() if joint else losses.sum()
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    with torch.no_grad():
        after = [value.float().mean(0) if joint else value for value in buffers.values()]
        for index, out in enumerate(outs):
            _fill(model.views.of(out), [g if shared or g is None else g[index] for g in gradients], after, index, joint)
    return [figures(loss, model.task.wrong(*pair)) for loss, *pair in zip(losses.detach(), output, target, strict=True)]


def _fill(
    views: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    buffers: Sequence[torch.Tensor],
    index: int,
    joint: bool,
) -> None:
    """Copies gradients and buffers to the views of a learner's vector."""
    found = [*gradients, *(buffers if joint else [value[index] for value in buffers])]
    unused = [view for view, value in zip(views, found, strict=True) if value is None]
    for view in unused:
        view.zero_()
    pairs = [(view, value) for view, value in zip(views, found, strict=True) if value is not None]
    torch._foreach_copy_([view for view, _ in pairs], [value for _, value in pairs])


class Operations(TorchFunctionMode):
    """Operations that get another rule than vmap's while the forward passes of several learners are computed.

    BatchNorm normalises the channels of all learners in one operation, each with its own statistics. Dropout draws the
    masks of each learner from a generator with the seed of its step, as if the learner computed by itself.

    Args:
        seeds: Seed of each learner's step.
        device: Device that computes.

    Attributes:
        latest: Function of torch that was called last.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.latest: Any = None
        self._seeds, self._device = seeds, device
        self._generators: list[torch.Generator] = []

    @property
    def drew(self) -> bool:
        """Whether masks were drawn."""
        return bool(self._generators)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generator of each learner. They are made at the first use, because few models need them."""
        if not self._generators:
            self._generators = [torch.Generator(self._device).manual_seed(seed) for seed in self._seeds]
        return self._generators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.latest, kwargs = func, kwargs or {}
        if func is functional.batch_norm:
            return _WideBatchNorm.apply(*_batch_norm_arguments(*args, **kwargs))  # type: ignore[no-untyped-call]
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Stands for `torch.nn.functional.dropout`, whose arguments it has."""
        if not training or not p:
            return functional.dropout(input, p, training, inplace)
        if p == 1:  # torch draws no mask either
            return input * 0.0
        return _OwnDropout.apply(input, p, *self.generators)  # type: ignore[no-untyped-call]


def _batch_norm_arguments(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """Returns the arguments of `torch.nn.functional.batch_norm` in their order."""
    return input, running_mean, running_var, weight, bias, training, momentum, eps


class _Vectorised(torch.autograd.Function):
    """A function that is called only inside vmap, whose operations have derivatives themselves."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("outside torch.func.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing."""


class _WideBatchNorm(_Vectorised):
    """BatchNorm of several learners in one operation: m learners with C channels have m·C channels."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
        inputs, mean, variance, weight, bias, *options = args
        learners = info.batch_size
        inputs = _stacked(inputs, in_dims[0], learners, 1)  # (samples, learners, channels, …)
        rows = [
            None if tensor is None else _stacked(tensor, dim, learners, 0)
            for tensor, dim in zip((mean, variance, weight, bias), in_dims[1:5], strict=True)
        ]
        flat = [None if row is None else row.reshape(-1) for row in rows]
        wide = inputs.reshape(len(inputs), -1, *inputs.shape[3:])
        found = functional.batch_norm(wide, *flat, *options)  # type: ignore[arg-type]
        for row, changed in zip(rows[:2], flat[:2], strict=True):  # running statistics
            if row is not None and changed is not None and row.data_ptr() != changed.data_ptr():
                row.copy_(changed.view(row.shape))
        return found.view(inputs.shape), 1


class _OwnDropout(_Vectorised):
    """Dropout with the masks that each learner would draw by itself."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
        inputs, p, *generators = args
        inputs = _stacked(inputs, in_dims[0], info.batch_size, 0)
        kept = [
            torch.empty_like(each, memory_format=torch.contiguous_format).bernoulli_(1 - p, generator=generator)
            for each, generator in zip(inputs, generators, strict=True)
        ]
        return inputs * torch.stack(kept).div_(1 - p), 0


def _stacked(tensor: torch.Tensor, dim: int | None, learners: int, to: int) -> torch.Tensor:
    """Returns a tensor with the dimension of the learners at a place."""
    if dim is None:
        return tensor.unsqueeze(to).expand(*tensor.shape[:to], learners, *tensor.shape[to:])
    return tensor.movedim(dim, to)
