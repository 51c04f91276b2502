import copy
import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Assorted, Regrouping
from torch import nn
from torch.nn import functional

from rudra.compute.bank.fused import fused_gradients
from rudra.compute.buffers import tried
from rudra.compute.flat import FlatModel
from rudra.compute.models import build
from rudra.compute.networks import cifar10_full
from rudra.compute.statedict import entries_of
from rudra.core.digest import sha256
from rudra.core.layout import Entry
from rudra.data.load import DataInfo
from rudra.errors import ConfigError, DataError
from rudra.job.tables import ModelTable


class Tied(nn.Module):
    """A large layer used twice, and its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.again = nn.Linear(256, 256, bias=False)
        self.again.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.layer(torch.tanh(self.layer(x))))))
        return x @ self.layer.weight[:, :10]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(20, 10), nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def lenet(size: int) -> nn.Module:
    return build(ModelTable(name="lenet"), DataInfo("x", 1, 1, (1, size, size), 10), 0)


def sequences() -> nn.Module:
    """A large layer with three-dimensional input, where in-place gradients do not apply."""
    return nn.Sequential(nn.Linear(256, 256), nn.Flatten(), nn.Linear(512, 10))


def normalised() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 10))
    model[0].weight.requires_grad_(False)
    return model


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 300), nn.Dropout(0.5), nn.Linear(300, 300), nn.Dropout(0.5), nn.Linear(300, 10))


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: lenet(28), (1, 28, 28)),
    (lambda: lenet(8), (1, 8, 8)),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10)), (1, 28, 28)),
    (Tied, (256,)),
    (Unused, (20,)),
    (sequences, (2, 256)),
    (normalised, (20,)),
    (Regrouping, (20,)),
    (lambda: torch.jit.script(Regrouping()), (20,)),
    (dropped, (20,)),
]


def draw(shape: tuple[int, ...], count: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, *shape, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def travelling(module: nn.Module) -> torch.Tensor:
    """A module's floating-point buffers and counters."""
    buffers = list(module.buffers())
    floats = [buffer.reshape(-1) for buffer in buffers if buffer.is_floating_point()]
    counters = [buffer.float()[None] for buffer in buffers if buffer.dtype == torch.int64 and buffer.dim() == 0]
    return torch.cat([torch.empty(0), *floats, *counters])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("make", "shape"), CASES)
def test_gradients_and_buffers_equal_plain_torch_bit_for_bit(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    plain = make()
    flat = FlatModel(copy.deepcopy(plain))
    weights, out = torch.empty(flat.size), torch.full((flat.size,), torch.nan)
    flat.read_into(weights)
    flat.bind(weights)
    before = weights.clone()
    for seed in (11, 12):  # the second time into a vector that holds the first gradient
        x, y = draw(shape, seed)
        plain.zero_grad()
        torch.manual_seed(seed)
        output = plain(x)
        for buffer in plain.buffers():
            buffer.detach_()
        expected = functional.cross_entropy(output, y)
        expected.backward()
        loss, errors = flat.gradient(x, y, out, seed)
        assert loss == expected.item()
        assert errors == int((output.argmax(1) != y).sum())
        trained = [p for p in plain.parameters() if p.requires_grad]
        gradients = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
        assert torch.equal(out[: flat.parameter_count], gradients)
        assert torch.equal(weights, before)
        buffers = travelling(plain)
        assert torch.equal(out[flat.parameter_count :], buffers)
        weights[flat.parameter_count :] = buffers  # as a server would
        before = weights.clone()
        flat.evaluate_batch(x, y)  # leaves no trace
        assert torch.equal(weights, before)


def test_layout_has_parameters_then_buffers_and_tied_ones_once() -> None:
    flat = FlatModel(normalised())
    assert flat.layout[0] == Entry("0.bias", (300,), 0, 300, "parameter")
    assert flat.layout[-2] == Entry("1.running_var", (300,), flat.size - 301, 300, "buffer")
    assert flat.layout[-1] == Entry("1.num_batches_tracked", (), flat.size - 1, 1, "counter")
    assert flat.parameter_count == flat.size - 601
    assert [e.offset for e in flat.layout[1:]] == [e.offset + e.size for e in flat.layout[:-1]]
    assert [e.name for e in FlatModel(Tied()).layout] == ["layer.weight", "layer.bias"]


@pytest.mark.parametrize("make", [Tied, normalised, Assorted])
def test_the_vector_and_what_is_beside_it_make_the_state_dict(make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = FlatModel(module)
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    flat.bind(weights)
    entries = {e.name: weights[e.offset : e.offset + e.size].view(e.shape) for e in flat.layout}
    listed = entries_of(module, flat.layout)
    assert [named.name for named in listed] == list(expected)
    for named in listed:
        tensor = entries[named.tensor] if named.value is None else torch.from_numpy(named.value)
        assert f"torch.{named.dtype}" == str(expected[named.name].dtype)
        assert torch.equal(tensor.to(expected[named.name].dtype), expected[named.name])


def test_a_copy_is_made_of_buffers_that_do_not_travel() -> None:
    module = Regrouping()
    (kept,) = [named for named in entries_of(module, FlatModel(module).layout) if named.value is not None]
    module.get_buffer("order").zero_()
    assert kept.name == "order"
    np.testing.assert_array_equal(kept.value, np.arange(10)[::-1])  # type: ignore[arg-type]


class Graph(nn.Module):
    """A layer on a graph, whose adjacency matrix is sparse."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((self.adjacency @ x.T).T)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_buffers_stay_with_the_module(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    matrix = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, 3]])
    inputs, target = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0])
    found = []
    for adjacency in (matrix, make(matrix)):
        torch.manual_seed(0)
        module = Graph(adjacency)
        tried(module, inputs)
        flat = FlatModel(module)
        vector, gradient = torch.empty(flat.size), torch.empty(flat.size)
        flat.read_into(vector)
        flat.bind(vector)
        flat.gradient(inputs, target, gradient, 0)
        assert torch.equal(module.adjacency.to_dense(), matrix)
        found.append((flat.size, gradient[:8]))
    assert (found[0][0], found[1][0]) == (17, 8)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_counters_are_whole_numbers_in_the_module() -> None:
    module = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10))
    flat = FlatModel(module)
    weights, out = torch.empty(flat.size), torch.empty(flat.size)
    flat.read_into(weights)
    weights[-1] = 41
    flat.bind(weights)
    flat.gradient(*draw((20,)), out, 0)
    assert out[-1] == 42 == module[1].num_batches_tracked
    assert module.get_buffer("1.num_batches_tracked").dtype == torch.int64


def test_numbers_that_means_would_change_stay_with_the_module() -> None:
    module = nn.Linear(20, 10)
    module.register_buffer("key", torch.tensor(2**20 + 1))
    assert [e.name for e in FlatModel(module).layout] == ["weight", "bias"]


def test_bind_switches_between_vectors_without_copies() -> None:
    flat = FlatModel(nn.Linear(3, 10))
    vectors = [torch.full((flat.size,), float(k)) for k in range(9)]
    for vector in vectors * 2:
        flat.bind(vector)
        read = torch.empty(flat.size)
        flat.read_into(read)
        assert torch.equal(read, vector)
        vector += 100
        flat.read_into(read)
        assert torch.equal(read, vector)


def test_evaluation_uses_the_weights_buffers_and_no_dropout() -> None:
    module = normalised()
    norm = module.get_submodule("1")
    flat = FlatModel(copy.deepcopy(module))
    weights, out = torch.empty(flat.size), torch.empty(flat.size)
    flat.read_into(weights)
    weights[flat.parameter_count :] += torch.rand(601)
    flat.bind(weights)
    x, y = draw((20,), 50)
    flat.gradient(x, y, out, 0)  # moves the module's statistics, and may not disturb the test
    norm.get_buffer("running_mean").copy_(weights[-601:-301])
    norm.get_buffer("running_var").copy_(weights[-301:-1])
    module.eval()
    with torch.no_grad():
        output = module(x)
    loss, error, metrics = flat.evaluate_batch(x, y)
    assert loss == pytest.approx(functional.cross_entropy(output, y).item(), rel=1e-6)
    assert error == pytest.approx((output.argmax(1) != y).float().mean().item())
    assert metrics["top5_error"] == pytest.approx((output.topk(5).indices != y[:, None]).all(1).float().mean().item())
    assert 0 < metrics["top5_error"] < error


def test_five_classes_have_no_top_five() -> None:
    flat = FlatModel(nn.Linear(3, 5))
    weights = torch.zeros(flat.size)
    flat.bind(weights)
    assert flat.evaluate_batch(torch.zeros(2, 3), torch.tensor([0, 4]))[2] == {}


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_that_the_model_does_not_have_is_named(label: int) -> None:
    flat = FlatModel(nn.Linear(3, 10))
    weights = torch.zeros(flat.size)
    flat.bind(weights)
    x, y = torch.zeros(2, 3), torch.tensor([0, label])
    with pytest.raises(DataError, match=f"label {label}; the model's are 0 to 9"):
        flat.gradient(x, y, torch.zeros(flat.size), 0)
    with pytest.raises(DataError, match=f"label {label}; the model's are 0 to 9"):
        flat.evaluate_batch(x, y)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Flatten(), "no parameter to train"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter to train"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), "weight is torch.float64; only torch.float32"),
        (lambda: nn.LazyLinear(3), "weight has no shape yet"),
    ],
)
def test_models_that_cannot_be_flat(module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlatModel(module())


def test_hash_is_of_the_values_as_little_endian_floats() -> None:
    expected = hashlib.sha256(struct.pack("<3f", 1.0, -2.5, 3.25)).hexdigest()
    assert sha256(np.array([1.0, -2.5, 3.25], np.float32)) == expected
    assert sha256(np.array([1.0, 9.0, -2.5, 9.0, 3.25], np.float32)[::2]) == expected


def tied() -> nn.Module:
    """One weight at two places, and a parameter without a part in the output."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
    module[3].weight = module[1].weight
    module.register_parameter("idle", nn.Parameter(torch.ones(3)))
    module.register_buffer("constant", torch.full((2,), 7.0))
    return module


@pytest.mark.parametrize(
    ("network", "shape"), [(tied, (1, 4, 4)), (lambda: cifar10_full((3, 16, 16), 16), (3, 16, 16))]
)
@pytest.mark.parametrize("shared", [True, False])
def test_mapped_gradients_are_those_of_one_after_the_other(network: Any, shape: Any, shared: bool) -> None:
    torch.manual_seed(0)
    model = FlatModel(network())
    weights = [torch.empty(model.size) for _ in range(1 if shared else 3)]
    for index, vector in enumerate(weights):
        model.read_into(vector)
        vector[: model.parameter_count] *= 1 + index
    inputs, labels = torch.randn(3, 2, *shape), torch.randint(16, (3, 2))
    outs = [torch.full((model.size,), math.nan) for _ in range(3)]
    losses, wrong = zip(*fused_gradients(model, weights, inputs, labels, outs, [0] * 3), strict=True)
    for index, out in enumerate(outs):
        model.bind(weights[0 if shared else index])
        expected = torch.empty(model.size)
        loss, errors = model.gradient(inputs[index], labels[index], expected, 0)
        assert torch.allclose(out, expected, atol=1e-6)
        assert losses[index] == pytest.approx(loss, abs=1e-5)
        assert wrong[index] == errors


def test_a_joint_gradient_is_the_mean_and_knows_every_sample() -> None:
    torch.manual_seed(0)
    model = FlatModel(tied())
    weights, joint = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    model.bind(weights)
    inputs, labels = torch.randn(6, 1, 4, 4), torch.randint(16, (6,))
    losses, wrong = model.joint_gradient(inputs, labels, joint, 0)
    parts = [torch.empty(model.size) for _ in range(3)]
    for index, part in enumerate(parts):
        two = slice(2 * index, 2 * index + 2)
        loss, errors = model.gradient(inputs[two], labels[two], part, 0)
        assert losses[two].mean() == pytest.approx(loss, abs=1e-5)
        assert wrong[two].sum() == errors
    assert torch.allclose(joint, torch.stack(parts).mean(0), atol=1e-6)
