"""A job that has all that a restart could forget, and what must hold of its parts."""

from typing import Any

import numpy as np
import torch
from clusters import TrialCheckpoint, TrialResult, TrialRows, train
from torch import nn

from rudra.job.job import Job
from topologies import Plan

MU = 8
TREE = {"name": "adv", "options": {"fan_out": 2}}
ALONE = {"name": "groups", "options": {"groups": 1}}
GROUPS = {"name": "groups", "options": {"groups": 2}}
SHARDED = {"name": "sharded", "options": {"shards": 3}}


class Dropping(nn.Module):
    """Has all that a restart could forget: dropout, and buffers that learning changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10)
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def make_job(protocol: str, **tables: Any) -> Job:
    """Three epochs of twelve updates of hardsync each, with a schedule."""
    optimizer = {"learning_rate": 0.05, "momentum": 0.9, "milestones": (1, 2), **tables.pop("optimizer", {})}
    return Job(
        model=tables.pop("model", {"name": Dropping}),
        data={"train_limit": 384},
        training={"minibatch_size": MU, "epochs": 3, "seed": 5, "evaluate": False},
        optimizer=optimizer,
        protocol={"name": protocol},
        cluster={"learners": 4, "threads_per_rank": 1},
        simulation={"jitter": 0.9, "latency_jitter_s": 0.05, "slowdown": {0: 3.0}},
        results={"checkpoint_every": "1 updates"},
        **tables,
    )


def check_resumed(whole: TrialResult, at: int) -> tuple[TrialCheckpoint, TrialResult]:
    """From the first checkpoint at or after update `at`, a run reaches the bits and the rows that it would have had."""
    saved = next(s for s in whole.saved if s.position.timestamp >= at)
    resumed = train(whole.job, resumed=saved)
    assert torch.equal(resumed.weights, whole.weights)
    check_rows(whole, saved, resumed)
    assert all(resumed.rows.totals[key] == whole.rows.totals[key] for key in ("timestamp", "samples", "applied"))
    return saved, resumed


def check_rows(whole: TrialResult, saved: TrialCheckpoint, resumed: TrialResult) -> None:
    """What is recorded after the restart is what would have been."""
    for table, clock in (("gradients", "update"), ("updates", "timestamp"), ("epochs", "timestamp")):
        then = whole.rows[table]
        then = then[then[clock] > saved.position.timestamp]
        now = resumed.rows[table]
        assert len(now) == len(then)
        for column in set(then.dtype.names or ()) - {"time_s", "update_s", "evaluation_began_s"}:
            assert now[column].tobytes() == then[column].tobytes(), column


def check_gradients(job: Job, plan: Plan, gradients: np.ndarray[Any, Any]) -> None:
    """Each learner's gradients were applied once each, in order, from the first on, and by weights that were there."""
    for learner in range(job.learners):
        steps = gradients["step"][gradients["learner"] == learner]
        assert np.array_equal(steps, np.arange(len(steps)))
    assert (gradients["staleness"] >= 0).all()
    assert (gradients["timestamp"] < gradients["update"]).all()


def lost(rows: TrialRows, kind: bytes = b"lost") -> Any:
    """Of the table of events."""
    if "events" not in rows.tables:
        return np.empty(0, [("kind", "S16"), ("role", "<i2"), ("timestamp", "<i8")])
    return rows["events"][rows["events"]["kind"] == kind]
