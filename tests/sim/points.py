"""A job on a few points: simulated, replayed, and cut into parts and stages."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rudra

SAMPLES = 96
DELAYS = {"jitter": 0.8, "latency_jitter_s": 0.05, "slowdown": {0: 2.0}}


def points() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 12, generator=generator)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    return TensorDataset(inputs, labels), TensorDataset(inputs[:20], labels[:20])


def network() -> nn.Module:
    """Something of everything: dropout, statistics that travel as buffers, and an integer buffer that does not."""
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4))


def make_job(rule_: Any = "async", learners: int = 3, **tables: Any) -> rudra.Job:
    rule = {"name": rule_, "modulation": "none", **tables.pop("protocol", {})}
    training = {"epochs": 3, "minibatch_size": 4, "seed": 5, **tables.pop("training", {})}
    return rudra.Job(
        model={"name": network},
        data={"name": points, "classes": 4, **tables.pop("data", {})},
        training=training,
        optimizer={"learning_rate": 0.02, **tables.pop("optimizer", {"momentum": 0.9})},
        protocol=rule,
        cluster={"learners": learners, "threads_per_rank": 1},
        simulation={**DELAYS, **tables.pop("simulation", {})},
        **tables,
    )
