"""Cost of checkpoints that are written while training continues: LeNet with momentum, and a model of 289 MB."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rudra.bench.ranks import SERVER, alexnet_job, in_turns, lenet_job, on_ranks, train, write_images
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI

CASES = {"lenet, μ = 16": (400, 4), "289 MB, μ = 4": (24, 2)}
"""Case -> steps of a run, and number of checkpoints in it."""

QUICK = {"lenet, μ = 16": (12, 2)}
LEARNERS = 1
MINUTE_S = 60.0


def run(*, quick: bool) -> Report:
    """Trains with checkpoints and without, in turns."""
    cases = QUICK if quick else CASES
    found = on_ranks(measure, LEARNERS, cases=cases, rounds=0 if quick else 5)[SERVER]
    report = Report(["training", "run, s", "checkpoints", "with / without", "s until kept", "percent at one a minute"])
    for case, (_, count) in cases.items():
        on, off = (found[case][name] for name in ("on", "off"))
        kept = [seconds for turn in found[case]["kept"] for seconds in turn]
        # The cost of all checkpoints, spread over one minute for each.
        percent = spread(100 * (a - b) / count / MINUTE_S for a, b in zip(on, off, strict=True))
        until_kept = spread(kept) if kept else "none in time"  # a quick run may end before a checkpoint is complete
        report.rows.append((case, spread(on), count, ratios(on, off), until_kept, percent))
        report.goals.append(Goal(f"{case}: <= 2 % at one checkpoint a minute", [percent.median], at_most=2.0))
    report.notes.append("until kept: from the copy of weights and optimiser state to the new name on the disk")
    return report


def measure(comm: "MPI.Comm", directory: Path, cases: dict[str, tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Runs cases in turns. Returns case -> seconds of runs with and without, and of each checkpoint until on disk."""
    if comm.rank == SERVER:
        write_images(directory)
    rest(comm)
    figures: dict[str, Any] = {}
    for case, (steps, count) in cases.items():
        job = lenet_job(directory, "async", LEARNERS, 16, steps) if case in QUICK else alexnet_job("async", 1, 4, steps)
        every = {"on": f"{steps // (count + 1)} updates", "off": "never"}
        for taken in in_turns(rounds, figures.setdefault(case, {})):
            for name in every:
                one = job.with_(results={"checkpoint_every": every[name]})
                with train(one, directory / "run.h5") as results:
                    events = results.events[results.events["kind"] == b"checkpoint"]
                    taken[name] = float(results.totals["time_s"][0])
                if name == "on":
                    taken["kept"] = [float(event["text"].split()[2]) for event in events]
                rest(comm)
    return figures
