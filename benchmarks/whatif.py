"""Predictions from the rows of one run, against runs with other settings on this machine.

In each turn one run is recorded, and its costs are fitted (`rudra predict RUN.h5`). Then every other setting is
predicted from them, and run.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shared import write_text
from rudra.api import run as train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.job.job import Job
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.simulation.predict import steady_rate
from rudra.simulation.whatif import FittedRun
from rudra.studies.calibrate import calibrate

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
    "1-softsync on adv*": ["protocol.name=softsync", "topology.name=adv*"],
}
SIZE, STEPS = 16, 400
CALIBRATED = (8, 16, 32)


def run(*, quick: bool) -> Report:
    """Records a run, predicts the other settings from it, and runs them, in turns."""
    models = dict([*MODELS.items()][:1]) if quick else MODELS
    settings = dict([*SETTINGS.items()][:1]) if quick else SETTINGS
    heads = ("from rows", "and calibration", "measured", "from rows / measured", "and calibration / measured")
    report = Report([f"hardsync, λ = 2, μ = {SIZE}, samples/s", *heads])
    errors = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        place = Path(name)
        write_text(place / "input.txt")
        for model, tables in models.items():
            job = _job(tables, place / "input.txt", 40 if quick else STEPS)
            calibrated = _calibrated(job, place / model, quick)
            found: dict[str, tuple[list[float], ...]] = {setting: ([], [], []) for setting in settings}
            for _ in range(1 if quick else 3):
                _turn(job, settings, calibrated, place, found)
            for setting, (rows, both, measured) in found.items():
                compared = ratios(rows, measured), ratios(both, measured)
                errors.append(abs(compared[1].median - 1))
                report.rows.append((f"{model}: {setting}", *map(spread, (rows, both, measured)), *compared))
    report.notes = [
        f"one torch thread per learner, {cores()} cores; from rows: times are proportional to μ, and learners divide",
        "the cores; and calibration: they follow the curve of `rudra calibrate` at μ = 8, 16 and 32, measured before",
    ]
    middle = sorted(errors)[len(errors) // 2]
    report.goals = [
        Goal("each, with the calibration, within 15 % of 1", errors, at_most=0.15),
        Goal("their median within 10 % of 1", [middle], at_most=0.1),
    ]
    return report


def _calibrated(job: Job, directory: Path, quick: bool) -> Path:
    """Calibrates a job's model. Returns the directory where predictions find the calibration."""
    with _measured_in(directory):
        file = cost_files.measured_path(job)
    directory.mkdir()
    sizes, seconds = (CALIBRATED[:1], 0.05) if quick else (CALIBRATED, 2.0)
    file.write_text(calibrate(job, sizes=sizes, seconds=seconds, show=False), encoding="utf-8")
    return directory


def _turn(
    job: Job, settings: dict[str, list[str]], calibrated: Path, place: Path, found: dict[str, tuple[list[float], ...]]
) -> None:
    path = place / "run.h5"
    _rate(job, path)
    for column, directory in enumerate((place / "none", calibrated)):
        with _measured_in(directory):
            fitted = FittedRun.read(path)
            for setting, overrides in settings.items():
                found[setting][column].append(fitted.predict(fitted.written(overrides)).samples_per_s)
    for setting, overrides in settings.items():
        other = fitted.written(overrides).with_(simulation={"costs": "defaults"})
        found[setting][2].append(_rate(other, place / "other.h5"))


@contextmanager
def _measured_in(directory: Path) -> Iterator[None]:
    """Looks for calibrations in a directory."""
    before, cost_files.MEASURED = cost_files.MEASURED, directory
    try:
        yield
    finally:
        cost_files.MEASURED = before


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
