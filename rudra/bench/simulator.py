"""A simulation against the gradients that it computes."""

import tempfile
import time
from pathlib import Path

import torch

from rudra import data, models
from rudra.api import simulate
from rudra.bench.report import Report, ratios, spread
from rudra.config import Job, cores
from rudra.flat import FlatModel
from rudra.learning import GradientSource


def run(*, quick: bool) -> Report:
    """Simulates `digits` with 4 and 30 learners without tests, in turns with the same number of bare gradients."""
    report = Report(["digits, one epoch", "ms per gradient", "bare gradient, ms", "bare / simulated"])
    for learners in (4,) if quick else (4, 30):
        job = Job.load("digits", ["training.epochs=1", "training.evaluate=false", f"cluster.learners={learners}"])
        simulated, bare = [], []
        for turn in range(2 if quick else 6):
            ours, theirs = _simulated(job), _bare(job)
            if turn:  # the first one warms up
                simulated.append(ours)
                bare.append(theirs)
        milliseconds = (spread(t * 1e3 for t in times) for times in (simulated, bare))
        report.rows.append((f"λ = {learners}", *milliseconds, ratios(bare, simulated)))
    report.notes = ["simulated: all of `rudra simulate`, with reading the data and writing the results"]
    return report


def _simulated(job: Job) -> float:
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        began = time.perf_counter()
        with simulate(job, output=Path(directory) / "run.h5", progress="quiet") as results:
            taken = time.perf_counter() - began
            return taken / int(results.minibatches.size)


def _bare(job: Job) -> float:
    job = job.resolved(cores=cores())
    train, _, info = data.load(job.data, test=False)
    assert train is not None
    model = FlatModel(models.build(job.model, info, job.training.seed))
    weights, gradient = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    source = GradientSource(job, 0, model, train, prefetch=False)
    count = len(train) // job.training.minibatch_size
    threads = torch.get_num_threads()
    torch.set_num_threads(job.cluster.threads_per_rank or 1)
    try:
        began = time.perf_counter()
        for step in range(count):
            source.compute(step, weights, gradient)
        return (time.perf_counter() - began) / count
    finally:
        torch.set_num_threads(threads)
