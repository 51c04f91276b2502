"""Time to accuracy on real ranks: what `rudra tune` finds for two learners, and torch DDP on gloo.

All methods start from the same weights, and use the same data, SGD, and one torch thread for each learner. Rudra's
settings are those that a search finds: for all protocols (`tuned`), or for one of them. DDP gets the best of a grid at
momentum 0.9, in two rounds:

1. every mini-batch size with every rate, for one epoch;
2. each size with its best rate, at a constant rate and with a cosine schedule, until an evaluation after an epoch
   reaches the target, or the point can no longer become the fastest.

Then all run in turns, compiled and not, with seeds that neither has used. If `only` leaves one rate, the first round is
left out. If it also leaves one size and one schedule, so is the second.

The result counts training time only. DDP's clock stops while its learners evaluate. Rudra's runs keep the weights of
each epoch, and the same learners evaluate them after the run, so that no evaluation takes a core from training.
"""

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.shared import check_only, chosen, data_directory
from benchmarks.tta_runs import LEARNERS, given, measure, read_kept
from benchmarks.tta_search import CONTESTANTS, DATA, MOVING, RATES, SCHEDULES, SIZES, Outcome, Perform, Point, search
from rudra.bench.ranks import on_ranks
from rudra.benchmark_report import Goal, Report, Spread, ratios, spread
from rudra.errors import ConfigError
from rudra.tuning.tune import BEST, tune

TOPOLOGIES = {"topology.name": ["base", "replicas", "groups"]}
SEEDS = (5, 6, 7)  # seeds of the comparison, not of the search


def run(*, quick: bool, only: Collection[str] = (), keep: Path | None = None) -> Report:
    """Searches and compares, which takes hours in full.

    Args:
        quick: two methods at one point, with few samples.
        only: names of data, methods and schedules, mini-batch sizes and rates. A sort with names is limited to them.
        keep: file that keeps runs. A run in the file is not repeated.

    Raises:
        ConfigError: the data is missing, or a word is unknown.
        RunError: a run failed.
    """
    check_only("tta", only, [*DATA, *CONTESTANTS, *SIZES, *RATES, *SCHEDULES])
    compiles = not quick and shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None
    report = Report(["data", "method", "μ", "rate", "schedule", "epochs", "s to target", "s an epoch", "DDP / it"])
    lacking = []
    for data in ["fashion-mnist"] if quick else chosen(only, DATA):
        path = data_directory() / data
        if not path.is_dir():
            lacking.append(f"no rows of {data}: it is not in {path}; RUDRA_DATA names the directory that it is in")
            continue
        with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
            kept = keep or Path(name) / "runs"

            def perform(points: Sequence[Point], path: Path = path, kept: Path = kept) -> dict[Point, Outcome]:
                missing = [point for point in points if point not in read_kept(kept)]
                if missing:
                    where = {"data": str(path), "kept": str(kept.absolute()), "quick": quick}
                    on_ranks(measure, LEARNERS, points=missing, **where)
                found = read_kept(kept)
                return {point: found[point] for point in points}

            if quick:
                best = {who: Point(data, who, 64, 0.05) for who in ("tuned", "ddp")}
            else:
                every = chosen(only, CONTESTANTS)
                grid = chosen(only, SIZES), chosen(only, RATES), perform, chosen(only, SCHEDULES)
                best = {who: point for who in every if (point := _tuned(data, who, path, kept))}
                best |= search(data, [who for who in every if CONTESTANTS[who].space is None], *grid)
                if slow := [who for who in every if who not in best]:
                    lacking.append(f"{data}: not reached in {DATA[data].epochs} epochs by {', '.join(slow)}")
            if best:
                _compare(report, best, SEEDS[: 1 if quick else None], perform, compiles=compiles)
    if not report.rows:
        raise ConfigError(f"bench tta: {lacking[0]}")
    report.notes = [
        "two learners of one torch thread each, LeNet; medians over seeds " + ", ".join(map(str, SEEDS)),
        "s to target: of training, until an epoch's test reaches "
        + ", ".join(f"{goal.accuracy:.0%} ({name})" for name, goal in DATA.items()),
        "DDP / it: by how much it is faster than DDP, compiled or not, whichever is faster",
        "tuned: what rudra tune finds for all protocols, or the name of the only one; all with an average over time",
        f"ddp-moving: DDP with torch's moving average, which moves by {MOVING} of the way with every update",
        *lacking,
    ]
    return report


def _tuned(data: str, who: str, path: Path, kept: Path) -> Point | None:
    """Searches on real ranks, or continues a search. Returns its answer. None: it is DDP, or nothing was found."""
    space, goal = CONTESTANTS[who].space, DATA[data]
    if space is None:
        return None
    found = tune(
        given(Point(data, who, 32, 0.02, epochs=2 * goal.epochs), path),
        target=f"accuracy >= {goal.accuracy:g}",
        given={**TOPOLOGIES, **space},
        output=(place := kept.with_name(f"{kept.name}-{data}-{who}")),
        mpi=True,
        quiet=not sys.stderr.isatty(),
    )
    job, file = found.job, str((place / BEST).absolute())
    settings = job.training.minibatch_size, job.optimizer.learning_rate
    return Point(data, who, *settings, epochs=goal.epochs, file=file) if found.winner else None


def _compare(report: Report, best: dict[str, Point], seeds: Sequence[int], perform: Perform, *, compiles: bool) -> None:
    """Runs the last round. Adds the rows, the fastest first, and the goal."""
    ways = [point._replace(compiled=compiled) for compiled in (False, True)[: 1 + compiles] for point in best.values()]
    found = perform([way._replace(seed=seed) for seed in seeds for way in ways])  # in turns over the seeds
    data, runs = ways[0].data, {way: [found[way._replace(seed=seed)] for seed in seeds] for way in ways}
    reached = {way: [one.reached(DATA[data].accuracy) for one in runs[way]] for way in ways}
    times = {way: [seconds for seconds, _ in reached[way]] for way in ways}
    ordered = sorted(times, key=lambda point: (spread(times[point]).median, times[point]))
    theirs = next((point for point in ordered if point.contestant == "ddp"), None)
    for point in ordered:
        epoch_s = spread(one.seconds[-1] / len(one.seconds) for one in runs[point])
        ratio = _ratio(times[theirs], times[point]) if theirs else "-"
        name = point.contestant + (", compiled" if point.compiled else "")
        about = (name, point.size, point.rate, point.schedule, spread(epochs for _, epochs in reached[point]))
        report.rows.append((data, *about, _told(times[point]), epoch_s, ratio))
    ours = next((point for point in ordered if CONTESTANTS[point.contestant].space is not None), None)
    if theirs and ours:
        faster = spread(times[theirs]).median / spread(times[ours]).median
        text = f"{data}, {ours.contestant}: the best of ours >= 1.5 times as fast as the best DDP"
        report.goals.append(Goal(text, [faster if math.isfinite(faster) else 0.0], at_least=1.5))


def _told(times: Sequence[float]) -> Spread | str:
    reached = [one for one in times if math.isfinite(one)]
    return spread(times) if len(reached) == len(times) else f"reached in {len(reached)} of {len(times)} runs"


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Spread | str:
    return ratios(theirs, ours) if all(map(math.isfinite, (*theirs, *ours))) else "-"
