"""Running statistics travel with the gradients, are averaged by samples, and are what evaluation uses."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import rudra
from rudra.compute import models
from rudra.data.load import load
from rudra.data.sampling import Sampler
from tests.selection import covering

pytestmark = pytest.mark.slow

SIZE = 16


def job(**tables: Any) -> rudra.Job:
    about: dict[str, dict[str, Any]] = {
        "model": {"name": "resnet32", "options": {"blocks": 1, "width": 8}},
        "data": {"name": "digits"},
        "training": {"epochs": 3, "minibatch_size": SIZE, "seed": 3},
        "optimizer": {"learning_rate": 0.05, "momentum": 0.9},
        "protocol": {"name": "hardsync", "modulation": "none"},
        "cluster": {"learners": 1, "threads_per_rank": 1, "flush_denormals": False},
    }
    return rudra.Job(**{name: {**about.get(name, {}), **tables.get(name, {})} for name in about | tables})


def plainly(made: rudra.Job, updates: int, batch: int) -> tuple[nn.Module, float]:
    """The same samples in plain torch, a batch at a time: the model and its test error."""
    torch.set_num_threads(1)
    loaded = load(made.data)
    model = models.build(made.model, loaded.info, made.training.seed)
    table = made.optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=table.learning_rate, momentum=table.momentum)
    sampler = Sampler(made.training.seed, 0, len(loaded.training))
    model.train()
    for step in range(updates):
        inputs, labels = loaded.training.batch(sampler.indices(step * batch, batch))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    inputs, labels = loaded.test.batch(np.arange(len(loaded.test)))
    with torch.no_grad():
        return model, float((model(inputs).argmax(1) != labels).float().mean())


@cache
def plain_error() -> float:
    return plainly(job(), 3 * 1437 // SIZE, SIZE)[1]


def test_one_learner_is_plain_torch(tmp_path: Path) -> None:
    made = job(training={"epochs": 1})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        ours, updates, error = results.state_dict(), len(results.updates), results.epochs["test_error"][-1]
    model, theirs = plainly(made, updates, SIZE)
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(ours[name], tensor.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
        assert ours[name].dtype == tensor.dtype
    assert error == pytest.approx(theirs, abs=2 / 360)


def statistics(made: rudra.Job, learner: int, size: int) -> dict[str, torch.Tensor]:
    """Of a learner after its first mini-batch."""
    loaded = load(made.data)
    model = models.build(made.model, loaded.info, made.training.seed).train()
    inputs, _ = loaded.training.batch(Sampler(made.training.seed, learner, len(loaded.training)).indices(0, size))
    model(inputs)
    return dict(model.named_buffers())


@pytest.mark.parametrize(
    ("protocol", "topology"),
    [
        ("hardsync", {"name": "base"}),
        ("hardsync", {"name": "groups", "options": {"groups": 1}}),
        ("average", {"name": "replicas"}),
        ("sma", {"name": "replicas"}),
        ("sma", {"name": "hierarchical", "options": {"blocks": 2}}),
    ],
    ids=str,
)
def test_an_update_takes_the_mean_of_all_learners_statistics(
    protocol: str, topology: dict[str, Any], tmp_path: Path
) -> None:
    tables = {"topology": topology, "protocol": {"name": protocol}}
    made = job(cluster={"learners": 4}, data={"train_limit": 4 * SIZE}, training={"epochs": 1}, **tables)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        assert len(results.updates) == 1
        ours = results.state_dict()
    each = [statistics(made, learner, SIZE) for learner in range(4)]
    for name in each[0]:
        mean = torch.stack([one[name] for one in each]).float().mean(0)
        np.testing.assert_allclose(ours[name], mean.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    name = "bn1.running_mean"
    assert not np.allclose(ours[name], each[0][name].numpy(), rtol=1e-3), "learners see different samples"


def test_a_server_of_replicas_moves_statistics_by_the_elasticity(tmp_path: Path) -> None:
    """Of one learner alone, α is a half."""
    tables = {"topology": {"name": "replicas", "options": {"parameter_server": True}}, "protocol": {"name": "easgd"}}
    made = job(cluster={"learners": 1}, data={"train_limit": SIZE}, training={"epochs": 1}, **tables)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        ours, info = results.state_dict(), load(made.data).info
    before = dict(models.build(made.model, info, made.training.seed).named_buffers())
    for name, expected in statistics(made, 0, SIZE).items():
        if expected.is_floating_point():
            halfway = before[name].lerp(expected, 0.5)
            np.testing.assert_allclose(ours[name], halfway.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def cumulative(classes: int) -> nn.Module:
    """Its running statistics are means over the batches counted, which another learner's may not be among."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.BatchNorm1d(classes, momentum=None))


@pytest.mark.parametrize("model", [{}, {"name": cumulative, "options": {}}], ids=["resnet", "cumulative"])
def test_the_newest_push_decides_under_async(model: dict[str, Any], tmp_path: Path) -> None:
    made = job(
        model=model,
        cluster={"learners": 2},
        data={"train_limit": 2 * SIZE},
        training={"epochs": 1},
        protocol={"name": "async"},
    )
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        ours, last = results.state_dict(), results.gradients[-1]
    assert (last["timestamp"], last["step"]) == (0, 0)
    for name, expected in statistics(made, int(last["learner"]), SIZE).items():
        np.testing.assert_allclose(ours[name], expected.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


CASES: list[dict[str, Any]] = [
    {"protocol": {"name": "hardsync"}},
    {"protocol": {"name": "softsync"}, "topology": {"name": "adv", "options": {"fan_out": 2}}},
    {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
]


@pytest.mark.parametrize("tables", covering(CASES[1:2], CASES), ids=str)
def test_a_resnet_evaluates_as_well_as_under_plain_torch(tables: dict[str, Any], tmp_path: Path) -> None:
    """The same number of samples, in mini-batches of a quarter."""
    waits = tables["protocol"]["name"] == "hardsync"
    rate = {"learning_rate": 0.05 if waits else 0.02, "momentum": 0.9 if waits else 0.5}
    made = job(cluster={"learners": 4}, training={"minibatch_size": SIZE // 4}, optimizer=rate, **tables)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.epochs["test_error"][-1] <= plain_error() + 0.03
        counted = [results.weights_of()[entry.offset] for entry in results.layout if entry.kind == "counter"]
    assert len(set(counted)) == 1, "all norms see every batch"
    assert counted[0] == round(counted[0]) > 0, "also where those of several learners were averaged"
