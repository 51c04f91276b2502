"""Gradients of several learners at once: those of each learner by itself, with its own statistics and masks."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rudra.compute.bank import choice, gathering
from rudra.compute.bank.choice import choose_form
from rudra.compute.bank.fused import fused_gradients
from rudra.compute.bank.gathering import Bank, gradients_are_summed, learn_in_step
from rudra.compute.bank.measured import MeasuredForms
from rudra.compute.checks import check_fused
from rudra.compute.device.streams import Pending
from rudra.compute.flat import FlatModel
from rudra.compute.networks import lenet, mlp, resnet32
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.job.job import Job

LEARNERS, SAMPLES = 3, 4


class Counting(nn.Module):
    """Replaces a buffer of its own, and changes another."""

    seen: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(inputs)
        self.mean.mul_(0.5).add_(inputs.mean(0), alpha=0.5)
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
        for entry, part in zip(model.layout, torch.split(vector, [entry.size for entry in model.layout]), strict=True)
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
    found = fused_gradients(model, list(weights), inputs, target, list(outs), [0] * LEARNERS)
    losses, wrong = zip(*found, strict=True)
    for index, vector in enumerate(weights):
        loss, wanted = by_itself(model, vector, inputs[index], target[index])
        assert losses[index] == pytest.approx(loss, abs=1e-12)
        assert float((outs[index] - wanted).abs().max()) <= 1e-12
        assert 0 <= wrong[index] <= SAMPLES


@pytest.mark.parametrize("name", ["lenet", "resnet8", "mlp"])
def test_a_bank_at_the_same_weights_has_a_gradient_for_each_or_their_mean(name: str) -> None:
    model, weights, inputs, target = learners_of(*NETWORKS[name], torch.float64)
    outs, mean = torch.full_like(weights, torch.nan), torch.full_like(weights[0], torch.nan)
    losses, _ = zip(*fused_gradients(model, [weights[0]], inputs, target, list(outs), [0] * LEARNERS), strict=True)
    again, _ = zip(*fused_gradients(model, [weights[0]], inputs, target, [mean], [0] * LEARNERS), strict=True)
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

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(inputs.mean(0), 0.5)
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


# Learners that become ready.


def a_bank(monkeypatch: pytest.MonkeyPatch, *, in_step: bool) -> tuple[Any, list[list[str]]]:
    """Returns a bank of four learners, and the teams that have computed together."""
    teams: list[list[str]] = []

    def computed(ready: Any, *, joint: bool) -> list[str]:
        teams.append(list(ready))
        return [f"figures of {each}" for each in ready]

    monkeypatch.setattr(gathering, "bank_gradients", computed)
    return Bank("abcd", in_step=in_step, joint=False), teams


def test_a_bank_in_step_computes_the_same_gradients_together_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, teams = a_bank(monkeypatch, in_step=True)
    chance = random.Random(5)
    for step in range(1000):
        ready = {learner: bank.gather(learner, f"{learner}{step}") for learner in chance.sample("abcd", 4)}
        done: list[str] = []
        while len(done) < 4:
            learner = chance.choice("abcd")
            if learner not in done and next(ready[learner], None) is None:
                assert bank.gradient(learner) == f"figures of {learner}{step}"
                done.append(learner)
        assert teams == [[f"{learner}{step}" for learner in "abcd"]]
        teams.clear()


def test_a_bank_waits_for_nobody_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, teams = a_bank(monkeypatch, in_step=True)
    ready = {learner: bank.gather(learner, learner) for learner in "abc"}
    assert all(isinstance(next(each), Pending) for each in ready.values())
    assert not next(ready["a"]).done()
    ready["b"].close()
    bank.follow("ac")
    assert next(ready["c"], None) is None
    assert bank.gradient("c") == "figures of c"
    assert teams == [["a", "c"]]
    assert next(ready["a"], None) is None
    assert bank.gradient("a") == "figures of a"
    assert len(teams) == 1


def test_learners_that_are_not_in_step_compute_with_those_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, teams = a_bank(monkeypatch, in_step=False)
    first, second = bank.gather("c", "c"), bank.gather("a", "a")
    assert isinstance(next(first), Pending)
    assert isinstance(next(second), Pending)
    assert next(first, None) is None
    assert bank.gradient("c") == "figures of c"
    third = bank.gather("c", "c1")
    assert isinstance(next(third), Pending)
    assert next(second, None) is None
    assert bank.gradient("a") == "figures of a"
    assert next(third, None) is None
    assert bank.gradient("c") == "figures of c1"
    assert teams == [["a", "c"], ["c1"]]


@pytest.mark.parametrize(
    ("protocol", "tables", "in_step", "summed"),
    [
        ("hardsync", {}, True, True),
        ("hardsync", {"results": {"gradient_norms": "every 2"}}, True, False),
        ("hardsync", {"topology": {"name": "groups"}}, True, True),
        ("async", {"topology": {"name": "groups", "options": {"groups": 2}}}, True, True),
        ("softsync", {}, False, False),
        ("async", {}, False, False),
        ("sma", {}, True, False),
        ("average", {"topology": {"options": {"groups": 2}}}, True, True),
        ("easgd", {"topology": {"options": {"parameter_server": True}}}, False, False),
    ],
)
def test_which_learners_are_in_step(protocol: str, tables: dict[str, Any], in_step: bool, summed: bool) -> None:
    job = Job(protocol={"name": protocol}, cluster={"learners": 4}, **tables).resolved()
    assert learn_in_step(job, job.plan()) == in_step
    assert gradients_are_summed(job, job.plan()) == summed


# The form.


@pytest.mark.parametrize(
    "more",
    [{"deterministic": True, "threads_per_rank": 1}, {"bank": "loop"}, {"deterministic": True, "graphs": "off"}],
)
def test_no_form_is_measured_where_only_a_loop_is_possible(more: dict[str, Any]) -> None:
    """No data is there to measure with."""
    data: Any = None
    job = Job(protocol={"name": "hardsync"}, cluster={"learners": 2, "learners_per_device": 2, **more}).resolved()
    assert choose_form(job, job.plan(), data, torch.device("cpu"), "autograd") == "loop"


def chosen(job: Job, **tables: Any) -> str:
    job = job.with_(**tables)
    return choose_form(job, job.plan(), load(job.data), torch.device("cpu"), "autograd")


def test_the_fastest_form_is_chosen_and_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(protocol={"name": "sma"}, cluster={"learners": 2, "learners_per_device": 2, "threads_per_rank": 2})
    job, caches = job.resolved(), Path(os.environ["XDG_CACHE_HOME"], "rudra")
    found = {"loop": 2.0, "graphs": 1.5, "fused": 1.0}
    measured = []

    def measure(learners: Any, forms: Sequence[str], span_s: float) -> Mapping[str, float]:
        measured.append([*forms])
        return {form: found[form] for form in forms}

    monkeypatch.setattr(choice, "measured_times", measure)
    with caplog.at_level("INFO"):
        assert [chosen(job) for _ in range(3)] == ["fused"] * 3
        assert chosen(job, cluster={"deterministic": True}) == "graphs", "it has the last bits of a loop"
        found["graphs"] = found["fused"] = 1.95
        assert chosen(job, training={"minibatch_size": 5}) == "loop", "the gain is small"
    assert measured == [["loop", "graphs", "fused"], ["loop", "graphs"], ["loop", "graphs", "fused"]]
    said = "bank of 2 learners: fused (a gradient takes: fused 500 ms, graphs 750 ms, loop 1e+03 ms"
    assert f"{said})" in caplog.text
    assert f"{said}, measured earlier: {caches}" in caplog.text
    assert len([*caches.iterdir()]) == 3


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{", b'{"about": 1, "seconds": {"loop": 1}}', b"\xff\xfe", b"[" * 100_000, None]
)
def test_a_damaged_file_of_times_is_ignored_and_replaced(damage: bytes | None) -> None:
    job = Job(cluster={"learners": 2, "learners_per_device": 2, "threads_per_rank": 2}).resolved()
    model, forms = FlatModel(lenet((1, 28, 28), 10)), ["loop", "graphs"]
    file = MeasuredForms(job, model, load(job.data).info, forms)
    assert file.read() is None
    for seconds in (1.0, 2.0):
        file.write({"loop": seconds, "graphs": 0.5, "fused": 3.0})
        assert file.read() == {"loop": seconds, "graphs": 0.5}
    whole = file.path.read_bytes()
    changed = whole.replace(b'"loop": 2.0', b'"loop": NaN') if damage is None else damage
    file.path.write_bytes(changed)
    assert file.read() is None
    file.write({"loop": 2.0, "graphs": 0.5, "fused": 3.0})
    assert file.path.read_bytes() == whole
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name], "nothing else is left"
    other = MeasuredForms(job.with_(training={"minibatch_size": 3}), model, load(job.data).info, forms)
    assert other.path != file.path
    assert MeasuredForms(job, model, load(job.data).info, [*forms, "other"]).read() is None


def test_jobs_that_measure_at_the_same_time_leave_a_whole_file() -> None:
    job = Job(cluster={"learners": 2, "learners_per_device": 2, "threads_per_rank": 2}).resolved()
    file = MeasuredForms(job, FlatModel(mlp((6,), 10)), load(job.data).info, ["loop", "graphs"])
    file.write({"loop": 1.0, "graphs": 1.0})
    writer = """if True:
        import sys
        from pathlib import Path
        from rudra.files import written
        for turn in range(200):
            with written(Path(sys.argv[1])) as part:
                part.write(Path(sys.argv[2]).read_bytes())
    """
    copy = file.path.with_suffix(".copy")
    copy.write_bytes(file.path.read_bytes())
    others = [subprocess.Popen([sys.executable, "-c", writer, file.path, copy]) for _ in range(2)]
    seen = set()
    while any(other.poll() is None for other in others):
        seen.add(str(file.read()))
    assert [other.returncode for other in others] == [0, 0]
    assert seen == {str(file.read())} != {"None"}


def test_the_forms_are_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(protocol={"name": "sma"}, cluster={"learners": 2, "learners_per_device": 2, "threads_per_rank": 2})
    job = job.resolved()
    monkeypatch.setattr(choice, "_SPAN_S", 0.0)
    threads = torch.get_num_threads()
    with caplog.at_level("INFO"):
        assert chosen(job) in ("loop", "graphs", "fused")
        assert all(f"{form} " in caplog.text for form in ("loop", "graphs", "fused"))
        assert chosen(job, model={"name": Spread}, cluster={"threads_per_rank": 1}) == "loop"
        assert chosen(job, model={"name": Noisy}, cluster={"deterministic": True}) == "loop"
    assert "compute one after another ([cluster] bank = 'fused': torch.func.vmap does not support" in caplog.text
    assert "([cluster] bank = 'graphs': the model draws random numbers, not only by dropout)" in caplog.text
    assert torch.get_num_threads() == threads
    assert not [thread for thread in threading.enumerate() if thread.name == "rudra-learner"]


class Noisy(nn.Module):
    """Adds noise to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs.flatten(1) + torch.randn(64))
        return output


class Spread(Branching):
    """Takes digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flatten(1))


TWO = {"learners": 4, "learners_per_device": 2, "bank": "fused"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"cluster": {"learners_per_device": 0}}, "[cluster] learners_per_device must be >= 1, not 0"),
        (
            {"cluster": {"learners": 5, "learners_per_device": 2}},
            "[cluster] learners_per_device = 2 does not divide learners = 5; use learners = 6 or 4, or another m",
        ),
        (
            {"cluster": {"learners": 2, "learners_per_device": 4}},
            "[cluster] learners_per_device = 4 does not divide learners = 2; use learners = 4, or another m",
        ),
        (
            {"cluster": {"learners_per_device": 2, "learners_per_rank": 2}},
            "[cluster] learners_per_device = 2 is not supported with learners_per_rank = 2; use one of them",
        ),
        (
            {"cluster": {"bank": "fused"}},
            "[cluster] bank = 'fused' needs learners_per_device; set it, or leave bank out",
        ),
        (
            {
                "cluster": {"learners": 6, "learners_per_device": 2},
                "topology": {"name": "groups", "options": {"groups": 2}},
            },
            "[cluster] learners_per_device = 2 does not divide the learners of each compute group; use a divisor of",
        ),
        (
            {"cluster": {**TWO, "one_rank": True}},
            "[cluster] one_rank = true is not supported with learners_per_device = 2 of 4 learners; use "
            "learners_per_device = 4, or one_rank = false",
        ),
        (
            {"cluster": {**TWO, "deterministic": True}},
            "[cluster] bank = 'fused' is not supported with deterministic = true, because it changes the last bits; "
            "use bank = 'loop'",
        ),
        (
            {"cluster": {**TWO, "bank": "graphs"}, "training": {"compile": True}},
            "[cluster] bank = 'graphs' is not supported with [training] compile = true; use bank = 'loop'",
        ),
        ({"cluster": {**TWO, "bank": "graphs"}, "placement": {"cut": 2}}, "with [placement] cut; use bank = 'loop'"),
        ({"cluster": {**TWO, "bank": "graphs", "graphs": "off"}}, "with graphs = 'off'; use bank = 'loop'"),
        (
            {"cluster": {**TWO, "bank": "graphs"}, "topology": {"name": "adv*"}, "protocol": {"name": "async"}},
            "[cluster] bank = 'graphs' is not supported with topology adv*, whose learners have threads; use 'loop'",
        ),
        (
            {"cluster": {**TWO, "bank": "graphs"}, "protocol": {"name": "hogbatch"}},
            "with protocol hogbatch, whose mini-batches differ in size; use bank = 'loop'",
        ),
        (
            {"cluster": {**TWO, "streams": 2}},
            "[cluster] streams = 2 is not supported with bank = 'fused'; use bank = 'graphs'",
        ),
        (
            {"cluster": {**TWO, "streams": 3}},
            "[cluster] streams = 3 is more than learners_per_device = 2; use 1 to 2",
        ),
        ({"cluster": {"streams": 3}}, "[cluster] streams = 3 needs learners_per_device; set it, or leave streams out"),
        ({"cluster": TWO, "training": {"compile": True}}, "with [training] compile = true; use bank = 'loop'"),
        ({"cluster": TWO, "training": {"precision": "float16"}}, "with [training] precision = 'float16'; use bank ="),
        ({"cluster": TWO, "training": {"microbatches": 2}}, "with [training] microbatches = 2; use bank = 'loop'"),
        ({"cluster": {**TWO, "shares": [1, 2, 1, 2]}}, "with shares, because all learners must have as many samples;"),
        ({"cluster": TWO, "data": {"sparse": True}}, "with [data] sparse = true; use bank = 'loop'"),
        ({"cluster": TWO, "placement": {"cut": 2}}, "with [placement] cut; use bank = 'loop'"),
        (
            {"cluster": TWO, "simulation": {"batching": "vmap"}},
            "with [simulation] batching = 'vmap'; use bank = 'loop'",
        ),
        (
            {"cluster": TWO, "topology": {"name": "adv*"}, "protocol": {"name": "async"}},
            "[cluster] bank = 'fused' is not supported with topology adv*, whose learners have threads; use 'loop'",
        ),
        (
            {"cluster": TWO, "protocol": {"name": "hogbatch"}},
            "with protocol hogbatch, whose mini-batches differ in size; use bank = 'loop'",
        ),
        (
            {"cluster": TWO, "fault_tolerance": {"straggler_timeout_s": 1.0}, "protocol": {"name": "hardsync"}},
            "with [cluster] learners_per_device = 2; use learners_per_device = 1",
        ),
    ],
)
def test_a_bank_that_cannot_be_is_refused_in_one_line(tables: dict[str, Any], message: str) -> None:
    tables = {"protocol": {"name": "hardsync"}, **tables}
    with pytest.raises(ConfigError) as caught:
        Job(**tables).resolved()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_learners_without_a_number_fill_whole_banks() -> None:
    assert Job(cluster={"learners_per_device": 3}).resolved().learners == 6
    assert Job(cluster={"learners_per_device": 8}).resolved().learners == 8
    job = Job(cluster={"learners_per_device": 2, "one_rank": True, "learners": 2}).resolved()
    assert job.plan().ranks == 1
