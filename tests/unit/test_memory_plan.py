"""The memory of a learner on its device: what is predicted from small mini-batches against what is counted."""

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import rudra
from rudra.cli.main import main
from rudra.compute import memory_plan, models, tasks
from rudra.compute.bank import choice
from rudra.compute.bank.choice import choose_form
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.flat import FlatModel
from rudra.compute.memory_plan import LIBRARIES, MemoryPlan, check_device_memory, planned
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.memory import bytes_text
from topologies import Plan, Role

IMAGES = TensorDataset(torch.rand(300, 3, 32, 32), torch.arange(300) % 10)
TEXTS = TensorDataset(torch.arange(300 * 20).view(300, 20) % 65, torch.arange(300 * 20).view(300, 20) % 65)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"name": "mlp", "options": {"hidden": [300, 100]}}},
    "lenet": {"model": {"name": "lenet"}},
    "resnet8": {"model": {"name": "resnet32", "options": {"blocks": 1}}},
    "lstm": {
        "model": {"name": "lstm", "options": {"hidden": 32}},
        "task": {"name": "language"},
        "data": {"name": (TEXTS, TEXTS), "classes": 65},
    },
}


def job_of(name: str = "mlp", mu: int = 64, **tables: Any) -> Job:
    given = {"data": {"name": (IMAGES, IMAGES), "classes": 10}, **MODELS[name], **tables}
    training = {"minibatch_size": mu, "evaluation_batch_size": 32, **given.pop("training", {})}
    return Job(training=training, cluster={"learners": 2, "threads_per_rank": 1}, **given)


def plan_of(job: Job, device: torch.device = CPU) -> MemoryPlan:
    found = planned(job, job.plan(), load(job.data), device)
    assert found is not None
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_of_a_mini_batch_are_predicted_from_small_ones(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(name, training={"precision": precision})
    predicted = plan_of(job).activations.at(64)
    monkeypatch.setattr(memory_plan, "MEASURED", (64, 64))
    monkeypatch.setattr(memory_plan, "through", lambda sizes, found: memory_plan.LinearBytes(found[0], 0.0))
    counted = plan_of(job).activations.at(64)
    assert predicted == pytest.approx(counted, rel=0.05)
    assert counted > 64 * 1000


def test_a_device_apart_from_main_memory_holds_two_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    here = plan_of(job_of())
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))
    spaces = here.workspaces._replace(fixed=here.workspaces.fixed + LIBRARIES)
    data = memory_plan.LinearBytes(0.0, 2 * here.data.per_sample)
    assert plan_of(job_of())._replace(bank=None) == here._replace(data=data, workspaces=spaces, bank=None)


def test_what_autograd_saves_of_a_linear_layer_is_counted_exactly() -> None:
    """Of two layers and the loss: the output of ReLU, the logarithms of the softmax, and one number per batch."""
    job = job_of(model={"name": "mlp", "options": {"hidden": [300]}})
    found = plan_of(job)
    assert found.data == (0.0, 4 * 3 * 32 * 32 + 8)
    assert found.activations.per_sample == 4 * (300 + 10)
    assert found.activations.fixed <= 8
    size = 4 * (3072 * 300 + 300 + 300 * 10 + 10)
    assert (found.weights, found.gradients, found.state) == (size, 2 * size, 0)


def test_learners_of_a_rank_have_vectors_of_their_own_and_owners_the_state_of_their_optimiser() -> None:
    job = job_of().with_(protocol={"name": "hardsync"}, topology={"name": "groups"}, optimizer={"name": "adam"})
    one, both = (plan_of(job.with_(cluster={"learners_per_rank": count})) for count in (1, 2))
    assert (one.state, both.state) == (2 * one.weights, 4 * one.weights)
    assert (both.weights, both.gradients) == (2 * one.weights, 3 * one.weights)
    parts = plan_of(job.with_(training={"microbatches": 2}))
    assert (parts.weights, parts.gradients) == (one.weights, 3 * one.weights), "a sum of gradients, and no buffers"


def bank_of(m: int, form: str, **tables: Any) -> Job:
    cluster = {
        "learners": m,
        "learners_per_device": m,
        "bank": form,
        "threads_per_rank": 1,
        **tables.pop("cluster", {}),
    }
    return job_of("lenet", **tables).with_(cluster=cluster)


def test_activations_of_a_bank_exist_once_for_each_learner_that_computes_at_the_same_time() -> None:
    one = plan_of(bank_of(1, "loop"))
    for form, streams, at_once in (("loop", None, 1), ("graphs", 2, 2), ("graphs", 8, 8), ("fused", None, 8)):
        found = plan_of(bank_of(8, form, cluster={"streams": streams}))
        copies = 8 * (form == "fused")
        assert (found.weights, found.state) == ((8 + copies) * one.weights, one.state)
        assert found.gradients == (8 + at_once) * one.weights, "autograd makes some of them"
        for part in ("activations", "workspaces", "data"):
            assert getattr(found, part).at(16) == pytest.approx(at_once * getattr(one, part).at(16), abs=8)
        saved = (8 - at_once) * one.activations.at(64)
        said = f"; activations of {at_once} of 8 learners at a time save {bytes_text(saved)}"
        assert found.text(64).endswith(said)
    averaged = bank_of(8, "graphs", cluster={"streams": 2}, protocol={"name": "sma"}, optimizer={"momentum": 0.9})
    found = plan_of(averaged)
    assert found.weights == 24 * one.weights, "z, a replica and a difference for each"
    assert found.state == 16 * one.weights, "the momentum of both optimisers"


def test_a_bank_that_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = plan_of(bank_of(5, "graphs", cluster={"streams": 2})).total(64)
    monkeypatch.setitem(DEVICES, "cpu", Small(enough))
    job = bank_of(8, "graphs", cluster={"streams": 2})
    with pytest.raises(ConfigError) as caught:
        rudra.simulate(job, progress="quiet")
    assert re.fullmatch(
        r"\[cluster\] learners_per_device = 8: the learners take \S+ MB on their GPU, where \S+ MB are free; use "
        r"1 to 5, or a smaller training\.minibatch_size",
        str(caught.value),
    )
    check_device_memory(*of_job(bank_of(5, "graphs", cluster={"streams": 2})), CPU)
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(bank_of(1, "graphs")).total(40)))
    both, free = plan_of(bank_of(2, "graphs")), DEVICES["cpu"].free_bytes(CPU)
    fits = max(mu for mu in range(1, 64) if both.total(mu) <= (free or 0))
    with pytest.raises(ConfigError, match=rf"^\[training\] minibatch_size = 64 .*; use 1 to {fits}, or more"):
        check_device_memory(*of_job(bank_of(2, "graphs")), CPU)


def test_banks_on_cpus_share_the_free_memory_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = plan_of(bank_of(3, "loop")).total(64)
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 2 * enough)
    check_device_memory(*of_job(bank_of(3, "loop")), CPU)
    two = bank_of(3, "loop", cluster={"learners": 6, "learners_per_device": 3})
    check_device_memory(*of_job(two), CPU)
    with pytest.raises(ConfigError, match=r"^\[cluster\] learners_per_device = 4: .* on their CPU, .*; use 1 to 3, or"):
        check_device_memory(*of_job(two.with_(cluster={"learners": 8, "learners_per_device": 4})), CPU)
    job, plan, data = of_job(two.with_(cluster={"learners": 8, "learners_per_device": 4}))
    check_device_memory(job, replace(plan, roles=tuple(apart(plan))), data, CPU)


def apart(plan: Plan) -> Iterator[Role]:
    """The roles of a plan, each rank on a node of its own."""
    return (replace(role, node=role.world_rank) for role in plan.roles)


def of_job(job: Job) -> tuple[Job, Any, Any]:
    return job, job.plan(), load(job.data)


def test_forms_that_do_not_fit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(learners: Any, forms: Sequence[str], span_s: float) -> dict[str, float]:
        measured.extend(forms)
        return dict.fromkeys(forms, 1.0)

    monkeypatch.setattr(choice, "measured_times", measure)
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(bank_of(4, "graphs", cluster={"streams": 2})).total(64)))
    job = bank_of(4, "auto", cluster={"streams": 2})
    assert choose_form(*of_job(job), CPU, "autograd") == "loop"
    assert measured == ["loop", "graphs"]


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that operations have made and that still live, and their peak.

    Args:
        given: tensors that are not counted.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in given}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, torch.Tensor) and (storage := each.untyped_storage()).data_ptr() not in self.sizes:
                place = storage.data_ptr()
                self.sizes[place] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, place, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return found


@pytest.mark.parametrize("name", MODELS)
def test_a_step_and_an_evaluation_take_no_more_than_predicted(name: str) -> None:
    job = job_of(name)
    found, data = plan_of(job), load(job.data)
    assert data.training is not None
    flat = FlatModel(models.build(job.model, data.info, 0), tasks.make(job.task, data.info.classes))
    weights, out = torch.zeros(2, flat.size)
    flat.read_into(weights)
    flat.bind(weights)
    batch = data.training.batch(torch.arange(64).numpy())
    parts, peaks = found.parts(64), []
    for work in (lambda: flat.gradient(*batch, out, 0), lambda: flat.evaluate_batch(*(t[:32] for t in batch))):
        work()
        with Living((*batch, weights)) as living:
            work()
        peaks.append(living.peak)
    step = parts["activations"] + parts["workspaces"] + parts["gradients"] - parts["weights"]
    assert peaks[0] <= step <= 1.6 * peaks[0]
    evaluation = parts["evaluation"] - parts["weights"] - found.data.at(32)
    assert peaks[1] <= 1.01 * evaluation


def test_a_server_on_the_rank_of_its_learner_takes_memory_there(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(next(iter(MODELS)))
    apart, together = (plan_of(job.with_(cluster={"learners": 1, "one_rank": one}).resolved()) for one in (False, True))
    assert together.weights == 2 * apart.weights
    assert together.gradients == apart.gradients + apart.weights
    assert (apart.state, together.state) == (0, job.optimizer.state_vectors * apart.weights)
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))  # which repeats steps
    ahead = plan_of(job.with_(cluster={"learners": 1, "one_rank": True}).resolved())
    assert ahead.state == together.state + 2 * (apart.weights + together.state)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_gpu_takes_no_more_than_predicted(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    job, gpu = job_of(name), torch.device("cuda", 0)
    found, data = plan_of(job, gpu), load(job.data)
    assert data.training is not None
    flat = FlatModel(models.build(job.model, data.info, 0).to(gpu), tasks.make(job.task, data.info.classes))
    weights, out = torch.zeros(2, flat.size, device=gpu)
    flat.read_into(weights)
    flat.bind(weights)
    batch = data.training.batch(torch.arange(64).numpy())
    flat.gradient(*batch, out, 0)
    peak = DEVICES["cuda"].peak_bytes(gpu, lambda: flat.gradient(*batch, out, 0))
    parts = found.parts(64)
    step = sum(parts[part] for part in ("data", "activations", "workspaces", "gradients")) - parts["weights"]
    assert peak <= step <= 2 * peak + LIBRARIES
    tests = [part[:32] for part in batch]
    assert (
        DEVICES["cuda"].peak_bytes(gpu, lambda: flat.evaluate_batch(*tests)) <= parts["evaluation"] - parts["weights"]
    )


class Small(DeviceKind):
    """A CPU with little memory."""

    noun = "GPU"

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, device: torch.device) -> int:
        return self.free


def simulated(job: Job, path: Path) -> None:
    rudra.simulate(job.with_(training={"epochs": 1}), output=path, progress="quiet", force=True).close()


LINE = (
    r"\[training\] minibatch_size = (\d+) \(μ\): a learner takes \S+ MB on its GPU, where \S+ MB are free; "
    r"use 1 to (\d+), or more training.microbatches"
)
HARDSYNC = {"protocol": {"name": "hardsync"}}


@pytest.mark.parametrize(
    ("tables", "samples", "fits"),
    [
        ({}, 40, 40),
        ({"training": {"microbatches": 4}}, 10, 40),
        ({"cluster": {"shares": [3.0, 1.0]}, **HARDSYNC}, 40, 27),  # 1.5 times 27 samples are 40
        ({"cluster": {"shares": [3.0, 1.0], "cpu_learners": [0]}, **HARDSYNC}, 40, 81),  # half of 81 samples are 40
        ({"topology": {"name": "groups"}, "optimizer": {"name": "adam"}, **HARDSYNC}, 40, 40),
    ],
    ids=str,
)
def test_a_mini_batch_that_does_not_fit_is_refused_with_the_largest_that_does(
    tables: dict[str, Any], samples: int, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, path = job_of("mlp", 128).with_(**tables), tmp_path / "run.h5"
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(job).total(samples)))
    for mu in (128, fits + 1):
        with pytest.raises(ConfigError) as caught:
            simulated(job.with_(training={"minibatch_size": mu}), path)
        match = re.fullmatch(LINE, str(caught.value))
        assert match is not None
        assert (int(match[1]), int(match[2])) == (mu, fits)
    assert not path.exists()
    simulated(job.with_(training={"minibatch_size": fits}), path)


def test_a_later_mini_batch_that_does_not_fit_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("mlp", 16).with_(changes=[{"at_epoch": 1, "training": {"minibatch_size": 64}}])
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(job).total(40)))
    with pytest.raises(ConfigError, match=r"minibatch_size = 64 \(μ\): .*; use 1 to 40, "):
        rudra.simulate(job.with_(training={"epochs": 2}), output=tmp_path / "run.h5", progress="quiet")


def test_batches_that_a_coordinator_assigns_are_checked_at_their_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [
        {"kind": "large", "min": 16, "max": 96, "learners": [0]},
        {"kind": "small", "max": 200, "device": "cpu", "learners": [1]},
    ]
    job = job_of("mlp").with_(protocol={"name": "hogbatch"}, hogbatch={"workers": workers})
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(job).total(40)))
    with pytest.raises(ConfigError, match=r"\[hogbatch\] workers: max = 96: a learner takes .*; use 1 to 40"):
        simulated(job, tmp_path / "run.h5")
    simulated(job.with_(data={"train_limit": 40}), tmp_path / "run.h5")  # no batch can have more samples


def test_a_model_that_does_not_fit_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("mlp")
    monkeypatch.setitem(DEVICES, "cpu", Small(plan_of(job).total(1) - 1))
    with pytest.raises(ConfigError, match=r"with a single sample does not fit either; use a smaller model, or a "):
        simulated(job, tmp_path / "run.h5")


class Whole(nn.Linear):
    """A model for batches of 64 samples, or one."""

    def __init__(self) -> None:
        super().__init__(3072, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.reshape(1 if len(inputs) == 1 else 64, 3072))


def test_a_model_that_takes_no_small_mini_batches_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(model={"name": Whole}, training={"evaluate": False})
    assert planned(job, job.plan(), load(job.data), CPU) is None
    monkeypatch.setitem(DEVICES, "cpu", Small(1))
    simulated(job, tmp_path / "run.h5")


class Counting(Small):
    """A device whose operations take memory of their own: 5 kB for each sample of the mini-batch."""

    def peak_bytes(self, device: torch.device, work: Callable[[], object]) -> int:
        Counting.calls += 1
        return 10**7 + 5000 * memory_plan.MEASURED[Counting.calls > 2]

    calls = 0


def test_statistics_of_a_device_show_workspaces_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("mlp")
    monkeypatch.setattr(Counting, "calls", 0)
    monkeypatch.setitem(DEVICES, "cpu", Counting(1))
    found = plan_of(job)
    copies = found.gradients - found.weights
    assert found.activations.at(64) + found.workspaces.at(64) + copies == pytest.approx(10**7 + 5000 * 64, abs=8)
    assert found.evaluation - found.weights - found.data.at(32) == 10**7 + 5000 * 32


@pytest.mark.parametrize(("free", "fits"), [(10**9, True), (10**6, False)])
def test_validate_shows_the_plan_and_warns_if_this_gpu_is_too_small(
    free: int, fits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Small(free))
    assert main(["validate", "digits", "--set", "cluster.device=cuda"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"learner memory about \S+ MB with 8 samples at once: weights .* on its device, ", out)
    warned = re.findall(r"a learner takes .* on its GPU, where 1 MB are free.*; a run on this machine is refused", err)
    assert len(warned) == (not fits)


@pytest.mark.parametrize(
    ("transport", "topology", "vectors"), [("ipc", "base", 4), ("staged", "base", 0), ("ipc", "groups", 7)]
)
def test_copies_that_other_ranks_read_are_planned(transport: str, topology: str, vectors: int) -> None:
    job = job_of(topology={"name": topology}).with_(cluster={"device": "cuda", "transport": transport})
    assert plan_of(job).slots == vectors * plan_of(job_of()).gradients / 2
