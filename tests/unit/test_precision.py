"""Forward, loss and backward in bfloat16 and float16; everything that lasts or travels is float32."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rudra.cli.main import main
from rudra.compute import networks, tasks
from rudra.compute.bank.fused import fused_gradients
from rudra.compute.checks import check_gradient
from rudra.compute.flat import FlatModel
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import TaskTable, TrainingTable

SIZE = 12


def mlp() -> nn.Module:
    """One of its layers is large enough for gradients in place."""
    return networks.mlp((20,), 10, hidden=[300, 300])


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 10))


def lenet() -> nn.Module:
    return networks.lenet((1, 28, 28), 10, channels=[4, 6], hidden=30)


def resnet() -> nn.Module:
    return networks.resnet32((3, 16, 16), 10, blocks=1, width=8)


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    mlp: (20,),
    normalised: (20,),
    lenet: (1, 28, 28),
    resnet: (3, 16, 16),
}
CLOSE = {"bfloat16": 0.15, "float16": 0.05}
"""Of a gradient's norm."""


def made(module: nn.Module, precision: str, **options: Any) -> tuple[FlatModel, torch.Tensor]:
    flat = FlatModel(copy.deepcopy(module), precision=precision, **options)
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    flat.bind(weights)
    return flat, weights


def drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, *shape, generator=generator), torch.randint(10, (SIZE,), generator=generator)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = make()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # half precision draws other masks
    return module


def near(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return bool((found - expected).norm() <= share * expected.norm())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", SHAPES)
def test_gradients_are_float32_and_near_those_in_float32(make: Callable[[], nn.Module], precision: str) -> None:
    module, batch = built(make), drawn(SHAPES[make])
    (whole, _), (mixed, weights) = made(module, "float32"), made(module, precision)
    before = weights.clone()
    expected, out, again = (torch.full((whole.size,), math.nan) for _ in range(3))
    loss, wrong = whole.gradient(*batch, expected, 5)
    found = mixed.gradient(*batch, out, 5)
    assert torch.equal(weights, before)
    assert found[0] == pytest.approx(loss, rel=0.02)
    assert abs(found[1] - wrong) <= 1
    parameters = slice(0, whole.parameter_count)
    assert near(out[parameters], expected[parameters], CLOSE[precision])
    assert not torch.equal(out[parameters], expected[parameters]), "it did compute in half precision"
    assert near(out[parameters.stop :], expected[parameters.stop :], 0.001)
    assert mixed.gradient(*batch, again, 5) == found
    assert torch.equal(out, again)
    tested, other = whole.evaluate_batch(*batch), mixed.evaluate_batch(*batch)
    assert other[0] == pytest.approx(tested[0], rel=0.02)
    assert other[2].keys() == tested[2].keys() == {"top5_error"}


def has_lstm_in_bfloat16() -> bool:
    """Whether this processor has one; older ones do not."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(2, 2)(torch.ones(2, 1, 2))
    except RuntimeError:
        return False
    return True


def test_characters_in_bfloat16() -> None:
    module = built(lambda: networks.lstm((7,), 10, hidden=16))
    inputs = torch.randint(10, (SIZE, 8), generator=torch.Generator().manual_seed(2))
    outs = []
    for precision in ("float32", "bfloat16"):
        flat, _ = made(module, precision, task=tasks.Language(10))
        outs.append(torch.empty(flat.size))
        if precision == "bfloat16" and not has_lstm_in_bfloat16():
            with pytest.raises(RuntimeError, match="LSTM"):
                flat.gradient(inputs[:, :-1], inputs[:, 1:], outs[-1], 0)
            return
        flat.gradient(inputs[:, :-1], inputs[:, 1:], outs[-1], 0)
    assert near(outs[1], outs[0], CLOSE["bfloat16"])


# The scale of a loss in float16.


def scaled_loss(factor: float) -> tasks.Task:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return factor * functional.cross_entropy(output, target)

    return tasks.make(TaskTable(name=loss), 10)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 300.0, 1e5])
def test_small_and_large_gradients_survive_float16(factor: float) -> None:
    module, batch = built(normalised), drawn((20,))
    (whole, _), (mixed, _) = (made(module, p, task=scaled_loss(factor)) for p in ("float32", "float16"))
    expected, out, after = (torch.empty(whole.size) for _ in range(3))
    whole.gradient(*batch, expected, 5)
    mixed.gradient(*batch, out, 5)
    parameters = slice(0, whole.parameter_count)
    assert near(out[parameters], expected[parameters], 0.05)
    # A try that went wrong leaves nothing behind: buffers are those after one mini-batch, and so is what comes next.
    assert near(out[parameters.stop :], expected[parameters.stop :], 0.001)
    mixed.gradient(*batch, after, 5)
    assert torch.equal(after, out)


def test_without_a_scale_small_gradients_are_lost() -> None:
    """What the test above would not show otherwise."""
    module, batch = built(normalised), drawn((20,))
    mixed, _ = made(module, "float16", task=scaled_loss(1e-6))
    mixed.scales = (1.0,)
    out = torch.empty(mixed.size)
    mixed.gradient(*batch, out, 5)
    assert out[: mixed.parameter_count].count_nonzero() < mixed.parameter_count / 2


def test_a_loss_that_is_no_number_ends_the_search() -> None:
    mixed, weights = made(built(normalised), "float16")
    weights[0] = math.nan
    out = torch.empty(mixed.size)
    assert math.isnan(mixed.gradient(*drawn((20,)), out, 5)[0])
    assert not out[: mixed.parameter_count].isfinite().all()


# Gradients of several learners together.


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_joint_gradient_is_near_that_in_float32(precision: str) -> None:
    module, batch = built(mlp), drawn((20,))
    outs, losses = [], []
    for each in ("float32", precision):
        flat, _ = made(module, each)
        outs.append(torch.empty(flat.size))
        losses.append(flat.joint_gradient(*batch, outs[-1], 0)[0])
    assert near(outs[1], outs[0], CLOSE[precision])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_fused_gradients_in_bfloat16_are_near_those_in_float32() -> None:
    module, (inputs, target) = built(lenet), drawn((1, 28, 28))
    flat, _ = made(module, "float32")
    halves = [slice(0, SIZE // 2), slice(SIZE // 2, SIZE)]
    single, together = torch.empty(2, flat.size), torch.empty(2, flat.size)
    loss = [flat.gradient(inputs[half], target[half], single[i], 0)[0] for i, half in enumerate(halves)]
    batches = (torch.stack([inputs[half] for half in halves]), torch.stack([target[half] for half in halves]))
    flat, weights = made(module, "bfloat16")
    found, _ = zip(*fused_gradients(flat, [weights], *batches, list(together), [0, 0]), strict=True)
    assert found == pytest.approx(loss, rel=0.01)
    assert near(together, single, 0.02)


# What torch cannot do.


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if output.dtype != torch.float32:
            raise RuntimeError('"special" not implemented\nfor such numbers. Set DEBUG=1')
        return output


def test_a_model_without_kernels_is_one_line() -> None:
    sample = drawn((20,))[0][:1], torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        check_gradient(TrainingTable(precision="float16"), FlatModel(Picky(), precision="float16"), sample, single=None)
    why = '"special" not implemented for such numbers'
    where = "[training] precision = 'float16'"
    assert str(caught.value) == f"{where}: torch does not support it for this model on this cpu ({why}); valid: float32"
    check_gradient(
        TrainingTable(precision="bfloat16"), FlatModel(built(normalised), precision="bfloat16"), sample, single=None
    )


def test_one_sample_in_a_minibatch_is_refused_where_a_model_needs_two() -> None:
    sample = drawn((20,))[0][:1], torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        check_gradient(
            TrainingTable(), FlatModel(built(normalised)), sample, single=("[training] minibatch_size = 1", "2 or more")
        )
    assert str(caught.value).startswith(
        "[training] minibatch_size = 1: torch cannot compute this model on one sample (Exp"
    )
    assert str(caught.value).endswith("; valid: 2 or more")
    check_gradient(TrainingTable(), FlatModel(built(normalised)), sample, single=None)


def test_a_job_learns_that_before_it_begins(tmp_path: Any) -> None:
    import rudra

    def data() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
        samples = torch.utils.data.TensorDataset(*drawn((20,)))
        return samples, samples

    job = Job(
        model={"name": Picky}, data={"name": data, "classes": 10}, training={"precision": "bfloat16"},
        cluster={"learners": 1},
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"precision = 'bfloat16': torch does not support it for this model on this cpu"
    ):
        rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet")
    assert not (tmp_path / "run.h5").exists()


def test_a_job_of_characters_trains_in_bfloat16_or_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question. " * 50)
    (tmp_path / "job.toml").write_text(
        f'[model]\nname = "lstm"\noptions.hidden = 8\n[data]\nname = "text"\npath = "{tmp_path / "text.txt"}"\n'
        '[task]\nname = "language"\n[training]\nprecision = "bfloat16"\n[cluster]\nlearners = 1\n'
    )
    code, said = main(["validate", str(tmp_path / "job.toml")]), capsys.readouterr().err
    if has_lstm_in_bfloat16():
        assert (code, said) == (0, "")
    else:
        assert code == 2
        unsupported = r"torch does not support it for this model on this cpu \([^.]*LSTM[^.]*\)"
        refused = rf"rudra: \[training\] precision = 'bfloat16': {unsupported}"
        assert re.fullmatch(rf"{refused}; valid: float32\n", said)
