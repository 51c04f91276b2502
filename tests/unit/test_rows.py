"""Gradients in rows, against the flat vectors that they stand for: to the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rudra
from rudra.compute import tasks
from rudra.compute.averaging_executor import AveragingExecutor
from rudra.compute.flat import FlatModel
from rudra.compute.optim import UpdateRule
from rudra.compute.rows import RowFormat, RowGradient
from rudra.compute.sparse import SparseLinear, SparseRows
from rudra.compute.vectors import RowBuffer
from rudra.core.actions import Accumulate
from rudra.core.layout import Entry
from rudra.core.messages import PushedGradient
from rudra.core.rows import dense_because
from rudra.job.tables import OptimizerTable
from rudra.report import topology
from tests.selection import CAMPAIGN
from tests.unit.sparse_samples import WIDTH, Twice, compressed, job, matrix, write_samples
from topologies.kinds import KINDS, TREE_SERVER

FORM = RowFormat(5, 12, 3, 50)
"""5 floats before 12 rows of 3, 9 behind."""
TAIL = 64


def gradient_of(count: int, seed: int = 0) -> RowBuffer:
    """One with so many rows."""
    generator = torch.Generator().manual_seed(seed)
    buffer = RowBuffer(FORM, TAIL)
    buffer.vector.fill_(torch.nan)
    buffer.gradient.rest.copy_(torch.randn(FORM.others, generator=generator))
    indices = torch.randperm(FORM.features, generator=generator)[:count].sort()[0].int()
    buffer.gradient.put(SparseRows(indices, torch.randn(count, FORM.width, generator=generator)))
    return buffer


def flat(gradient: RowGradient) -> torch.Tensor:
    """The vector that it stands for."""
    start = gradient.row_format.start
    return torch.cat([gradient.rest[:start], gradient.whole.flatten(), gradient.rest[start:]])


@pytest.mark.parametrize("count", [0, 1, 6, 12])
def test_no_more_than_what_is_used_travels(count: int) -> None:
    buffer, came = gradient_of(count), RowBuffer(FORM, TAIL)
    assert (buffer.gradient.rows is None) == (count == 12)  # all rows, with their indices, would be longer
    sent = buffer.write(PushedGradient(7, 3, 0, ())).copy()
    assert len(sent) == TAIL + 4 * buffer.gradient.used
    came.wire[: len(sent)] = sent
    assert came.read().sender == 7
    assert torch.equal(flat(came.gradient), flat(buffer.gradient))
    assert np.array_equal(came.array.view(np.int32), buffer.array.view(np.int32))


@pytest.mark.parametrize("fraction", [0.25, 0.8])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(("one", "two"), [(3, 4), (0, 5), (4, 0), (0, 0), (8, 8), (12, 3), (3, 12), (12, 12), (4, 4)])
def test_averages_have_the_bits_of_flat_ones(one: int, two: int, scale: float, fraction: float) -> None:
    ours, theirs = (AveragingExecutor((), FORM.size, FORM.size, 1) for _ in range(2))
    ours.use_rows(FORM)
    for name, count in (("gradient 0", one), ("gradient 1", two)):
        buffer = gradient_of(count, seed=count)
        theirs.buffer(name).vector.copy_(flat(buffer.gradient))
        ours.put(name, buffer)
    for executor in (ours, theirs):
        executor.accumulate(Accumulate("gradient 0", "gradient 0", 1.0, 0.7))
        executor.accumulate(Accumulate("gradient 0", "gradient 1", fraction, scale))
    found = ours.buffer("gradient 0").gradient
    assert isinstance(found, RowGradient)
    assert torch.equal(flat(found), theirs.buffer("gradient 0").vector)


@pytest.mark.parametrize("count", [0, 5, 12])
@pytest.mark.parametrize(
    "groups", [(), ({"parameters": ["b"], "rate_factor": 3.0},), ({"parameters": ["a", "c"], "rate_factor": 0.5},)]
)
def test_steps_have_the_bits_of_flat_ones(count: int, groups: Any) -> None:
    """Also when the weights lie elsewhere meanwhile."""
    layout = [
        Entry("a", (5,), 0, 5, "parameter"),
        Entry("b", (12, 3), 5, 36, "parameter"),
        Entry("c", (9,), 41, 9, "parameter"),
    ]
    table = OptimizerTable(learning_rate=0.1, groups=groups)
    ours, theirs = torch.ones(50), torch.ones(50)
    rules = UpdateRule(table, ours, layout, rows=FORM), UpdateRule(table, theirs, layout)
    for turn in range(3):
        gradient = gradient_of(count, seed=turn).gradient
        rules[0].step_rows(gradient, 0.3 / (turn + 1))
        rules[1].step(flat(gradient), 0.3 / (turn + 1))
        ours = ours.clone()
        rules[0].move(ours)
        assert torch.equal(ours, theirs)


class Normed(nn.Sequential):
    """With buffers and a counter behind its parameters, and its sparse layer not in front of all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.Sequential(SparseLinear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Normed, Twice])
def test_a_models_gradient_has_the_bits_of_the_flat_one(make: Any) -> None:
    torch.manual_seed(0)
    model = FlatModel(make(), tasks.Classification(2))
    form = model.row_form
    weights, vector = torch.zeros(model.size), torch.zeros(model.size)
    model.read_into(weights)
    model.bind(weights)
    rows = RowGradient(torch.full((form.floats,), torch.nan), form)
    for count in (4, 2, 9):
        batch = compressed(matrix(count)), torch.arange(count) % 2
        outcomes = {model.gradient(*batch, out, 0) for out in (vector, rows)}
        assert len(outcomes) == 1
        assert torch.equal(flat(rows), vector)
        assert rows.rows is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({}, marks=CAMPAIGN),
        {"protocol": {"name": "softsync"}},
        pytest.param({"protocol": {"name": "hardsync"}}, marks=CAMPAIGN),
        pytest.param({"protocol": {"modulation": "gradient_staleness"}}, marks=CAMPAIGN),
        {"topology": {"name": "adv"}, "optimizer": {"groups": [{"parameters": ["1.weight"], "rate_factor": 2.0}]}},
        {"topology": {"name": "adv*"}},
    ],
)
def test_a_run_has_the_bits_of_one_with_flat_gradients(tables: dict[str, Any], tmp_path: Path) -> None:
    """Which a norm to clip at needs, however large; and replays. Its gradients have the same norms."""
    file = write_samples(tmp_path)
    states, norms = [], []
    for name, clip in (("rows", None), ("flat", 1e9)):
        given = {key: dict(value) for key, value in tables.items()}
        run = job(file, True, cluster={"learners": 3}, **given).with_(optimizer={"clip_norm": clip})
        run = run.with_(results={"gradient_norms": "every 1"})
        assert bool(dense_because(run.resolved(), run.resolved().plan())) == (clip is not None)
        output = tmp_path / f"{name}.h5"
        with rudra.simulate(run, output=output, progress="quiet") as results:
            states.append(results.state_dict())
            norms.append(np.concatenate([results.gradients["norm"], results.updates["norm"]]))
        assert rudra.replay(output).identical
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)


def test_a_kind_of_role_that_takes_no_rows_gets_whole_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job(write_samples(tmp_path), True, topology={"name": "adv", "options": {"fan_out": 2}}).resolved(learners=3)
    assert dense_because(run, run.plan()) == ""
    monkeypatch.setitem(KINDS, TREE_SERVER, KINDS[TREE_SERVER]._replace(takes_rows=False))
    assert dense_because(run, run.plan()) == "a tree server takes whole vectors"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, ""),
        ({"topology": {"name": "adv*"}}, ""),
        ({"optimizer": {"momentum": 0.9}}, "momentum = 0.9 moves every weight"),
        ({"optimizer": {"weight_decay": 0.01}}, "weight_decay = 0.01 changes every weight"),
        (
            {"optimizer": {"groups": [{"parameters": ["*"], "weight_decay": 0.5}]}},
            "weight_decay = 0.5 changes every weight",
        ),
        ({"optimizer": {"clip_norm": 2.0}}, "clip_norm = 2 needs the norm of all"),
        ({"optimizer": {"name": "adam"}}, "adam has state for every weight"),
        ({"training": {"precision": "bfloat16"}}, "precision = 'bfloat16'"),
        ({"cluster": {"gradient_format": "float16"}}, "gradient_format = 'float16'"),
        ({"topology": {"name": "sharded"}}, "topology sharded sends parts of gradients"),
        ({"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}}, "topology groups adds gradients among"),
        ({"protocol": {"name": "sma"}, "topology": {"name": "replicas"}}, "topology replicas adds gradients among"),
    ],
)
def test_what_keeps_gradients_flat_is_told(tables: dict[str, Any], reason: str) -> None:
    asked = rudra.Job(data={"name": "libsvm", "sparse": True}).with_(cluster={"learners": 4}).with_(**tables)
    told = topology.as_text(topology.of_job(asked))
    assert f"\ngradients: {f'dense: {reason}' if reason else 'rows, of a first layer whose inputs are sparse'}" in told
    assert "\ngradients: " not in topology.as_text(topology.of_job(asked.with_(data={"sparse": False})))
