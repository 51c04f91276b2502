"""Loss and errors of weights on a split."""

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from rudra.compute.device.streams import Done, Pending, Stream, until_done
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import ERROR, LOSS, Sums
from rudra.compute.tasks import Task
from rudra.core.events import SplitMetrics
from rudra.data.samples import Samples
from rudra.data.sampling import seed_all

AT_ONCE = Stream()
"""Stream of a caller that waits for each batch."""


def evaluate(
    model: FlatModel,
    weights: torch.Tensor,
    split: Samples,
    batch_size: int,
    name: str = "test",
    stream: Stream = AT_ONCE,
    after: Sequence[Pending] = (),
) -> Iterator[SplitMetrics | Pending | None]:
    """Evaluates weights, one batch at a time, so that the caller can do other work in between.

    Args:
        model: Model that computes. It may do other work between two batches.
        weights: (size,) float32, only read. They must not change until the end.
        split: Samples of the split.
        batch_size: Number of samples in a batch.
        name: Name of the split.
        stream: Stream that computes.
        after: Work of other streams that must be done before.

    Yields:
        None after each batch but the last, work of the device as long as it is not done, and finally the result.
    """
    batches = range(-(-len(split) // batch_size))
    sums = yield from summed(model, weights, split, batch_size, batches, stream, after)
    yield score_of(name, sums, len(split), model.task)


def summed(
    model: FlatModel,
    weights: torch.Tensor,
    split: Samples,
    batch_size: int,
    batches: range,
    stream: Stream,
    after: Sequence[Pending] = (),
) -> Generator[Pending | None, None, Mapping[str, float]]:
    """Evaluates weights on some batches of a split. Arguments and what it yields are as for `evaluate`.

    Two batches at most are queued. A device whose queue is full would stop the rank.

    Returns:
        Metrics, summed over the samples of the batches.
    """
    sums: Sums = defaultdict(float)
    before: Pending = Done([])
    for batch in batches:
        if batch != batches[0]:
            yield None
        last = stream.submit(partial(_add_batch, sums, model, weights, split, batch_size, batch), after)
        yield from until_done(before)
        before = last
    totals = stream.submit(lambda: tuple(sums.values()))
    yield from until_done(totals)
    return dict(zip(sums, totals.numbers(), strict=True))


def _add_batch(
    sums: Sums, model: FlatModel, weights: torch.Tensor, split: Samples, batch_size: int, batch: int
) -> tuple[()]:
    """Evaluates weights on one batch of a split, and adds the metrics to the sums."""
    indices = np.arange(batch * batch_size, min((batch + 1) * batch_size, len(split)))
    if split.random:
        seed_all(batch * batch_size)
    samples = split.batch(indices)
    model.bind(weights)
    loss, wrong, metrics = model.evaluate_batch(*samples)
    for metric, value in {LOSS: loss, ERROR: wrong, **metrics}.items():
        sums[metric] += value * len(indices)
    return ()


def score_of(name: str, sums: Mapping[str, float], samples: int, task: Task) -> SplitMetrics:
    """Computes the metrics of a split from sums over all its samples."""
    means = {metric: total / samples for metric, total in sums.items()}
    loss, error = means.pop(LOSS), means.pop(ERROR)
    return SplitMetrics(name, loss, error, tuple({**task.derived(loss), **means}.items()))
