"""One learner that needs three times as long for a sample: what `rudra explain` says, and what shares gain.

The learner sleeps for the rest of its time, like a learner on a slower device. So it takes no core from the others.
"""

import io
import re
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rudra.api import run as train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.explain import explain
from rudra.job.job import Job
from rudra.mpi.launch import world_rank, world_size
from rudra.simulation.predict import steady_rate

SAMPLE_S, TIMES, SIZE = 3e-3, 3.0, 16
LEARNERS = 2
TOPOLOGIES = ("base", "groups")


class Sleeping(nn.Module):
    """Linear layer whose forward pass takes `SAMPLE_S` for a sample, and `TIMES` as long on the last rank."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if (size := world_size()) is not None and self.training:
            time.sleep(len(inputs) * SAMPLE_S * (TIMES if world_rank() == size - 1 else 1.0))
        found: torch.Tensor = self.layer(inputs.flatten(1))
        return found


def model() -> nn.Module:
    """Returns the model, for 64 features and ten classes."""
    return Sleeping(64, 10)


def run(*, quick: bool) -> Report:
    """Records a run, explains it, and runs it with `shares = "auto"`, in turns."""
    heads = ("named", "samples/s", 'with shares = "auto"', "gain", "predicted gain", "ratio")
    report = Report([f"hardsync, λ = {LEARNERS}", *heads])
    named, off = [], []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        for topology in TOPOLOGIES[:1] if quick else TOPOLOGIES:
            found: tuple[list[float], ...] = ([], [], [], [])
            seen = 0
            for _ in range(1 if quick else 3):
                its, *figures = _turn(_job(topology, 20 if quick else 60), Path(name))
                seen += its
                for values, figure in zip(found, figures, strict=True):
                    values.append(figure)
            *_, gains, predicted = found
            ratio = ratios(predicted, gains)
            named.append(seen / len(gains))
            off.append(abs(ratio.median - 1))
            report.rows.append((topology, f"{seen} of {len(gains)}", *map(spread, found), ratio))
    report.notes = [
        f"learner {LEARNERS - 1} sleeps {TIMES:g} times as long as the other one, {SAMPLE_S * 1e3:g} ms for a sample",
        f"named: runs in which `rudra explain` says that learner {LEARNERS - 1} is slow",
    ]
    report.goals = [
        Goal("explain names the slow learner in every run", named, at_least=1.0),
        Goal("the predicted gain is within 20 % of the measured one", off, at_most=0.2),
    ]
    return report


def _turn(job: Job, place: Path) -> tuple[bool, float, float, float, float]:
    """Returns whether the slow learner is named, samples/s without and with shares, and both gains."""
    before = _rate(job, place / "run.h5")
    explanation = explain(place / "run.h5", trust=True)
    after = _rate(job.with_(cluster={"shares": "auto"}), place / "shares.h5")
    named = re.search(rf"Learner {LEARNERS - 1} \(rank .*\) needs \d", "\n".join(explanation.lines)) is not None
    gains = {each.overrides: each.gain for each in explanation.alternatives}
    return named, before, after, after / before - 1, gains.get(("cluster.shares=auto",), 0.0)


def _rate(job: Job, path: Path) -> float:
    with redirect_stderr(io.StringIO()):  # the measured shares
        results = train(job, output=path, force=True, progress="quiet")
    with results:
        return steady_rate(results.updates)[1]


def _job(topology: str, steps: int) -> Job:
    tables: dict[str, Any] = {
        "model": {"name": "benchmarks.straggler:model"},
        "data": {
            "name": "rudra.data.noise:noise",
            "options": {"shape": [64]},
            "classes": 10,
            "train_limit": steps * LEARNERS * SIZE,
        },
        "training": {"epochs": 1, "minibatch_size": SIZE, "evaluate": False},
        "optimizer": {"learning_rate": 1e-4, "momentum": 0.9},
        "protocol": {"name": "hardsync", "modulation": "none"},
        "topology": {"name": topology},
        "cluster": {"learners": LEARNERS, "threads_per_rank": 1},
    }
    return Job(name="bench", **tables)
