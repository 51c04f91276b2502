"""Steps of replicas that are made while the gradient is computed: the bits of usual steps, and what leaves in time."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rudra
from rudra.compute import replicas, step_ahead
from rudra.compute.making import make_executors
from rudra.compute.replicas import AveragerExecutor
from rudra.core.actions import Compute, PullReplica, StepReplica, Update
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import ReplicaStepped
from rudra.data.load import load

SAMPLES, FEATURES, CLASSES = 64, 12, 5


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    split = TensorDataset(torch.randn(SAMPLES, FEATURES, generator=generator), labels)
    return split, split


def normed() -> nn.Module:
    layers = nn.Linear(FEATURES, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Dropout(0.4), nn.Linear(40, 30), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(30, CLASSES))


MODELS: dict[str, dict[str, Any]] = {
    "chain": {"model": {"name": "mlp", "options": {"hidden": [40, 30]}}, "training": {"gradients": "direct"}},
    "autograd, with buffers": {"model": {"name": normed}},
    "bfloat16": {"model": {"name": normed}, "training": {"precision": "bfloat16"}},
    "velocity of Caffe": {"model": {"name": normed}, "optimizer": {"momentum_form": "caffe", "weight_decay": 0.01}},
    "no momentum": {"model": {"name": normed}, "optimizer": {"momentum": 0.0}},
}


def executor(tables: dict[str, Any]) -> AveragerExecutor:
    job = rudra.Job(
        data={"name": data, "classes": CLASSES},
        training={"minibatch_size": 8, "gradients": "autograd"},
        optimizer={"momentum": 0.9},
        protocol={"name": "average"},
        cluster={"learners": 2},
    ).with_(**tables)
    plan = job.plan()
    (made,) = make_executors(job, plan, plan.learners[:1], load(job.data, test=False), prefetch=False).values()
    assert isinstance(made, AveragerExecutor)
    made.prepare()
    return made


class Learner:
    """A learner whose replica is averaged with no other.

    Attributes:
        told: pieces of the gradient, and parts of the difference, in the order in which they became final.
    """

    def __init__(self, tables: dict[str, Any]) -> None:
        self.executor = executor(tables)
        self.told: list[tuple[str, slice]] = []
        self.sent: list[tuple[slice, torch.Tensor]] = []

    def train(self, step: int, *, ends: bool, ahead: bool) -> ReplicaStepped:
        its, name = self.executor, DIFFERENCE if ends else ""
        action = StepReplica(GRADIENT, REPLICA, 0.1 / (1 + step), WEIGHTS, name)
        self.told, its.ready = [], None
        its.renew(GRADIENT).vector.fill_(torch.nan)
        if ends and ahead:
            its.renew(DIFFERENCE).vector.fill_(torch.nan)
            before = its.buffer(REPLICA).vector.clone()
            take = its.step_ahead(action, self._final)
            assert take is not None

            def ready(piece: slice) -> None:
                self.told.append(("gradient", piece))
                take(piece)

            its.ready = ready
        (_,) = its.perform(Compute(step, its.source.work.after(step), REPLICA, GRADIENT))
        if ends and ahead:
            assert torch.equal(its.buffer(REPLICA).vector, before)
        (stepped,) = its.perform(action)
        assert isinstance(stepped, ReplicaStepped)
        for part, sent in self.sent:
            its.buffer(DIFFERENCE).vector[part] = sent
        self.sent.clear()
        return stepped

    def _final(self, part: slice) -> None:
        """The part leaves, and the average overwrites it."""
        left = self.executor.buffer(DIFFERENCE).vector[part]
        self.sent.append((part, left.clone()))
        left.fill_(torch.nan)
        self.told.append(("difference", part))

    def average(self, step: int) -> None:
        list(self.executor.perform(Update(DIFFERENCE, WEIGHTS, 1.0, step)))
        list(self.executor.perform(PullReplica(REPLICA, WEIGHTS, 0.5)))

    def state(self) -> list[torch.Tensor]:
        its = self.executor
        return [*(its.buffer(name).vector for name in (REPLICA, WEIGHTS)), *its._inner.state().values()]


@pytest.mark.parametrize("tables", MODELS.values(), ids=MODELS)
def test_parts_of_a_difference_leave_during_the_pass_and_have_the_usual_bits(
    tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ahead, "STEPPED", 64)
    for module in (step_ahead, replicas):
        monkeypatch.setattr(module, "CHUNK", 400)
    usual, early = Learner(tables), Learner(tables)
    for step in range(7):
        ends = step % 3 < 2  # periods of one and of two mini-batches
        found = [learner.train(step, ends=ends, ahead=learner is early).distance for learner in (usual, early)]
        if not ends:
            continue
        assert found[0] == found[1] > 0
        assert torch.equal(*(learner.executor.buffer(DIFFERENCE).vector for learner in (usual, early)))
        last = max(place for place, (kind, _) in enumerate(early.told) if kind == "gradient")
        gone = sum(part.stop - part.start for kind, part in early.told[:last] if kind == "difference")
        whole = sum(part.stop - part.start for kind, part in early.told if kind == "difference")
        assert whole == early.executor.parameters
        first_layer = FEATURES * 40 + 40
        assert gone > whole - first_layer - 2 * 40 - 64  # all but it, its norm, and what is stepped with them
        for learner in (usual, early):
            learner.average(step)
        assert all(map(torch.equal, usual.state(), early.state()))
    assert len(early.executor._idle) <= 1 + len(usual.executor._idle)


def test_a_step_that_needs_more_than_its_part_is_not_made_ahead() -> None:
    for optimizer in ({"name": "adamw", "momentum": 0.0}, {"clip_norm": 1.0}):
        its = executor({"optimizer": optimizer, "model": {"name": normed}})
        its.renew(DIFFERENCE)
        action = StepReplica(GRADIENT, REPLICA, 0.1, WEIGHTS, DIFFERENCE)
        assert its.step_ahead(action, lambda part: None) is None


def test_a_step_that_was_begun_in_vain_leaves_nothing() -> None:
    """A member has died: the learner continues from the weights, as if it had not begun."""
    its = Learner(MODELS["autograd, with buffers"])
    its.train(0, ends=True, ahead=True)
    its.average(0)
    before = [tensor.clone() for tensor in its.state()]
    executor = its.executor
    take = executor.step_ahead(StepReplica(GRADIENT, REPLICA, 0.1, WEIGHTS, DIFFERENCE), lambda part: None)
    assert take is not None
    take(slice(0, executor.parameters))
    assert all(map(torch.equal, before, its.state()))
    executor.restore({name: tensor.copy() for name, tensor in executor.state().items()})
    assert all(map(torch.equal, before, its.state()))
    its.train(1, ends=True, ahead=False)
