"""Gradients of several mini-batches that are computed together, as one big batch or by `torch.func.vmap`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.flat import FlatModel
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.core.work import Work
from rudra.data.samples import Batch
from rudra.data.sparse import joined
from rudra.data.trees import mapped, moved
from rudra.errors import ConfigError


def joint_gradient(
    sources: Sequence[GradientSource],
    minibatches: Sequence[tuple[int, Work]],
    weights: torch.Tensor,
    out: torch.Tensor,
) -> list[BatchResult]:
    """Computes the mean gradient of several learners as one big batch.

    The result is not bitwise identical to the mean of separate gradients, and dropout draws other masks.

    Args:
        sources: Sources of the learners. They share one model.
        minibatches: Step and samples of each learner. All have the same number of samples.
        weights: (size,) float32, only read.
        out: (size,) float32, filled as by `FlatModel.gradient`.

    Returns:
        Results of each learner's own mini-batch.
    """
    batches = [source.minibatch(*minibatch) for source, minibatch in zip(sources, minibatches, strict=True)]
    inputs, target = put_together(joined, batches)
    (step, work), *_ = minibatches
    model, each = sources[0].model, len(sources)
    model.bind(weights)
    losses, wrong = model.joint_gradient(inputs, target, out, sources[0].seed(step))
    means, errors = losses.reshape(each, -1).mean(1), wrong.reshape(each, -1).sum(1, dtype=np.float32)
    return _outcomes(means, errors, work.count)


def mapped_gradients(
    sources: Sequence[GradientSource],
    minibatches: Sequence[tuple[int, Work]],
    weights: Sequence[torch.Tensor],
    outs: list[torch.Tensor],
) -> list[BatchResult]:
    """Computes one gradient for each of several learners together, by `torch.func.vmap`.

    The gradients are not bitwise identical to `GradientSource.compute`, and dropout draws other masks.

    Args:
        sources: Sources of the learners. They share one model.
        minibatches: Step and samples of each learner. All have the same number of samples.
        weights: (size,) float32 for each learner, or a single vector for all, only read.
        outs: (size,) float32 for each learner, filled as by `FlatModel.gradient`.
    """
    batches = [source.minibatch(*minibatch) for source, minibatch in zip(sources, minibatches, strict=True)]
    inputs, target = put_together(torch.stack, batches)
    model = sources[0].model
    (step, work), *_ = minibatches
    model.seed(sources[0].seed(step))
    losses, errors = vmap_gradients(model, weights, inputs, target, outs)
    return _outcomes(losses, errors, work.count)


def put_together(how: Callable[[list[torch.Tensor]], torch.Tensor], batches: Sequence[Batch]) -> Batch:
    """Combines several batches into one."""
    try:
        inputs, target = mapped(lambda *tensors: how(list(tensors)), *batches)
    except RuntimeError:
        where = "[simulation] batching: mini-batches of different sizes cannot be computed together"
        raise ConfigError(f"{where}; valid for this data: none") from None
    return inputs, target


def _outcomes(losses: npt.NDArray[Any], errors: npt.NDArray[Any], samples: int) -> list[BatchResult]:
    return [BatchResult(loss, wrong, samples) for loss, wrong in zip(losses.tolist(), errors.tolist(), strict=True)]


def vmap_gradients(
    model: FlatModel, weights: Sequence[torch.Tensor], inputs: Any, target: Any, outs: Sequence[torch.Tensor]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Computes several gradients at once by `torch.func.vmap`. They may differ from others in the last bits.

    Args:
        model: Model without compiled code.
        weights: Weights for each gradient, (size,) float32. A single vector applies to all.
        inputs: (gradients, μ, …), a tensor or several.
        target: (gradients, μ, …).
        outs: (size,) float32 each, filled as by `FlatModel.gradient`. Their buffers are copies of the weights' buffers.

    Returns:
        Mean loss and number of wrong samples for each gradient.

    Raises:
        RuntimeError, ValueError: vmap does not support this model.
    """
    model.set_mode(training=True)
    shared, layout = len(weights) == 1, model.layout
    vectors = weights[0][None] if shared else torch.stack(list(weights))
    parts = [
        v.view(-1, *e.shape) for v, e in zip(torch.split(vectors, [e.size for e in layout], 1), layout, strict=True)
    ]
    of = {e.name: (e.kind, part[0] if shared else part) for part, e in zip(parts, layout, strict=True)}
    trained = {name: value for name, (kind, value) in of.items() if kind == "parameter"}
    buffers = {name: value for name, (kind, value) in of.items() if kind == "buffer"}  # gradients change no counters

    def loss(
        trained: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], inputs: Any, target: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def module(*args: Any, **keywords: Any) -> Any:
            return torch.func.functional_call(model.module, {**trained, **buffers}, args, keywords)

        output, mean = model.autograd.loss(module, inputs, target)
        return mean, output

    place = None if shared else 0
    one = torch.func.grad_and_value(loss, has_aux=True)
    all_ = torch.func.vmap(one, in_dims=(place, place, 0, 0), randomness="different")
    found, (losses, output) = all_(trained, buffers, moved(inputs, model.device), moved(target, model.device))
    for index, out in enumerate(outs):
        views = model.views.of(out)[: len(trained)]
        torch._foreach_copy_(views, [gradient[index] for gradient in found.values()])
        out[model.parameter_count :] = vectors[0 if shared else index, model.parameter_count :]
    wrong = [model.task.wrong(*pair) for pair in zip(output, target, strict=True)]
    sums = [np.nan if each is None else float(each.sum()) for each in wrong]
    return losses.numpy(force=True), np.array(sums, np.float32)
