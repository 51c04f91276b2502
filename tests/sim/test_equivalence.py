"""The protocols against plain torch: same samples, same rate, same weights."""

from typing import Any

import numpy as np
import pytest
import torch
from clusters import train
from torch.nn import functional

from rudra import data, models
from rudra.config import Job
from rudra.flat import FlatModel
from rudra.sampling import Sampler

MU = 8
DIGITS = 1437
"""Training samples of digits."""

DELAYS = {"jitter": 0.9, "latency_jitter_s": 0.05, "slowdown": {0: 3.0}}


def make_job(protocol_: str, learners: int, updates: int, model: str = "mlp", **tables: Any) -> Job:
    """A job of exactly `updates` updates, in epochs as long as the data allows."""
    rule = {"name": protocol_, **tables.pop("protocol", {})}
    job = Job(
        model={"name": model},
        training={"minibatch_size": MU, "seed": 3, "evaluate": False},
        optimizer={"learning_rate": 0.01, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"reference_batch_size": 32, **rule},
        cluster={"learners": learners, "threads_per_rank": 1},
        simulation=DELAYS,
        **tables,
    )
    per_update = job.make_protocol().gradients_per_update * MU
    epochs = next(e for e in range(1, updates + 1) if updates % e == 0 and updates // e * per_update <= DIGITS)
    return job.with_(training={"epochs": epochs}, data={"train_limit": updates // epochs * per_update})


def plain_sgd(job: Job, steps: int, batches: Any, rate: float, **options: Any) -> torch.Tensor:
    """Plain torch: a module, its own parameters, an optimiser; `batches(step)` gives sample numbers."""
    split, _, info = data.load(job.data, test=False)
    assert split is not None
    module = models.build(job.model, info, job.training.seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9, **options)
    torch.set_num_threads(1)
    for step in range(steps):
        inputs, labels = split.batch(batches(step))
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    flat = FlatModel(module)
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    return weights


def union(job: Job) -> Any:
    """Sample numbers of the mini-batches of all learners, by step."""
    samples = job.data.train_limit or DIGITS
    samplers = [Sampler(job.training.seed, learner, samples) for learner in range(job.learners)]
    return lambda step: np.concatenate([s.indices(step * MU, MU) for s in samplers])


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("learners", [3, 5])
def test_hardsync_is_one_large_batch(learners: int, model: str) -> None:
    # At high rates a max-pooling decision that flips on the last bit is amplified; that is not the protocol's doing.
    job = make_job("hardsync", learners, 100, model, optimizer={"learning_rate": 0.002})
    trained = train(job)
    assert trained.rows.totals["timestamp"] == 100
    rate = 0.002 * (learners * MU / 32) ** 0.5
    assert trained.rows["updates"]["learning_rate"] == pytest.approx(rate)
    expected = plain_sgd(job, 100, union(job), rate)
    assert (trained.weights - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_async_with_one_learner_is_plain_sgd_bit_for_bit(weight_decay: float) -> None:
    job = make_job("async", 1, 150, "lenet", optimizer={"weight_decay": weight_decay})
    trained = train(job)
    expected = plain_sgd(job, 150, union(job), 0.01, weight_decay=weight_decay)
    assert torch.equal(trained.weights, expected)


@pytest.mark.parametrize(("protocol", "learners", "n"), [("softsync", 4, 2), ("softsync", 3, 1), ("async", 5, None)])
def test_recorded_gradients_explain_the_weights(protocol: str, learners: int, n: int | None) -> None:
    """The record says which gradients, of which weights, went into which update: redo them by hand."""
    job = make_job(protocol, learners, 30, protocol={"n": n} if n else {})
    trained = train(job)
    gradients, updates = trained.rows["gradients"], trained.rows["updates"]
    assert gradients["staleness"].max() > 0
    split, _, info = data.load(job.data, test=False)
    assert split is not None
    flat = FlatModel(models.build(job.model, info, job.training.seed))
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    versions, velocity = [weights.clone()], torch.zeros(flat.size)
    for update in updates:
        total = torch.zeros(flat.size)
        for row in gradients[gradients["update"] == update["timestamp"]]:
            flat.bind(versions[row["timestamp"]])
            sampler = Sampler(job.training.seed, int(row["learner"]), len(split))
            out = torch.empty(flat.size)
            flat.gradient(*split.batch(sampler.indices(int(row["step"]) * MU, MU)), out, 0)
            total += out
        velocity = 0.9 * velocity + total / int(update["gradients"])
        versions.append(versions[-1] - float(update["learning_rate"]) * velocity)
    assert (trained.weights - versions[-1]).abs().max() <= 1e-5


def test_rate_by_gradient_staleness_weighs_inside_the_average() -> None:
    job = make_job("async", 4, 40, protocol={"modulation": "gradient_staleness"})
    rows = train(job).rows
    sigma = rows["gradients"]["staleness"]
    assert sigma.max() > 1
    assert (rows["gradients"]["scale"] == 1 / np.maximum(1, sigma)).all()
    assert (rows["updates"]["learning_rate"] == 0.01).all()


def test_rate_by_mean_staleness() -> None:
    updates = train(make_job("async", 4, 40, protocol={"modulation": "mean_staleness"})).rows["updates"]
    assert updates["learning_rate"] == pytest.approx(0.01 / np.maximum(1, updates["mean_staleness"]))


def test_batch_norm_statistics_travel_and_are_averaged() -> None:
    """Under hardsync the server's running mean is the mean of what the learners' batches made of it."""

    def factory() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))

    job = make_job("hardsync", 3, 1).with_(model={"name": factory})
    trained = train(job)
    split, _, info = data.load(job.data, test=False)
    assert split is not None
    means = []
    for learner in range(3):
        inputs, _ = split.batch(Sampler(3, learner, len(split)).indices(0, MU))
        means.append(0.1 * inputs.flatten(1).mean(0))
    flat = FlatModel(models.build(job.model, info, 3))
    entry = next(e for e in flat.layout if e.name.endswith("running_mean"))
    found = trained.weights[entry.offset : entry.offset + entry.size]
    assert torch.allclose(found, torch.stack(means).mean(0), atol=1e-6)
