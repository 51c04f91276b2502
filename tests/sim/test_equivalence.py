"""Protocols and topologies against plain torch and against each other: same samples, same rate, same weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import Guarded, TrialRows, train
from torch import nn
from torch.nn import functional

import rudra
from rudra.compute import models
from rudra.compute.executor import Executor
from rudra.compute.flat import FlatModel
from rudra.core.actions import Compute, ExecutorAction, Update
from rudra.core.events import Event
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.job.job import Job
from tests.selection import CAMPAIGN

MU = 8
DIGITS = 1437
"""Training samples of digits."""

DELAYS = {"jitter": 0.9, "latency_jitter_s": 0.05, "slowdown": {0: 3.0}}


def make_job(protocol_: str, learners: int, updates: int, model: str = "mlp", **tables: Any) -> Job:
    """A job of exactly `updates` updates, in epochs as long as the data allows."""
    rule = {"name": protocol_, **tables.pop("protocol", {})}
    job = Job(
        model={"name": model},
        training={"minibatch_size": MU, "seed": 3, "evaluate": False},
        optimizer={"learning_rate": 0.01, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"reference_batch_size": 32, **rule},
        cluster={"learners": learners, "threads_per_rank": 1},
        simulation={**DELAYS, **tables.pop("simulation", {})},
        **tables,
    )
    plan = job.plan()
    per_update = job.make_protocol(plan).gradients_per_update * learners // plan.workers * MU
    epochs = next(e for e in range(1, updates + 1) if updates % e == 0 and updates // e * per_update <= DIGITS)
    return job.with_(training={"epochs": epochs}, data={"train_limit": updates // epochs * per_update})


def plain_sgd(job: Job, steps: int, batches: Any, rate: float, schedule: Any = None, **options: Any) -> torch.Tensor:
    """Plain torch: a module, its own parameters, an optimiser; `batches(step)` gives sample numbers.

    What `schedule` makes of the optimiser is stepped after each step of it.
    """
    split, _, info, _ = load(job.data, test=False)
    module = models.build(job.model, info, job.training.seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9, **options)
    scheduler = None if schedule is None else schedule(optimizer)
    torch.set_num_threads(1)
    for step in range(steps):
        inputs, labels = split.batch(batches(step))
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    flat = FlatModel(module)
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    return weights


def union(job: Job, learners: Sequence[int] | None = None) -> Any:
    """Sample numbers of the mini-batches of all or some learners, by step."""
    samples = job.data.train_limit or DIGITS
    chosen = range(job.learners) if learners is None else learners
    samplers = [Sampler(job.training.seed, learner, samples) for learner in chosen]
    return lambda step: np.concatenate([s.indices(step * MU, MU) for s in samplers])


@pytest.mark.parametrize("topology", [{"name": "base"}, {"name": "groups", "options": {"groups": 1}}], ids=str)
def test_one_cycle_by_updates_is_that_of_plain_torch(topology: dict[str, Any]) -> None:
    """One learner; the number of updates is known from the job."""
    options = {"max_lr": 0.1, "cycle_momentum": False}
    table = {"schedule": "torch.optim.lr_scheduler:OneCycleLR", "schedule_every": "update", "schedule_options": options}
    job = make_job("hardsync", 1, 60, topology=topology, optimizer=table, protocol={"modulation": "none"})
    trained = train(job)
    rates: list[float] = []

    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, **options, total_steps=60)  # type: ignore[arg-type]
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return made

    expected = plain_sgd(job, 60, union(job), 0.01, one_cycle)
    assert trained.rows["updates"]["learning_rate"].tolist() == rates
    assert torch.equal(trained.weights, expected)


@pytest.mark.parametrize(("learners", "model"), [(3, "lenet"), (5, "mlp")])
def test_hardsync_is_one_large_batch(learners: int, model: str) -> None:
    # At high rates a max-pooling decision that flips on the last bit is amplified; that is not the protocol's doing.
    job = make_job("hardsync", learners, 100, model, optimizer={"learning_rate": 0.002})
    trained = train(job)
    assert trained.rows.totals["timestamp"] == 100
    rate = 0.002 * (learners * MU / 32) ** 0.5
    assert trained.rows["updates"]["learning_rate"] == pytest.approx(rate)
    expected = plain_sgd(job, 100, union(job), rate)
    assert (trained.weights - expected).abs().max() <= 1e-5


TREES: list[dict[str, Any]] = [
    {"name": "adv", "options": {"fan_out": 2}},
    {"name": "adv", "options": {"fan_out": [1, 2]}},
    {"name": "adv", "options": {"fan_out": [3, 4]}},
    {"name": "adv"},
]
GROUPS: list[dict[str, Any]] = [{"name": "groups", "options": {"groups": g}} for g in (1, 2, 3, 7)]


@pytest.fixture(scope="module")
def references() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after 40 updates of seven learners under hardsync: through one server, and of one large batch."""
    job = make_job("hardsync", 7, 40)
    return train(job).weights, plain_sgd(job, 40, union(job), 0.01 * (7 * MU / 32) ** 0.5)


SERVED = {"name": "groups", "options": {"groups": 1, "parameter_server": True}}


@pytest.mark.parametrize("topology", [*TREES, *GROUPS, SERVED], ids=str)
def test_hardsync_is_one_large_batch_on_every_topology(
    topology: dict[str, Any], references: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Seven learners on three nodes, which neither a fan-out nor a number of groups divides."""
    trained = train(make_job("hardsync", 7, 40, topology=topology, simulation={"nodes": 3}))
    assert trained.rows.totals["timestamp"] == 40
    rate = 0.01 * (7 * MU / 32) ** 0.5
    assert trained.rows["updates"]["learning_rate"] == pytest.approx(rate)
    assert (trained.rows["gradients"]["staleness"] == 0).all()
    for expected in references:
        assert (trained.weights - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("topology", [*TREES, {"name": "groups", "options": {"groups": 3}}, GROUPS[0]], ids=str)
def test_batch_norm_statistics_are_averaged_by_samples_on_every_topology(topology: dict[str, Any]) -> None:
    def factory() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))

    job = make_job("hardsync", 5, 8, topology=topology, simulation={"nodes": 2}).with_(model={"name": factory})
    reference = make_job("hardsync", 5, 8).with_(model={"name": factory})
    assert (train(job).weights - train(reference).weights).abs().max() <= 1e-5


@pytest.mark.parametrize("protocol", ["async", "softsync", "hardsync"])
def test_replicas_of_one_group_do_not_care_for_the_protocol(protocol: str) -> None:
    """Its gradients are added before any protocol sees them: synchronous training by allreduce."""
    job = make_job(protocol, 4, 30, topology=GROUPS[0], protocol={"modulation": "none"})
    trained = train(job)
    assert (trained.weights - plain_sgd(job, 30, union(job), 0.01)).abs().max() <= 1e-5
    for role in trained.plan.learners:
        assert torch.equal(trained.executors[role].buffer("weights").vector, trained.weights)


@pytest.mark.parametrize(("groups", "k"), [(2, 2), (3, 2), (2, 3)])
def test_a_group_is_one_learner_with_a_batch_of_all(groups: int, k: int) -> None:
    """The others compute their first gradient until the end, so the first group trains alone."""
    learners, fast = groups * k, list(range(k))
    slow = dict.fromkeys(range(k, learners), 1e6)
    topology = {"name": "groups", "options": {"groups": groups}}
    job = make_job("async", learners, 40, topology=topology, simulation={"slowdown": slow})
    trained = train(job)
    gradients = trained.rows["gradients"]
    assert list(gradients["learner"]) == fast * 40
    assert (gradients["staleness"] == 0).all()
    expected = plain_sgd(job, 40, union(job, fast), 0.01 / groups)  # async: α0/n, with n groups
    assert (trained.weights - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_async_with_one_learner_is_plain_sgd_bit_for_bit(weight_decay: float) -> None:
    job = make_job("async", 1, 150, "lenet", optimizer={"weight_decay": weight_decay})
    trained = train(job)
    expected = plain_sgd(job, 150, union(job), 0.01, weight_decay=weight_decay)
    assert torch.equal(trained.weights, expected)


class Normed(nn.Module):
    """Has buffers, which travel with a gradient and are none."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.output = nn.Linear(64, 33), nn.BatchNorm1d(33), nn.Linear(33, 10)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.output(self.norm(self.hidden(inputs.flatten(1))).relu())


def test_groups_clipping_warm_up_and_cosine_are_plain_torch_bit_for_bit() -> None:
    """Four epochs of 30 updates; the warm-up ends in the middle of the second one, and the last two are of cosine."""
    table = {"momentum": 0.9, "weight_decay": 0.01, "learning_rate": 0.1, "clip_norm": 1.0}
    schedule = {"schedule": "cosine", "warm_up": 1.5, "schedule_options": {"eta_min": 0.01}}
    groups = [{"parameters": ["*.bias", "norm.*"], "weight_decay": 0.0}, {"parameters": "hidden.*", "rate_factor": 0.5}]
    job = make_job("async", 1, 120, optimizer={**table, **schedule, "groups": groups})
    job = job.with_(model={"name": Normed}, training={"epochs": 4}, data={"train_limit": 30 * MU})
    trained = train(job)

    split, _, info, _ = load(job.data, test=False)
    module = models.build(job.model, info, job.training.seed)
    assert isinstance(module, Normed)
    rest = [module.hidden.bias, module.norm.weight, module.norm.bias, module.output.bias]
    optimizer = torch.optim.SGD(
        [{"params": rest, "weight_decay": 0.0}, {"params": [module.hidden.weight]}, {"params": [module.output.weight]}],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(dummy, 2, 0.01)
    batches, norms = union(job), []
    for step in range(120):
        if step == 90:
            dummy.step()
            cosine.step()
        rate = cosine.get_last_lr()[0] * min(1.0, (step + 1) / 30 / 1.5)
        for group, factor in zip(optimizer.param_groups, (1.0, 0.5, 1.0), strict=True):
            group["lr"] = rate * factor
        inputs, labels = split.batch(batches(step))
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
    assert min(norms) < 1.0 < max(norms)
    flat = FlatModel(module)
    expected = torch.empty(flat.size)
    flat.read_into(expected)
    assert torch.equal(trained.weights, expected)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "topology", [{"name": "base"}, *TREES[:2], {"name": "adv*", "options": {"fan_out": 2}}, *GROUPS[1:3]], ids=str
)
@pytest.mark.parametrize(("protocol", "learners", "n"), [("softsync", 4, 2), ("softsync", 3, 1), ("async", 5, None)])
def test_recorded_gradients_explain_the_weights(
    protocol: str, learners: int, n: int | None, topology: dict[str, Any]
) -> None:
    """The record says which gradients, of which weights, went into which update: redo them by hand."""
    job = make_job(protocol, learners, 30, protocol={"n": n} if n else {}, topology=topology, simulation={"nodes": 2})
    trained = train(job)
    assert trained.rows["gradients"]["staleness"].max() > 0
    assert (trained.weights - redone(job, trained.rows)).abs().max() <= 1e-5


def redone(job: Job, rows: TrialRows, form: str = "torch", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weights that a record leads to, with momentum by hand in one form or the other."""
    split, _, info, _ = load(job.data, test=False)
    flat = FlatModel(models.build(job.model, info, job.training.seed))
    weights = torch.empty(flat.size)
    flat.read_into(weights)
    versions, velocity = [weights.to(dtype)], torch.zeros(flat.size, dtype=dtype)
    gradients, m, decay = rows["gradients"], job.optimizer.momentum, job.optimizer.weight_decay
    for update in rows["updates"]:
        total = torch.zeros(flat.size, dtype=dtype)
        for row in gradients[gradients["update"] == update["timestamp"]]:
            flat.bind(versions[row["timestamp"]].float())
            sampler = Sampler(job.training.seed, int(row["learner"]), len(split))
            out = torch.empty(flat.size)
            flat.gradient(*split.batch(sampler.indices(int(row["step"]) * MU, MU)), out, 0)
            total += out
        mean, rate = total / int(update["gradients"]) + decay * versions[-1], float(update["learning_rate"])
        velocity = m * velocity + (rate * mean if form == "caffe" else mean)
        versions.append(versions[-1] - (velocity if form == "caffe" else rate * velocity))
    return versions[-1].float()


CHANGING: dict[str, dict[str, Any]] = {
    "milestones": {"optimizer": {"milestones": [1, 3]}},
    "mean staleness": {"protocol": {"modulation": "mean_staleness"}},
    "warm-up, and down to zero": {"optimizer": {"warm_up": 1.5, "schedule": "cosine"}},
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("changing", "topology"),
    [
        *((name, topology) for name in CHANGING for topology in ({"name": "base"}, TREES[0])),
        *((name, GROUPS[0]) for name in CHANGING if name != "mean staleness"),  # nothing is stale in one group
    ],
    ids=str,
)
def test_momentum_has_the_form_that_the_job_names_where_rates_change(changing: str, topology: dict[str, Any]) -> None:
    """With one group every learner has a replica that it updates itself."""
    tables = CHANGING[changing]
    own = {"weight_decay": 0.01, "learning_rate": 0.05, **tables.get("optimizer", {})}
    job = make_job("async", 4, 40, topology=topology, protocol={"modulation": "none", **tables.get("protocol", {})})
    job = job.with_(training={"epochs": 4}, data={"train_limit": job.data.train_limit // 4})
    ends = []
    for form in ("torch", "caffe"):
        run = job.with_(optimizer={**own, "momentum_form": form})
        trained = train(run)
        assert len(set(trained.rows["updates"]["learning_rate"])) > 2
        for dtype in (torch.float32, torch.float64):
            assert (trained.weights - redone(run, trained.rows, form, dtype)).abs().max() <= 1e-5
        ends.append(trained.weights)
    assert (ends[0] - ends[1]).abs().max() > 0.02


class Stamped(Guarded):
    """Knows the digest of every version of the weights, and of those that each gradient was computed from."""

    def __init__(self, executors: dict[int, Executor]) -> None:
        super().__init__(executors)
        self.versions = {0: self._digest(0, "weights")}
        self.used: dict[tuple[int, int], str] = {}

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        if isinstance(action, Compute):
            self.used[role, action.step] = self._digest(role, action.weights)
        event = super().perform(role, action, seconds)
        if isinstance(action, Update):
            self.versions[action.timestamp] = self._digest(role, action.weights)
        return event


SLOW_PULLS: dict[str, Any] = {"bandwidth_bytes_per_s": 3e7, "latency_jitter_s": 0.03, "jitter": 0.9, "compute_s": 0.02}


@pytest.mark.parametrize(
    ("options", "network"),
    [
        pytest.param({}, {}, marks=CAMPAIGN),
        ({"fan_out": [2, 2], "weight_fan_out": 1}, SLOW_PULLS),
        pytest.param({"fan_out": 3, "weight_fan_out": 3}, SLOW_PULLS, marks=CAMPAIGN),
    ],
    ids=["fast", "slow chain", "slow star"],
)
def test_overlapped_learners_use_whole_weights_of_their_timestamp(
    options: dict[str, Any], network: dict[str, Any]
) -> None:
    """Thousands of swaps, with poison where weights are coming in: every gradient is of what the server once had."""
    topology = {"name": "adv*", "options": options}
    job = make_job("async", 5, 1500, topology=topology, simulation={"nodes": 2, **network}).with_(model={"name": tiny})
    trained = train(job, Stamped)
    tensors, gradients, learners = trained.tensors, trained.rows["gradients"], trained.rows.learners
    assert isinstance(tensors, Stamped)
    assert learners["pulls"].sum() > 1000
    assert len(tensors.versions) == 1501
    for row in gradients:
        role = trained.plan.learners[row["learner"]]
        assert tensors.used[role, int(row["step"])] == tensors.versions[int(row["timestamp"])]
    for learner in learners:
        mine = gradients[gradients["learner"] == learner["learner"]]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "none is lost or repeated"
        assert learner["pushed"] >= len(mine)
    totals = trained.rows.totals
    assert learners["pushed"].sum() == totals["pushed"] == totals["applied"] + totals["discarded"]
    if network:
        assert gradients["staleness"].max() > 8, "nothing would be shown if weights came at once"


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


@pytest.mark.parametrize(("learners", "n", "c"), [(5, 3, 1), (7, 3, 2), (5, 2, 2)])
def test_the_rate_is_divided_by_n_whatever_c_is(learners: int, n: int, c: int) -> None:
    """λ/n is rounded down: with λ = 5 and n = 3 an update is made of one gradient, as if n were 5."""
    updates = train(make_job("softsync", learners, 20, protocol={"n": n})).rows["updates"]
    assert (updates["gradients"] == c).all()
    assert updates["learning_rate"] == pytest.approx(0.01 / n, rel=1e-12)


def tensors(results: rudra.Results) -> dict[str, torch.Tensor]:
    return results.state_dict()


@pytest.mark.parametrize(
    "topology", [{"name": "base"}, {"name": "adv*", "options": {"fan_out": 2}}, *GROUPS[:2]], ids=str
)
def test_a_warm_start_begins_with_the_final_weights_of_another_run(topology: dict[str, Any], tmp_path: Path) -> None:
    """All of them, buffers too, on every role: what follows is what plain torch makes of them."""
    job = make_job("async", 2, 6, protocol={"modulation": "none"}).with_(model={"name": Normed})
    with rudra.simulate(job, output=tmp_path / "first.h5", progress="quiet") as results:
        final, sha256 = tensors(results), results.summary()["weights_sha256"]
    warm = job.with_(
        topology=topology, protocol={"name": "softsync", "n": 1}, training={"warm_start": tmp_path / "first.h5"}
    )
    one = warm.with_(training={"epochs": 1}, data={"train_limit": 2 * MU}, optimizer={"momentum": 0.0})
    if topology["name"] == "groups":  # whose average of all is the one update
        one = one.with_(protocol={"name": "hardsync", "n": None, "modulation": "none"})
    with rudra.simulate(one, output=tmp_path / "second.h5", progress="quiet") as results:
        summary, found, gradients = results.summary(), tensors(results), results.gradients
    assert summary["initial_weights_sha256"] == sha256
    assert summary["updates"] == 1
    split, _, info, _ = load(one.data, test=False)
    module = models.build(one.model, info, 3)
    total: dict[str, torch.Tensor] = {}
    for row in gradients:
        module.load_state_dict(final)
        module.zero_grad()
        numbers = Sampler(3, int(row["learner"]), 2 * MU).indices(int(row["step"]) * MU, MU)
        inputs, labels = split.batch(numbers)
        loss = functional.cross_entropy(module(inputs), labels)
        loss.backward()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in module.named_parameters():
            total[name] = total.get(name, torch.zeros(())) + parameter.grad / 2
    for name, gradient in total.items():
        assert torch.allclose(found[name], final[name] - 0.01 * gradient, atol=1e-7)


def test_rate_by_gradient_staleness_weighs_inside_the_average() -> None:
    job = make_job("async", 4, 40, protocol={"modulation": "gradient_staleness"})
    rows = train(job).rows
    sigma = rows["gradients"]["staleness"]
    assert sigma.max() > 1
    assert (rows["gradients"]["scale"] == 1 / np.maximum(1, sigma)).all()
    assert (rows["updates"]["learning_rate"] == 0.01).all()


def test_rate_by_mean_staleness() -> None:
    updates = train(make_job("async", 4, 40, protocol={"modulation": "mean_staleness"})).rows["updates"]
    assert updates["learning_rate"] == pytest.approx(0.01 / np.maximum(1, updates["mean_staleness"]))


def test_batch_norm_statistics_travel_and_are_averaged() -> None:
    """Under hardsync the server's running mean is the mean of what the learners' batches made of it."""

    def factory() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))

    job = make_job("hardsync", 3, 1).with_(model={"name": factory})
    trained = train(job)
    split, _, info, _ = load(job.data, test=False)
    means = []
    for learner in range(3):
        inputs, _ = split.batch(Sampler(3, learner, len(split)).indices(0, MU))
        means.append(0.1 * inputs.flatten(1).mean(0))
    flat = FlatModel(models.build(job.model, info, 3))
    entry = next(e for e in flat.layout if e.name.endswith("running_mean"))
    found = trained.weights[entry.offset : entry.offset + entry.size]
    assert torch.allclose(found, torch.stack(means).mean(0), atol=1e-6)
