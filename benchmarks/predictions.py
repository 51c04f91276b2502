"""Predictions of `rudra tune` in virtual time, against runs of its answers on real ranks.

Costs are measured once. Each search is limited to one protocol, topology and mini-batch size, and chooses rate and
momentum. Its answer then runs with fresh seeds on two ranks with learners. The machine must be otherwise idle.
"""

import json
import math
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import check_only, chosen, data_directory
from rudra.api import run as train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.results.reader import open_results
from rudra.simulation.predict import predict
from rudra.studies.calibrate import calibrate
from rudra.tuning.answer import Verdict
from rudra.tuning.rounds import MOMENTUM, RATE
from rudra.tuning.tune import tune

POINTS: dict[str, tuple[str, str, int]] = {
    "allreduce-16": ("hardsync", "groups", 16),
    "allreduce-32": ("hardsync", "groups", 32),
    "allreduce-64": ("hardsync", "groups", 64),
    "server-32": ("hardsync", "base", 32),
    "softsync-32": ("softsync", "base", 32),
    "async-32": ("async", "base", 32),
    "sma-16": ("sma", "replicas", 16),
    "sma-32": ("sma", "replicas", 32),
    "average-32": ("average", "replicas", 32),
    "softsync-64": ("softsync", "base", 64),
}
"""Name -> protocol, topology and mini-batch size of a search."""

SIZES = (16, 32, 64)
SEEDS = (5, 6, 7)
LOSS, EPOCHS = 0.45, 20
RATE_GIVEN, MOMENTUM_GIVEN = 0.02, 0.9


def run(*, quick: bool, only: Collection[str] = (), keep: Path | None = None) -> Report:
    """Searches, and runs the answers.

    Args:
        quick: One search of an mlp with few samples, of one rate and one momentum.
        only: Names of searches.
        keep: Directory of costs and searches. They are not repeated if they are there.

    Raises:
        ConfigError: The data is missing, or a word is unknown.
    """
    check_only("predictions", only, [*POINTS])
    path = data_directory() / "fashion-mnist"
    if not path.is_dir():
        raise ConfigError(f"bench predictions: no {path}; RUDRA_DATA names the directory that fashion-mnist is in")
    heads = ("s an epoch", "measured / predicted", "s to target", "expected", "measured / predicted", "within")
    report = Report(["search", *heads])
    speeds, times = [], []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        place = keep or Path(name)
        place.mkdir(exist_ok=True)
        job = _job(path, quick).with_(simulation={"costs": str(_calibrated(_job(path, quick), place, quick))})
        answers: dict[str, Verdict] = {}
        for point in ["allreduce-16"] if quick else chosen(only, POINTS):
            protocol, topology, size = POINTS[point]
            space: dict[str, list[Any]] = {"protocol.name": [protocol], "topology.name": [topology]}
            space |= {"training.minibatch_size": [size], "cluster.learners_per_rank": [1]}
            space |= {RATE: [RATE_GIVEN], MOMENTUM: [MOMENTUM_GIVEN]} if quick else {}
            about: dict[str, Any] = {"target": job.training.target, "given": space, "output": place / point}
            answers[point] = tune(job, **about, quiet=not sys.stderr.isatty())
        for point, answer in answers.items():
            if answer.winner is None:
                report.notes.append(f"{point}: the search found nothing: {next(answer.lines())}")
                continue
            epoch_s, measured_s = _measured(answer.job, place / point, SEEDS[: 1 if quick else None])
            predicted_s, said_s = predict(answer.job).epoch_s, answer.winner.time_s
            low, high = answer.winner.expected_s
            inside = sum(low <= each <= high for each in measured_s)
            speed, time = ratios(epoch_s, [predicted_s] * len(epoch_s)), spread(measured_s).median / said_s
            speeds.append(abs(speed.median - 1))
            times.append(max(time, 1 / time) if 2 * inside > len(measured_s) else math.inf)
            expected = f"{low:.3g} to {high:.3g}"
            report.rows.append((point, predicted_s, speed, said_s, expected, time, f"{inside} of {len(measured_s)}"))
    report.notes.append(
        f"LeNet, two learners; a validation loss <= {LOSS}; medians of seeds {', '.join(map(str, SEEDS))}"
    )
    last = -1 - len(speeds) // 5
    report.goals = [
        Goal("seconds of an epoch within 10 %, in 8 of 10", sorted(speeds)[last:][:1], at_most=0.1),
        Goal("time to target within 1.3 x and the expected range, in 8 of 10", sorted(times)[last:][:1], at_most=1.3),
    ]
    return report


def _job(path: Path, quick: bool) -> Job:
    return Job(
        name="bench",
        model={"name": "mlp" if quick else "lenet"},
        data={
            "name": "idx",
            "path": str(path),
            "train_limit": 800 if quick else 6000,
            "test_limit": 100 if quick else 2000,
            "validation_split": 0.25,
            "split_seed": 0,
        },
        training={
            "epochs": EPOCHS,
            "minibatch_size": 32,
            "target": f"validation loss <= {1 if quick else LOSS:g}",
            "target_window": 1,
        },
        optimizer={"learning_rate": RATE_GIVEN, "momentum": MOMENTUM_GIVEN},
        protocol={"name": "hardsync"},
        cluster={"learners": 2, "threads_per_rank": 1},
    )


def _calibrated(job: Job, place: Path, quick: bool) -> Path:
    """Measures the costs of the model, and returns their file."""
    file = place / "costs.toml"
    if file.is_file():
        return file
    about: dict[str, Any] = {"sizes": SIZES[:1], "seconds": 0.05} if quick else {"sizes": SIZES}
    file.write_text(calibrate(job, **about, show=False), encoding="utf-8")
    return file


def _measured(job: Job, place: Path, seeds: Collection[int]) -> tuple[list[float], list[float]]:
    """Runs a job on real ranks. Returns the seconds of an epoch and until the target, by seed. They are kept.

    The first epoch does not count: no evaluation delays it.
    """
    kept = place / "measured.json"
    if kept.is_file():
        epochs_s, times_s = json.loads(kept.read_text())
        return epochs_s, times_s
    epochs_s, times_s = [], []
    for seed in seeds:
        seeded = job.with_(training={"seed": seed, "stop_at_target": True})
        with suppress(RunError):  # it diverged
            train(seeded, output=place / "run.h5", force=True, progress="quiet").close()
        with open_results(place / "run.h5") as results:
            time_s = results.epochs["time_s"]
            epochs_s.append(float(np.median(np.diff(time_s))) if len(time_s) > 1 else float(time_s[0]))
            reached = results.summary()["time_to_target_s"]
            times_s.append(math.inf if reached is None else float(reached))
    kept.write_text(json.dumps([epochs_s, times_s]))
    return epochs_s, times_s
