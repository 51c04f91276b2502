import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rudra.compute.models import build, check_model_output
from rudra.compute.tasks import Classification
from rudra.data.load import DataInfo
from rudra.errors import ConfigError
from rudra.job.tables import ModelTable


def info(*input_shape: int, classes: int = 10) -> DataInfo:
    return DataInfo("pictures", 100, 10, input_shape, classes)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("table", "data", "count"),
    [
        ({"name": "mlp"}, info(1, 8, 8), 64 * 128 + 128 + 1290),
        ({"name": "mlp", "options": {"hidden": [9, 7]}}, info(12, classes=3), 12 * 9 + 9 + 9 * 7 + 7 + 7 * 3 + 3),
        ({"name": "lenet"}, info(1, 28, 28), 431_080),
        ({"name": "lenet"}, info(3, 32, 32), 520 * 3 - 40 + 25_050 + 1250 * 500 + 500 + 5010),
        ({"name": "lenet"}, info(1, 8, 8), 200 + 9050 + 800 * 500 + 500 + 5010),
        (
            {"name": "lenet", "options": {"channels": [4, 6], "hidden": 20}},
            info(1, 8, 8),
            40 + 222 + 96 * 20 + 20 + 210,
        ),
        ({"name": "cifar10_full"}, info(3, 32, 32), 89_578),
    ],
)
def test_sizes_and_fit(table: dict[str, Any], data: DataInfo, count: int) -> None:
    model = build(ModelTable(**table), data, 0)
    check_model_output(model, Classification(data.classes), data)
    assert parameters(model) == count
    assert model.training


def test_weights_are_a_function_of_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = build(ModelTable(name="lenet"), info(1, 8, 8), seed)
        return nn.utils.parameters_to_vector(model.parameters())

    state = torch.get_rng_state()
    first = weights(2**63 - 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(weights(2**63 - 1), first)
    assert not torch.equal(weights(2), first)


def test_a_factory_may_draw_from_any_generator() -> None:
    def projection() -> nn.Module:
        """Random features that are not trained."""
        model = nn.Linear(4, 3, bias=False)
        drawn = np.random.rand(3, 3) + random.random()
        model.weight.data = torch.tensor(np.c_[drawn, np.zeros(3)], dtype=torch.float32)
        return model

    def weights(seed: int) -> torch.Tensor:
        return build(ModelTable(name=projection), info(4), seed).get_parameter("weight").detach()

    states = random.getstate(), str(np.random.get_state())
    first = weights(1)
    assert states == (random.getstate(), str(np.random.get_state()))
    random.random()
    np.random.rand()
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def own(classes: int, depth: int = 1) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(depth)], nn.Linear(64, classes))


class Small(nn.Module):
    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_users_factories_get_what_their_signature_names() -> None:
    assert parameters(build(ModelTable(name=own, options={"depth": 2}), info(1, 8, 8), 0)) == 2 * 65 * 64 + 650
    assert isinstance(build(ModelTable(name=Small), info(4), 0), Small)
    assert isinstance(build(ModelTable(name="torch.nn:Identity"), info(4), 0), nn.Identity)


def lazy(first: int = 3) -> nn.Module:
    layers = [nn.Conv2d(1, first, 3), nn.LazyBatchNorm2d(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(10)]
    return nn.Sequential(*layers)


def test_lazy_layers_get_shapes_and_the_weights_of_the_seed() -> None:
    one, again, other = (build(ModelTable(name=lazy), info(1, 8, 8), seed) for seed in (0, 0, 1))
    assert parameters(one) == 3 * 10 + 2 * 3 + (3 * 36 + 1) * 10
    assert all(map(torch.equal, one.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(one.get_parameter("4.weight"), other.get_parameter("4.weight"))
    assert one.training
    assert (one.get_buffer("1.running_mean").tolist(), one.get_buffer("1.num_batches_tracked").item()) == ([0] * 3, 0)
    with pytest.raises(ConfigError, match=r"\[model\] does not take inputs of shape \(2, 8, 8\) as pictures has: "):
        build(ModelTable(name=lazy), info(2, 8, 8), 0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "lenett"}, "'lenett' is unknown; valid: mlp, lenet, cifar10_full, alexnet, .*, lstm, package"),
        ({"name": "mlp", "options": {"width": 3}}, "mlp: got an unexpected .* 'width'; its parameters: input_shape, "),
        ({"name": "mlp", "options": {"hiden": 3}}, "mlp: got an unexpected .* 'hiden'; .*; did you mean hidden[?]"),
        ({"name": "mlp", "options": {"hidden": [0, -1]}}, r"mlp cannot be made with these options \(hidden\): "),
        ({"name": "math:pi"}, "math:pi is a float and cannot be called"),
        ({"name": dict}, "dict gave a dict, not a torch.nn.Module"),
        ({"name": "lenet"}, r"lenet takes images .* not inputs of shape \(7,\)"),
        ({"name": "alexnet"}, "alexnet takes images .* 63x63"),
    ],
)
def test_mistakes_in_the_model_table(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelTable(**table), info(7), 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(4, 9), "has 9 outputs, and pictures has 10 classes"),
        (lambda: nn.Linear(5, 10), r"does not take inputs of shape \(4,\) as pictures has: .*shapes cannot be mult"),
        (lambda: nn.Sequential(nn.Linear(4, 10), nn.Flatten(0)), r"gives shape \(10,\) .* needs \(1, 10\)"),
        (lambda: nn.LSTM(4, 10), "gives a tuple, not a tensor"),
    ],
)
def test_outputs_that_do_not_fit(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check_model_output(model(), Classification(10), info(4))
    assert "\n" not in str(raised.value)


class Remembering(nn.Module):
    """Changes buffers in evaluation, too: in place, and by making them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10, momentum=None))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("sum").add_(x.sum(0))
        self.calls = self.calls + 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_model_that_changes_its_own_weights_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Embedding(9, 10, max_norm=0.1), nn.Flatten(), nn.Linear(40, 10))
    example = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    data = DataInfo("tokens", 100, 10, (4,), 10, example)
    with pytest.raises(ConfigError, match=r"\[model\] changes 1.weight in `forward`, as an Embedding with max_norm"):
        check_model_output(model, Classification(10), data)


def test_check_output_leaves_no_trace() -> None:
    model = Remembering()
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    check_model_output(model, Classification(10), info(4))
    assert model.training
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name]), name
