"""Runs whose weights must not change, bit for bit, while the code around them does."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import rudra
from rudra import Job

MOMENTUM = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "milestones": [1]}
ADAM = {"name": "adam", "learning_rate": 0.002}
ADAMW = {"name": "adamw", "learning_rate": 0.002, "weight_decay": 0.05}
SCHEDULED = {
    **MOMENTUM,
    "milestones": [],
    "schedule": "cosine",
    "warm_up": 0.5,
    "clip_norm": 0.5,
    "weight_decay": 0.01,
    "groups": [{"parameters": ["*.bias"], "weight_decay": 0.0}],
}
TOPOLOGIES = {
    "base": {"name": "base"},
    "adv": {"name": "adv", "options": {"fan_out": 2}},
    "adv*": {"name": "adv*", "options": {"fan_out": 2}},
    "groups": {"name": "groups", "options": {"groups": 2}},
    "allreduce": {"name": "groups", "options": {"groups": 1}},
}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "1-softsync": {"name": "softsync"},
    "2-softsync": {"name": "softsync", "n": 2},
    "async": {"name": "async"},
}


class Normalised(nn.Module):
    """Has all that is no parameter: running statistics, a counter, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 10)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(inputs)
        return scores


def job(topology: str, protocol: str, optimizer: dict[str, Any] = MOMENTUM, /, **tables: dict[str, Any]) -> Job:
    """Two epochs of 28 mini-batches of four learners, one of which is slower."""
    plain = Job(
        model={"name": "mlp", "options": {"hidden": [24]}},
        data={"name": "digits", "train_limit": 224},
        training={"epochs": 2, "minibatch_size": 8, "seed": 7, "evaluate": False},
        optimizer=optimizer,
        protocol=PROTOCOLS[protocol],
        topology=TOPOLOGIES[topology],
        cluster={"learners": 4, "threads_per_rank": 1},
        simulation={"costs": "defaults", "jitter": 0.4, "latency_jitter_s": 0.02, "slowdown": {1: 1.5}},
    )
    return plain.with_(**tables)


def lost(learner: int, at_s: float = 0.7) -> dict[str, Any]:
    return {"faults": [{"learner": learner, "dies_at_s": at_s}], "detection_s": 0.05}


NORMALISED = {"name": Normalised, "options": {}}
PAIRS = [(t, p) for t in ("base", "adv", "adv*") for p in PROTOCOLS if (t, p) != ("adv*", "hardsync")]
PAIRS += [("groups", "hardsync"), ("groups", "1-softsync"), ("groups", "async")]
PAIRS += [("allreduce", "hardsync"), ("allreduce", "1-softsync")]  # others are these again

RUNS: dict[str, Job] = {
    **{f"{topology} {protocol}": job(topology, protocol) for topology, protocol in PAIRS},
    "base hardsync, adam": job("base", "hardsync", ADAM),
    "base async, adam": job("base", "async", ADAM),
    "allreduce hardsync, adam": job("allreduce", "hardsync", ADAM),
    "base 1-softsync, momentum as in Caffe": job("base", "1-softsync", {**MOMENTUM, "momentum_form": "caffe"}),
    "adv async, adam": job("adv", "async", ADAM),
    "adv 2-softsync, adamw": job("adv", "2-softsync", ADAMW),
    "groups 1-softsync, adam": job("groups", "1-softsync", ADAM),
    "base 1-softsync, scheduled": job("base", "1-softsync", SCHEDULED),
    "allreduce hardsync, scheduled": job("allreduce", "hardsync", SCHEDULED),
    "base async, nesterov, mean staleness": job(
        "base", "async", {**MOMENTUM, "options": {"nesterov": True}}, protocol={"modulation": "mean_staleness"}
    ),
    "base 2-softsync, gradient staleness": job("base", "2-softsync", protocol={"modulation": "gradient_staleness"}),
    "base 1-softsync, float16": job("base", "1-softsync", cluster={"gradient_format": "float16"}),
    "adv hardsync, float16": job("adv", "hardsync", cluster={"gradient_format": "float16"}),
    "groups async, float16": job("groups", "async", cluster={"gradient_format": "float16"}),
    "base hardsync, BatchNorm": job("base", "hardsync", model=NORMALISED),
    "adv* async, BatchNorm": job("adv*", "async", model=NORMALISED),
    "groups 1-softsync, BatchNorm": job("groups", "1-softsync", model=NORMALISED),
    "base async, bfloat16": job("base", "async", training={"precision": "bfloat16"}),
    "base hardsync, a lost learner": job("base", "hardsync", simulation=lost(2)),
    "base async, a lost learner": job("base", "async", simulation=lost(0)),
    "adv 1-softsync, a lost learner": job("adv", "1-softsync", simulation=lost(3)),
    "adv* async, a lost learner": job("adv*", "async", simulation=lost(1)),
    "groups 1-softsync, a lost learner": job("groups", "1-softsync", simulation=lost(3)),
}
ON_RANKS = ("base hardsync", "adv hardsync", "groups hardsync", "allreduce hardsync", "base hardsync, BatchNorm")
"""Of these real ranks come to the bits that virtual time does: nothing in them depends on time."""


def warm_start(directory: Path) -> Job:
    """Goes on from another run's weights, with a rate and a memory of its own."""
    before = directory / "before.h5"
    rudra.simulate(RUNS["base 1-softsync"], output=before, progress="quiet").close()
    return job("adv", "async", training={"warm_start": before})
