"""Hogbatch jobs of any workers, and what must hold of their record."""

from typing import Any

import numpy as np
import torch
from clusters import TrialResult, TrialRows, train
from hypothesis import strategies as st

from rudra.compute import models, tasks
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.compute.optim import UpdateRule
from rudra.core.work import Work
from rudra.data.load import load
from rudra.job.job import Job

UNLIKE: list[dict[str, Any]] = [
    {"learners": [0], "kind": "small", "threads": 4, "max": 16, "compute_s": {1: 0.004, 16: 0.064}},
    {"kind": "large", "min": 16, "max": 128, "compute_s": {16: 0.01, 128: 0.02}},
]


def job(workers: list[dict[str, Any]], learners: int = 2, rule: str = "adaptive", **tables: Any) -> Job:
    training = {"epochs": 3, "seed": 3, "evaluate": False, **tables.pop("training", {})}
    return Job(
        protocol={"name": "hogbatch", **tables.pop("protocol", {})},
        hogbatch={"workers": workers, "rule": rule, **tables.pop("hogbatch", {})},
        cluster={"learners": learners, "threads_per_rank": 1},
        training=training,
        **tables,
    ).resolved()


def digits(samples: int | None = 400) -> dict[str, Any]:
    """Tables of a small model, and the training set's first samples."""
    return {"model": {"name": "mlp"}, "data": {"name": "digits", "train_limit": samples}}


def async_alone(**tables: Any) -> TrialResult:
    """One learner that does what one worker with batches of 16 does."""
    plain = Job(
        protocol={"name": "async", "modulation": "none"},
        cluster={"learners": 1, "threads_per_rank": 1},
        training={"epochs": 3, "seed": 3, "evaluate": False, "minibatch_size": 16},
        **tables,
    )
    return train(plain.resolved())


def check_served(run: Job, rows: TrialRows, samples: int) -> None:
    """Every epoch has applied each sample once, and every gradient is accounted for."""
    check_epochs(rows, samples, each_epoch=run.hogbatch.shuffle == "epoch")
    totals = rows.totals
    assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
    assert totals["samples"] == samples * run.training.epochs


def check_epochs(rows: TrialRows, samples: int, *, each_epoch: bool = False) -> None:
    """Every epoch has applied each sample once."""
    gradients, updates = rows["gradients"], rows["updates"]
    of = updates["epoch"][gradients["update"] - 1]
    assert (updates["gradients"] == 1).all()
    for epoch in range(1, int(rows["epochs"]["epoch"].max()) + 1):
        mine = np.sort(gradients[of == epoch], order="first")
        begin = (epoch - 1) * samples if each_epoch else 0
        ends = mine["first"] + mine["samples"]
        assert mine["first"][0] == begin
        assert ends[-1] == begin + samples
        assert (mine["first"][1:] == ends[:-1]).all()


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Job, int]:
    learners = draw(st.integers(1, 5))
    workers = []
    for learner in range(learners):
        small = draw(st.booleans())
        least = draw(st.integers(1, 4 if small else 60))
        most = least + draw(st.integers(0, 200))
        threads = {"threads": draw(st.sampled_from([1, 2, 5, 48]))} if small else {}
        kind = "small" if small else "large"
        own_s = draw(st.sampled_from([None, 0.01, {1: 1e-4, 100: 1e-2}, {1: 1e-2, 1000: 0.2}]))
        bounds = {"min": least, "max": most, "compute_s": own_s}
        workers.append({"learners": [learner], "kind": kind, **threads, **bounds})
    times = st.sampled_from([0.0, 1e-4, 1e-3, 0.05])
    faults = [
        {"learner": learner, "dies_at_s": draw(st.floats(0.5, 5.0))}
        for learner in range(1, learners)
        if draw(st.booleans())
    ]
    simulation = {
        "jitter": draw(st.sampled_from([0.0, 0.1, 0.9])),
        "latency_s": draw(times),
        "latency_jitter_s": draw(times),
        "bandwidth_bytes_per_s": draw(st.sampled_from([1e7, 1e9, 1e13])),
        "message_s": draw(times),
        "update_s": draw(times),
        "evaluation_s": draw(st.sampled_from([0.0, 1.0])),
        "detection_s": draw(st.sampled_from([0.0, 0.1])),
        "faults": faults,
    }
    hogbatch = {
        "alpha": draw(st.sampled_from([1.1, 2.0, 3.0])),
        "beta": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "shuffle": draw(st.sampled_from(["once", "epoch"])),
        "counts": draw(st.sampled_from(["run", "epoch"])),
    }
    rule = draw(st.sampled_from(["fixed", "adaptive", "balanced"]))
    training: dict[str, Any] = {"epochs": draw(st.integers(1, 4)), "seed": draw(st.integers(0, 99))}
    training["evaluate"] = draw(st.sampled_from([False, True, "always", "workers"]))
    run = job(workers, learners, rule, hogbatch=hogbatch, simulation=simulation, training=training)
    return run, draw(st.integers(1, 700))


ALONE: list[dict[str, Any]] = [{"kind": "large", "min": 16, "max": 16}]


def replayed_plainly(run: Job, rows: TrialRows) -> torch.Tensor:
    """The weights after all recorded work, in a loop that knows nothing of roles."""
    data = load(run.data)
    model = FlatModel(models.build(run.model, data.info, run.training.seed), tasks.make(run.task, data.info.classes), 1)
    weights = torch.empty(model.size)
    model.read_into(weights)
    rule = UpdateRule(run.optimizer, weights, model.layout)
    sources = [
        GradientSource(run, learner, Work(0, 0, 1, 0), model, data.training, prefetch=False)
        for learner in range(run.learners)
    ]
    versions, gradient = [weights.clone()], torch.empty(model.size)
    for row, update in zip(rows["gradients"], rows["updates"], strict=True):
        work = Work(0, int(row["first"]), int(row["samples"]), 0)
        sources[row["learner"]].compute(int(row["step"]), work, versions[row["timestamp"]], gradient)
        rule.step(gradient, float(update["learning_rate"]))
        versions.append(weights.clone())
    return weights
