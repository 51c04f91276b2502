"""Gradients of the mini-batches of several learners, computed together: as one big batch, or one for each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.bank.fused import fused_gradients
from rudra.compute.device.streams import known
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.core.work import Work
from rudra.data.samples import Batch
from rudra.data.sparse import joined
from rudra.data.trees import mapped
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
    outs: Sequence[torch.Tensor],
) -> list[BatchResult]:
    """Computes one gradient for each of several learners together (`rudra.compute.bank.fused`).

    The gradients differ from `GradientSource.compute` in the last bits.

    Args:
        sources: Sources of the learners. They share one model.
        minibatches: Step and samples of each learner. All have the same number of samples.
        weights: (size,) float32 for each learner, or a single vector for all, only read.
        outs: As for `fused_gradients`.
    """
    batches = [source.minibatch(*minibatch) for source, minibatch in zip(sources, minibatches, strict=True)]
    inputs, target = put_together(torch.stack, batches)
    model = sources[0].model
    seeds = [source.seed(step) for source, (step, _) in zip(sources, minibatches, strict=True)]
    found = fused_gradients(model, weights, inputs, target, outs, seeds)
    pairs = (known(figures) for figures in found)
    return [BatchResult(loss, errors, minibatches[0][1].count) for loss, errors in pairs]


def put_together(
    how: Callable[[list[torch.Tensor]], torch.Tensor],
    batches: Sequence[Batch],
    where: str = "[simulation] batching",
    instead: str = "none",
) -> Batch:
    """Combines several batches into one.

    Args:
        how: Combines tensors into one.
        batches: Batches of the same structure.
        where: Key that wants it, for a message.
        instead: Its valid value for other batches, for a message.

    Raises:
        ConfigError: The batches have different sizes.
    """
    try:
        inputs, target = mapped(lambda *tensors: how(list(tensors)), *batches)
    except RuntimeError:
        text = f"{where}: mini-batches of different sizes cannot be computed together"
        raise ConfigError(f"{text}; valid for this data: {instead}") from None
    return inputs, target


def _outcomes(losses: npt.NDArray[Any], errors: npt.NDArray[Any], samples: int) -> list[BatchResult]:
    return [BatchResult(loss, wrong, samples) for loss, wrong in zip(losses.tolist(), errors.tolist(), strict=True)]
