"""Layers timed in the steps of their training, and what `rudra profile` and `rudra place` say of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rudra.cli.main import main
from rudra.compute.cuts import chain
from rudra.compute.flat import FlatModel
from rudra.compute.networks import lenet, lstm, resnet32
from rudra.compute.tasks import Classification
from rudra.compute.timing import TimedChain, layers_of
from rudra.core.placement import Layer
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare.profile import Profile, as_toml, profile, sizes
from rudra.studies.place import as_text, place

CPU = torch.device("cpu")
SMALL = {"training": {"minibatch_size": 4}, "data": {"train_limit": 32, "test_limit": 16}}
QUICK = 0.01


def test_the_parts_of_a_step_are_all_of_it_and_change_nothing() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(9, 3))
    inputs, target = torch.randn(5, 3, 4), torch.tensor([0, 1, 2, 0, 1])
    plain = FlatModel(model, Classification(3))
    weights, ours, theirs = torch.empty(3, plain.size)
    plain.read_into(weights)
    plain.bind(weights)
    expected = plain.gradient(inputs, target, theirs, 7)
    timed = TimedChain(chain(model, inputs), CPU)
    flat = FlatModel(timed, Classification(3))
    flat.bind(weights)
    timed.listen()
    for _ in range(3):
        began = timed.now()
        assert flat.gradient(inputs, target, ours, 7) == expected
        ended = timed.now()
        assert torch.equal(ours, theirs)
        parts = timed.parts(began, ended)
        assert len(parts) == 2 * 5 + 2
        assert sum(parts) == pytest.approx(ended - began)
        assert min(parts) > -1e-9
        forward, backward = parts[:5], parts[5:10]
        assert min(forward) > 0
        assert backward[0] == 0  # nothing behind it is trained
        assert min(backward[1:]) > 0


def test_what_layers_hold_and_give() -> None:
    def kinds(model: nn.Module, inputs: torch.Tensor) -> list[tuple[str, str, int, int]]:
        return [(e.name, e.kind, e.parameters_bytes, e.output_bytes) for e in layers_of(chain(model, inputs))]

    assert kinds(lenet((1, 28, 28), 10), torch.zeros(2, 1, 28, 28)) == [
        ("0", "convolution", 4 * 520, 4 * 20 * 24 * 24),
        ("1", "pool", 0, 4 * 20 * 12 * 12),
        ("2", "convolution", 4 * 25_050, 4 * 50 * 8 * 8),
        ("3", "pool", 0, 4 * 800),
        ("4", "", 0, 4 * 800),
        ("5", "linear", 4 * 400_500, 4 * 500),
        ("6", "", 0, 4 * 500),
        ("7", "linear", 4 * 5_010, 0),
    ]
    found = kinds(lstm((7,), 20, hidden=11), torch.zeros(2, 7, dtype=torch.int64))
    assert [kind for _, kind, _, _ in found] == ["embedding", "recurrent", "linear"]
    assert [given for *_, given in found] == [4 * 7 * 11, 4 * 7 * 11, 0]
    blocks = [kind for name, kind, _, _ in kinds(resnet32((3, 8, 8), 10), torch.zeros(2, 3, 8, 8)) if "layer" in name]
    assert blocks == ["convolution"] * 15


def test_shared_parameters_belong_to_the_first_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    found = layers_of(chain(model, torch.zeros(2, 4)))
    assert [layer.parameters_bytes for layer in found] == [64, 0, 0]
    assert not any(layer.cut for layer in found)


def job(**tables: Any) -> Job:
    return Job.load("digits").with_(**{**SMALL, **tables})


def test_a_profile_of_a_job() -> None:
    found = profile(job(), seconds=QUICK)
    assert found.minibatch_size == 4
    assert [layer.name for layer in found.layers] == list("01234567")
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert found.sum_s > sum(layer.seconds for layer in found.layers) > 0
    assert found.step_s > 0
    assert [layer.cut for layer in found.layers] == [True] * 7 + [False]


def test_sizes_are_those_of_the_measured_layers_without_times() -> None:
    found = sizes(job())
    assert [replace(layer, forward_s=0.0, backward_s=0.0) for layer in profile(job(), seconds=QUICK).layers] == [*found]


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"training": {"compile": True}},
            "digits: .training. compile = true leaves no layers to time; use compile = false",
        ),
        ({"model": {"name": lambda classes: nn.LazyLinear(classes)}}, r"\[model\] "),
    ],
)
def test_what_cannot_be_profiled(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        profile(job(**tables), seconds=QUICK)


@pytest.mark.parametrize(("bandwidth", "cut"), [(1e5, True), (1e15, False)])
def test_placing_pays_behind_a_slow_link_alone(bandwidth: float, *, cut: bool) -> None:
    """Layers at one server take their turns, which is all that counts where bytes take no time."""
    slow = {"bandwidth_bytes_per_s": bandwidth, "latency_s": 0.0, "compute_s": 0.1}
    found = place(job(simulation=slow, cluster={"learners": 8}), seconds=QUICK)
    assert (found.decisions["auto"].cut is not None) == cut
    ralp = found.decisions["ralp"].cut
    assert ralp.name == "4"
    text = as_text(found)
    assert "λ = 8, μ = 4" in text
    assert f"auto: {'cut' if cut else 'no cut'}" in text


def test_costs_that_tell_layers_are_taken(tmp_path: Path) -> None:
    """As `rudra calibrate` writes them; nothing is measured then, at whatever μ."""
    layers = tuple(
        Layer(name, kind, size, 4 * (9 - size), 1e-3 * size, 0.0, cut=size < 3)
        for name, kind, size in (("a", "convolution", 1), ("b", "", 2), ("c", "linear", 3))
    )
    told = Profile("digits", 4, layers, 0.5, 0.0, 1.0, 1)
    path = tmp_path / "costs.toml"
    path.write_text(f"latency_s = 0.25\n[models.lenet]\ncompute_s = 1.0\n{as_toml(told)}\n", encoding="utf-8")
    found = place(job(simulation={"costs": str(path)}, training={"minibatch_size": 8}, cluster={"learners": 2}))
    assert found.cluster.latency_s == 0.25
    assert [(e.name, e.kind, e.parameters_bytes, e.output_bytes, e.cut) for e in found.layers] == [
        (e.name, e.kind, e.parameters_bytes, e.output_bytes, e.cut) for e in layers
    ]
    assert [e.forward_s for e in found.layers] == pytest.approx([2 * e.forward_s for e in layers])
    assert [e.backward_s for e in found.layers] == pytest.approx([0.0, 0.0, 1.0], abs=1e-9)


def test_commands_print_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["digits", "--seconds", "0.01", "--json", "--set", "data.train_limit=32"]
    assert main(["profile", *line]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Layer(**layer).name for layer in found["layers"]] == list("01234567")
    assert main(["place", *line, "--learners", "3", "--back-speed", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["learners"], said["back_speed"]) == (3, 2)
    assert said["chosen"]["ralp"]["cut"] == "4"
    assert [cut["index"] for cut in said["cuts"]] == [*range(1, 8)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("profile digits -o layers.txt", "layers.txt: unknown kind of picture '.txt'; valid: .png, .svg, .pdf"),
        ("place digits --back-speed 0", "--back-speed 0; valid: > 0"),
    ],
)
def test_mistakes(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"rudra: {text}\n"
