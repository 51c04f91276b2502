"""Steps that a device does before the roles ask: whatever the roles then do, they see what they would have seen.

The device of these tests repeats recorded operations on the CPU, late and in any order that its streams allow.
"""

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rudra.compute import speculation
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import DeviceKind
from rudra.compute.device.streams import Done, finished
from rudra.compute.executor import Executor
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors, speculation_of
from rudra.compute.owners import OwnerExecutor
from rudra.compute.speculation import MOST, VAIN, WARM, SpeculativeSteps
from rudra.core.actions import Compute, SetOptimizer, Update
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.events import Computed, Updated
from rudra.core.messages import PushedGradient, Weights
from rudra.data.load import Data, load
from rudra.job.job import Job
from rudra.mpi.leases import Going
from rudra.mpi.local_traffic import LocalTraffic
from rudra.mpi.transfers import Wanted
from tests.selection import covering

HOST = DeviceKind()
SAMPLES = 160  # of the training set, so that a pass has 40 steps


def normal(*_: Any) -> nn.Module:
    """A network with statistics, a counter and random numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 10))


def even(*_: Any) -> nn.Module:
    """A network whose weights are whole cache lines, so that one kernel updates all of them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False))


class Waits(nn.Module):
    """A network whose code depends on a number."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs.flatten(1))
        return out * 2 if out.sum() > 0 else out


def job_of(model: Any = normal, **tables: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "digits", "train_limit": SAMPLES},
        training={"minibatch_size": 4, "seed": 5, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.05, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"name": "hardsync"},
        cluster={"learners": 1, "one_rank": True, "threads_per_rank": 1, **tables.pop("cluster", {})},
        **tables,
    ).resolved()


@cache
def digits() -> Data:
    return load(job_of().data, test=False)


class Ranks:
    """A learner and a server on one rank, and what they have seen.

    Attributes:
        seen: Everything that the roles could notice, in order.
        steps: The steps that are done ahead. None: none are.
    """

    def __init__(self, job: Job, device: DeviceKind, rates: Callable[[int], float | None] | None = None) -> None:
        self.rates = rates or (lambda timestamp: self.rate)
        plan = job.plan()
        self.learner_role, self.owner_role = plan.learners[0], plan.server
        executors: dict[int, Executor] = make_executors(
            job, plan, (self.owner_role, self.learner_role), digits(), prefetch=False
        )
        learner, owner = executors[self.learner_role], executors[self.owner_role]
        assert isinstance(learner, LearnerExecutor)
        assert isinstance(owner, OwnerExecutor)
        self.learner, self.owner = learner, owner
        for executor in executors.values():
            executor.prepare()
        known = None if rates is None else lambda samples, updates: rates(self.timestamp + updates)
        self.steps = speculation_of(job, plan, executors, known)
        self.traffic = LocalTraffic(
            executors,
            halves=False,
            received=lambda *_: None,
            sent=lambda going: executors[going.role].sent(going.name),
            speculation=self.steps,
        )
        self.seen: list[Any] = []
        self.step = self.timestamp = 0
        self.rate = job.optimizer.learning_rate
        self._pull()

    def carry(self, giver: int, name: str, taker: int, into: str, *, gradient: bool) -> None:
        message = PushedGradient(giver, 0, 0, ()) if gradient else Weights(giver, self.timestamp)
        self.traffic.receive(Wanted(taker, into, None, 0, halves=False), giver, gradient=gradient)
        self.traffic.send(Going(giver, name, taker), message, gradient=gradient)

    def _pull(self) -> None:
        self.carry(self.owner_role, WEIGHTS, self.learner_role, WEIGHTS, gradient=False)

    def train(self, steps: int, between: Callable[["Ranks", str], None] = lambda *_: None) -> None:
        """Trains like the roles. `between` is called after each part of a step with the name of this part."""
        for _ in range(steps):
            work = self.learner.source.work.after(self.step)
            compute = Compute(self.step, work, WEIGHTS, GRADIENT, self.timestamp)
            self.learner.make_room(compute)
            (found,) = finished(self.learner.perform(compute))
            assert isinstance(found, Computed)
            self.seen.append(found)
            between(self, "computed")
            into = f"gradient {self.step % 2}"
            self.carry(self.learner_role, GRADIENT, self.owner_role, into, gradient=True)
            between(self, "pushed")
            (updated,) = finished(
                self.owner.perform(Update(into, WEIGHTS, self.rates(self.timestamp), self.timestamp + 1))
            )
            assert isinstance(updated, Updated)
            self.seen.append((updated.timestamp, updated.digest))
            between(self, "updated")
            self.timestamp, self.step = self.timestamp + 1, self.step + 1
            self._pull()
            between(self, "pulled")

    def close(self) -> list[Any]:
        """Returns all that was seen, and the state in the end."""
        self.seen.append({name: tensor.tobytes() for name, tensor in self.owner.state().items()})
        self.seen.append(self.learner.sha256(WEIGHTS))
        self.learner.close()
        return self.seen


def ranks_on(device: DeviceKind, monkeypatch: pytest.MonkeyPatch, job: Job) -> Ranks:
    monkeypatch.setitem(DEVICES, "cpu", device)
    return Ranks(job, device)


CASES: dict[str, Job] = {
    "statistics, counter, dropout": job_of(),
    "lenet": job_of("lenet", optimizer={"learning_rate": 0.005}),
    "without momentum": job_of("mlp", optimizer={"momentum": 0.0}),
    "weight decay, nesterov": job_of("mlp", optimizer={"weight_decay": 0.1, "options": {"nesterov": True}}),
    "adam": job_of("mlp", optimizer={"name": "adam", "learning_rate": 0.001, "momentum": 0.0}),
    "whole cache lines": job_of(even),
    "caffe": job_of("mlp", optimizer={"momentum_form": "caffe"}),
    "crops": job_of("lenet", optimizer={"learning_rate": 0.005}, augment={"crop": 1, "flip": True}),
    "bfloat16": job_of("mlp", training={"precision": "bfloat16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_ahead_have_the_bits_of_the_usual_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = CASES[name]
    plain = ranks_on(HOST, monkeypatch, job)
    plain.train(100)
    wanted = plain.close()
    ahead = ranks_on(AdverseDevice(1), monkeypatch, job)
    ahead.train(100)
    assert ahead.steps is not None
    assert ahead.steps.refusal == ""
    assert ahead.steps.committed >= 100 - WARM - 1
    assert ahead.close() == wanted


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("whole cache lines", 1),
        ("without momentum", speculation.KEPT),
        ("adam", speculation.KEPT),
        ("caffe", speculation.KEPT),
    ],
)
def test_another_rate_needs_no_other_record_if_the_optimiser_reads_it_in_memory(
    name: str, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the plain kernel for the rest of a cache line, Adam and Caffe's momentum need it in main memory."""

    def drop(ranks: Ranks, part: str) -> None:
        if part == "pulled" and ranks.step % 16 == 15:
            ranks.rate *= 0.7

    seen = []
    for device in (HOST, AdverseDevice(2)):
        ranks = ranks_on(device, monkeypatch, CASES[name])
        ranks.train(120, drop)
        if ranks.steps is not None:
            assert len(ranks.steps._graphs) == records
            assert ranks.steps.committed > 60
        seen.append(ranks.close())
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("name", "records", "committed"),
    [("whole cache lines", 1, 100 - WARM), ("adam", 0, 0)],
)
def test_rates_that_change_with_each_update_are_predicted(
    name: str, records: int, committed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record for each rate would cost more than it saves."""

    def falling(timestamp: int) -> float:
        return 0.05 / (1 + timestamp)

    seen = []
    for device in (HOST, AdverseDevice(2)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        ranks = Ranks(CASES[name], device, falling)
        ranks.train(100)
        if ranks.steps is not None:
            assert (len(ranks.steps._graphs), ranks.steps.committed) == (records, committed)
            assert ranks.steps.refusal == ""
        seen.append(ranks.close())
    assert seen[0] == seen[1]


def test_a_rate_that_is_not_the_predicted_one_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an evaluation lowers it."""
    seen = []
    for device in (HOST, AdverseDevice(3)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        ranks = Ranks(CASES["whole cache lines"], device, lambda timestamp: 0.05)
        ranks.train(20)
        ranks.rates = lambda timestamp: 0.01 + timestamp / 1e5
        ranks.train(3)
        seen.append(ranks.close())
    assert seen[0] == seen[1]


class Meddler:
    """Roles that do something unexpected now and then, the same with the same seed."""

    def __init__(self, seed: int, often: float) -> None:
        self._chance, self._often = random.Random(seed), often

    def __call__(self, ranks: Ranks, part: str) -> None:
        if self._chance.random() > self._often:
            return
        match self._chance.randrange(6):
            case 0:
                ranks.seen.append(ranks.owner.sha256(WEIGHTS))
            case 1 if part in {"computed", "pushed"}:
                ranks.seen.append(ranks.learner.sha256(GRADIENT))
            case 2 if part in {"computed", "pushed", "pulled"}:
                ranks.seen.append(ranks.learner.sha256(WEIGHTS))
            case 3:
                ranks.rate = self._chance.choice((0.05, 0.01, 0.002))
            case 4:
                ranks.seen.append({name: tensor.tobytes() for name, tensor in ranks.owner.state().items()})
            case 5 if part == "pulled":
                momentum = self._chance.choice((0.9, 0.5, 0.0))
                finished(ranks.owner.perform(SetOptimizer(WEIGHTS, momentum, {})))


@pytest.mark.parametrize("seeds", covering([2], [2, 8]))
@pytest.mark.parametrize("often", [0.005, 0.05])
def test_roles_that_do_anything_at_any_time_see_what_they_would_have_seen(
    often: float, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "VAIN", 1000)
    committed = 0
    for seed in range(seeds):
        seen = []
        for device in (HOST, AdverseDevice(seed)):
            ranks = ranks_on(device, monkeypatch, CASES["statistics, counter, dropout"])
            ranks.train(90, Meddler(seed, often))
            seen.append(ranks.close())
            committed += 0 if ranks.steps is None else ranks.steps.committed
        assert seen[1] == seen[0], seed
    assert committed > seeds * 90 * (0.7 if often < 0.01 else 0.2)


def test_a_host_that_does_not_wait_before_it_goes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other orders, the device has done all steps by then."""

    class Hasty(SpeculativeSteps):
        def roll_back(self) -> None:
            for burst in self._bursts:
                burst.pending = Done([])
            super().roll_back()

    def trained(seed: int) -> list[Any]:
        ranks = ranks_on(AdverseDevice(seed), monkeypatch, CASES["without momentum"])
        ranks.train(20, look)
        return ranks.close()

    def look(ranks: Ranks, part: str) -> None:
        if ranks.step == WARM:
            ranks.seen.append(ranks.owner.sha256(WEIGHTS))

    wanted = trained(0)
    monkeypatch.setattr("rudra.compute.making.SpeculativeSteps", Hasty)
    assert sum(trained(seed) != wanted for seed in range(1, 11)) >= 3


def test_steps_that_cannot_be_recorded_are_done_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(Waits)
    plain = ranks_on(HOST, monkeypatch, job)
    plain.train(20)
    waits = ranks_on(AdverseDevice(1), monkeypatch, job)
    waits.train(20)
    assert waits.steps is not None
    assert waits.steps.refusal.startswith("the host waits for a number (at ")
    assert f"{Path(__file__).name}:" in waits.steps.refusal
    assert waits.steps.committed == 0
    assert waits.close() == plain.close()


def test_steps_that_cannot_be_predicted_are_soon_done_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_on(AdverseDevice(1), monkeypatch, CASES["without momentum"])
    tried = []

    def look(ranks: Ranks, part: str) -> None:
        assert ranks.steps is not None
        if part == "computed":
            tried.append(bool(ranks.steps._bursts))
            ranks.learner.sha256(WEIGHTS)

    ranks.train(30, look)
    assert sum(tried) == VAIN
    assert not any(tried[-10:])


def test_a_burst_ends_where_a_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the roles evaluate or save, so the device need not go back."""
    assert WARM + MOST < SAMPLES // 4 < MOST * 2, "a second burst would be longer than the pass"
    ranks, ends = ranks_on(AdverseDevice(1), monkeypatch, CASES["without momentum"]), []

    def look(ranks: Ranks, part: str) -> None:
        assert ranks.steps is not None
        if part == "updated" and not ranks.steps._bursts:
            ends.append(ranks.step + 1)

    ranks.train(3 * SAMPLES // 4, look)
    assert [end for end in ends if end > WARM] == [40, 80, 120]


def test_a_large_model_does_no_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "LARGEST", 3_000_000)
    ranks = ranks_on(AdverseDevice(1), monkeypatch, CASES["lenet"])
    ranks.train(WARM + 4)
    assert ranks.steps is not None
    assert ranks.steps.refusal.startswith("weights and optimiser have ")
    assert ranks.steps.committed == 0


@pytest.mark.parametrize(
    "tables",
    [
        {"cluster": {"graphs": "off"}},
        {"training": {"microbatches": 2}},
        {"optimizer": {"name": "torch.optim:SGD", "momentum": 0.0}},
        {"optimizer": {"average": {"rate": 0.5}}},
        {"cluster": {"learners": 2}},
        {"results": {"gradient_norms": "every 2"}},
        {"augment": {"name": "torch:neg"}},
    ],
)
def test_jobs_whose_steps_hold_more_do_none_ahead(tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1))
    job = job_of("mlp", **tables)
    plan = job.plan()
    roles = (plan.server, *plan.learners)
    executors = make_executors(job, plan, roles, digits(), prefetch=False)
    assert speculation_of(job, plan, executors) is None


def test_a_loss_that_is_not_finite_ends_training_with_the_usual_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has done more steps by then, with weights that are not finite."""

    def trained(device: DeviceKind) -> tuple[int, str]:
        ranks = ranks_on(device, monkeypatch, job_of("mlp"))
        ranks.train(10)
        ranks.rate = 1e18
        with pytest.raises(Diverged):
            ranks.train(20, stop)
        return ranks.step, ranks.owner.sha256(WEIGHTS)

    def stop(ranks: Ranks, part: str) -> None:
        if part == "computed" and not math.isfinite(ranks.seen[-1].loss):
            raise Diverged

    assert trained(AdverseDevice(3)) == trained(HOST)


class Diverged(Exception):
    """The loss is not finite."""
