"""Time to accuracy on real ranks: Rudra's ways to train with two learners, and torch DDP on gloo.

All methods start from the same weights, use the same data, optimiser (SGD, momentum 0.9) and one torch thread for each
learner, and search the same grid, in three rounds:

1. every mini-batch size with every rate, for one epoch;
2. each size with its best rate, at a constant rate and with a cosine schedule, until an evaluation after an epoch
   reaches the target, or the point can no longer become the fastest;
3. the fastest of these, compiled and not, with seeds that the first two rounds did not use, for one epoch more than
   it needed.

If `only` leaves one rate, the first round is left out. If it also leaves one size and one schedule, so is the second.

The result counts training time only. DDP's clock stops while its learners evaluate. Rudra's runs keep the weights of
each epoch, and the same learners evaluate them after the run, so that no evaluation takes a core from training.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.shared import check_only, chosen, data_directory
from benchmarks.tta_runs import LEARNERS, measure, read_kept
from benchmarks.tta_search import CONTESTANTS, DATA, MOVING, RATES, SCHEDULES, SIZES, Outcome, Perform, Point, search
from rudra.bench.ranks import on_ranks
from rudra.benchmark_report import Goal, Report, Spread, ratios, spread
from rudra.errors import ConfigError

SEEDS = (2, 3, 4)  # seeds of the comparison, not of the search


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
                best = {who: Point(data, who, 64, 0.05) for who in ("sma", "ddp")}
            else:
                every = chosen(only, CONTESTANTS)
                best = search(data, every, chosen(only, SIZES), chosen(only, RATES), perform, chosen(only, SCHEDULES))
                if slow := [who for who in every if who not in best]:
                    lacking.append(f"{data}: not reached in {DATA[data].epochs} epochs by {', '.join(slow)}")
            if best:
                _compare(report, best, SEEDS[: 1 if quick else None], perform, compiles=compiles)
    if not report.rows:
        raise ConfigError(f"bench tta: {lacking[0]}")
    report.notes = [
        "two learners of one torch thread each, LeNet; each method at the best of its grid; medians over seeds "
        + ", ".join(map(str, SEEDS)),
        "s to target: of training, until an epoch's test reaches "
        + ", ".join(f"{goal.accuracy:.0%} ({name})" for name, goal in DATA.items()),
        "DDP / it: by how much it is faster than DDP, compiled or not, whichever is faster",
        "moving: hardsync by allreduce, and a moving average of its weights; ddp-moving: DDP with torch's, "
        f"both move by {MOVING} of the way with every update",
        *lacking,
    ]
    return report


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
    ours = next((point for point in ordered if CONTESTANTS[point.contestant].protocol), None)
    if theirs and ours:
        faster = spread(times[theirs]).median / spread(times[ours]).median
        text = f"{data}, {ours.contestant}: the best of ours >= 1.5 times as fast as the best DDP"
        report.goals.append(Goal(text, [faster if math.isfinite(faster) else 0.0], at_least=1.5))


def _told(times: Sequence[float]) -> Spread | str:
    reached = [one for one in times if math.isfinite(one)]
    return spread(times) if len(reached) == len(times) else f"reached in {len(reached)} of {len(times)} runs"


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Spread | str:
    return ratios(theirs, ours) if all(map(math.isfinite, (*theirs, *ours))) else "-"
