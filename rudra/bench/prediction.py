"""Predicted against measured time per epoch, on this machine, calibrated in the same run right before."""

import tempfile
import tomllib
from pathlib import Path
from typing import Any

from rudra.api import run as train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.data.noise import noise
from rudra.job.job import Job
from rudra.prepare.points import at
from rudra.simulation.predict import predict, steady_rate
from rudra.studies.calibrate import calibrate

MINIBATCH_SIZE = 16
SIZES = (12, 24)
"""μ of the calibration runs, which differs from μ of the predicted runs."""

EPOCH = 50_000
PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "1-softsync": {"name": "softsync", "n": 1},
    "λ-softsync": {"name": "async"},
}
MODELS = {"lenet": (1, 28, 28), "cifar10_full": (3, 32, 32)}


def run(*, quick: bool) -> Report:
    """Calibrates, then runs every configuration, in turns. Each turn's calibration predicts this turn's runs."""
    configurations = [(1, "hardsync"), *((2, protocol) for protocol in PROTOCOLS)][: 1 if quick else None]
    report = Report([f"s per {EPOCH:,} samples, μ = {MINIBATCH_SIZE}", "predicted", "measured", "predicted / measured"])
    figures = []
    for model in list(MODELS)[: 1 if quick else 2]:
        found: dict[tuple[int, str], tuple[list[float], list[float]]] = {c: ([], []) for c in configurations}
        for _ in range(1 if quick else 5):
            for configuration, (predicted, measured) in zip(found, _turn(model, list(found), quick), strict=True):
                found[configuration][0].append(predicted)
                found[configuration][1].append(measured)
        for (learners, protocol), (ours, theirs) in found.items():
            ratio = ratios(ours, theirs)
            figures.append(abs(ratio.median - 1))
            name = f"{model}, λ = {learners}, {protocol if learners > 1 else 'all protocols alike'}"
            report.rows.append((name, spread(ours), spread(theirs), ratio))
    report.notes = [f"calibrated with async runs at μ = {SIZES[0]} and {SIZES[1]}; one torch thread per learner"]
    report.goals = [Goal("median of predicted / measured within 10 % of 1", figures, at_most=0.1)]
    return report


def _turn(model: str, configurations: list[tuple[int, str]], quick: bool) -> list[tuple[float, float]]:
    """Returns predicted and measured seconds per epoch of each configuration."""
    seconds = 0.2 if quick else 4.0
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        costs = Path(name) / "costs.toml"
        costs.write_text(calibrate(_job(model), sizes=SIZES, seconds=seconds, show=False), encoding="utf-8")
        table = tomllib.loads(costs.read_text(encoding="utf-8"))["models"][model]["compute_s"]
        steps = max(40, int(seconds / at({int(size): s for size, s in table.items()}, MINIBATCH_SIZE)))
        found = []
        for learners, protocol in configurations:
            job = _job(model).with_(
                protocol=PROTOCOLS[protocol],
                cluster={"learners": learners},
                data={"train_limit": steps * learners * MINIBATCH_SIZE},
                simulation={"costs": str(costs)},
            )
            with train(job, output=Path(name) / "run.h5", force=True, progress="quiet") as results:
                _, rate = steady_rate(results.updates)
            found.append((predict(job, samples=EPOCH).epoch_s, EPOCH / rate))
        return found


def _job(model: str) -> Job:
    return Job(
        name="bench",
        model={"name": model},
        data={"name": noise, "options": {"shape": MODELS[model]}, "classes": 10},
        training={"epochs": 1, "minibatch_size": MINIBATCH_SIZE, "evaluate": False},
        optimizer={"learning_rate": 1e-4, "momentum": 0.9},
        protocol={"modulation": "none"},
        cluster={"learners": 1, "threads_per_rank": 1},
    )
