"""Training with forward and backward in half precision."""

import pytest
import torch
from clusters import train

from rudra.core.wire import tail_bytes
from rudra.job.job import Job
from tests.selection import covering

pytestmark = pytest.mark.slow


def digits(precision: str) -> Job:
    return Job(
        model={"name": "lenet", "options": {"channels": [8, 16], "hidden": 64}},
        data={"name": "digits"},
        training={"epochs": 4, "precision": precision},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        protocol={"name": "softsync"},
        cluster={"learners": 2, "threads_per_rank": 1},
    )


@pytest.mark.parametrize("precision", covering(["float16"], ["bfloat16", "float16"]))
def test_digits_are_learned_and_what_lasts_or_travels_is_float32(precision: str) -> None:
    trained = train(digits(precision))
    assert trained.rows["epochs"]["test_error"][-1] < 0.05
    size = len(trained.weights)
    names = {role: executor.names for role, executor in trained.executors.items()}
    assert all({"weights"} <= set(names[role]) for role in (trained.plan.server, *trained.plan.learners))
    for role, executor in trained.executors.items():
        for name in names[role]:
            buffer = executor.buffer(name)
            assert buffer.vector.dtype == torch.float32
            assert len(buffer.wire) == size * 4 + tail_bytes(trained.plan.max_gradients_per_message)
    rounded = trained.weights.to(getattr(torch, precision)).float()
    assert (rounded != trained.weights).float().mean() > 0.9, "weights keep what half precision has no room for"
