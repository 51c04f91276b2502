"""Predictions from the rows of one run, against runs with other settings on this machine.

In each turn one run is recorded, and its costs are fitted (`rudra predict RUN.h5`). Then every other setting is
predicted from them, and run.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared import write_text
from rudra.api import run as train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.machine import cores
from rudra.simulation.predict import steady_rate
from rudra.simulation.whatif import FittedRun

NOISE = {"name": "rudra.data.noise:noise", "options": {"shape": [1, 28, 28]}, "classes": 10}
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model": {"name": "lenet"}, "data": NOISE},
    "lstm": {
        "model": {"name": "lstm"},
        "data": {"name": "text", "options": {"length": 64}},
        "task": {"name": "language"},
    },
}
SETTINGS: dict[str, list[str]] = {
    "λ = 1": ["cluster.learners=1"],
    "μ = 32": ["training.minibatch_size=32"],
    "1-softsync, μ = 8": ["protocol.name=softsync", "training.minibatch_size=8"],
    "async": ["protocol.name=async"],
    "groups": ["topology.name=groups"],
}
SIZE, STEPS = 16, 400


def run(*, quick: bool) -> Report:
    """Records a run, predicts the other settings from it, and runs them, in turns."""
    models = dict([*MODELS.items()][:1]) if quick else MODELS
    settings = dict([*SETTINGS.items()][:1]) if quick else SETTINGS
    report = Report([f"hardsync, λ = 2, μ = {SIZE}, samples/s", "predicted", "measured", "predicted / measured"])
    errors = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        text = Path(name) / "input.txt"
        write_text(text)
        for model, tables in models.items():
            found: dict[str, tuple[list[float], list[float]]] = {setting: ([], []) for setting in settings}
            for _ in range(1 if quick else 3):
                _turn(_job(tables, text, 40 if quick else STEPS), settings, Path(name) / "run.h5", found)
            for setting, (predicted, measured) in found.items():
                ratio = ratios(predicted, measured)
                errors.append(abs(ratio.median - 1))
                report.rows.append((f"{model}: {setting}", spread(predicted), spread(measured), ratio))
    report.notes = [f"one torch thread per learner, {cores()} cores; costs from the rows of the run, no calibration"]
    middle = sorted(errors)[len(errors) // 2]
    report.goals = [
        Goal("each predicted / measured within 15 % of 1", errors, at_most=0.15),
        Goal("their median within 10 % of 1", [middle], at_most=0.1),
    ]
    return report


def _turn(
    job: Job, settings: dict[str, list[str]], path: Path, found: dict[str, tuple[list[float], list[float]]]
) -> None:
    _rate(job, path)
    fitted = FittedRun.read(path, trust=True)
    for setting, overrides in settings.items():
        other = fitted.written(overrides)
        found[setting][0].append(fitted.predict(other).samples_per_s)
        found[setting][1].append(_rate(other.with_(simulation={"costs": "defaults"}), path.with_name("other.h5")))


def _rate(job: Job, path: Path) -> float:
    with train(job, output=path, force=True, progress="quiet") as results:
        return steady_rate(results.updates)[1]


def _job(tables: dict[str, Any], text: Path, steps: int) -> Job:
    data = {**tables["data"], "train_limit": steps * 2 * SIZE}
    return Job(
        name="bench",
        **{**tables, "data": data if data["name"] != "text" else {**data, "path": text}},
        training={"epochs": 1, "minibatch_size": SIZE, "evaluate": False},
        optimizer={"learning_rate": 1e-4, "momentum": 0.9},
        protocol={"name": "hardsync", "modulation": "none"},
        cluster={"learners": 2, "threads_per_rank": 1},
    )
