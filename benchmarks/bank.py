"""A bank of learners on one device: gradients of m learners in each form (`cluster.bank`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.shared import one_thread
from rudra.bench.ranks import compared
from rudra.benchmark_report import Report, ratios, spread
from rudra.compute.bank.trial import BankLearners, FormTrial
from rudra.compute.device.kind import CPU
from rudra.data.load import load
from rudra.job.job import Job
from rudra.machine import cores

FORMS = ("loop", "graphs", "fused")
SPAN_S = 0.1
"""Least time of one turn of a form, in seconds."""

NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"name": "mlp"}, (1, 4, 4)),
    "lenet": ({"name": "lenet"}, (1, 28, 28)),
    "resnet8": ({"name": "resnet32", "options": {"blocks": 1}}, (3, 32, 32)),
    "resnet32": ({"name": "resnet32"}, (3, 32, 32)),
}


def images(shape: list[int]) -> tuple[TensorDataset, TensorDataset]:
    """Random images with their labels."""
    found = TensorDataset(torch.randn(256, *shape), torch.arange(256) % 10)
    return found, found


@one_thread()
def run(*, quick: bool) -> Report:
    """Measures in this process, with a thread for each core, on random images. `loop, 1 thread` has one."""
    report = Report(
        [
            *("network", "pixels", "μ", "m", "images/s loop, 1 thread", *(f"images/s {form}" for form in FORMS)),
            *("graphs / loop", "fused / loop"),
        ]
    )
    for name, size in [("mlp", 4)] if quick else [("lenet", 4), ("resnet8", 16), ("resnet32", 16)]:
        for learners in (2,) if quick else (1, 2, 4, 8):
            times = measured(name, size, learners, 2 if quick else 9)
            rates = [size * learners / spread(turns).median for turns in times.values()]
            more = [ratios(times["loop"], times[form]) for form in FORMS[1:]]
            report.rows.append((name, NETWORKS[name][1][1], size, learners, *rates, *more))
    report.notes = [f"{cores()} cores; each learner of graphs has one torch thread, and a thread of its own"]
    return report


def measured(name: str, size: int, learners: int, turns: int) -> Mapping[str, list[float]]:
    """Returns the seconds of a gradient of each learner in each turn, by form."""
    model, shape = NETWORKS[name]
    job = Job(
        model=model,
        data={"name": images, "options": {"shape": list(shape)}, "classes": 10},
        training={"minibatch_size": size},
        cluster={"learners": learners, "learners_per_device": learners},
    ).resolved(threads_per_rank=cores())
    data = load(job.data)
    found = BankLearners(job, job.plan(), data, CPU, "direct")
    ways = {"loop, 1 thread": FormTrial(found, "loop", 1), **{form: FormTrial(found, form, cores()) for form in FORMS}}
    once = max(trial.seconds() + trial.seconds() for trial in ways.values()) / 2
    count = max(1, round(SPAN_S / once))
    times = compared({form: partial(_mean_s, trial, count) for form, trial in ways.items()}, turns)
    for trial in ways.values():
        trial.close()
    return times


def _mean_s(trial: FormTrial, count: int) -> float:
    return sum(trial.seconds() for _ in range(count)) / count
