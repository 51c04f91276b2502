"""`rudra validate` finds what a run would stumble over, in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rudra.cli.main import main
from rudra.job.job import Job
from rudra.job.tables import OPTIMIZERS
from rudra.simulation import dry_run
from rudra.simulation.dry_run import rehearse

SMALL = 'model.options={"hidden" = [8]}'


def unfit(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


def normed(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 9), nn.BatchNorm1d(9)), nn.Dropout(0.1), nn.Linear(9, classes)
    )


def touched(moment: Any) -> None:
    raise AssertionError("hooks are made, not called")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.name=lenett", r"[model] name: 'lenett' is unknown; valid: mlp, "),
        ("model.name=no_such_module:Net", "no_such_module:Net: no module 'no_such_module' on the Python path"),
        ("model.options.hiden=[8]", "[model] mlp: got an unexpected keyword argument 'hiden'"),
        ("task.options.smoothing=0.1", "[task] classification: got an unexpected keyword argument 'smoothing'"),
        (f"task.name={__name__}:unfit", "gave shape (8, 10); a loss is one number, a scalar tensor"),
        ("task.name=regression", "[task] regression needs numbers, as float32; digits has targets int64"),
        ("data.name=digit", "[data] name: 'digit' is unknown; valid: arff, npz, "),
        ("data.name=cifar10", "cifar10"),
        ("optimizer.options.nestorov=true", "[optimizer] unknown option 'nestorov' of sgd; valid: dampening, "),
        ("training.target=acuracy >= 0.9", "no evaluation measures 'acuracy'; use "),
        ("training.warm_start=no.h5", "no.h5"),
        (
            "simulation.costs=p755",
            "[simulation] costs = 'p755' is neither a file nor a preset; use a file or one of crossbow, p775",
        ),
        ('hooks=[{at="end", call="no_such_module:log"}]', "no_such_module:log: no module 'no_such_module'"),
    ],
)
def test_what_a_run_would_stumble_over_is_found(
    override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.toml"
    hooks = override.partition("=")[2] if override.startswith("hooks=") else "[]"
    job.write_text(f'hooks = {hooks}\n[model]\nname = "mlp"\noptions.hidden = [8]\n[training]\nminibatch_size = 8\n')
    more = [] if override.startswith("hooks=") else ["--set", override]
    assert main(["validate", "--syntax", str(job), *more]) == 0
    capsys.readouterr()
    assert main(["validate", str(job), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rudra: ")
    assert err.count("\n") == 1
    assert said in err


def infinite() -> tuple[Any, Any]:
    points = torch.full((40, 3), torch.inf)
    data = torch.utils.data.TensorDataset(points, torch.arange(40) % 2)
    return data, data


def test_data_that_is_not_finite_is_named() -> None:
    network = {"name": nn.Linear, "options": {"in_features": 3, "out_features": 2}}
    job = Job(model=network, data={"name": infinite, "classes": 2}).resolved()
    with pytest.raises(Exception, match=r"\[data\] training sample \d+ has a value that is not finite"):
        rehearse(job, job.plan())


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("topology", "protocol"),
    [
        ({"name": "base"}, "async"),
        ({"name": "adv", "options": {"fan_out": 2}}, "hardsync"),
        ({"name": "adv*"}, "async"),
        ({"name": "groups", "options": {"groups": 1}}, "hardsync"),
        ({"name": "groups", "options": {"groups": 2}}, "async"),
    ],
)
def test_memory_is_told_for_every_kind_of_role(topology: dict[str, Any], protocol: str, optimizer: str) -> None:
    job = Job(
        model={"name": "mlp", "options": {"hidden": [500, 2000]}},
        training={"minibatch_size": 2},
        optimizer={"name": optimizer},
        topology=topology,
        protocol={"name": protocol},
        cluster={"learners": 4, "threads_per_rank": 1},
        hooks=[{"at": "update", "call": touched}],
    )
    plan = job.plan()
    found = rehearse(job, plan)
    assert set(found.memory) == {role.kind for role in plan.roles}
    assert found.size == found.parameters == 64 * 500 + 500 + 500 * 2000 + 2000 + 2000 * 10 + 10
    assert found.metrics == ("top5_error",)
    assert found.loss == pytest.approx(np.log(10), rel=0.2)
    vector = found.size * 4
    state = {"adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0}[optimizer]
    least = min(found.memory.values())
    if plan.roles[plan.server].kind == "parameter server":
        weights, averaged, waiting = 1, 1, 2
        assert found.memory["parameter server"] - least < (weights + averaged + waiting + state + 12) * vector
        assert found.memory["parameter server"] > (weights + averaged + state) * vector


@pytest.mark.parametrize(
    ("tables", "here", "apart"),
    [
        ({}, 0, 3),
        ({"cluster": {"buckets": "off"}}, 0, 0),
        ({"cluster": {"buckets": 1.0}}, 0, 3),
        ({"cluster": {"buckets": 1.0, "node_memory": False}}, 3, 0),
        ({"cluster": {"buckets": 100.0, "node_memory": False}}, 0, 0),
        ({"training": {"microbatches": 2}}, 0, 0),
        ({"topology": {"name": "sharded", "options": {"shards": 2}}}, 0, 1.5),
        ({"topology": {"name": "adv", "options": {"fan_out": 2}}}, 0, 0),
        ({"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}}, 0, 1),
    ],
)
def test_a_server_holds_gradients_that_come_in_buckets(
    tables: dict[str, Any], here: float, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`here`, `apart`: vectors of the model's size, on one node, and in addition if all learners are on other nodes."""
    monkeypatch.setattr(dry_run, "memory_bytes", lambda name: 0)
    job = Job(
        model={"name": "mlp", "options": {"hidden": [1000, 1000]}},
        **{"protocol": {"name": "async"}} | tables,
    ).with_(cluster={"learners": 3, "threads_per_rank": 1})
    off = job.with_(cluster={"buckets": "off"})
    found, without = (rehearse(one, one.plan()) for one in (job, off))
    vector = found.size * 4
    server = next(kind for kind in found.memory if kind != "statistics server")
    assert found.memory[server] - without.memory[server] == pytest.approx(here * vector, rel=0.01)
    assert found.apart_bytes == pytest.approx(apart * vector, rel=0.01)
    assert without.apart_bytes == 0


@pytest.mark.parametrize(
    ("tables", "more"),
    [
        ({}, 1),
        ({"optimizer": {"momentum": 0.9}}, 2),
        ({"optimizer": {"name": "adam"}}, 3),
        ({"optimizer": {"clip_norm": 1.0}}, 0),
        ({"cluster": {"learners_per_rank": 3}}, 0),
        ({"cluster": {"buckets": "off"}}, 0),
        ({"topology": {"name": "replicas"}, "protocol": {"name": "diloco"}, "optimizer": {"name": "adamw"}}, 3),
        ({"topology": {"name": "replicas"}, "protocol": {"name": "sma"}}, 0),
    ],
)
def test_learners_on_several_nodes_hold_vectors_for_early_updates(
    tables: dict[str, Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "memory_bytes", lambda name: 0)
    job = Job(
        model={"name": "mlp", "options": {"hidden": [100]}},
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
    ).with_(cluster={"learners": 3, "threads_per_rank": 1}, optimizer={"momentum": 0.0})
    job = job.with_(**tables)
    found = rehearse(job, job.plan())
    assert found.apart_bytes == pytest.approx(4 * more * found.size, rel=0.01)


def test_validate_says_what_learners_on_other_nodes_need(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["validate", "digits", "--learners", "4"]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "; more at a server whose learners are on other nodes: 6.64 MB\n" in said
    assert main([*line, "--set", "cluster.buckets=off"]) == 0
    assert "other nodes" not in capsys.readouterr().out
    assert main([*line, "--set", "topology.name=groups"]) == 0
    assert "; more at learners on several nodes: 3.32 MB\n" in capsys.readouterr().out


BY_TESTS = [
    "training.patience=2",
    "results.keep_best=true",
    "optimizer.schedule=plateau",
    "training.target=loss <= 0.1",
]


@pytest.mark.parametrize("override", [*BY_TESTS, "training.stop_at_target=true"])
def test_what_goes_by_tests_is_rehearsed_predicted_and_timed_without_them(override: str, tmp_path: Path) -> None:
    more = [BY_TESTS[-1]] if "stop" in override else []
    keys = ["model.name=mlp", SMALL, "training.epochs=1", "cluster.learners=2", "data.train_limit=64", *more, override]
    line = ["digits", *(f"--set={key}" for key in keys)]
    assert main(["validate", *line]) == 0
    assert main(["predict", *line, "--learners", "2"]) == 0
    output = str(tmp_path / "out.h5")
    assert main(["simulate", *line, "--set=simulation.tensors=false", "--quiet", "--output", output]) == 0


@pytest.mark.parametrize(("cut", "drawn"), [(4, True), (5, False)])
def test_what_a_step_sends_is_told_apart(cut: int, drawn: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine numbers of each of eight samples cross, and with dropout on both sides the state of the generator."""
    job = Job(model={"name": normed}, placement={"cut": cut}, cluster={"learners": 3}, training={"minibatch_size": 8})
    sent = rehearse(job, job.plan()).crossed
    assert (sent.activations, sent.parameters) == (8 * 8 * 9, 8 * (65 * 9 + 18))
    assert sent.buffers == 8 * 19, "means, variances, and a count"
    assert sent.generator == (8 * torch.get_rng_state().numel() / 4 if drawn else 0)
    assert main(["validate", "digits", "--learners", "3", "--set", "placement.cut=5"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  a step sends"))
    assert "0.376 MB of tensors: for each of 3 learners activations of 0.0256 MB" in line
    assert line.endswith("MB of headers; no targets")
