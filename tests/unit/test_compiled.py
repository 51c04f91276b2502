"""Compiled gradients are those of torch, for whatever users bring; where nothing can be compiled, one line says so."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from compiler import needs_compiler
from small_models import Regrouping
from torch import nn
from torch.nn import functional

import rudra
from rudra.compute.compiled import CompiledStep
from rudra.compute.flat import FlatModel
from rudra.compute.shortcuts import gradients_of
from rudra.compute.tasks import Classification, OwnLoss, Task
from rudra.errors import ConfigError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # torch's, where it compiles in parts
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Odd(nn.Module):
    """Two inputs, a layer that is used twice, a large one, tied weights, an idle layer, and buffers made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.idle = nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(5, 5)
        self.norm, self.large = nn.BatchNorm1d(300), nn.Linear(300, 400)
        self.up, self.down = nn.Linear(400, 300, bias=False), nn.Linear(300, 400, bias=False)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())
        self.last = nn.Linear(400, 3)
        self.again = nn.Linear(400, 3)
        self.again.weight = self.last.weight
        self.regrouping = Regrouping()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(torch.cat([left, right], 1))))
        x = self.twice(torch.relu(self.twice(x)))
        x = self.down(self.up(torch.relu(self.large(x))))
        return self.last(x) + self.again(x) + self.regrouping(x[:, :20])[:, :3]


def draw() -> dict[str, torch.Tensor]:
    return {"left": torch.rand(4, 2), "right": torch.rand(4, 4)}


@needs_compiler
@pytest.mark.slow
def test_compiled_gradients_losses_and_buffers_of_an_odd_model_are_those_of_torch() -> None:
    torch.manual_seed(0)
    module = Odd()
    how = gradients_of(module, Classification(0))
    plain, compiled = FlatModel(copy.deepcopy(module)), FlatModel(module, compiled=True, gradients=how)
    weights = [torch.empty(plain.size) for _ in range(2)]
    plain.read_into(weights[0])
    weights[1].copy_(weights[0]).mul_(0.7)
    wanted, found = torch.empty(plain.size), torch.empty(plain.size)
    (bias,) = (entry for entry in plain.layout if entry.name == "regrouping.layer.bias")  # BatchNorm takes it away
    noise = slice(bias.offset, bias.offset + bias.size)
    for step in range(4):
        inputs, labels = draw(), torch.randint(0, 3, (4,))
        for model in (plain, compiled):
            model.bind(weights[step % 2])
        loss = plain.gradient(inputs, labels, wanted, step)
        assert compiled.gradient(inputs, labels, found, step) == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[noise], wanted[noise], rtol=0, atol=1e-4)
        found[noise] = wanted[noise]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert compiled.compiled_difference(inputs, labels) < 1e-5
    for model in (plain, compiled):
        model.bind(weights[0])
    assert compiled.evaluate_batch(draw(), labels)[2].keys() == plain.evaluate_batch(draw(), labels)[2].keys()


class Output(dict[str, Any]):
    """As Hugging Face's models give it: a mapping with attributes, that also holds what is no tensor."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Output:
        logits = self.linear(x)
        return Output(logits=logits, hidden=(x, logits), cache=None, kind="large")


def of_all(output: Output, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, target) + output["hidden"][1].square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("task", [Classification(3), OwnLoss(3, of_all, "of_all")], ids=lambda task: task.name)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_an_output_may_be_an_object_with_logits(task: Task, *, compiled: bool) -> None:
    module = Large()
    inputs, target = torch.rand(4, 5), torch.tensor([0, 1, 2, 0])
    wanted = functional.cross_entropy(module(inputs).logits, target)
    if isinstance(task, OwnLoss):
        wanted = wanted + module(inputs).logits.square().mean()
    gradients = torch.autograd.grad(wanted, list(module.parameters()))
    model = FlatModel(module, task, compiled=compiled)
    weights, found = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    model.bind(weights)
    assert model.gradient(inputs, target, found, 0) == pytest.approx((wanted.item(), ANY))
    torch.testing.assert_close(found, torch.cat([gradient.flatten() for gradient in gradients]))
    assert model.evaluate_batch(inputs, target)[0] == pytest.approx(wanted.item())


def job(**tables: Any) -> rudra.Job:
    return rudra.Job(
        model={"name": "mlp", "options": {"hidden": [16]}},
        data={"name": "digits", "train_limit": 200},
        training={"epochs": 2, "minibatch_size": 10, "compile": True},
        optimizer={"learning_rate": 0.1},
        protocol={"name": "async", "modulation": "none"},
        cluster={"learners": 2, "threads_per_rank": 1},
        **tables,
    )


@pytest.mark.slow
@needs_compiler
def test_a_compiled_run_learns_and_replays(tmp_path: Path) -> None:
    with rudra.simulate(job(), output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.epochs["train_loss"][-1] < results.epochs["train_loss"][0]
    assert rudra.replay(tmp_path / "run.h5").difference is None


@pytest.mark.slow
@needs_compiler
def test_each_model_has_versions_of_its_own() -> None:
    """Torch keeps a number of versions for a piece of code; what shares it would be computed eagerly beyond that."""
    inputs, target = torch.rand(4, 5), torch.tensor([0, 1, 2, 0])
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (3, 4):
            module = nn.Sequential(nn.Linear(5, width))
            model = FlatModel(module, Classification(width), compiled=True, gradients="direct")
            weights, found = torch.empty(model.size), torch.empty(model.size)
            model.read_into(weights)
            model.bind(weights)
            model.gradient(inputs, target, found, 0)


def test_without_a_compiler_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ConfigError, match=r"\[training\] compile = true: there is no C\+\+ compiler here \(no-such"):
        rudra.simulate(job(), output=tmp_path / "run.h5", progress="quiet")


def test_only_processors_need_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    module = nn.Linear(5, 3, device="meta")
    CompiledStep(module, Classification(3), [*module.parameters()], None)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"simulation": {"batching": "vmap"}},
            "compile = true is not supported with .simulation. batching = .*; use batching",
        ),
        (
            {"training": {"precision": "bfloat16"}},
            "compile = true is not supported with precision = .bfloat16.; use precision",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job().with_(**tables)
