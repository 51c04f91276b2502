"""The gradient noise scale of runs, against gradients of single samples and between protocols."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import rudra
from rudra.compute import models
from rudra.data.load import load
from rudra.job.job import Job
from rudra.results.progress import summary_table
from rudra.results.run_noise import plus_minus
from tests.selection import CAMPAIGN

FIXED = 1e-9  # a rate at which the weights stay where they are


def make_job(size: int, epochs: int, protocol: str = "hardsync", limit: int = 900, **tables: Any) -> Job:
    return Job(
        model={"name": "lenet", "options": {"channels": [8, 16], "hidden": 64}},
        data={"train_limit": limit, "test_limit": 20},
        training={"minibatch_size": size, "epochs": epochs, "evaluate": False, "seed": 3},
        optimizer={"learning_rate": FIXED, "momentum": 0.0, **tables.pop("optimizer", {})},
        protocol={"name": protocol, "modulation": "none"},
        cluster={"learners": 4, "threads_per_rank": 1, **tables.pop("cluster", {})},
        results={"gradient_norms": "every 1", "minibatches": False},
        **tables,
    ).resolved()


@pytest.fixture(scope="module")
def exact() -> float:
    """B of the initial weights, from the gradient of each sample."""
    job = make_job(4, 1)
    data = load(job.data, test=False, seed=3)
    model = models.build(job.model, data.info, 3)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    inputs, target = data.training.batch(np.arange(len(data.training)))

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    squares, total = 0.0, 0.0
    for part in torch.arange(len(target)).split(40):
        each = vmap(grad(loss), (None, 0, 0))(parameters, inputs[part], target[part])
        flat = torch.cat([tensor.flatten(1) for tensor in each.values()], 1).double()
        squares, total = squares + float((flat**2).sum()), total + flat.sum(0)
    signal = float((total / len(target)).square().sum())
    return (squares / len(target) - signal) / signal


def found_in(job: Job, path: Path) -> tuple[dict[str, Any], str]:
    """The noise scale of a run, and what `rudra show` says about it."""
    with rudra.simulate(job, output=path / "run.h5", progress="quiet") as results:
        summary = results.summary()
    line = next(line for line in summary_table(summary).splitlines() if "noise scale B" in line)
    return summary["noise_scale"], line.strip()


@pytest.mark.parametrize(("size", "epochs"), [(4, 12), pytest.param(24, 10, marks=CAMPAIGN)])
def test_noise_scale_of_lenet_is_that_of_single_samples(size: int, epochs: int, exact: float, tmp_path: Path) -> None:
    found, line = found_in(make_job(size, epochs), tmp_path)
    assert found["error"] < 0.05 * exact
    assert found["samples"] == pytest.approx(exact, rel=0.1)
    assert f"(updates 1–{found['updates']}), " in line
    assert line.endswith(f"; an update has {4 * size}")


@pytest.mark.parametrize(
    ("tables", "note"),
    [
        ({"protocol": "softsync"}, "gradients of different weights: B includes their drift"),
        ({"cluster": {"learners": 1}}, "biased: from gradients of successive updates, so B is too large"),
        pytest.param(
            {"protocol": "average", "averaging": {"period": 3}},
            "estimated from the distances of replicas",
            marks=CAMPAIGN,
        ),
        (
            {"protocol": "easgd", "averaging": {"elasticity": 0.6, "outer": {"learning_rate": 1.0}}},
            "estimated from the distances of replicas",
        ),
    ],
    ids=["softsync", "one", "average", "easgd"],
)
def test_other_protocols_find_about_the_same_and_say_what_it_contains(
    tables: dict[str, Any], note: str, exact: float, tmp_path: Path
) -> None:
    rate = {} if "averaging" not in tables else {"optimizer": {"learning_rate": 1e-4}}  # distances need a few bits
    found, line = found_in(make_job(8, 3, **tables, **rate), tmp_path)
    assert found["samples"] == pytest.approx(exact, rel=0.2)
    assert line.endswith(f"; {note}")


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"protocol": "easgd", "topology": {"name": "replicas", "options": {"parameter_server": True}}},
            "unknown: each replica is averaged with the weights separately",
        ),
        (
            {"protocol": "average", "optimizer": {"momentum": 0.9}},
            "unknown: replicas do not take steps of plain SGD, without momentum and clip_norm",
        ),
        (
            {"protocol": "async", "topology": {"name": "sharded", "options": {"shards": 2}}},
            "unknown: an update has one gradient, in rows or on several servers, and none is kept for the next",
        ),
        ({}, "unknown: 3 updates are too few, at least 10 are needed"),
    ],
    ids=["served", "momentum", "shards", "few"],
)
def test_no_noise_scale_says_why(tables: dict[str, Any], text: str, tmp_path: Path) -> None:
    found, line = found_in(make_job(8, 1, limit=96, **tables), tmp_path)
    assert found["samples"] is None
    assert line.endswith(text)


def test_reports_and_watch_show_the_noise_scale(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
    from rudra.report.noise_figure import noise_scales
    from rudra.report.panels import lines_of
    from rudra.report.runs import read
    from rudra.report.watch import Watched

    job = make_job(8, 2).with_(model={"name": "mlp", "options": {}})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        summary, watched = results.summary(), Watched(results)
        watched.read()
        whole = summary["noise_scale"]
        assert f"B {plus_minus(whole['samples'], whole['error'])}" in " ".join(watched.frame(200, 20, 0.0))
    (figure,) = noise_scales(lines_of([read(tmp_path / "run.h5")]), log=False)
    each = [(epoch["samples"], epoch["error"], 32.0) for epoch in summary["epoch_noise_scale"]]
    assert [row[1:] for row in figure.table.rows] == [(number, *row) for number, row in enumerate(each, 1)]
    assert (
        noise_scales(
            lines_of([replace(read(tmp_path / "run.h5"), summary={**summary, "epoch_noise_scale": None})]), log=False
        )
        == []
    )


def test_norms_of_a_run_that_diverged_are_left_out(tmp_path: Path) -> None:
    job = make_job(8, 1, limit=96).with_(model={"name": "mlp", "options": {}})
    rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet").close()
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        norms = file["gradient_norms"][()]
        norms["norm"][norms["step"] == 2] = [np.inf, 1e200, np.nan, 1.0]  # in the last update
        file["gradient_norms"][...] = norms
    with rudra.open_results(tmp_path / "run.h5") as results:
        assert results.summary()["noise_scale"]["updates"] == len(results.updates) - 1
