"""Peak memory of the roles in sizes of the model, on real ranks, with SGD and momentum."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, PlainLoop, on_ranks, train
from rudra.findings import Goal, Report
from rudra.job.job import Job
from rudra.mpi.session import rest
from rudra.simulation.rehearsal import memory_bytes, restart_peak

if TYPE_CHECKING:
    from mpi4py import MPI


def run(*, quick: bool) -> Report:
    """Measures alexnet at μ = 1 with λ = 1, 2, 3, and once with snapshots taken for tests."""
    options = {"width": 512} if quick else {}
    cases = [(1, False), (1, True)] if quick else [(1, False), (2, False), (3, False), (2, True)]
    report = Report(["peak, in models", "learner", "parameter server", "statistics server"])
    learners: list[float] = []
    servers: dict[bool, list[float]] = {False: [], True: []}
    for count, evaluate in cases:
        ranks = on_ranks(measure, count, evaluate=evaluate, options=options)
        models_ = [rank["peak"] / rank["model"] for rank in ranks]
        learner = max(models_[LEARNER:])
        learners.append(round(learner, 1))
        servers[evaluate].append(round(models_[SERVER], 1))  # buffers make whole models; headers and code are on top
        name = f"λ = {count}, {'tests and snapshots' if evaluate else 'no tests'}"
        report.rows.append((name, *(f"{x:.2f}" for x in (learner, models_[SERVER], models_[STATISTICS]))))
        model_bytes = ranks[LEARNER]["model"]
    report.notes = [
        f"model: {model_bytes / 1e6:.0f} MB; alexnet at μ = 1, softsync, real gradients of 3x224x224 inputs",
        "peak: VmHWM from the first buffer to the last, start-up included, less VmRSS with libraries loaded and warm",
    ]
    report.goals = [
        Goal("learner <= 4 models", learners, at_most=4.0),
        Goal("server <= 4 models", servers[False], at_most=4.0),
        Goal("server with a snapshot <= 5 models", servers[True], at_most=5.0),
    ]
    return report


def measure(comm: "MPI.Comm", directory: Path, evaluate: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Runs a job and returns `peak` and `model` in bytes."""
    torch.set_num_threads(1)
    PlainLoop(1).run(2)
    inputs = TensorDataset(torch.zeros(6, 3, 224, 224), torch.arange(6))
    job = Job(
        name="bench",
        model={"name": "alexnet", "options": options},
        data={"name": (inputs, inputs), "classes": 1000},
        training={"epochs": 2, "minibatch_size": 1, "evaluate": evaluate, "evaluation_batch_size": 1},
        optimizer={"name": "sgd", "learning_rate": 0.001, "momentum": 0.9},
        cluster={"learners": comm.size - LEARNER, "threads_per_rank": 1},
    )
    rest(comm)
    restart_peak()
    before = memory_bytes("VmRSS")
    with train(job, directory / "run.h5") as results:
        peak = memory_bytes("VmHWM") - before
        model = 4 * sum(entry.size for entry in results.layout)
    return {"peak": peak, "model": model}
