import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rudra.compute.evaluation import evaluate
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.compute.models import build, check_model_output
from rudra.compute.tasks import Classification
from rudra.core.work import Work
from rudra.data.load import load
from rudra.data.samples import Split
from rudra.data.sampling import Sampler
from rudra.data.sources import Dense
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import DataTable, ModelTable

JOB = Job(training={"minibatch_size": 4, "seed": 5})


def work(learner: int, size: int = 4) -> Work:
    """Of a learner's first step, if it draws a stream of its own."""
    return Work(learner, 0, size, size)


def tiny() -> tuple[FlatModel, Split]:
    rng = np.random.default_rng(0)
    split = Split(Dense(rng.integers(0, 9, (10, 1, 4, 4), dtype=np.uint8)), Dense(rng.integers(0, 3, 10)))
    torch.manual_seed(0)
    return FlatModel(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))), split


def gradients(steps: list[int], *, prefetch: bool, learner: int = 0) -> list[tuple[BatchResult, list[float]]]:
    model, split = tiny()
    source = GradientSource(JOB, learner, work(learner), model, split, prefetch=prefetch)
    weights, found = torch.linspace(-1, 1, model.size), []
    for step in steps:
        out = torch.empty(model.size)
        found.append((source.checked(source.compute(step, source.work.after(step), weights, out)), out.tolist()))
    source.close()
    return found


def input_threads() -> int:
    return sum(thread.name == "rudra-input" for thread in threading.enumerate())


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4, 5], [3, 4, 9, 10, 0, 1, 1]])
def test_prefetching_changes_no_bit_whatever_the_order_of_steps(steps: list[int]) -> None:
    assert gradients(steps, prefetch=True) == gradients(steps, prefetch=False)
    assert input_threads() == 0


def test_a_gradient_depends_on_learner_and_step_alone() -> None:
    once = dict(enumerate(gradients(list(range(6)), prefetch=False)))
    assert gradients([4, 2], prefetch=True) == [once[4], once[2]]
    assert len({str(g) for g in once.values()}) == 6
    assert gradients([2], prefetch=False, learner=1) != [once[2]]
    assert all(outcome.samples == 4 for outcome, _ in once.values())


def mask(learner: int, step: int, seed: int = 5) -> list[bool]:
    """Which inputs dropout lets through, of samples that are all alike."""
    split = Split(Dense(np.full((10, 1, 4, 16), 9, np.uint8)), Dense(np.zeros(10, np.int64)))
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)))
    job = JOB.with_(training={"minibatch_size": 1, "seed": seed})
    out = torch.empty(model.size)
    source = GradientSource(job, learner, work(learner, 1), model, split, prefetch=False)
    source.compute(step, source.work.after(step), torch.linspace(-1, 1, model.size), out)
    return [value != 0 for value in out[:64].tolist()]


def test_dropout_has_a_mask_of_its_own_for_each_learner_and_step_and_seed() -> None:
    asked = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 7), (0, 0, 6)]
    masks = [mask(*which) for which in asked]
    for i, one in enumerate(masks):
        assert 10 < sum(one) < 54
        assert one == mask(*asked[i])
        for other in masks[:i]:
            assert 10 < sum(a != b for a, b in zip(one, other, strict=True)) < 54, "half of two masks differ"


def noise(inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return inputs + torch.rand(inputs.shape, generator=generator)


def test_augmentation_draws_anew_for_each_learner_and_step_and_seed() -> None:
    """Of samples that are all alike; the steps are drawn together."""
    model, _ = tiny()
    split = Split(Dense(np.zeros((10, 1, 4, 4), np.float32)), Dense(np.zeros(10, np.int64)))

    def drawn(learner: int, step: int, seed: int = 5) -> torch.Tensor:
        job = JOB.with_(augment={"name": noise}, training={"seed": seed})
        source = GradientSource(job, learner, work(learner), model, split, prefetch=False)
        inputs, _ = source.minibatch(step, source.work.after(step))
        assert isinstance(inputs, torch.Tensor)
        return inputs

    asked = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 7), (0, 0, 6)]
    seen = [drawn(*which) for which in asked]
    for i, one in enumerate(seen):
        assert torch.equal(one, drawn(*asked[i]))
        assert not any(torch.equal(one, other) for other in seen[:i])


class Fragile:
    """Samples of the user's, who knows where from: fails at one, and remembers how often it was asked."""

    random = False

    def __init__(self, split: Split, bad: int) -> None:
        self.split, self.bad, self.asked = split, bad, 0

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: Any) -> Any:
        self.asked += 1
        if self.bad in indices:
            raise KeyError(f"sample {self.bad}")
        return self.split.batch(indices)


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_the_users_data_raises_comes_out_of_compute(prefetch: bool) -> None:
    model, split = tiny()
    source = GradientSource(JOB, 0, work(0), model, Fragile(split, bad=3), prefetch=prefetch)
    weights, out = torch.zeros(model.size), torch.zeros(model.size)
    with pytest.raises(KeyError, match="sample 3"):  # within one pass every sample comes up
        _ = [source.compute(step, source.work.after(step), weights, out) for step in range(3)]
    source.close()
    assert input_threads() == 0


def test_the_input_thread_stays_two_minibatches_ahead() -> None:
    model, split = tiny()
    counting = Fragile(split, bad=-1)
    source = GradientSource(JOB, 0, work(0), model, counting, prefetch=True)
    weights, out = torch.zeros(model.size), torch.zeros(model.size)
    for step in range(5):
        source.compute(step, source.work.after(step), weights, out)
    source.close()  # ends behind what was asked for
    assert counting.asked == 5 + 2


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (4, 4), (7, 7), (3000, 3000), (4, 9), (1, 30)])
def test_minibatches_drawn_together_are_those_drawn_one_by_one(size: int, stride: int) -> None:
    model, split = tiny()
    source = GradientSource(JOB, 1, Work(1, stride - size, size, stride), model, split, prefetch=False)
    sampler = Sampler(5, 1, len(split))
    for step in [0, 1, 2, 700, 3, 2, 2, 10**6, 701]:
        inputs, target = source.minibatch(step, source.work.after(step))
        wanted = split.batch(sampler.indices(stride - size + step * stride, size))
        assert torch.equal(inputs, wanted[0]), step
        assert torch.equal(target, wanted[1]), step
        inputs.zero_()  # as a model may that changes its inputs in place
        target.zero_()


@pytest.mark.parametrize("prefetch", [True, False])
def test_work_may_change_between_steps(prefetch: bool) -> None:
    model, split = tiny()
    source = GradientSource(JOB, 1, work(1), model, split, prefetch=prefetch)
    walk = [Work(1, 0, 4, 4), Work(1, 4, 4, 4), Work(1, 8, 2, 6), Work(1, 14, 2, 6), Work(0, 3, 5, 5), Work(0, 0, 1, 9)]
    samplers = [Sampler(5, stream, len(split)) for stream in range(2)]
    for step, own in enumerate(walk):
        inputs, _ = source.minibatch(step, own)
        wanted, _ = split.batch(samplers[own.stream].indices(own.first, own.count))
        assert isinstance(inputs, torch.Tensor)
        assert torch.equal(inputs, wanted), step
    source.close()


@pytest.mark.parametrize(("batch_size", "turns"), [(355, 1), (1000, 1), (100, 4), (71, 5)])
def test_evaluation_in_turns_is_the_whole_test(batch_size: int, turns: int) -> None:
    _, test, info, _ = load(DataTable(name="digits"), train=False)
    module = build(ModelTable(name="mlp"), info, 3)
    check_model_output(module, Classification(info.classes), info)
    model = FlatModel(module)
    weights = torch.empty(model.size)
    model.read_into(weights)
    *waiting, result = evaluate(model, weights, test, batch_size)
    assert waiting == [None] * (turns - 1)
    x, y = test.batch(np.arange(355))
    with torch.no_grad():
        output = module(x)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
    assert result.error == pytest.approx(float((output.argmax(1) != y).float().mean()), abs=1e-6)
    hits = (output.topk(5).indices == y[:, None]).any(1)
    assert dict(result.metrics)["top5_error"] == pytest.approx(1 - float(hits.float().mean()), abs=1e-6)


def test_training_between_two_batches_of_a_test_does_not_disturb_it() -> None:
    model, split = tiny()
    weights, other = torch.linspace(-1, 1, model.size), torch.zeros(model.size)
    (alone,) = [r for r in evaluate(model, weights, split, 3) if r]
    turns = []
    for turn in evaluate(model, weights, split, 3):
        turns.append(turn)
        model.bind(other)
        model.gradient(*split.batch(np.arange(4)), torch.empty(model.size), 0)
    assert not alone.metrics, "three classes have no five most probable"
    assert [turn and (turn.loss, turn.error) for turn in turns] == [None] * 3 + [(alone.loss, alone.error)]


class Normed(nn.Module):
    """Has all that parts must hand on: dropout, and buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_are_torch_s_gradient_accumulation(microbatches: int) -> None:
    """Seven samples in parts of 4 and 3, or 3, 2 and 2: weighted by samples, one generator, buffers in order."""
    _, split = tiny()
    torch.manual_seed(3)
    module, plain = Normed(), Normed()
    plain.load_state_dict(module.state_dict())
    model = FlatModel(module)
    job = JOB.with_(training={"minibatch_size": 7, "microbatches": microbatches})
    source = GradientSource(job, 0, work(0, 7), model, split, prefetch=False)
    weights, out = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    before = weights.clone()
    result = source.checked(source.compute(0, source.work, weights, out))
    assert torch.equal(weights, before)
    inputs, target = source.minibatch(0, source.work)
    torch.manual_seed(source.seed(0))
    loss = 0.0
    for ours, theirs in zip(inputs.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        part = nn.functional.cross_entropy(plain(ours), theirs) * (len(ours) / 7)
        part.backward()
        loss += part.item()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert torch.allclose(out[: model.parameter_count], expected, atol=1e-7)
    norm = plain.layers[2]
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(norm.running_mean, torch.Tensor)
    behind = dict(zip([e.name for e in model.layout], torch.split(out, [e.size for e in model.layout]), strict=True))
    assert torch.equal(behind["layers.2.running_mean"], norm.running_mean)
    assert behind["layers.2.num_batches_tracked"].item() == microbatches
    assert (result.samples, result.loss) == (7, pytest.approx(loss))


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({}, r"\[training\] microbatches = 5 is more than the samples of a gradient; use 1 to 4"),
        (
            {"training": {"minibatch_size": 8, "microbatches": 5}, "placement": {"cut": 1}},
            r"microbatches = 5 is not supported with \[placement\] cut; use microbatches = 1",
        ),
        (
            {"training": {"minibatch_size": 8, "microbatches": 5}, "simulation": {"batching": "vmap"}},
            "batching = 'vmap'; use microbatches = 1, or batching = 'none'",
        ),
    ],
)
def test_microbatches_that_cannot_be_are_refused(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        JOB.with_(**{"training": {"microbatches": 5}, "cluster": {"learners": 2}, **tables}).plan()
