"""Scores of weights in checkpoints on the test set of their job."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rudra.compute import models, tasks
from rudra.compute.device import placement
from rudra.compute.evaluation import evaluate
from rudra.compute.executor import torch_as_in
from rudra.compute.flat import FlatModel
from rudra.core.buffer_names import AVERAGE, WEIGHTS
from rudra.core.events import SplitMetrics
from rudra.data.load import load
from rudra.job.job import Job
from rudra.results import checkpoint


def on_test_set(job: Job, paths: Sequence[Path]) -> list[dict[str, float]]:
    """Evaluates the weights of checkpoints, or their average over time if there is one. It reads the test set once.

    Args:
        job: Resolved job with the data, the model, the task and the seed of the checkpoints.
        paths: Checkpoints.

    Returns:
        For each checkpoint: metric -> value, with "loss" and "error" (NaN if the task has none).

    Raises:
        CheckpointError: A checkpoint does not exist, or is damaged.
        DataError: The data is missing or damaged.
    """
    with torch_as_in(job.cluster):
        data = load(job.data, train=False, seed=job.training.seed, ignored=job.task.ignored)
        assert data.test is not None  # a job without a test set cannot be trained
        device = placement.virtual(job.cluster.device, window=job.hogbatch.shares_weights)
        module = models.build(job.model, data.info, job.training.seed).to(device)
        flat = FlatModel(module, tasks.make(job.task, data.info.classes), precision=job.training.precision)
        found: list[dict[str, float]] = []
        for path in paths:
            tensors = checkpoint.read(path)[1]
            weights = torch.from_numpy(tensors.get(AVERAGE, tensors[WEIGHTS])).to(device)
            steps = evaluate(flat, weights, data.test, job.training.evaluation_batch_size)
            scores = (step for step in steps if isinstance(step, SplitMetrics))
            found += [{"loss": s.loss, "error": s.error, **dict(s.metrics)} for s in scores]
    return found
