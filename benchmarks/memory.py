"""Peak memory of the roles in sizes of the model, on real ranks, with SGD and momentum, by memory and by messages."""

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from rudra.bench.ranks import LEARNER, SERVER, STATISTICS, PlainLoop, on_ranks, train
from rudra.benchmark_report import Goal, Report
from rudra.job.job import Job
from rudra.memory import memory_bytes
from rudra.mpi.quiet import rest

if TYPE_CHECKING:
    from mpi4py import MPI


WAYS = {"memory": True, "messages": False}
EVERY_S = 1e-3
"""Interval between two samples of the memory. Filling a model's memory takes many times as long."""


def run(*, quick: bool) -> Report:
    """Measures alexnet at μ = 1 with λ = 1, 2, 3, and once with snapshots for evaluations."""
    given: dict[str, Any] = {"options": {}, "side": 224, "every_s": EVERY_S}
    if quick:
        given = {"options": {"width": 64}, "side": 64, "every_s": 10 * EVERY_S}
    cases = [(1, True)] if quick else [(1, False), (2, False), (3, False), (2, True)]
    heads = ("learner", "parameter server", "statistics server")
    report = Report(["peak, in models", *heads, *(f"{head}, by messages" for head in heads)])
    learners: list[float] = []
    servers: dict[bool, list[float]] = {False: [], True: []}
    for count, evaluate in cases:
        cells = []
        for way, near in WAYS.items():
            ranks = on_ranks(measure, count, evaluate=evaluate, near=near, **given)
            models_ = [rank["peak"] / rank["model"] for rank in ranks]
            learner = max(models_[LEARNER:])
            cells += [f"{x:.2f}" for x in (learner, models_[SERVER], models_[STATISTICS])]
            if way == "memory":  # buffers are multiples of the model's size, and headers and code come on top
                learners.append(round(learner, 1))
                servers[evaluate].append(round(models_[SERVER], 1))
            model_bytes = ranks[LEARNER]["model"]
        report.rows.append((f"λ = {count}, {'tests and snapshots' if evaluate else 'no tests'}", *cells))
    report.notes = [
        f"model: {model_bytes / 1e6:.0f} MB; alexnet at μ = 1, softsync, real gradients of "
        f"3x{given['side']}x{given['side']} inputs",
        "peak: the most of RssAnon and of the pages in the rank's own file that neighbours map, looked at each",
        "millisecond, start-up included, less the same with libraries loaded and warm; what a rank maps of its",
        "neighbours counts for these alone",
    ]
    report.goals = [
        Goal(text, figures, at_most=limit)
        for text, figures, limit in (
            ("learner <= 3.5 models", learners, 3.5),
            ("server <= 4 models", servers[False], 4.0),
            ("server with a snapshot <= 5 models", servers[True], 5.0),
        )
        if figures
    ]
    return report


def measure(
    comm: "MPI.Comm", directory: Path, evaluate: bool, near: bool, options: dict[str, Any], side: int, every_s: float
) -> dict[str, Any]:
    """Runs a job and returns `peak` and `model` in bytes."""
    torch.set_num_threads(1)
    PlainLoop(1).run(2)
    inputs = TensorDataset(torch.zeros(6, 3, side, side), torch.arange(6))
    job = Job(
        name="bench",
        model={"name": "alexnet", "options": options},
        data={"name": (inputs, inputs), "classes": 1000},
        training={"epochs": 2, "minibatch_size": 1, "evaluate": evaluate, "evaluation_batch_size": 1},
        optimizer={"name": "sgd", "learning_rate": 0.001, "momentum": 0.9},
        cluster={"learners": comm.size - LEARNER, "threads_per_rank": 1, "node_memory": near},
    )
    rest(comm)
    before = _own_bytes()
    with _Peak(every_s) as peak, train(job, directory / "run.h5") as results:
        model = 4 * sum(entry.size for entry in results.layout)
    return {"peak": peak.bytes - before, "model": model}


def _own_bytes() -> int:
    """Returns this process's private memory, plus the memory that neighbours read and only this process may write."""
    shared = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:rudra-buffers"):
                found = os.fstat(int(file))
                if fcntl.fcntl(int(file), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                    shared[found.st_ino] = found.st_blocks * 512
    return memory_bytes("RssAnon") + sum(shared.values())


class _Peak:
    """Peak of this process's memory while a block runs, sampled by a thread.

    Args:
        every_s: interval between samples.

    Attributes:
        bytes: largest sample.
    """

    def __init__(self, every_s: float) -> None:
        self.bytes, self._every_s = 0, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Peak":
        self._thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self.bytes = max(self.bytes, _own_bytes())
