"""Loss and errors of weights on a split."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch

from rudra.compute.device.streams import known
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import ERROR, LOSS, Sums
from rudra.compute.tasks import Task
from rudra.core.events import SplitMetrics
from rudra.data.samples import Samples
from rudra.data.sampling import seed_all


def evaluate(
    model: FlatModel, weights: torch.Tensor, split: Samples, batch_size: int, name: str = "test"
) -> Iterator[SplitMetrics | None]:
    """Evaluates weights, one batch at a time, so that the caller can do other work in between.

    Args:
        model: Model that computes. It may do other work between two batches.
        weights: (size,) float32, only read. They must not change until the end.
        split: Samples of the split.
        batch_size: Number of samples in a batch.
        name: Name of the split.

    Yields:
        None after each batch but the last, and the result after that.
    """
    sums: Sums = defaultdict(float)
    batches = -(-len(split) // batch_size)
    for batch in range(batches):
        add_batch(sums, model, weights, split, batch_size, batch)
        if batch + 1 < batches:
            yield None
    yield score_of(name, sums, len(split), model.task)


def add_batch(sums: Sums, model: FlatModel, weights: torch.Tensor, split: Samples, batch_size: int, batch: int) -> None:
    """Evaluates weights on one batch of a split, and adds the metrics to the sums; see `evaluate`."""
    indices = np.arange(batch * batch_size, min((batch + 1) * batch_size, len(split)))
    if split.random:
        seed_all(batch * batch_size)
    samples = split.batch(indices)
    model.bind(weights)
    loss, wrong, metrics = model.evaluate_batch(*samples)
    for metric, value in {LOSS: loss, ERROR: wrong, **metrics}.items():
        sums[metric] += value * len(indices)


def score_of(name: str, sums: Sums, samples: int, task: Task) -> SplitMetrics:
    """Computes the metrics of a split from sums over all its samples. Waits for the device."""
    means = {metric: total / samples for metric, total in zip(sums, known(sums.values()), strict=True)}
    loss, error = means.pop(LOSS), means.pop(ERROR)
    return SplitMetrics(name, loss, error, tuple({**task.derived(loss), **means}.items()))
