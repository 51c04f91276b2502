"""Updates and forward passes that begin while a gradient arrives: the bits of usual ones, whatever happens."""

import random
from typing import Any

import pytest
import torch
from flat_layout import NO_DECAY, SLOW, layout
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import rudra
from rudra.compute.arrivals import Arrivals
from rudra.compute.learners import ReplicaExecutor
from rudra.compute.making import make_executors
from rudra.compute.optim import UpdateRule
from rudra.compute.tasks import Classification
from rudra.compute.waiting import NotInTime, Waiting
from rudra.core.actions import Compute, Reduce, Update
from rudra.core.buckets import parts
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.events import Computed
from rudra.core.records import Gradient
from rudra.core.work import Work
from rudra.data.load import load
from rudra.job.tables import OptimizerTable
from rudra.mpi.group_reduction import MEASURED_STEPS, WaitShare

SAMPLES, FEATURES, CLASSES = 64, 12, 5
TABLES: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 5e-4},
    "momentum": {"momentum": 0.9, "weight_decay": 5e-4},
    "nesterov": {"momentum": 0.9, "options": {"nesterov": True}},
    "caffe": {"momentum": 0.9, "momentum_form": "caffe", "weight_decay": 5e-4},
    "dampening": {"momentum": 0.9, "options": {"dampening": 0.1}},
    "adam": {"name": "adam", "weight_decay": 5e-4},
    "amsgrad": {"name": "adam", "options": {"amsgrad": True, "eps": 1e-3}},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "adagrad": {"name": "adagrad", "options": {"lr_decay": 0.01}},
    "rmsprop": {"name": "rmsprop", "momentum": 0.5, "weight_decay": 5e-4, "options": {"centered": True}},
}


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes begin early, however soon the other parts arrive."""
    monkeypatch.setattr(Arrivals, "worthwhile", lambda *about: True)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("most", "groups"), [(176, []), (4096, []), (4096, [SLOW, NO_DECAY])])
def test_a_step_apart_has_the_bits_of_a_step_in_any_order(table: str, groups: list[dict[str, Any]], most: int) -> None:
    entries = [entry for entry in layout() if entry.kind == "parameter"]
    size, chance = sum(entry.size for entry in entries), random.Random(3)
    weights = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    rules = [UpdateRule(OptimizerTable(groups=groups, **TABLES[table]), each, entries) for each in weights]
    usual, apart, in_place = rules
    for rule in rules:
        rule.prepare()
        if rule.sliced is None:  # the first step allocates the state
            rule.step(torch.ones(size), 0.1)
    for step in range(3):
        gradient, into = torch.randn(size, generator=torch.Generator().manual_seed(step)), torch.empty(size)
        before = {name: tensor.clone() for name, tensor in apart.state().items()}
        sliced = apart.sliced
        assert sliced is not None
        assert in_place.sliced is not None
        in_place.sliced.step(gradient.__getitem__, 0.1 / (1 + step), most)
        sliced.begin_apart(torch.empty(size), 0.7, most)
        sliced.step_apart(0, gradient[: sliced.begin_apart(into, 0.3, most)[0].stop])  # it is dropped
        slices = sliced.begin_apart(into, 0.1 / (1 + step), most)
        for number in chance.sample(range(len(slices)), len(slices)):
            sliced.step_apart(number, gradient[slices[number]])
        assert torch.equal(weights[0], weights[1])
        assert all(torch.equal(tensor, before[name]) for name, tensor in apart.state().items())
        sliced.adopt()
        apart.move(into)
        usual.step(gradient, 0.1 / (1 + step))
        weights[1] = into
        for rule, its in zip(rules, weights, strict=True):
            assert torch.equal(weights[0], its)
            assert rule.state().keys() == usual.state().keys()
            assert all(torch.equal(tensor, usual.state()[name]) for name, tensor in rule.state().items())


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    split = TensorDataset(torch.randn(SAMPLES, FEATURES, generator=generator), labels)
    return split, split


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 20), nn.Tanh(), nn.Dropout(0.4), nn.Linear(20, CLASSES))


class Own(nn.Module):
    """A user's layer of plain code, with weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.last, self.gain = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            inputs = inputs + torch.dropout(self.norm(self.layer(inputs)), 0.3, self.training) * self.gain
        return torch.nn.functional.linear(inputs, self.last.weight * 2)


class Counting(Own):
    """A user's layer that remembers how often it was used."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.gain.passes = getattr(self.gain, "passes", 0) + 1  # type: ignore[attr-defined]
        return super().forward(inputs)


class OwnLoss(Classification):
    """A user's loss."""


class Counted(nn.BatchNorm1d):
    """BatchNorm that replaces a buffer in each pass. Its layers are torch's for `EarlyForward`."""

    __module__ = "rudra.tests"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        found = super().forward(inputs)
        self.running_mean = self.running_mean * 0.5
        return found


def normed() -> nn.Module:
    first = nn.Linear(FEATURES, 20), nn.BatchNorm1d(20), nn.Dropout(0.4), Counted(20, momentum=None)
    return nn.Sequential(*first, nn.Linear(20, CLASSES), nn.BatchNorm1d(CLASSES))


MODELS: dict[str, dict[str, Any]] = {
    "chain": {"model": {"name": "mlp", "options": {"hidden": [30, 20]}}, "training": {"gradients": "direct"}},
    "autograd": {"model": {"name": dropping}},
    "bfloat16": {"model": {"name": dropping}, "training": {"precision": "bfloat16"}},
    "buffers": {"model": {"name": normed}},
    "users' layers": {"model": {"name": Own}},
    "adam": {"model": {"name": normed}, "optimizer": {"name": "adam", "momentum": 0.0}},
    "velocity of Caffe": {"model": {"name": dropping}, "optimizer": {"momentum_form": "caffe"}},
}


def executor(tables: dict[str, Any]) -> ReplicaExecutor:
    job = rudra.Job(
        data={"name": data, "classes": CLASSES},
        training={"minibatch_size": 4, "gradients": "autograd"},
        optimizer={"momentum": 0.9},
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
        cluster={"learners": 2},
    ).with_(**tables)
    plan = job.plan()
    (made,) = make_executors(job, plan, plan.learners[:1], load(job.data, test=False), prefetch=False).values()
    assert isinstance(made, ReplicaExecutor)
    made.prepare()
    return made


class Learner:
    """A learner whose gradients are averaged with nobody else's. Their parts arrive while a forward pass waits.

    Args:
        tables: tables of the job.
        early: generator of the order of arrivals and of failures. None: nothing begins early.
    """

    def __init__(self, tables: dict[str, Any], early: random.Random | None) -> None:
        self.executor, self.early = executor(tables), early
        self.used = 0
        plain = self.executor.source.gradient_of

        def counted(*args: Any) -> Any:
            self.used += 1
            return plain(*args)

        self.executor.source.gradient_of = counted  # type: ignore[method-assign]

    def compute(self, step: int, work: Work) -> Computed:
        (computed,) = self.executor.perform(Compute(step, work, WEIGHTS, GRADIENT))
        assert isinstance(computed, Computed)
        return computed

    def average(self, rate: float, *, in_time: bool) -> None:
        gradient = self.executor.buffer(GRADIENT).vector
        gradient[self.executor.size - self.executor._counters :] -= 0.3  # means of counters may be fractions
        if self.early is None:
            return
        its = parts(self.executor.size, self.executor.parameters, 48)
        left = self.early.sample(range(len(its)), len(its))
        mean = gradient.clone()
        gradient.fill_(torch.nan)  # what has not arrived
        arrivals = Arrivals(its, (), gradient.__getitem__, lambda: False, lambda: None)

        def arrive() -> None:
            number = left.pop()
            gradient[its[number]] = mean[its[number]]
            arrivals.add(number)

        def wait(stretch: slice) -> None:
            if not in_time and len(left) < len(its) // 2:
                raise NotInTime
            arrive()

        arrivals.wait = wait  # type: ignore[method-assign]
        about = Gradient(-1, 0, 4, 0, 0, 0, 0, 1.0, 0.0, 0.0, 0)
        self.executor.prepare_early(Reduce(GRADIENT, 0, 0, about, True, rate=rate), arrivals)
        while not arrivals.begun:
            arrive()
        self.executor.pass_early()
        while left:
            arrive()

    def update(self, timestamp: int, rate: float) -> None:
        list(self.executor.perform(Update(GRADIENT, WEIGHTS, rate, timestamp)))

    @property
    def all(self) -> list[torch.Tensor]:
        """Everything that a checkpoint has."""
        return [torch.from_numpy(array.copy()) for array in self.executor.state().values()]


SURPRISES = ["nothing", "nothing", "another rate", "another mini-batch", "a checkpoint", "too late", "an evaluation"]


@cases(60)
@given(st.sampled_from(sorted(MODELS)), st.lists(st.sampled_from(SURPRISES), min_size=4, max_size=12), st.integers(0))
def test_a_learner_gets_the_same_bits_whatever_was_predicted(model: str, surprises: list[str], seed: int) -> None:
    """Until an update, a checkpoint and others see nothing of it."""
    usual, early = Learner(MODELS[model], None), Learner(MODELS[model], random.Random(seed))
    stream = early.executor.source.work
    step, expected = 0, 0
    for number, what in enumerate(surprises):
        work = stream.after(step)
        assert usual.compute(step, work) == early.compute(step, work)
        assert torch.equal(*(each.executor.buffer(GRADIENT).vector for each in (usual, early)))
        assert early.used in range(expected + 1)
        before = early.all
        for each in (usual, early):
            each.average(0.1, in_time=what != "too late")
        assert all(torch.equal(*pair) for pair in zip(early.all, before, strict=True))
        expected += what in ("nothing", "an evaluation", "too late")
        for each in (usual, early):
            if what == "a checkpoint":
                each.executor.restore({name: tensor.copy() for name, tensor in each.executor.state().items()})
            each.update(number + 1, 0.05 if what == "another rate" else 0.1)
            if what == "an evaluation":
                each.executor.source.model.bind(torch.zeros(each.executor.size))
                batch = each.executor.source.minibatch(0, stream)
                each.executor.source.model.evaluate_batch(*batch)
                torch.rand(3)
        assert all(torch.equal(*pair) for pair in zip(usual.all, early.all, strict=True))
        step += 2 if what == "another mini-batch" else 1


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("model", MODELS)
def test_forward_passes_do_begin_early(model: str) -> None:
    """Passes 1, 2, 4 and 8 of a model with autograd check its weights, and need all of them first."""
    learner = Learner(MODELS[model], random.Random(1))
    for step in range(12):
        learner.compute(step, learner.executor.source.work.after(step))
        learner.average(0.1, in_time=True)
        learner.update(step + 1, 0.1)
    assert learner.used == (11 if model == "chain" else 8)


@pytest.mark.parametrize(
    ("model", "tables"),
    [
        (Counting, {}),
        (dropping, {"task": {"name": OwnLoss}}),
        (dropping, {"training": {"precision": "float16"}}),
        (dropping, {"training": {"microbatches": 2}}),
        (dropping, {"optimizer": {"clip_norm": 1.0}}),
        (dropping, {"optimizer": {"name": "torch.optim:Adadelta", "momentum": 0.0}}),
    ],
    ids=["a user's layer", "a user's task", "float16", "microbatches", "clipping", "a user's optimiser"],
)
def test_where_it_is_not_safe_none_begins_early(model: Any, tables: dict[str, Any]) -> None:
    made = executor({"model": {"name": model}} | tables)
    list(made.perform(Compute(0, made.source.work, WEIGHTS, GRADIENT)))
    possible = made.can_pass_early and made.source.can_pass_early_now and made._rule.sliced is not None
    assert not possible


def test_functions_wait_for_weights_in_lists_views_and_keywords() -> None:
    weights, seen = torch.zeros(100), list[slice]()
    head, tail = weights[:12].view(3, 4), weights[20:30]
    with Waiting(weights, seen.append):
        torch.cat([tail, torch.ones(2)])
        torch.add(torch.ones(3), other=head.t()[0])
        torch.ones(3) + 1
    assert seen[0] == slice(20, 30)
    assert slice(0, 12) in seen
    assert seen[-1] == slice(0, 9)


@pytest.mark.parametrize(
    ("seconds", "copies", "tensors", "worthwhile"),
    [(0.002, 2, 20, False), (0.02, 2, 20, True), (0.02, 2, 3000, False), (0.006, 2, 20, True), (0.006, 3, 20, False)],
)
def test_a_pass_begins_early_if_the_other_parts_need_longer_than_it_costs(
    monkeypatch: pytest.MonkeyPatch, seconds: float, copies: int, tensors: int, worthwhile: bool
) -> None:
    """Two of eight parts of 24 MB have arrived in this time, so the others need three times as long."""
    now = [5.0]
    monkeypatch.setattr("rudra.compute.arrivals.time.monotonic", lambda: now[0])
    its = [slice(750_000 * i, 750_000 * (i + 1)) for i in range(8)]
    arrivals = Arrivals(its, (), torch.zeros(1).__getitem__, lambda: False, lambda: None)
    now[0] += seconds
    arrivals.add(0)
    arrivals.add(5)
    assert arrivals.worthwhile(copies, tensors) == worthwhile


@pytest.mark.parametrize(
    ("waits_s", "large"),
    [([9.0, 1.2, 1.3, 0.1, 1.1, 1.4], True), ([9.0, 1.2, 0.7, 0.8, 0.9, 9.0], False)],
    ids=["longer than a second of computation in most steps", "only in some"],
)
def test_a_learner_waits_for_long_if_most_steps_after_the_first_do(waits_s: list[float], large: bool) -> None:
    waits, now, enough = WaitShare(), 100.0, []
    for wait_s in waits_s:
        waits.begin(now + 1.0)
        now += 1.0 + wait_s
        enough.append(waits.end(now))
    assert enough == [False] * MEASURED_STEPS + [True]
    assert waits.is_large is large
