"""Banks that grow on real ranks, against a sweep of fixed sizes in the same sitting.

Each turn measures all fixed sizes, and then a run whose bank grows. So all of them meet the same other work on this
machine. The score of the run is the throughput that the sweep has at its last size, as a fraction of the best.
"""

import time
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shared import check_only, chosen
from rudra.bench.ranks import in_turns, on_ranks, train, write_images
from rudra.benchmark_report import Goal, Report
from rudra.core.decisions import measurements
from rudra.machine import cores
from rudra.mpi.quiet import rest
from rudra.results.reader import Results

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.job.job import Job

SIZES = (1, 2, 4, 8, 16)
SAMPLES, MINIBATCH = 1000, 4
RANKS = 2


class Case(NamedTuple):
    """Model and form of a bank.

    Attributes:
        title: Name of the case in the report.
        model: Table `[model]`.
        bank: Form of the bank.
        threads: Number of threads of the rank.
    """

    title: str
    model: dict[str, Any]
    bank: str
    threads: int


class Latent(torch.nn.Module):
    """A small network whose forward pass takes a fixed time, as if its operations were too short for a device.

    Args:
        latency_s: This time in seconds.
    """

    def __init__(self, latency_s: float) -> None:
        super().__init__()
        self.latency_s = latency_s
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.latency_s)
        output: torch.Tensor = self.layers(inputs)
        return output


CASES = {
    "fused": Case("a latency of 10 ms, fused", {"name": Latent, "options": {"latency_s": 0.01}}, "fused", 1),
    "loop": Case("a latency of 10 ms, in turn", {"name": Latent, "options": {"latency_s": 0.01}}, "loop", 1),
    "lenet": Case("lenet, on a thread for each core", {"name": "lenet"}, "graphs", cores()),
}


def run(*, quick: bool, only: Collection[str] = ()) -> Report:
    """Trains on random images by SMA, on two ranks. `only` names cases."""
    check_only("growth", only, CASES)
    sizes, rounds = (SIZES[:2], 0) if quick else (SIZES, 2)
    report = Report(["samples/s of m learners", *map(str, sizes), "last m", "measured", "of the best"])
    scores = []
    for name in chosen(only, CASES)[: 1 if quick else None]:
        figures = on_ranks(measure, 1, case=name, sizes=sizes, rounds=rounds)[0]
        sweep = {m: median(figures[str(m)]) for m in sizes}
        fractions = [at(sweep, m) / max(sweep.values()) for m in figures["last"]]
        scores.append(median(fractions))
        rates = [f"{sweep[m]:,.0f}" for m in sizes]
        last = ", ".join(map(str, figures["last"]))
        report.rows.append((CASES[name].title, *rates, last, max(figures["measured"]), f"{scores[-1]:.2f}"))
    report.notes = [
        f"SMA, mini-batches of {MINIBATCH}, a bank on one rank; medians of {max(1, rounds)} turns with all sizes and a "
        "run whose bank grows (growth = 'double'). last m: of each turn. measured: numbers of learners, at most"
    ]
    report.goals = [Goal("the last m has >= 0.8 of the best samples/s of the sweep", scores, at_least=0.8)]
    return report


def at(sweep: dict[int, float], m: int) -> float:
    """Returns the throughput of a size, between two of the sweep on a straight line."""
    return float(np.interp(m, [*sweep], [*sweep.values()]))


def measure(comm: "MPI.Comm", directory: Path, case: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Runs all sizes in turns. Returns size -> samples per second, and what the growing run did, for each round."""
    if comm.rank == 0:
        write_images(directory, SAMPLES)
    ranks = comm.Split(int(comm.rank >= RANKS), comm.rank)
    figures: dict[str, list[Any]] = {}
    for taken in in_turns(rounds, figures):
        for m in (*sizes, 0):
            rest(comm)
            if comm.rank >= RANKS:
                continue
            with train(make_job(directory, CASES[case], m, sizes[-1]), directory / "run.h5", ranks) as results:
                if m:
                    taken[str(m)] = samples_per_s(results)
                else:
                    taken["last"] = int(results.updates["gradients"][-1])
                    taken["measured"] = len(measurements(results.events))
        rest(comm)
    return figures


def make_job(directory: Path, case: Case, m: int, most: int) -> "Job":
    """Returns a job of m learners, or of a bank that grows if m is 0."""
    from rudra.job.job import Job

    size = {"learners_per_device": m, "learners": m} if m else {"learners_per_device": "auto", "learners": most}
    return Job(
        name="bench",
        model=case.model,
        data={"name": "idx", "path": directory},
        training={"epochs": max(1, m // 4) if m else 8, "minibatch_size": MINIBATCH, "evaluate": False},
        optimizer={"learning_rate": 1e-3},
        protocol={"name": "sma"},
        cluster={"threads_per_rank": case.threads, "bank": case.bank, **size},
        results={"report_s": 0.1},
    )


def samples_per_s(results: Results) -> float:
    """Returns the median throughput of a run, without the first updates, which fill caches."""
    updates = results.updates[3:]
    samples: NDArray[np.int64] = updates["samples"][:-1]
    time_s: NDArray[np.float64] = updates["time_s"]
    return float(np.median(samples / np.diff(time_s)))
