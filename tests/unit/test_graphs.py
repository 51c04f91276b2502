"""Passes that a device repeats from a record. The device of these tests records torch's operations on the CPU."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import rudra
from rudra.compute import networks
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.faults import set_deterministic
from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.streams import known
from rudra.compute.flat import FlatModel
from rudra.compute.graphs import KEPT, WARM
from rudra.compute.tasks import Language
from rudra.errors import ConfigError
from rudra.job.job import Job


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> AdverseDevice:
    found = AdverseDevice(1)
    monkeypatch.setitem(DEVICES, "cpu", found)
    return found


def normal(*_: Any) -> nn.Module:
    """A network with statistics, a counter and random numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(144, 10)
    )


class Waits(nn.Module):
    """A network whose code depends on a number."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs.flatten(1))
        return out * 2 if out.sum() > 0 else out


class Case(NamedTuple):
    """A network, the shape of a sample, and arguments of its `FlatModel`."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    how: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "statistics, counter, dropout": Case(normal, (1, 8, 8)),
    "lenet": Case(lambda: networks.lenet((1, 28, 28), 10), (1, 28, 28)),
    "resnet": Case(lambda: networks.resnet32((3, 8, 8), 10, blocks=1), (3, 8, 8)),
    "lstm": Case(lambda: networks.lstm((5,), 10, hidden=8), (5,), {"task": Language(10)}),
    "bfloat16": Case(normal, (1, 8, 8), {"precision": "bfloat16"}),
    "float16": Case(normal, (1, 8, 8), {"precision": "float16"}),
}


def model_of(case: Case, *, graphs: bool, device: torch.device = CPU) -> FlatModel:
    torch.manual_seed(0)
    found = FlatModel(case.make().to(device), **case.how)
    if graphs:
        found.record_passes()
    return found


def steps(
    model: FlatModel, shape: tuple[int, ...], sizes: Sequence[int], outs: int = 2
) -> tuple[torch.Tensor, list[Any]]:
    """Trains for one step for each size, with gradients in some vectors in turn. Returns weights and figures."""
    weights, *gradients = torch.empty(outs + 1, model.size, device=model.device)
    model.read_into(weights)
    figures = []
    for step, size in enumerate(sizes):
        made, out = torch.Generator().manual_seed(step), gradients[step % outs]
        words = torch.randint(10, (size, *shape), generator=made)
        batch = (words, words) if len(shape) == 1 else (torch.randn(size, *shape, generator=made), words[:, 0, 0, 0])
        model.bind(weights)
        figures.append(known(model.gradient(*batch, out, seed=100 + step, scale=model.scales[0])))
        count = model.parameter_count
        weights[:count] -= 0.001 * out[:count]
        weights[count:] = out[count:]
    return weights, figures


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_pass_has_the_bits_of_the_usual_one(name: str) -> None:
    """With other samples, weights, random numbers and statistics in each step, and some shorter mini-batches."""
    case, sizes = CASES[name], [6] * 12 + [2] + [6] * 4 + [2] * 3
    plain, recording = (model_of(case, graphs=graphs) for graphs in (False, True))
    wanted, found = (steps(model, case.shape, sizes) for model in (plain, recording))
    assert torch.equal(found[0], wanted[0])
    assert found[1] == wanted[1]
    assert recording.graphs is not None
    assert recording.graphs.refusal == ""
    assert len(recording.graphs._known) >= 2, "one for each gradient's vector"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_graph_of_a_gpu_has_the_bits_of_the_usual_pass(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    case, sizes, gpu = CASES[name], [6] * 12 + [2] + [6] * 4, torch.device("cuda", 0)
    restore = set_deterministic(True)
    try:
        plain, recording = (model_of(case, graphs=graphs, device=gpu) for graphs in (False, True))
        wanted, found = (steps(model, case.shape, sizes) for model in (plain, recording))
    finally:
        restore()
    assert torch.equal(found[0], wanted[0])
    assert found[1] == wanted[1]
    assert recording.graphs is not None
    assert recording.graphs.refusal == ""
    assert recording.graphs.tried


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_of_compiled_code_has_the_bits_of_the_code() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    case, gpu = (
        Case(CASES["lenet"].make, (1, 28, 28), {"compiled": True, "gradients": "direct"}),
        torch.device("cuda", 0),
    )
    plain, recording = (model_of(case, graphs=graphs, device=gpu) for graphs in (False, True))
    wanted, found = (steps(model, case.shape, [6] * 8) for model in (plain, recording))
    assert torch.equal(found[0], wanted[0])
    assert found[1] == wanted[1]
    assert recording.graphs is not None
    assert (recording.graphs.tried, recording.graphs.refusal) == (True, "")


@pytest.mark.gpu
def test_a_gpu_refuses_to_record_a_step_in_which_the_host_waits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu, case = torch.device("cuda", 0), Case(Waits, (1, 8, 8))
    plain, recording = (model_of(case, graphs=graphs, device=gpu) for graphs in (False, True))
    wanted, found = (steps(model, case.shape, [6] * 9) for model in (plain, recording))
    assert torch.equal(found[0], wanted[0])
    assert recording.graphs is not None
    assert "test_graphs.py:" in recording.graphs.refusal
    assert torch.zeros(2, device=gpu).sum() == 0, "the GPU works as before"
    torch.rand(1, device=gpu)


def test_python_code_runs_only_until_the_pass_is_recorded() -> None:
    calls = []
    case = Case(normal, (1, 8, 8))
    model = model_of(case, graphs=True)
    model.module.register_forward_hook(lambda *_: calls.append(1))
    steps(model, case.shape, [6] * 12, outs=1)
    assert WARM < len(calls) <= 6, "passes with a checksum of the weights are usual ones"


def test_a_graph_that_is_not_valid_any_more_is_recorded_again(device: AdverseDevice) -> None:
    case = CASES["lenet"]
    model = model_of(case, graphs=True)
    steps(model, case.shape, [3] * 6, outs=1)
    assert model.graphs is not None
    (before,) = model.graphs._known.values()
    device.invalidate()
    model.graphs._seen.clear()
    calls = []
    model.module.register_forward_hook(lambda *_: calls.append(1))
    batch, (weights, out) = (before.inputs, before.target), before.vectors
    for seed in range(6):
        model.gradient(*batch, out, seed)
    assert WARM < len(calls) <= WARM + 2, "some usual passes, the recording, and then repetitions"
    assert model.graphs.of(*batch, weights, out) is not before


def test_vectors_that_are_always_new_are_computed_as_usual() -> None:
    case = CASES["lenet"]
    model = model_of(case, graphs=True)
    weights, figures = steps(model, case.shape, [3] * (KEPT + 8), outs=KEPT + 8)
    assert (weights, figures)[1] == steps(model_of(case, graphs=False), case.shape, [3] * (KEPT + 8), outs=KEPT + 8)[1]
    assert model.graphs is not None
    assert len(model.graphs._known) <= KEPT


def test_a_model_that_cannot_be_recorded_is_computed_as_usual() -> None:
    case = Case(Waits, (1, 8, 8))
    plain, recording = (model_of(case, graphs=graphs) for graphs in (False, True))
    wanted, found = (steps(model, case.shape, [6] * 9) for model in (plain, recording))
    assert torch.equal(found[0], wanted[0])
    assert recording.graphs is not None
    assert re.fullmatch(r"the host waits for a number \(at test_graphs\.py:\d+\)", recording.graphs.refusal)


def job_of(model: Callable[..., Any], graphs: str, **tables: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "digits", "train_limit": 240, "test_limit": 60},
        training={"epochs": 2, "minibatch_size": 8, "gradients": "autograd", **tables.pop("training", {})},
        cluster={"learners": 2, "graphs": graphs},
        **tables,
    )


@pytest.mark.parametrize("tables", [{}, {"training": {"microbatches": 2}}, {"protocol": {"name": "sma"}}])
def test_a_run_with_graphs_has_the_weights_of_a_run_without(tables: dict[str, Any], tmp_path: Path) -> None:
    weights = []
    for graphs in ("on", "off"):
        output = tmp_path / f"{graphs}.h5"
        with rudra.simulate(job_of(normal, graphs, **tables), output=output, progress="quiet") as results:
            weights.append(results.weights)
    assert torch.equal(*map(torch.from_numpy, weights))


def test_a_demanded_graph_that_is_impossible_is_refused_before_training() -> None:
    with pytest.raises(ConfigError) as error:
        rudra.simulate(job_of(Waits, "on"), progress="quiet")
    assert re.fullmatch(
        r"\[cluster\] graphs = 'on': the step of this model cannot be recorded: the host waits for a number "
        r"\(at test_graphs.py:\d+\); valid for this model: auto, off",
        str(error.value),
    )


def test_the_hooks_of_a_model_run_in_each_step() -> None:
    calls, case = [], Case(normal, (1, 8, 8))
    module = normal()
    module.register_forward_hook(lambda *_: calls.append(1))
    model = FlatModel(module)
    model.record_passes()
    steps(model, case.shape, [6] * 9)
    assert len(calls) == 9


def test_a_device_without_graphs_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", DeviceKind())
    with pytest.raises(ConfigError, match=r"^\[cluster\] graphs = 'on': a CPU has no graphs; valid there: auto, off$"):
        rudra.simulate(job_of(normal, "on"), progress="quiet")
