"""The simulator: numeric mode against bare gradients, and timing-only mode at scale."""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rudra.api import simulate
from rudra.bench.ranks import compared
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.core.work import Work
from rudra.data.load import load
from rudra.data.noise import noise
from rudra.job.job import Job
from rudra.machine import cores
from rudra.memory import memory_bytes
from rudra.results.reader import Results, open_results


def run(*, quick: bool) -> Report:
    """Measures numeric mode and as many bare gradients in turns, then timing-only runs, each in its own process."""
    report = Report(["", "simulated", "bare", "bare / simulated", "peak memory, MB"])
    turns = []
    batched = [
        PAPERS.with_(protocol={"name": "hardsync", "n": None}, simulation={"batching": batching})
        for batching in ("big-batch", "vmap")
    ]
    for job in (_digits(1),) if quick else (_digits(8), PAPERS, *batched):
        ways = {"simulated": partial(_simulated_s, job), "bare": partial(_bare_s, job)}
        simulated, bare = compared(ways, 1 if quick else 5).values()
        milliseconds = (spread(t * 1e3 for t in times) for times in (simulated, bare))
        batching = job.simulation.batching
        if batching == "none":
            turns.append(ratios(bare, simulated).median)
        name = f"{job.model.name}, μ = {job.training.minibatch_size}, λ = {job.learners}"
        name += f", {job.protocol.name}, {batching}" if batching != "none" else ""
        report.rows.append((f"{name}: ms per gradient", *milliseconds, ratios(bare, simulated), ""))
    messages_per_s, seconds = [], 0.0
    for learners, updates in ((16, 200), (256, 8)) if quick else ((16, 20_000), (256, 2_000), (4096, 1_000)):
        run_s, messages, peak = _at_scale(learners, updates)
        messages_per_s.append(messages / run_s)
        seconds = run_s if learners == 4096 else 0.0
        name = f"timing only, λ = {learners}, {updates:,} updates"
        report.rows.append((f"{name}: s", run_s, "", "", f"{peak:.0f}"))
        report.rows.append((f"{'':13}{learners * updates:,} pushes: messages/s", messages / run_s, "", "", ""))
    report.notes = [
        "numeric: all of `rudra simulate`, with reading the data, the server's arithmetic and writing the results;",
        "bare: the same number of gradients at fixed weights, without averages, updates or records",
        "timing only: 1-softsync of alexnet, 72 M parameters, from a job to its result file by a process of its own;",
        "mini-batch rows off; messages: gradients, answers and weights",
    ]
    report.goals = [
        Goal("numeric mode costs <= 10 % over the gradients: bare / simulated >= 0.91", turns, at_least=0.91),
        Goal("timing only >= 200,000 messages/s", [max(messages_per_s)], at_least=200_000),
    ]
    if seconds:
        report.goals.append(Goal("4,096 learners, 1,000 updates, in < 120 s", [seconds], at_most=120))
    return report


def _digits(epochs: int) -> Job:
    return Job.load("digits", [f"training.epochs={epochs}", "training.evaluate=false"]).with_(cluster={"learners": 4})


PAPERS = Job(
    model={"name": "cifar10_full"},
    data={"name": noise, "options": {"shape": (3, 32, 32), "samples": 4_800}, "classes": 10},
    training={"epochs": 1, "minibatch_size": 4, "evaluate": False},
    protocol={"name": "softsync", "n": 1},
    cluster={"learners": 30},
)
"""The paper's fastest configuration (Table 3), on noise."""


def _simulated_s(job: Job) -> float:
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        began = time.perf_counter()
        with simulate(job, output=Path(directory) / "run.h5", progress="quiet") as results:
            taken = time.perf_counter() - began
            return taken / int(results.minibatches.size)


def _bare_s(job: Job) -> float:
    job = job.resolved(cores=cores())
    train, _, info, _ = load(job.data, test=False, seed=job.training.seed)
    assert train is not None
    model = FlatModel(models.build(job.model, info, job.training.seed), gradients="direct")
    weights, gradient = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    size = job.training.minibatch_size
    source = GradientSource(job, 0, Work(0, 0, size, size), model, train, prefetch=False)
    count = job.training.epochs * len(train) // size
    threads = torch.get_num_threads()
    torch.set_num_threads(job.cluster.threads_per_rank or 1)
    try:
        began = time.perf_counter()
        for step in range(count):
            source.compute(step, source.work.after(step), weights, gradient)
        return (time.perf_counter() - began) / count
    finally:
        torch.set_num_threads(threads)


def _at_scale(learners: int, updates: int) -> tuple[float, int, float]:
    """Returns seconds, messages and peak memory in MB of a timing-only run."""
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        path = Path(directory) / "run.h5"
        code = f"from benchmarks import simulator; simulator.scale({learners}, {updates}, {str(path)!r})"
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
        taken, peak = map(float, done.stdout.split())
        with open_results(path) as results:
            return taken, _messages(results), peak


def scale(learners: int, updates: int, path: str) -> None:
    """Simulates in this process, and prints seconds and peak memory in MB."""
    job = scale_job(learners, updates)
    began = time.perf_counter()
    simulate(job, output=path, progress="quiet").close()
    print(time.perf_counter() - began, memory_bytes("VmHWM") / 1e6)


def scale_job(learners: int, updates: int) -> Job:
    """Returns a timing-only job: 1-softsync of alexnet at μ = 4 for `updates` updates."""
    samples = 4 * learners * updates
    return Job(
        name="bench",
        model={"name": "alexnet"},
        data={"name": noise, "options": {"shape": (3, 224, 224), "samples": samples, "pool": 1}, "classes": 1000},
        training={"epochs": 1, "minibatch_size": 4, "evaluate": False},
        protocol={"name": "softsync", "n": 1},
        cluster={"learners": learners},
        simulation={"tensors": False, "compute_s": 1.0, "bandwidth_bytes_per_s": 1e12},
        results={"minibatches": False},
    )


def _messages(results: Results) -> int:
    """Counts gradients, answers and weights, without reports to the statistics server."""
    learners: Any = results.learners
    return int((2 * learners["pushed"] + learners["pulls"]).sum())
