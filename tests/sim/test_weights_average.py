"""The average of the weights over time: torch's own, at every owner of weights, resumed, replayed, and exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import TrialResult, train
from resumable import ALONE, GROUPS, SHARDED, TREE, check_resumed, make_job
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

import rudra
from rudra.compute import models
from rudra.core.actions import ExecutorAction, Update
from rudra.core.buffer_names import AVERAGE, WEIGHTS
from rudra.core.digest import sha256
from rudra.core.events import Event
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.replay import replay
from rudra.simulation.tensors import RealTensors

EMA = {"average": {"rate": 0.1}}
EPOCH = {"average": {"window": "1 epoch"}}
UPDATES = {"average": {"window": "7 updates"}}

AVERAGING = {
    "server": ("hardsync", {}),
    "async": ("async", {}),
    "tree": ("hardsync", {"topology": TREE}),
    "sharded": ("hardsync", {"topology": SHARDED}),
    "allreduce": ("hardsync", {"topology": ALONE}),
    "groups": ("async", {"topology": GROUPS}),
    "replicas": ("sma", {"topology": {"name": "replicas"}}),
    "blocks": ("easgd", {"topology": {"name": "hierarchical", "options": {"blocks": 2}}}),
    "a server for replicas": ("easgd", {"topology": {"name": "replicas", "options": {"parameter_server": True}}}),
}
"""Name -> protocol and tables, for every owner of whole weights."""

STAGES = {
    "synchronous": ("hardsync", {"placement": {"cut": "layers.4", "rule": "synchronous", "servers": 2}}),
    "merged": ("async", {"placement": {"cut": "layers.4", "rule": "merged"}}),
    "allreduce": ("hardsync", {"placement": {"cut": "layers.4", "rule": "synchronous"}, "topology": ALONE}),
}


def of_part(trained: TrialResult, name: str) -> torch.Tensor:
    return torch.cat([trained.executors[owner].buffer(name).vector for owner in trained.plan.owners])


class Watched(RealTensors):
    """Notes the weights of all owners after each of their updates."""

    seen: dict[int, list[torch.Tensor]]

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        event = super().perform(role, action, seconds)
        if isinstance(action, Update) and action.average:
            self.seen.setdefault(role, []).append(self.executors[role].buffer(WEIGHTS).vector.clone())
        return event


class Flat(nn.Module):
    """Weights as a module, for torch's averages."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.all = nn.Parameter(weights.clone())


def in_torch(seen: list[torch.Tensor], how: Callable[..., Any], begins: Callable[[int], bool]) -> torch.Tensor:
    """The average of these weights by `swa_utils`, which begins again before some updates."""
    model = AveragedModel(Flat(seen[0]), multi_avg_fn=how)
    for update, weights in enumerate(seen):
        if begins(update):
            model = AveragedModel(Flat(weights), multi_avg_fn=how)
        model.update_parameters(Flat(weights))
    return model.module.all.detach()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def one_learner(table: dict[str, Any], **tables: Any) -> Job:
    """Twenty steps."""
    return Job(
        model={"name": normalised},
        data={"train_limit": 160},
        training={"minibatch_size": 16, "epochs": 2, "seed": 4},
        optimizer={"learning_rate": 0.1, "momentum": 0.9, **table},
        protocol={"name": "hardsync", "modulation": "none"},
        cluster={"learners": 1, "threads_per_rank": 1},
        **tables,
    )


@pytest.mark.parametrize(("table", "how"), [(EMA, get_ema_avg_fn(0.9)), (EPOCH, get_swa_avg_fn())])
def test_twenty_steps_are_those_of_plain_torch(tmp_path: Path, table: dict[str, Any], how: Callable[..., Any]) -> None:
    """Weights, statistics of BatchNorm, and the error: what the file holds is the averaged model."""
    run = one_learner(table)
    split, _, info, _ = load(run.data)
    model = models.build(run.model, info, run.training.seed)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler, mean = Sampler(run.training.seed, 0, 160), AveragedModel(model, avg_fn=how, use_buffers=True)
    for step in range(20):
        inputs, labels = split.batch(sampler.indices(step * 16, 16))
        stepper.zero_grad()
        functional.cross_entropy(model.train()(inputs), labels).backward()
        stepper.step()
        if step == 10 and table is EPOCH:
            mean = AveragedModel(model, avg_fn=how, use_buffers=True)
        mean.update_parameters(model)
    with rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet") as results:
        found, epochs = results.state_dict(), results.epochs
    expected = mean.module.state_dict()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            assert torch.allclose(torch.as_tensor(found[name]), tensor, rtol=1e-5, atol=1e-6), name
    tests = load(run.data, train=False).test
    assert tests is not None
    inputs, labels = tests.batch(np.arange(len(tests)))
    wrong = (mean.module.eval()(inputs).argmax(1) != labels).float().mean()
    assert epochs["test_error"][-1] == pytest.approx(float(wrong), abs=2 / len(tests))


@pytest.mark.each_value
@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("table", [EMA, UPDATES], ids=["rate", "window"])
def test_every_owner_averages_as_torch_does(name: str, table: dict[str, Any]) -> None:
    protocol, tables = AVERAGING[name]
    seen: dict[int, list[torch.Tensor]] = {}
    kind = type("Watching", (Watched,), {"seen": seen})
    job = make_job(protocol, optimizer=table, **tables)
    trained = train(job.with_(training={"epochs": 2}, optimizer={"milestones": ()}), kind)
    owner = trained.plan.owners[-1]  # has the model's buffers
    mine = seen[owner]
    assert len(mine) >= 20
    how = get_ema_multi_avg_fn(0.9) if table is EMA else get_swa_multi_avg_fn()
    expected = in_torch(mine, how, lambda update: table is UPDATES and update % 7 == 0)
    executor = trained.executors[owner]
    found = executor.buffer(AVERAGE).vector
    counters = executor.layout[-1].size  # of batches, which are copied
    assert executor.layout[-1].kind == "counter"
    assert torch.allclose(found[:-counters], expected[:-counters], rtol=1e-6, atol=1e-7)
    assert torch.equal(found[-counters:], mine[-1][-counters:])
    assert not torch.equal(found, mine[-1])
    assert [role for role, each in trained.executors.items() if AVERAGE in each.names] == [*trained.plan.owners]


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_changes_nothing_else(name: str) -> None:
    protocol, tables = AVERAGING[name]
    job = make_job(protocol, **tables).with_(training={"epochs": 1})
    without, with_ = train(job), train(job.with_(optimizer=EMA))
    assert torch.equal(without.weights, with_.weights)
    for table in ("gradients", "updates"):
        assert without.rows[table].tobytes() == with_.rows[table].tobytes()


@pytest.mark.parametrize("name", STAGES)
def test_layers_at_a_stage_server_are_averaged_where_they_are(name: str) -> None:
    protocol, tables = STAGES[name]
    trained = train(make_job(protocol, optimizer=EMA, **tables).with_(training={"epochs": 1}))
    assert [AVERAGE in executor.names for executor in trained.executors.values()].count(True) == 2
    if name != "merged":
        kept = {key: table for key, table in tables.items() if key != "placement"}
        whole = train(make_job(protocol, optimizer=EMA, **kept).with_(training={"epochs": 1}))
        found, expected = (of_part(each, AVERAGE).sort().values for each in (trained, whole))
        assert torch.equal(found, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name for name, (protocol, _) in AVERAGING.items() if protocol != "async"][:-1])
@pytest.mark.parametrize(("table", "at"), [(EMA, 7), (EPOCH, 12), (EPOCH, 17), (UPDATES, 7)])
def test_a_resumed_run_has_the_average_of_one_that_never_stopped(name: str, table: dict[str, Any], at: int) -> None:
    protocol, tables = AVERAGING[name]
    whole = train(make_job(protocol, optimizer=table, **tables).with_(training={"epochs": 2}))
    _, resumed = check_resumed(whole, at)
    assert torch.equal(of_part(resumed, AVERAGE), of_part(whole, AVERAGE))


@pytest.mark.parametrize("name", ["async", "sharded", "replicas"])
def test_a_replay_ends_with_the_average_of_the_file(tmp_path: Path, name: str) -> None:
    protocol, tables = AVERAGING[name]
    job = make_job(protocol, optimizer=EPOCH, **tables).with_(training={"epochs": 2, "evaluate": True})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        kept, (*_, last) = results.weights, results.epochs["weights_sha256"]
    done = replay(tmp_path / "run.h5", job=job, quiet=True)
    assert done.identical, done
    assert kept is not None
    assert done.weights_sha256 == sha256(kept) == last.decode()


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"optimizer": {"average": {"rate": 0.1, "window": "1 epoch"}}},
            r"window = '1 epoch' is not supported",
        ),
        (
            {"optimizer": {"average": {"window": "5 s"}}},
            r"average.window = '5 s' is not such an interval; use",
        ),
        ({"optimizer": {"average": {"rate": 0.0}}}, r"\[optimizer\] average.rate must be > 0, not 0.0"),
        ({"optimizer": {"average": {"decay": 0.9}}}, r"\[optimizer.average\] unknown key 'decay'; valid: rate, window"),
        (
            {"optimizer": EMA, "protocol": {"name": "hogbatch"}, "hogbatch": {"weights": "shared"}},
            r"\[optimizer\] average is not supported with \[hogbatch\] weights = 'shared'; remove average",
        ),
        (
            {"optimizer": EMA, "protocol": {"name": "hogbatch"}, "training": {"evaluate": "workers"}},
            r"\[optimizer\] average is not supported with \[training\] evaluate = 'workers', which",
        ),
    ],
)
def test_what_cannot_be_is_refused(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Job(**{"cluster": {"learners": 2}, **tables})
