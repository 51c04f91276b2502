"""Models as chains of layers, and cuts of them."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from fuzzing import in_campaign
from torch import nn
from torch.nn import functional

from rudra.compute import networks
from rudra.compute.cuts import LayerChain, chain
from rudra.compute.flat import FlatModel
from rudra.data.trees import called
from rudra.errors import ConfigError


def pictures(*shape: int) -> torch.Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))


def characters(count: int) -> torch.Tensor:
    return torch.randint(0, 20, (4, count), generator=torch.Generator().manual_seed(3))


def made(factory: Callable[..., nn.Module], *shape: int, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    return factory(shape, 20 if factory is networks.lstm else 10, **options)


@cache
def resnet50() -> nn.Module:
    """Its initial weights take longer than all that a test does with it, so tests copy it."""
    return made(networks.resnet50, 3, 32, 32)


SHIPPED: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, list[str]]] = {
    "mlp": (lambda: made(networks.mlp, 12, hidden=[9, 7]), pictures(12), ["2", "3", "4", "5"]),
    "lenet": (lambda: made(networks.lenet, 1, 28, 28), pictures(1, 28, 28), ["1", "2", "4", "5", "6", "7"]),
    "lenet of small images": (lambda: made(networks.lenet, 1, 8, 8), pictures(1, 8, 8), ["2", "5", "7"]),
    "cifar10_full": (lambda: made(networks.cifar10_full, 3, 32, 32), pictures(3, 32, 32), ["2", "3", "4", "5", "12"]),
    "alexnet": (lambda: made(networks.alexnet, 3, 63, 63, width=50), pictures(3, 63, 63), ["1", "5", "12", "15", "18"]),
    "vgg16": (lambda: made(networks.vgg16, 3, 32, 32, width=8), pictures(3, 32, 32), ["1", "2", "3", "7", "44", "46"]),
    "resnet32": (
        lambda: made(networks.resnet32, 3, 32, 32, width=4),
        pictures(3, 32, 32),
        ["bn1", "relu", "layer1", "layer1.1", "layer2", "layer3.4", "avgpool", "fc"],
    ),
    "resnet50": (lambda: copy.deepcopy(resnet50()), pictures(3, 32, 32), ["maxpool", "layer2.1", "fc"]),
    "lstm": (lambda: made(networks.lstm, 7, hidden=11), characters(7), ["lstm", "fc"]),
}


class Functions(nn.Module):
    """A forward of its own, with functions between its layers, a block with a short cut, and a part inside a part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.block = Block(4)
        self.features = nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
        self.head = Head(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.relu(self.conv(x - 0.5)), 2)
        return functional.log_softmax(self.head(self.relu(self.features(self.block(x)))), 1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.two(functional.relu(self.one(x))) + x)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.hidden = nn.Linear(width, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x.mean((2, 3)) * self.scale)))


class Outside(nn.Module):
    """Functions in front of all layers and behind them, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.stack([x, y], dim=1)) * 2  # type: ignore[no-any-return]


class Staged(nn.Module):
    """Says what its layers are; torch.fx cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def stages(self) -> list[nn.Module]:
        return [self.one, nn.Sequential(nn.Tanh(), self.two), self.three]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            raise ValueError
        return self.three(self.two(torch.tanh(self.one(x))))  # type: ignore[no-any-return]


OWN: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, list[str]]] = {
    "torch.fx": (
        lambda: Functions(),
        pictures(3, 10, 10),
        ["relu", "block", "features", "features.1", "relu:2", "head", "head.out"],
    ),
    "a function beside a layer": (lambda: Twice(), pictures(4), ["two", "three"]),
    "stages": (lambda: Staged(), pictures(6), ["stages.1", "three"]),
}


def cases() -> list[Any]:
    """Every second place of shipped models in training, and the first one of each model as it is tested, too."""
    return [
        pytest.param(make, inputs, at, training, id=f"{name} at {at}{'' if training else ', tested'}")
        for name, (make, inputs, places) in {**SHIPPED, **OWN}.items()
        for at in (places if name in OWN or in_campaign() else places[::2])
        for training in ([True, False] if at == places[0] else [True])
    ]


@pytest.mark.each_value
@pytest.mark.parametrize(("make", "inputs", "at", "training"), cases())
def test_front_then_back_is_the_model(
    make: Callable[[], nn.Module], inputs: torch.Tensor, at: str, *, training: bool
) -> None:
    """Outputs, gradients and buffers, to the last bit, where only bytes go from one side to the other."""
    torch.manual_seed(7)
    whole = make().train(training)
    model = copy.deepcopy(whole)
    front, back = chain(model, inputs).cut(at)
    whole_output, draws = computed(whole, inputs)
    front.train(training)
    back.train(training)
    torch.set_rng_state(draws)
    sent = front(inputs)
    received = torch.empty(sent.shape).copy_(sent.detach()).requires_grad_()
    before = received.detach().clone()
    output = back(received)
    assert torch.equal(output, whole_output)
    assert torch.equal(received, before)
    output.square().sum().backward()
    sent.backward(torch.empty(sent.shape).copy_(received.grad))
    whole_output.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]
    for ours, theirs in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def computed(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the state that dropout has drawn from."""
    state = torch.get_rng_state()
    return model(inputs), state


@pytest.mark.parametrize(("make", "inputs", "places"), [*SHIPPED.values(), *OWN.values()], ids=[*SHIPPED, *OWN])
def test_parts_are_slices_of_the_flat_vector(
    make: Callable[[], nn.Module], inputs: torch.Tensor, places: list[str]
) -> None:
    for at in places:
        model = make()
        whole = FlatModel(copy.deepcopy(model))
        parts = [FlatModel(part) for part in chain(model, inputs).cut(at)]
        for kind in ("parameter", "buffer", "counter"):
            ours = [(e.name, e.shape) for part in parts for e in part.layout if e.kind == kind]
            assert ours == [(e.name, e.shape) for e in whole.layout if e.kind == kind]
        for part in parts:
            part.bind(torch.full((part.size,), 0.25))
        assert all(bool((p == 0.25).all()) for p in model.parameters())


@pytest.mark.parametrize(("make", "inputs", "places"), [*SHIPPED.values()], ids=list(SHIPPED))
def test_numbers_and_names_say_the_same(make: Callable[[], nn.Module], inputs: torch.Tensor, places: list[str]) -> None:
    found = chain(make(), inputs)
    for name in places:
        index = found.place(name)
        assert found.place(index) == index
        assert index in found.admissible()
        assert found.crossings[index - 1].shape == tuple(found.cut(index)[0].eval()(inputs).shape)


@pytest.mark.parametrize("inputs", [{"y": torch.arange(4.0), "x": torch.ones(4)}, (torch.ones(4), torch.arange(4.0))])
def test_several_inputs_go_to_the_front(inputs: Any) -> None:
    model = Outside()
    found = chain(model, inputs)
    assert found.names == ("layers.0", "layers.1", "layers.2", "layers.3")
    front, back = found.cut("layers.3")
    assert torch.equal(back(called(front, inputs)), called(model, inputs))


def test_names_are_those_of_the_model() -> None:
    found = chain(Functions(), pictures(3, 10, 10))
    assert found.names == (*("conv", "relu", "block", "features.0", "features.1", "relu:2", "head.hidden", "head.out"),)
    assert found.place("features") == 3
    assert found.place("head") == 6


class Twice(nn.Module):
    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(1, 1) if mode == "unused" else nn.Identity()
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x)
        if self.mode == "branch":
            first = functional.dropout(first, 0.5, self.training)
        if self.mode == "order":
            return self.two(self.three(first))  # type: ignore[no-any-return]
        if self.mode == "values" and first.sum() > 0:
            return first  # type: ignore[no-any-return]
        if self.mode == "crossing":
            return self.three(self.two(first)) + x  # type: ignore[no-any-return]
        if self.mode == "short cut":
            return self.unused(self.three(self.two(first)) + first)  # type: ignore[no-any-return]
        return self.three(self.two(first) + first)  # type: ignore[no-any-return]


class Lying(Staged):
    def stages(self) -> list[nn.Module]:
        return [self.one, self.two, self.three]


class Strange(Staged):
    def stages(self) -> list[Any]:
        return [self.one, torch.tanh, self.two]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def with_tuples() -> nn.Module:
    class First(nn.Module):
        def forward(self, both: tuple[torch.Tensor, Any]) -> torch.Tensor:
            return both[0]

    return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), First(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("make", "at", "text"),
    [
        (lambda: Twice("short cut"), "three", r"cut = 'three' is inside layer 'two', where more than one tensor cr"),
        (lambda: Twice("crossing"), "two", r"\[model\] Twice cannot be cut, as more than one tensor crosses everywhe"),
        (lambda: Twice("branch"), "two", r"\[model\] Twice .* as the `forward` of Twice depends on `training`; "),
        (lambda: Twice("values"), "two", r"\[model\] Twice cannot be cut, as torch.fx cannot trace Twice: .*; make it"),
        (lambda: Twice("order"), "three", r"\[placement\] cut = 'three': the model's parameters are not in the order "),
        (lambda: Twice("unused"), "three", r"cut = 'three': unused.weight belongs to no layer"),
        (lambda: nn.Linear(4, 4), 1, r"\[model\] Linear cannot be cut, as torch.nn.Linear is one layer; make it of "),
        (tied, "2", r"\[placement\] cut = '2': 0.weight is used on both sides \(tied weights\)"),
        (with_tuples, "2", r"\[placement\] cut = '2': more than one tensor crosses between '1' and '2'"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "3", r"cut = '3' is unknown; valid: 1, 2"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "0", r"cut = '0': nothing is in front of the first layer"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, r"cut = 2: the model has 2 layers; valid: 1 to 1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 0, r"cut = 0: the model has 2 layers; valid: 1 to 1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 1, r"cut = 1: the back would have no parameter to train"),
        (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), 1, r"cut = 1: the front would have no parameter to train"),
    ],
)
def test_refusals(make: Callable[[], nn.Module], at: str | int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        chain(make(), pictures(4)).cut(at)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Lying, r"\[model\] Lying: its stages in sequence do not compute its output"),
        (Strange, r"\[model\] Strange.stages\(\) has a builtin_function_or_method; valid: torch.nn.Modules"),
    ],
)
def test_stages_that_are_none(model: type[nn.Module], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        chain(model(), pictures(6))


def test_no_gradient_goes_to_whole_numbers() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Embedding(20, 3), nn.Flatten(), nn.Linear(21, 2))
    with pytest.raises(ConfigError, match=r"cut = 1: the tensor between '0' and '1' is torch.int64, which has no"):
        chain(model, characters(7)).cut(1)


def test_finding_a_chain_changes_nothing() -> None:
    model = made(networks.vgg16, 3, 32, 32, width=8)
    before = copy.deepcopy(model.state_dict())
    found: LayerChain = chain(model, pictures(3, 32, 32))
    assert model.training
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert [type(layer) for layer in found.layers] == [type(layer) for layer in model.children()]
