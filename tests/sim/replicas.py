"""Jobs that average replicas, and what their roles hold in the end."""

from typing import Any

import torch
from clusters import TrialResult
from torch import nn

from rudra.compute.flat import FlatModel
from rudra.core.buffer_names import REPLICA
from rudra.job.job import Job

MU = 8
DELAYS = {"jitter": 0.9, "latency_jitter_s": 0.05, "slowdown": {0: 3.0}}


def softmax_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def averaged(name: str, k: int, averages: int, model: Any = softmax_regression, epochs: int = 1, **tables: Any) -> Job:
    """A job of so many averages."""
    averaging = tables.pop("averaging", {})
    run = Job(
        model={"name": model},
        training={"minibatch_size": MU, "seed": 3, "evaluate": False, "epochs": epochs, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.02, **tables.pop("optimizer", {})},
        protocol={"name": name},
        averaging=averaging,
        topology=tables.pop("topology", {"name": "replicas"}),
        cluster={"learners": k, "threads_per_rank": 1},
        simulation={**DELAYS, **tables.pop("simulation", {})},
        **tables,
    )
    samples = averages // epochs * k * MU * run.make_protocol().period
    assert samples <= 1437
    return run.with_(data={"train_limit": samples})


def replica(trained: TrialResult, learner: int) -> torch.Tensor:
    return trained.executors[trained.plan.learners[learner]].buffer(REPLICA).vector


def flat(module: nn.Module) -> torch.Tensor:
    weights = torch.empty((model := FlatModel(module)).size)
    model.read_into(weights)
    return weights


def interleaved(seed: int) -> dict[str, Any]:
    return {"jitter": 0.9, "latency_jitter_s": 0.2, "slowdown": {seed % 3: 1.0 + seed % 7}, "compute_s": 0.05}
