"""Gradients of chains have the bits of autograd, and other models are left to it."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from rudra.compute import networks
from rudra.compute.chain import Chain
from rudra.compute.flat import FlatModel
from rudra.compute.rows import RowGradient
from rudra.compute.tasks import Classification, MultiLabel, Task
from rudra.errors import DataError
from tests.unit.sparse_samples import WIDTH, compressed, matrix

ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.Sigmoid, nn.Tanh, nn.ReLU)


def chain(activation: type[nn.Module], sizes: tuple[int, ...], *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def bits_by_autograd(flat: FlatModel, batch: Any) -> tuple[torch.Tensor, tuple[float, float]]:
    out = torch.full((flat.size,), float("nan"))
    held, flat.chain = flat.chain, None
    found = flat.gradient(*batch, out, 0)
    flat.chain = held
    return out, found


@pytest.mark.parametrize(("threads", "samples"), [(1, 1), (1, 3), (2, 64)])
@pytest.mark.parametrize(
    ("sizes", "bias", "task"),
    [
        ((30, 2), True, Classification(2)),
        ((300, 64, 64, 2), True, Classification(2)),
        ((54, 128, 33, 10), False, Classification(10)),
        ((500, 300, 70, 65), True, Classification(65, label_smoothing=0.1)),
        ((500, 300, 983), True, MultiLabel(983)),
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits_are_those_of_autograd(
    activation: type[nn.Module], sizes: tuple[int, ...], bias: bool, task: Task, samples: int, threads: int
) -> None:
    torch.manual_seed(3)
    flat = FlatModel(chain(activation, sizes, bias=bias), task, gradients="direct")
    assert flat.chain is not None
    weights, out = torch.empty(flat.size), torch.full((flat.size,), float("nan"))
    flat.read_into(weights)
    flat.bind(weights)
    inputs = torch.randn(samples, sizes[0] // 2, 2)
    labels = torch.randint(sizes[-1], (samples,))
    target = labels if isinstance(task, Classification) else (torch.rand(samples, sizes[-1]) < 0.1).float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = flat.gradient(inputs, target, out, 0)
        assert (bits_by_autograd(flat, (inputs, target))[0].numpy().tobytes()) == out.numpy().tobytes()
        assert bits_by_autograd(flat, (inputs, target))[1] == found
    finally:
        torch.set_num_threads(before)


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    module = chain(nn.ReLU, (4, 3, 2))
    module[1].register_forward_hook(lambda *_: None)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def frozen() -> nn.Module:
    module = chain(nn.ReLU, (4, 3, 2))
    module[1].weight.requires_grad = False
    return module


@pytest.mark.parametrize(
    "module",
    [
        hooked(),
        tied(),
        frozen(),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Doubling(3, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
    ],
    ids=["hooked", "tied", "frozen", "dropout", "subclass", "ends with an activation", "batchnorm", "parametrised"],
)
def test_other_models_are_left_to_autograd(module: nn.Module) -> None:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert Chain.of(module, parameters, Classification(2)) is None


def test_a_label_that_there_is_not_is_said() -> None:
    flat = FlatModel(chain(nn.ReLU, (4, 3, 2)), Classification(2), gradients="direct")
    flat.bind(torch.zeros(flat.size))
    with pytest.raises(DataError, match="a sample has label 7; the model's are 0 to 1"):
        flat.gradient(torch.zeros(2, 4), torch.tensor([0, 7]), torch.zeros(flat.size), 0)


@pytest.mark.parametrize("samples", [1, 2, 9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_rows", [True, False])
def test_a_first_layer_for_sparse_inputs_has_the_bits_of_autograd(samples: int, bias: bool, in_rows: bool) -> None:
    torch.manual_seed(3)
    about: dict[str, Any] = {"hidden": [20, 20], "activation": "sigmoid", "biases": bias, "initialisation": "fan-in"}
    module = networks.mlp((WIDTH,), 3, sparse=True, **about)
    flat = FlatModel(module, Classification(3), gradients="direct")
    assert flat.chain is not None
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    flat.bind(weights)
    batch = compressed(matrix(samples, density=0.3)), torch.randint(3, (samples,))
    memory = [torch.full((flat.row_form.floats if in_rows else flat.size,), float("nan")) for _ in range(2)]
    found = []
    for room, of_chain in zip(memory, (flat.chain, None), strict=True):
        flat.chain = of_chain
        found.append(flat.gradient(*batch, RowGradient(room, flat.row_form) if in_rows else room, 0))
    assert found[0] == found[1]
    if not in_rows:
        assert torch.equal(*memory)
        return
    ours, theirs = (RowGradient(room, flat.row_form) for room in memory)
    assert torch.equal(ours.rest, theirs.rest)
    assert torch.equal(ours.whole, theirs.whole)
