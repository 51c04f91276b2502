"""Corrections of gradients: where they are called, with what, and that resumed runs and replays repeat them."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from clusters import train
from torch.nn import functional

import rudra
from protocols import Correction, GradientRecord
from rudra.compute import models
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.simulation.conformance import cases, cases_of_correction, outcome

PLACES: dict[str, dict[str, Any]] = {
    "base": {"protocol": {"name": "async"}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "sharded": {"protocol": {"name": "async"}, "topology": {"name": "sharded", "options": {"shards": 2}}},
    "groups": {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
    "one group": {"protocol": {"name": "hardsync"}, "topology": {"name": "groups", "options": {"groups": 1}}},
    "replicas": {"protocol": {"name": "sma"}},
    "shared replicas": {"protocol": {"name": "sma"}, "topology": {"name": "replicas", "options": {"groups": 2}}},
    "central": {"protocol": {"name": "easgd"}, "topology": {"name": "replicas", "options": {"parameter_server": True}}},
}


class Velocity(Correction):
    """Replaces each gradient by a running sum, so that every call changes the weights. The norm makes parts differ."""

    def __init__(self) -> None:
        self.sum: Any = None

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        assert pulled_weights is None
        self.sum = gradient.clone() if self.sum is None else self.sum * 0.5 + gradient / (1 + gradient.norm())
        gradient.copy_(self.sum)

    def state(self) -> dict[str, Any]:
        return {} if self.sum is None else {"sum": self.sum}

    def load_state(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


class Witness(Correction):
    """Compares the weights that it gets with the weights of that timestamp, which a hook has noted."""

    needs_pulled_weights = True
    noted: ClassVar[dict[int, torch.Tensor]] = {}
    seen: ClassVar[list[GradientRecord]] = []

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        assert torch.equal(pulled_weights, self.noted[record.timestamp])
        assert torch.equal(weights, self.noted[record.timestamp + record.staleness])
        assert gradient.shape == weights.shape
        self.seen.append(record)


def note(moment: rudra.Moment) -> None:
    assert moment.timestamp is not None
    Witness.noted[moment.timestamp] = flat(moment)


def flat(moment: rudra.Moment) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in moment.weights().values()]))


def job(place: str, correction: Any = None, epochs: int = 1, hooks: Any = (), **options: Any) -> rudra.Job:
    tables = PLACES[place]
    protocol = tables["protocol"] | ({"correction": correction, "correction_options": options} if correction else {})
    return rudra.Job(
        name="corrected",
        model={"name": "mlp", "options": {"hidden": [8]}},
        data={"name": "digits", "train_limit": 160},
        training={"epochs": epochs, "minibatch_size": 4, "evaluate": False},
        optimizer={"learning_rate": 0.05},
        cluster={"learners": 4, "threads_per_rank": 1},
        simulation={"slowdown": {0: 5.0}, "jitter": 0.3},
        hooks=hooks,
        **{**tables, "protocol": protocol},
    )


def weights_after(job_: rudra.Job, output: Path) -> str:
    with rudra.simulate(job_, output=output, progress="quiet") as results:
        return str(results.summary()["weights_sha256"])


@pytest.mark.parametrize("place", PLACES)
def test_delay_compensation_with_coefficient_0_has_the_bits_of_a_run_without(place: str, tmp_path: Path) -> None:
    none = weights_after(job(place), tmp_path / "none.h5")
    for adaptive in (False, True):
        zero = job(place, "dc_asgd", coefficient=0.0, adaptive=adaptive)
        assert weights_after(zero, tmp_path / f"{adaptive}.h5") == none


@pytest.mark.parametrize("place", PLACES)
def test_a_replay_repeats_a_correction_with_a_state(place: str, tmp_path: Path) -> None:
    own = job(place, Velocity)
    weights = weights_after(own, tmp_path / "run.h5")
    assert weights != weights_after(job(place), tmp_path / "none.h5")
    found = rudra.replay(tmp_path / "run.h5", job=own, quiet=True)
    assert found.identical, found
    assert found.weights_sha256 == weights


@pytest.mark.parametrize("place", ["base", "softsync", "groups"])
def test_a_correction_sees_the_weights_that_the_gradient_was_computed_from(place: str, tmp_path: Path) -> None:
    Witness.seen.clear()
    Witness.noted.clear()
    hooks = [{"at": "update", "call": note}]
    watched = job(place, Witness, hooks=hooks)
    plan = watched.plan()
    info = load(watched.data, test=False, seed=watched.training.seed).info
    first = models.build(watched.model, info, watched.training.seed)
    Witness.noted[0] = torch.cat([parameter.detach().flatten() for parameter in first.parameters()])
    with rudra.simulate(watched, output=tmp_path / "run.h5", progress="quiet") as results:
        rows = results.gradients
    k = len(plan.learners) // plan.workers
    records = Witness.seen[: len(rows) // k]  # the last gradients may not be applied
    assert [r.step for r in records] == rows["step"][::k].tolist()
    assert [r.timestamp for r in records] == rows["timestamp"][::k].tolist()
    assert [r.samples for r in records] == [4 * k] * len(records)
    assert {r.learner for r in records} == set(range(plan.workers))
    if place != "softsync":
        assert [r.staleness for r in records] == rows["staleness"][::k].tolist()
    assert max(r.staleness for r in records) > 2


@pytest.mark.parametrize("adaptive", [False, True])
def test_twenty_steps_of_delay_compensation_are_those_of_plain_torch(adaptive: bool, tmp_path: Path) -> None:
    about = job("base", "dc_asgd", coefficient=2.0, adaptive=adaptive)
    versions: dict[int, torch.Tensor] = {}

    def keep(moment: rudra.Moment) -> None:
        versions[moment.timestamp or 0] = flat(moment)

    hooked = about.with_(hooks=[{"at": "update", "call": keep}])
    with rudra.simulate(hooked, output=tmp_path / "run.h5", progress="quiet") as results:
        rows, rates = results.gradients[:20], results.updates["learning_rate"]
    assert rows["staleness"].max() > 2
    data = load(about.data, test=False, seed=about.training.seed)
    model = models.build(about.model, data.info, about.training.seed)
    parameters = list(model.parameters())
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    pulled, mean = {0: weights.clone()}, torch.zeros_like(weights)
    for row, rate in zip(rows, rates, strict=False):
        old = pulled[int(row["timestamp"])]
        torch.nn.utils.vector_to_parameters(old, parameters)
        samples = Sampler(about.training.seed, int(row["learner"]), 160).indices(int(row["first"]), 4)
        inputs, target = data.training.batch(samples)
        loss = functional.cross_entropy(model(inputs), target)
        g = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
        coefficient: Any = 2.0
        if adaptive:
            mean = 0.95 * mean + 0.05 * g * g
            coefficient = 2.0 / (mean + 1e-7).sqrt()
        weights = weights - float(rate) * (g + coefficient * g * g * (weights - old))
        update = int(row["update"])
        pulled[update] = weights
        assert torch.allclose(weights, versions[update], rtol=1e-5, atol=1e-6), update


@pytest.mark.parametrize("place", ["base", "sharded", "one group", "replicas", "shared replicas"])
def test_a_run_that_is_resumed_in_the_middle_continues_with_the_state_of_its_correction(place: str) -> None:
    own = job(place, Velocity, epochs=2)
    if place in ("base", "sharded"):  # all wait for each other, so a resumed run computes the same gradients
        own = own.with_(protocol={"name": "hardsync"})
    whole = train(own.with_(results={"checkpoint_every": "1 update"}))
    middle = whole.saved[len(whole.saved) // 2]
    assert any("correction." in name for name in middle.tensors)
    assert torch.equal(train(own, resumed=middle).weights, whole.weights)
    forgetful = {name: tensor for name, tensor in middle.tensors.items() if "correction." not in name}
    assert not torch.equal(train(own, resumed=middle._replace(tensors=forgetful)).weights, whole.weights)


class Forgetful(Velocity):
    def state(self) -> dict[str, Any]:
        return {}


def test_the_check_finds_a_state_that_is_not_declared() -> None:
    names = {Velocity: "ok", Forgetful: "FAILED"}
    for rule, status in names.items():
        case = next(case for case in cases_of_correction({"correction": rule}) if case.name == "hardsync, base")
        assert outcome(case).status == status
    assert [case.name for case in cases("protocols:Correction", {})][-1] == "async, adv (fan_out = 2)"
