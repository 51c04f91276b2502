"""Gradients of several learners at once: those of each learner by itself, with its own statistics and masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rudra.compute.bank.fused import fused_gradients
from rudra.compute.checks import check_fused
from rudra.compute.flat import FlatModel
from rudra.compute.networks import lenet, mlp, resnet32
from rudra.errors import ConfigError

LEARNERS, SAMPLES = 3, 4


class Counting(nn.Module):
    """Replaces a buffer of its own, and changes another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(inputs)
        self.mean.mul_(0.5).add_(inputs.mean(0), alpha=0.5)  # type: ignore[operator]
        output: torch.Tensor = self.layer(inputs - self.mean)
        return output


def normed() -> nn.Module:
    """BatchNorm in all its forms: after linear layers, without weights, and without statistics."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, affine=False),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(8, track_running_stats=False, momentum=0.3),
        nn.Linear(8, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: lenet((1, 28, 28), 10, (4, 6), 20), (1, 28, 28)),
    "resnet8": (lambda: resnet32((3, 8, 8), 10, 1, 4), (3, 8, 8)),
    "mlp": (lambda: mlp((6,), 10, (5,), "tanh"), (6,)),
    "normed": (normed, (6,)),
    "counting": (Counting, (6,)),
}


def learners_of(network: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns a model, weights of several learners, their inputs and their labels."""
    torch.manual_seed(0)
    model = FlatModel(network())
    weights = torch.empty(LEARNERS, model.size)
    for vector in weights:
        model.read_into(vector)
    weights[:, : model.parameter_count] *= 1 + 0.1 * torch.randn(LEARNERS, model.parameter_count)
    inputs = torch.randn(LEARNERS, SAMPLES, *shape, dtype=dtype)
    return model, weights.to(dtype), inputs, torch.randint(10, (LEARNERS, SAMPLES))


def by_itself(
    model: FlatModel, vector: torch.Tensor, inputs: torch.Tensor, target: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Computes the loss and the gradient of one learner by plain torch, followed by the buffers."""
    found = {
        entry.name: part.reshape(entry.shape).clone()
        for entry, part in zip(model.layout, vector.split([entry.size for entry in model.layout]), strict=True)
    }
    kinds = {entry.name: entry.kind for entry in model.layout}
    trained = {name: tensor.requires_grad_() for name, tensor in found.items() if kinds[name] == "parameter"}
    found |= {name: tensor.long() for name, tensor in found.items() if kinds[name] == "counter"}
    model.module.train()
    output = torch.func.functional_call(model.module, found, (inputs,))
    loss = nn.functional.cross_entropy(output, target)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    behind = [tensor for name, tensor in found.items() if name not in trained]
    return loss.item(), torch.cat([part.detach().flatten().to(vector.dtype) for part in (*gradients, *behind)])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_bank_are_those_of_each_learner_in_double_precision(name: str) -> None:
    model, weights, inputs, target = learners_of(*NETWORKS[name], torch.float64)
    outs = torch.full_like(weights, torch.nan)
    losses, wrong = fused_gradients(model, list(weights), inputs, target, list(outs), [0] * LEARNERS)
    for index, vector in enumerate(weights):
        loss, wanted = by_itself(model, vector, inputs[index], target[index])
        assert losses[index] == pytest.approx(loss, abs=1e-12)
        assert float((outs[index] - wanted).abs().max()) <= 1e-12
        assert 0 <= wrong[index] <= SAMPLES


@pytest.mark.parametrize("name", ["lenet", "resnet8", "mlp"])
def test_a_bank_at_the_same_weights_has_a_gradient_for_each_or_their_mean(name: str) -> None:
    model, weights, inputs, target = learners_of(*NETWORKS[name], torch.float64)
    outs, mean = torch.full_like(weights, torch.nan), torch.full_like(weights[0], torch.nan)
    losses, _ = fused_gradients(model, [weights[0]], inputs, target, list(outs), [0] * LEARNERS)
    again, _ = fused_gradients(model, [weights[0]], inputs, target, [mean], [0] * LEARNERS)
    alone = [by_itself(model, weights[0], *pair) for pair in zip(inputs, target, strict=True)]
    assert losses == pytest.approx([loss for loss, _ in alone], abs=1e-12)
    assert again == pytest.approx(losses, abs=1e-12)
    assert float((outs - torch.stack([wanted for _, wanted in alone])).abs().max()) <= 1e-12
    assert float((mean - outs.mean(0)).abs().max()) <= 1e-7  # buffers are averaged in single precision


@pytest.mark.parametrize("p", [0.2, 0.5, 1.0])
def test_each_learner_of_a_bank_draws_the_masks_that_it_would_draw_by_itself(p: float) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Dropout(p), nn.Linear(6, 40), nn.Dropout(p, inplace=True), nn.ReLU(), nn.Linear(40, 10))

    model, weights, inputs, target = learners_of(network, (6,), torch.float32)
    outs, alone = torch.empty_like(weights), torch.empty(model.size)
    fused_gradients(model, list(weights), inputs, target, list(outs), seeds := [7, 8, 9])
    for index, vector in enumerate(weights):
        model.bind(vector)
        model.gradient(inputs[index], target[index], alone, seeds[index])
        assert torch.allclose(outs[index], alone, atol=1e-6)
    assert p == 1 or not torch.allclose(outs[0], outs[1], atol=1e-3)


class Branching(nn.Module):
    """Computes what depends on the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        return output if output.sum() > 0 else 2 * output


class Averaging(nn.Module):
    """Has an operation that vmap computes for each learner by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(inputs.mean(0), 0.5)  # type: ignore[operator]
        output: torch.Tensor = self.layer(inputs - self.mean)
        return output


@pytest.mark.parametrize(
    ("network", "operation"),
    [
        (Branching, "torch.Tensor.__bool__"),
        (Averaging, "aten::lerp_"),
        (lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Dropout1d(), nn.Flatten(), nn.Linear(6, 10)), "dropout1d"),
    ],
    ids=["branches", "slow", "random"],
)
def test_a_model_that_cannot_be_vectorised_is_refused_with_the_name_of_an_operation(
    network: Callable[[], nn.Module], operation: str
) -> None:
    model, weights, inputs, target = learners_of(network, (6,), torch.float32)
    with pytest.raises(ConfigError) as caught:
        check_fused("[cluster] bank = 'fused'", "valid: loop", model, weights[0], (inputs[0, :1], target[0, :1]))
    text = str(caught.value)
    assert text.startswith("[cluster] bank = 'fused': torch.func.vmap does not support ")
    assert operation in text
    assert text.endswith("; valid: loop")
    assert "\n" not in text
