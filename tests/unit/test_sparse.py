"""Inputs that stay sparse: mini-batches in compressed rows, and the layer that takes them, against dense ones."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rudra
from rudra.cli.main import main
from rudra.compute import models, tasks
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import not_finite
from rudra.compute.sparse import SparseLinear
from rudra.data.load import load
from rudra.data.sparse import finite_rows, is_sparse, joined, split
from rudra.job.tables import DataTable, ModelTable
from tests.unit.real_data import REAL, needs_real_data
from tests.unit.sparse_samples import WIDTH, Twice, compressed, job, matrix, write_samples


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_samples(tmp_path)


def table(file: Path, sparse: Any = True, **more: Any) -> DataTable:
    name = {".svm": "libsvm", ".arff": "arff"}[file.suffix]
    return DataTable(name=name, path=file, test_split=0.25, sparse=sparse, **more)


@pytest.mark.parametrize("suffix", [".svm", ".arff"])
@pytest.mark.parametrize("more", [{}, {"scale": 0.5, "validation_split": 0.2, "train_limit": 20}])
def test_mini_batches_hold_what_dense_ones_do(file: Path, suffix: str, more: dict[str, Any]) -> None:
    sparse, dense = (load(table(file.with_suffix(suffix), on, **more)) for on in (True, False))
    for one, other in ((sparse.training, dense.training), (sparse.test, dense.test)):
        which = np.array([3, 0, 3, 7])
        (x, y), (dense_x, dense_y) = one.batch(which), other.batch(which)
        assert is_sparse(x)
        assert x.col_indices().dtype == torch.int32
        assert torch.equal(x.to_dense(), dense_x)
        assert torch.equal(y, dense_y)
    told = load(table(file.with_suffix(suffix), **more), train=False, test=False).info
    assert told.sparse
    assert told == sparse.info
    assert is_sparse(told.sample[0])
    assert told.sample[0].shape == (1, WIDTH)


def test_auto_is_for_what_is_stored_in_a_tenth(file: Path) -> None:
    assert load(table(file, "auto")).info.sparse  # of 40 features, 3
    assert not load(table(file, "auto", standardise=True)).info.sparse
    assert not load(table(file, False)).info.sparse
    file.write_text("1 1:1 3:1\n0 2:1\n1 3:1\n0 1:1\n")
    assert not load(table(file, "auto")).info.sparse
    assert not load(DataTable(sparse="auto")).info.sparse


def dense_network(input_shape: tuple[int], classes: int, **options: Any) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(input_shape), nn.Linear(input_shape[0], classes))


def own_data(path: Path) -> tuple[TensorDataset, TensorDataset]:
    dense = TensorDataset(torch.from_numpy(matrix(8)), torch.arange(8) % 2)
    return dense, dense


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"name": "digits"}}, "[data] sparse = true: the inputs of digits are dense; valid: false, 'auto'"),
        ({"data": {"name": own_data}}, "[data] sparse = true: your own dataset makes its"),
        ({"data": {"standardise": True}}, "[data] standardise = true changes zeros to other numbers; valid: false, or"),
        ({"data": {"subtract_mean": True}}, "[data] subtract_mean: the inputs of libsvm are sparse; valid: false"),
        ({"augment": {"crop": 2}}, "[augment] crop, flip: for images (channels, height, width), not inputs (40,)"),
        (
            {"training": {"compile": True}},
            "[training] compile = true: steps on sparse inputs cannot be compiled; valid",
        ),
        ({"model": {"name": dense_network}}, "[data] sparse = true: [model] does not take sparse inputs ("),
        ({"simulation": {"batching": "vmap"}}, "[simulation] batching = 'vmap': the inputs are sparse; valid for"),
    ],
)
def test_what_sparse_inputs_cannot_do_is_one_line(tables: dict[str, Any], message: str, file: Path) -> None:
    with pytest.raises(rudra.RudraError) as error:
        rudra.simulate(job(file, True).with_(**tables), output=file.with_suffix(".h5"), progress="quiet")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_sparse_is_true_false_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "digits", "--set", 'data.sparse="csr"']) == 2
    assert "[data] sparse must be true, 'auto' or false, not 'csr'" in capsys.readouterr().err


def test_rows_are_split_joined_and_looked_through() -> None:
    dense = matrix(12)
    x = compressed(dense)
    pieces = split(x, 4)
    assert [len(piece) for piece in pieces] == [4, 4, 4]
    assert torch.equal(torch.cat([piece.to_dense() for piece in pieces]), torch.from_numpy(dense))
    assert torch.equal(joined(split(x, 1)).to_dense(), x.to_dense())
    dense[3, dense[3] != 0] = np.nan
    assert (~finite_rows(compressed(dense))).tolist() == np.isnan(dense).any(1).tolist()
    assert not_finite(compressed(dense)).sum() == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_the_layer_equals_torchs_on_dense_inputs(count: int, density: float, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, 6, bias)
    torch.manual_seed(0)
    layer = SparseLinear(WIDTH, 6, bias)
    dense = torch.from_numpy(matrix(count, density=density))
    outputs = [plain(dense), layer(compressed(dense.numpy())), layer(dense)]
    factors = torch.randn(count, 6)
    gradients = [
        torch.autograd.grad((output * factors).sum(), list(m.parameters()))
        for output, m in zip(outputs, (plain, layer, layer), strict=True)
    ]
    assert gradients[1][0].layout is torch.sparse_coo  # as of an nn.Embedding with sparse gradients
    for output, (weight, *rest) in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(weight.to_dense(), gradients[0][0].t(), rtol=0, atol=2e-6)
        assert all(torch.equal(*pair) for pair in zip(rest, gradients[0][1:], strict=True))


def test_a_width_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="SparseLinear has 39 features, and its inputs have 40"):
        SparseLinear(39, 2)(compressed(matrix(2)))


def mlp(sparse: bool) -> nn.Module:
    info = load(DataTable()).info
    options = {"hidden": [8], "activation": "tanh", "input_shape": (WIDTH,), "sparse": sparse}
    return models.build(ModelTable(name="mlp", options=options), info, 0)


@pytest.mark.parametrize("make", [Twice, functools.partial(mlp, True)])
def test_the_flat_gradient_is_that_of_autograd(make: Any) -> None:
    module, x, y = make(), compressed(matrix(9)), torch.arange(9) % 2
    loss = functional.cross_entropy(module(x), y)
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
    wanted = [each.to_dense() for each in found]
    flat = FlatModel(module, tasks.Classification(2))
    weights, out = torch.zeros(flat.size), torch.full((flat.size,), torch.nan)
    flat.read_into(weights)
    flat.bind(weights)
    flat.gradient(x, y, out, 0)
    torch.testing.assert_close(out, torch.cat([each.flatten() for each in wanted]), rtol=1e-6, atol=1e-7)


def test_mlp_begins_alike_and_names_its_layers_alike() -> None:
    dense, sparse = (mlp(on).state_dict() for on in (False, True))
    assert list(dense) == list(sparse)
    assert all(torch.equal(dense[n], sparse[n].t() if n == "1.weight" else sparse[n]) for n in dense)


def check_alike(dense: rudra.Job, sparse: rudra.Job, directory: Path) -> None:
    """That both end with the same weights, to 1e-6."""
    states = []
    for name, each in (("dense", dense), ("sparse", sparse)):
        with rudra.simulate(each, output=directory / f"{name}.h5", progress="quiet") as results:
            states.append(results.state_dict())
    one, other = states
    other["1.weight"] = other["1.weight"].t()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "tables",
    [
        {"cluster": {"learners": 3}},
        {"cluster": {"learners": 3}, "protocol": {"name": "hardsync"}, "simulation": {"batching": "big-batch"}},
        {"cluster": {"learners": 3}, "topology": {"name": "sharded", "options": {"shards": 2}}},
        {
            "cluster": {"learners": 2},
            "protocol": {"name": "hardsync"},
            "placement": {"cut": "3", "rule": "synchronous"},
        },
        {"optimizer": {"name": "adam", "learning_rate": 1e-3}},
    ],
)
def test_sparse_equals_dense_on_few_samples(tables: dict[str, Any], file: Path, tmp_path: Path) -> None:
    check_alike(*(job(file, sparse, **{k: dict(v) for k, v in tables.items()}) for sparse in (False, True)), tmp_path)


@pytest.mark.campaign
@pytest.mark.slow
@needs_real_data
@pytest.mark.parametrize(
    ("path", "data"), [("w8a.xz", {"test_split": 0.2}), ("reuters.trn.bz2", {"options": {"test": "reuters.tst.bz2"}})]
)
def test_sparse_equals_dense_on_real_data(path: str, data: dict[str, Any], tmp_path: Path) -> None:
    file = REAL / "libsvm" / path
    assert load(DataTable(name="libsvm", path=file, sparse="auto", **data), train=False, test=False).info.sparse
    check_alike(job(file, False, 64, data=data), job(file, True, 64, data=data), tmp_path)
