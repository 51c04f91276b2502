"""The networks that Rudra ships, against the published sizes, independent formulas and plain torch."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rudra.compute.flat import FlatModel
from rudra.compute.models import build
from rudra.compute.networks import MODELS, _Basic, _LocalNorm
from rudra.data.load import DataInfo
from rudra.errors import ConfigError
from rudra.job.tables import ModelTable


def make(name: str, *input_shape: int, classes: int = 10, **options: Any) -> nn.Module:
    """One of the networks as a job gets it, with the weights of seed 0."""
    return build(ModelTable(name=name, options=options), DataInfo("data", 1, 1, input_shape, classes), 0)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def inputs(count: int, *shape: int) -> torch.Tensor:
    """Noise; pictures of 4x4 blocks of it, as a network sees little but the mean of finer ones."""
    generator = torch.Generator().manual_seed(1)
    if len(shape) < 3:
        return torch.randn(count, *shape, generator=generator)
    return functional.interpolate(torch.randn(count, shape[0], 4, 4, generator=generator), size=shape[1:])


def characters(*shape: int) -> torch.Tensor:
    return torch.randint(0, 65, shape, generator=torch.Generator().manual_seed(1))


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, rate: float, steps: int, momentum: float = 0
) -> list[float]:
    """Losses before each of the steps of SGD on one batch, and after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    losses = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mlp", (7,), {"activation": "gelu"}, r"\[model\] mlp has no activation 'gelu'; valid: relu, sigmoid, tanh"),
        ("mlp", (7,), {"activation": []}, r"\[model\] mlp cannot be made with these options \(activation\): "),
        (
            "mlp",
            (7,),
            {"initialisation": "he"},
            r"\[model\] mlp has no initialisation 'he'; valid: auto, fan-in, hogbatch",
        ),
        (
            "mlp",
            (7,),
            {"activation": "sigmoid", "biases": False},
            r"\[model\] mlp: Xavier's sigmoids need biases; valid: initialisation fan-in or hogbatch",
        ),
        ("vgg16", (3, 7, 8), {}, r"\[model\] vgg16 takes images .* of 8x8 or more, not inputs of shape \(3, 7, 8\)"),
        ("vgg16", (3, 8, 8), {"width": 0}, r"\[model\] vgg16 cannot be made with these options \(width\): "),
        ("resnet32", (3, 8, 7), {}, r"\[model\] resnet32 takes images .* of 8x8 or more"),
        ("resnet32", (3, 8, 8), {"blocks": 0}, r"\[model\] resnet32 needs blocks of 1 or more, not 0"),
        ("resnet50", (3, 31, 32), {}, r"\[model\] resnet50 takes images .* of 32x32 or more"),
        ("lstm", (1, 8, 8), {}, r"\[model\] lstm takes sequences of shape \(T,\), not inputs of shape \(1, 8, 8\)"),
        ("lstm", (9,), {"layers": 0}, r"\[model\] lstm cannot be made with these options \(layers\): "),
    ],
)
def test_mistakes_are_one_line(name: str, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        make(name, *shape, **options)
    assert "\n" not in str(raised.value)


def test_a_job_can_name_every_network_and_its_description_lists_them() -> None:
    described = ModelTable.model_fields["name"].description or ""
    assert described.startswith(f"shipped network ({', '.join(MODELS)}), or package.module:callable")


HOGBATCH = {"hidden": [512] * 6, "activation": "sigmoid", "biases": False, "initialisation": "hogbatch"}


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlp", (54,), 2, HOGBATCH, 54 * 512 + 5 * 512**2 + 512 * 2),
        ("mlp", (500,), 983, HOGBATCH, 2_070_016),
        ("mlp", (54,), 2, HOGBATCH | {"biases": True}, 54 * 512 + 5 * 512**2 + 512 * 2 + 6 * 512 + 2),
        ("lenet", (1, 28, 28), 10, {"channels": [32, 64], "hidden": 1024}, 1_111_946),  # 4.24 MiB, CROSSBOW's Table 1
        ("vgg16", (3, 32, 32), 100, {}, 15_038_116),  # 57.37 MiB, likewise
        ("vgg16", (3, 32, 32), 10, {"batch_norm": False}, 14_714_688 + 512 * 513 + 5130),
        ("resnet32", (3, 32, 32), 10, {}, 464_154),
        ("resnet32", (3, 32, 32), 10, {"blocks": 3}, 269_722),
        ("resnet32", (3, 32, 32), 10, {"blocks": 9}, 853_018),
        ("resnet50", (3, 224, 224), 1000, {}, 25_557_032),  # 97.49 MiB, likewise
        ("lstm", (50,), 65, {}, 65 * 128 + 2 * (2 * 512 * 128 + 2 * 512) + 129 * 65),
        ("lstm", (50,), 65, {"hidden": 7, "layers": 1}, 65 * 7 + 2 * 28 * 7 + 2 * 28 + 8 * 65),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], count: int
) -> None:
    with torch.device("meta"):
        model = make(name, *shape, classes=classes, **options)
    assert parameters(model) == count


@pytest.mark.parametrize(
    ("name", "shape", "options", "rate"),
    [
        ("mlp", (1, 8, 8), {}, 0.1),
        ("mlp", (54,), {"hidden": [32] * 6, "activation": "sigmoid"}, 0.3),
        ("mlp", (54,), {"hidden": [32] * 6, "activation": "tanh"}, 0.1),
        ("lenet", (1, 8, 8), {}, 0.05),
        ("vgg16", (3, 32, 32), {"width": 8, "dropout": 0}, 0.001),
        ("vgg16", (3, 32, 32), {"width": 16, "dropout": 0, "batch_norm": False}, 0.3),
        ("vgg16", (2, 33, 65), {"width": 4, "dropout": 0}, 0.001),
        ("resnet32", (1, 8, 8), {}, 0.05),
        ("resnet32", (3, 32, 32), {"blocks": 1}, 0.05),
        ("resnet32", (5, 9, 11), {"blocks": 2, "width": 4}, 0.05),
        ("resnet50", (1, 32, 32), {}, 0.01),
    ],
)
@pytest.mark.slow
def test_networks_start_near_chance_and_learn_one_batch(
    name: str, shape: tuple[int, ...], options: dict[str, Any], rate: float
) -> None:
    model = make(name, *shape, **options)
    first, *_, last = train(model, inputs(10, *shape), torch.arange(10), rate, 5)
    assert first == pytest.approx(math.log(10), abs=0.8)
    assert last < 0.98 * first


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vgg16", (1, 8, 8)), ("vgg16", (1, 28, 28)), ("resnet32", (1, 8, 8)), ("resnet50", (4, 32, 47)), ("mlp", (3, 5))],
)
def test_networks_fit_any_size_down_to_their_least(name: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        assert make(name, *shape, classes=7)(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_network_of_sigmoids_begins_as_the_one_of_tanh(depth: int) -> None:
    sigmoid, tanh = (make("mlp", 20, hidden=[30] * depth, activation=name) for name in ("sigmoid", "tanh"))
    torch.testing.assert_close(sigmoid(inputs(9, 20)), tanh(inputs(9, 20)))


def test_hogbatchs_network_is_a_chain_of_products_and_sigmoids() -> None:
    """Ma & Rusu, Eqs. 1 to 3, in plain torch: outputs, and a step of SGD with the mean gradient of a batch."""
    model = make("mlp", 30, classes=2, **HOGBATCH | {"hidden": [24] * 3})
    matrices = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert [m.shape for m in matrices] == [(24, 30), (24, 24), (24, 24), (2, 24)]
    x, y = inputs(16, 30), torch.arange(16) % 2

    def output() -> torch.Tensor:
        state = x
        for matrix in matrices[:-1]:
            state = 1 / (1 + torch.exp(-(state @ matrix.T)))
        return state @ matrices[-1].T

    torch.testing.assert_close(model(x), output())
    probabilities = torch.softmax(output(), 1)
    gradients = torch.autograd.grad(-probabilities[torch.arange(16), y].log().mean(), matrices)
    train(model, x, y, rate=0.5, steps=0)
    for parameter, matrix, gradient in zip(model.parameters(), matrices, gradients, strict=True):
        torch.testing.assert_close(parameter, matrix - 0.5 * gradient)


@pytest.mark.parametrize(
    ("initialisation", "deviations"),
    [
        ("fan-in", [54**-0.5, 512**-0.5, 512**-0.5]),
        ("hogbatch", [(48 / 566) ** 0.5, (48 / 1024) ** 0.5, (48 / 514) ** 0.5]),  # d = ⌊√566⌋ + 1 = 24
    ],
)
@pytest.mark.parametrize("biases", [False, True])
def test_normal_initialisations_have_their_deviations(
    initialisation: str, deviations: list[float], biases: bool
) -> None:
    options = {"hidden": [512] * 2, "activation": "sigmoid", "biases": biases, "initialisation": initialisation}
    model = make("mlp", 54, classes=2, **options)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer, deviation in zip(layers, deviations, strict=True):
        assert layer.weight.std().item() == pytest.approx(deviation, rel=4 / (2 * layer.weight.numel()) ** 0.5)
        assert abs(layer.weight.mean().item()) < 4 * deviation / layer.weight.numel() ** 0.5
        assert (layer.bias is not None) == biases
        assert not biases or not layer.bias.any()


def test_signals_keep_their_size_through_hogbatchs_layers() -> None:
    """Unlike with "fan-in", behind whose eight sigmoids samples differ by less than a thousandth of a logit."""
    spread = {}
    for initialisation in ("fan-in", "hogbatch"):
        options = HOGBATCH | {"hidden": [512] * 8, "initialisation": initialisation}
        spread[initialisation] = make("mlp", 300, classes=2, **options)(inputs(64, 300)).std(0).mean().item()
    assert spread["fan-in"] < 1e-3
    assert spread["hogbatch"] > 0.1


@pytest.mark.parametrize(("name", "options"), [("vgg16", {"width": 4}), ("resnet32", {"blocks": 1})])
def test_training_moves_the_statistics_of_every_batch_norm_and_evaluation_none(name: str, options: Any) -> None:
    model = make(name, 3, 16, 16, **options)

    def statistics() -> list[torch.Tensor]:
        return [b.clone() for n, b in model.named_buffers() if "running" in n]

    start = statistics()
    model(inputs(6, 3, 16, 16))
    trained = statistics()
    model.eval()(inputs(6, 3, 16, 16))
    assert not any(torch.equal(a, b) for a, b in zip(start, trained, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trained, statistics(), strict=True))


def test_vgg16_drops_out_as_crossbows() -> None:
    for dropout, expected in [(0.5, [0.3, *[0.4] * 7, 0.5, 0.5]), (0.25, [0.15, *[0.2] * 7, 0.25, 0.25])]:
        with torch.device("meta"):
            model = make("vgg16", 3, 32, 32, dropout=dropout)
        assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == pytest.approx(expected)


def test_the_shortcut_of_resnet32_has_no_parameters() -> None:
    """Where the convolutions give nothing, every other pixel is left, and zeros in the new channels."""
    block = _Basic(3, 5, 2)
    nn.init.zeros_(block.bn2.weight)
    x = inputs(4, 3, 7, 10)
    output = block(x)
    assert torch.equal(output[:, :3], x[:, :, ::2, ::2].relu())
    assert not output[:, 3:].any()
    assert {n.partition(".")[0] for n, _ in block.named_parameters()} == {"conv1", "bn1", "conv2", "bn2"}


def torchvisions_resnet50() -> dict[str, tuple[int, ...]]:
    """Names and shapes of its state, by the rule that torchvision makes them by."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(convolution: str, norm: str, *shape: int) -> None:
        shapes[f"{convolution}.weight"] = shape
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{name}"] = shape[:1]
        shapes[f"{norm}.num_batches_tracked"] = ()

    layer("conv1", "bn1", 64, 3, 7, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for index in range(blocks):
            block = f"layer{stage}.{index}."
            layer(f"{block}conv1", f"{block}bn1", width, inputs, 1, 1)
            layer(f"{block}conv2", f"{block}bn2", width, width, 3, 3)
            layer(f"{block}conv3", f"{block}bn3", 4 * width, width, 1, 1)
            if index == 0:
                layer(f"{block}downsample.0", f"{block}downsample.1", 4 * width, inputs, 1, 1)
            inputs = 4 * width
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def test_resnet50_takes_torchvisions_weights() -> None:
    with torch.device("meta"):
        model = make("resnet50", 3, 224, 224, classes=1000)
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == torchvisions_resnet50()
    strided = [name for name, layer in model.named_modules() if getattr(layer, "stride", None) == (2, 2)]
    shrinking = [f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv2", "downsample.0")]
    assert strided == ["conv1", *shrinking]  # v1 has them in conv1 of a block


def test_lstm_predicts_each_character_from_those_before_it() -> None:
    model = make("lstm", 12, classes=65)
    x = characters(4, 12)
    output = model(x)
    assert output.shape == (4, 12, 65)
    assert torch.equal(model(x), output)  # nothing is kept from one batch to the next
    changed = x.clone()
    changed[:, 7] = (x[:, 7] + 1) % 65
    differs = (model(changed) != output).any(2)
    assert not differs[:, :7].any()
    assert differs[:, 7:].all()
    for length in (1, 12, 30):
        assert model(characters(2, length)).shape == (2, length, 65)
    first, *_, last = train(model, x, x.roll(-1, 1), 1.0, 3)
    assert first == pytest.approx(math.log(65), abs=0.2)
    assert last < 0.98 * first


def test_lstm_in_a_flat_vector_computes_as_a_plain_one() -> None:
    """Its weights move to another vector each time that the model is bound, as a learner's do."""
    plain = make("lstm", 12, classes=65, hidden=24)
    flat = FlatModel(copy.deepcopy(plain))
    x, y = characters(4, 12), characters(4, 12).roll(-1, 1)
    vectors = [torch.empty(flat.size) for _ in range(2)]
    for step in range(4):
        vector = vectors[step % 2]
        torch.cat([p.detach().flatten() for p in plain.parameters()], out=vector)
        flat.bind(vector)
        losses = []
        for module in (plain, flat.module):
            module.zero_grad()
            losses.append(functional.cross_entropy(module(x).flatten(0, 1), y.flatten()))
            losses[-1].backward()
        assert torch.equal(*losses)
        for ours, theirs in zip(flat.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
            assert theirs.grad.any()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= parameter.grad


def test_alexnet_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = make("alexnet", 3, 224, 224, classes=1000)
        output = model(torch.zeros(2, 3, 256, 256))
    assert parameters(model) == 72_221_944
    assert round(parameters(model) * 4 / 1e6) == 289
    assert tuple(output.shape) == (2, 1000)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.5, 0.5]


def test_cifar10_full_starts_as_caffe_does() -> None:
    model = make("cifar10_full", 3, 32, 32)
    deviations = [float(p.detach().std()) for p in model.parameters() if p.dim() > 1]
    np.testing.assert_allclose(deviations, [1e-4, 1e-2, 1e-2, 1e-2], rtol=0.05)
    assert not any(p.detach().any() for p in model.parameters() if p.dim() == 1)


def test_cifar10_full_can_start_learning() -> None:
    """Its tiny first weights give no signal unless inputs are in the range 0…255."""
    model = make("cifar10_full", 3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(-128, 128, (8, 3, 4, 4), generator=generator).float()
    losses = train(model, functional.interpolate(blocks, size=(32, 32)), torch.arange(8), 0.001, 39, momentum=0.9)
    assert losses[0] == pytest.approx(math.log(10), abs=0.01)
    assert losses[-1] < 1.5


def test_local_norm_is_caffes_formula() -> None:
    x = torch.randn(2, 3, 6, 6) * 100
    mean = functional.avg_pool2d(x * x, 3, stride=1, padding=1)
    torch.testing.assert_close(_LocalNorm()(x), x / (1 + 5e-5 * mean) ** 0.75)
