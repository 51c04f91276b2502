"""What the paper's Figure 5 and Table 2 say of errors, on few images, with several seeds: is the order beyond noise?"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.shared import data_directory
from rudra.errors import ConfigError, RunError
from rudra.findings import Goal, Report, spread
from rudra.results.reader import open_results
from rudra.studies import pool, sweep
from rudra.studies.sweep import Point

SEEDS = (1, 2, 3)
SMALLEST = {"data.train_limit": 256, "data.test_limit": 64, "training.epochs": 1, "optimizer.milestones": []}


class Claim(NamedTuple):
    """Of a study: which points have smaller errors than which others, and how that is said."""

    study: str
    better: Callable[[Point], bool]
    worse: Callable[[Point], bool]
    text: str


def product(point: Point) -> int:
    """μλ, rounded to a power of two as in the paper's table."""
    return int(2 ** round(math.log2(point.job.training.minibatch_size * point.job.learners)))


CLAIMS = (
    Claim(
        "rudra/figure5",
        lambda point: point.job.protocol.modulation == "n",
        lambda point: point.job.protocol.modulation == "none",
        "Figure 5: errors with α0/n below those with α0",
    ),
    Claim(
        "rudra/table2",
        lambda point: product(point) == 128,
        lambda point: product(point) == 1024,
        "Table 2: errors at μλ = 128 below those at 1024",
    ),
)


def run(*, quick: bool) -> Report:
    """Runs both studies with `--quick` for every seed; half an hour for each seed on two cores.

    Raises:
        ConfigError: CIFAR-10 is not there.
        RunError: a point failed.
    """
    data = data_directory() / "cifar-10"
    if not data.is_dir():
        raise ConfigError(f"bench studies: no CIFAR-10 in {data}; RUDRA_DATA names the directory that cifar-10 is in")
    report = Report(["study", "point", "test error, %"])
    for claim in CLAIMS[1:] if quick else CLAIMS:
        errors: dict[str, list[float]] = defaultdict(list)
        gaps = []
        for seed in SEEDS[: 1 if quick else None]:
            given = {"data.path": data, "training.seed": seed, **(SMALLEST if quick else {})}
            planned = sweep.plan(claim.study, quick=True, overrides=[f"{key}={value}" for key, value in given.items()])
            if quick:  # one point of either kind
                kinds = [next(filter(kind, planned.points)) for kind in (claim.better, claim.worse)]
                planned = replace(planned, points=tuple(kinds))
            found = _errors(planned)
            for point, error in found:
                errors[point.label].append(error)
            worst = max(error for point, error in found if claim.better(point))
            gaps.append(min(error for point, error in found if claim.worse(point)) - worst)
        report.rows += [(claim.study, label, spread(values)) for label, values in errors.items()]
        report.goals.append(Goal(f"{claim.text}, in points, at every seed", gaps, at_least=1.0))
    report.notes = [f"virtual time; `rudra sweep STUDY --quick` with training.seed = {', '.join(map(str, SEEDS))}"]
    return report


def _errors(planned: sweep.Sweep) -> list[tuple[Point, float]]:
    """The final test error of every point of a study, in %."""
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        directory = Path(name)
        workers = sweep.workers_for(planned, None)
        if failures := pool.run(planned, directory, set(), workers=workers, mode="quiet"):
            raise RunError(f"{planned.name}, {failures[0].point.label}: {failures[0].reason}")
        found = []
        for point in planned.points:
            with open_results(directory / point.file) as results:
                found.append((point, 100 * float(results.summary()["final_test_error"])))
        return found
