"""Models as users write them: loss and gradient are plain torch's, on every way to compute that accepts the model."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from torch import nn
from torch.nn import functional
from users_models import CLASSES, MODELS, UNSEEN, WIDTH, Of, batch, body, made

import rudra
from rudra.compute import first_gradient
from rudra.compute.bank.fused import fused_gradients
from rudra.compute.checks import check_batching
from rudra.compute.flat import FlatModel
from rudra.compute.shortcuts import gradients_of
from rudra.compute.tasks import Classification
from rudra.data.load import load
from rudra.errors import ConfigError
from tests.selection import CAMPAIGN

COMPILED = ("large with norms", "hook on a large parameter", "checkpoint", "custom function")
TRACED = (
    *("convolutions", "attention", "gru, packed", "tied", "spectral norm", "second derivative", "gradient penalty"),
    *("hook after accumulation", "hook on a module's gradient", "buffers made anew", "experts", "sparse embedding"),
    "custom function",
)
CODE = [pytest.param(name, True, marks=CAMPAIGN if name in TRACED else ()) for name in COMPILED]
"""A custom function is gone before code is written: torch traces it into the operations of its two passes."""


def plain(name: str) -> tuple[float, torch.Tensor]:
    """Loss and gradient by torch alone."""
    model, (inputs, target) = made(name), batch()
    torch.manual_seed(3)
    loss = functional.cross_entropy(model(inputs), target)
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
    return loss.item(), torch.cat([part.flatten() for part in parts])


def bound(model: FlatModel) -> torch.Tensor:
    weights = torch.empty(model.size)
    model.read_into(weights)
    model.bind(weights)
    return weights


def flat(name: str, **how: Any) -> tuple[float, torch.Tensor]:
    module = made(name)
    task = Classification(CLASSES)
    seen = name != UNSEEN  # else the first gradient tells
    model = FlatModel(module, task, gradients=gradients_of(module, task) if seen else "autograd", **how)
    weights, out = bound(model), torch.full((model.size,), torch.nan)
    before = weights.clone()
    for _ in range(2):  # the second gradient does not depend on the first
        loss, _ = model.gradient(*batch(), out, 3)
        assert torch.equal(weights, before)
        if len(out) > model.parameter_count:  # a second forward pass would begin with other buffers
            break
    return loss, out[: model.parameter_count]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_plain_torch(name: str) -> None:
    (loss, gradient), (wanted_loss, wanted) = flat(name), plain(name)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert difference(gradient, wanted) <= 1e-6


@pytest.mark.parametrize("batching", ["big-batch", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_computed_together_are_those_of_plain_torch_or_refused(name: str, batching: str) -> None:
    wanted, (inputs, target) = plain(name)[1], batch()
    module = made(name)
    model = FlatModel(module, Classification(CLASSES))
    weights = bound(model)
    try:
        check_batching(batching, model, weights, (inputs[:1], target[:1]))
    except ConfigError:
        return
    if name == UNSEEN:
        return  # and no gradient is tried here
    out = torch.empty(model.size)
    if batching == "vmap":
        fused_gradients(model, [weights], inputs[None], target[None], [out], [3])
    else:
        model.joint_gradient(inputs, target, out, 3)
    if name != "dropout" or batching == "vmap":  # a big batch has other masks
        assert difference(out[: model.parameter_count], wanted) <= 1e-5


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's, where it compiles in parts
@pytest.mark.parametrize(("name", "code"), [*CODE, *((n, False) for n in TRACED)])
def test_compiled_gradients_are_those_of_plain_torch(name: str, code: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `code` by compiled code; else by the operations that torch found to compile, which takes a tenth."""
    if not code:
        traced = functools.partial(torch.compile, dynamic=False, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", lambda step, **_: traced(step))
    (loss, gradient), (wanted_loss, wanted) = flat(name, compiled=True), plain(name)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert difference(gradient, wanted) <= 1e-5


SAFE = {"chain", "large chain", "large with norms", "dropout", "in place", "frozen layer"}


@pytest.mark.parametrize("name", MODELS)
def test_faster_code_only_for_plain_layers_without_hooks(name: str) -> None:
    direct = name in SAFE or name == UNSEEN
    assert gradients_of(made(name), Classification(CLASSES)) == ("direct" if direct else "autograd")


class Limited(nn.Linear):
    """Max-norm and monotonic layers change their weights in `forward`, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, CLASSES)
        self.how, self.calls = how, 0

    def train(self, mode: bool = True) -> "Limited":
        if self.how == "merged for tests" and self.training != mode:  # as LoRA layers merge their parts
            self.weight.data += -0.1 if mode else 0.1
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.how == "assigned":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        elif self.how == "clamped":
            self.weight.data.clamp_(min=0)
        elif self.how == "clamped without effect":
            self.weight.data.clamp_(min=-100)
        elif self.how == "in place":
            with torch.no_grad():
                self.weight.mul_(1.0)
        elif self.how == "later" and self.calls > 3:
            self.weight.data.mul_(0.9)
        elif self.how == "by NumPy":
            self.weight.detach().numpy()[0] *= 0.5
        return super().forward(x)


HOWS = ["assigned", "clamped", "in place", "later", "by NumPy"]


@pytest.mark.parametrize("how", HOWS)
def test_a_model_that_changes_its_weights_is_refused_in_training(how: str) -> None:
    model = FlatModel(nn.Sequential(Limited(how)), Classification(CLASSES))
    bound(model)
    out = torch.empty(model.size)

    def train() -> None:
        for _ in range(8):
            model.gradient(*batch(), out, 0)

    with pytest.raises(ConfigError, match=r"\[model\] changes (0.weight|a parameter) in `forward`"):
        train()


def data() -> tuple[Any, Any]:
    return (set_ := torch.utils.data.TensorDataset(*batch(40))), set_


def job(model: Any, **training: Any) -> rudra.Job:
    return rudra.Job(
        model={"name": model},
        data={"name": data, "classes": CLASSES},
        training={"epochs": 1, "minibatch_size": 4, **training},
        cluster={"learners": 2, "device": "cpu"},
    )


def tried(job: rudra.Job) -> str:
    job = job.resolved()
    return first_gradient.try_first_gradient(job, job.plan(), load(job.data, seed=0))


@pytest.mark.parametrize("how", ["clamped without effect", "merged for tests", *HOWS[:3]])
def test_the_first_gradient_refuses_a_model_that_writes_to_its_weights(how: str) -> None:
    with pytest.raises(ConfigError, match=r"\[model\] changes 0.weight in `forward`"):
        tried(job(lambda: nn.Sequential(Limited(how))))


def test_the_first_gradient_decides_who_computes(caplog: pytest.LogCaptureFixture) -> None:
    for name in SAFE:
        assert tried(job(MODELS[name])) == "direct"
    assert tried(job(body, gradients="autograd")) == "autograd"
    assert tried(job(MODELS["tied"])) == "autograd"
    assert not caplog.records
    assert tried(job(MODELS[UNSEEN])) == "autograd"
    assert "written directly differ from torch.autograd's by" in caplog.text
    with pytest.raises(ConfigError, match=r"gradients = 'direct': the model has layers, hooks or a loss that need"):
        tried(job(MODELS["tied"], gradients="direct"))


def test_the_result_file_says_who_computed(tmp_path: Path) -> None:
    with rudra.simulate(job(body), output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.job["training"]["gradients"] == "direct"


def test_weights_in_other_memory_with_the_same_values_are_bound_again() -> None:
    model = FlatModel(Of(lambda m, x: m.layer(x), layer=nn.Linear(WIDTH, CLASSES)), Classification(CLASSES))
    weights, out = bound(model), torch.empty(model.size)
    layer = model.module.layer
    layer.register_forward_pre_hook(lambda m, _: setattr(m.weight, "data", m.weight.data.clone()))
    model.gradient(*batch(), out, 0)
    weights += 1
    assert torch.equal(layer.weight, weights[: layer.weight.numel()].view_as(layer.weight))


def test_copies_of_a_model_are_models_of_their_own() -> None:
    module = made("large chain")
    first = FlatModel(copy.deepcopy(module), Classification(CLASSES), gradients="direct")
    assert first.module[2].forward is not module[2].forward
