"""Averages of replicas against plain torch, against each other, and against hardsync."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clusters import TrialCheckpoint, job, timing, train
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from replicas import MU, averaged, flat, replica, softmax_regression
from torch.nn import functional

import rudra
from protocols import averaging_pairs
from protocols.average import Average
from protocols.easgd import EASGD
from protocols.sma import SMA
from rudra.compute import models
from rudra.core.actions import Compute, ExecutorAction, Reduce, StepReplica
from rudra.core.buffer_names import DIFFERENCE
from rudra.core.events import Event
from rudra.core.records import Gradient
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.roles.averaging import Averager
from rudra.roles.elastic import ReplicaSteps
from rudra.roles.periods import joined
from rudra.simulation.timing_only import TimingOnly

Make = Callable[[Any], torch.optim.Optimizer]


def reference(run: Job, averages: int, inner: Make, outer: Make, alpha: float | None) -> Iterator[list[torch.Tensor]]:
    """Plain torch: z and all replicas after each average; alpha: replicas are corrected early, else they become z."""
    split, _, info, _ = load(run.data, test=False)
    k, period = run.learners, run.make_protocol().period
    z, *replicas = [models.build(run.model, info, run.training.seed) for _ in range(k + 1)]
    steppers, outer_stepper = [inner(each.parameters()) for each in replicas], outer(z.parameters())
    samplers = [Sampler(run.training.seed, j, run.data.train_limit or 0) for j in range(k)]
    for step in range(averages * period):
        last = step % period == period - 1
        given_up = [torch.zeros_like(p) for p in z.parameters()]  # by all replicas
        for each, stepper, sampler in zip(replicas, steppers, samplers, strict=True):
            inputs, labels = split.batch(sampler.indices(step * MU, MU))
            stepper.zero_grad()
            functional.cross_entropy(each(inputs), labels).backward()
            before = [(w - p).detach() for w, p in zip(each.parameters(), z.parameters(), strict=True)]
            stepper.step()
            after = [(w - p).detach() for w, p in zip(each.parameters(), z.parameters(), strict=True)]
            for w, total, apart in zip(
                each.parameters(), given_up, before if alpha is not None else after, strict=True
            ):
                total += apart
                w.data -= apart * (alpha or 0.0) if last else 0.0
        if not last:
            continue
        for p, total in zip(z.parameters(), given_up, strict=True):
            p.grad = -total / k
        outer_stepper.step()
        for each in replicas if alpha is None else []:
            each.load_state_dict(z.state_dict())
        yield [flat(z), *map(flat, replicas)]


def sgd(rate: float, momentum: float = 0.0, *, nesterov: bool = False) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=nesterov)


@pytest.mark.each_value
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sma_is_its_algorithm(period: int, momentum: float) -> None:
    """Every step of z and of all replicas, up to the rounding of float32."""
    k = 3
    for averages in (1, 2, 7, 25):
        run = averaged(
            "sma",
            k,
            averages,
            averaging={"period": period, "outer": {"momentum": momentum}},
            optimizer={"momentum": 0.5},
        )
        alpha = 1 / k if momentum else 1 / (k + 1)
        *_, expected = reference(run, averages, sgd(0.02, 0.5), sgd(alpha * k, momentum), alpha)
        trained = train(run)
        found = [trained.weights, *(replica(trained, learner) for learner in range(k))]
        assert max((a - b).abs().max() for a, b in zip(expected, found, strict=True)) <= 1e-6
        assert len(trained.rows["averages"]) == averages * k


@pytest.mark.parametrize("name", ["average", "diloco"])
def test_averages_after_the_step_are_those_of_plain_torch(name: str) -> None:
    """DiLoCo with AdamW inside: the pseudo-gradient points from z to the replicas, not away from them."""
    outer = {"average": sgd(1.0), "diloco": sgd(0.7, 0.9, nesterov=True)}[name]
    run = averaged(
        name, 3, 8, averaging={"period": 5}, optimizer={"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}
    )

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)

    *_, expected = reference(run, 8, adamw, outer, None)
    trained = train(run)
    assert (trained.weights - expected[0]).abs().max() <= 1e-6
    assert all(torch.equal(replica(trained, learner), trained.weights) for learner in range(3))
    losses = trained.rows["minibatches"]["loss"]
    assert losses[-9:].mean() < losses[:9].mean()


@pytest.mark.parametrize(("model", "averages", "most"), [(softmax_regression, 100, 1e-5), ("lenet", 20, 1e-4)])
def test_averaging_after_each_step_is_hardsync_with_momentum(model: Any, averages: int, most: float) -> None:
    epochs = 4 if averages == 100 else 1
    run = averaged("average", 3, averages, model, epochs, averaging={"outer": {"momentum": 0.9}})
    hardsync = run.with_(
        protocol={"name": "hardsync", "modulation": "none"},
        averaging={"outer": {}},
        topology={"name": "groups"},
        optimizer={"momentum": 0.9},
    )
    ours, other = train(run), train(hardsync)
    assert ours.rows.totals["timestamp"] == other.rows.totals["timestamp"] == averages
    assert (ours.weights - other.weights).abs().max() <= most


def test_without_elasticity_replicas_are_independent() -> None:
    """Bit for bit what each learner comes to with any others, averaged as often as may be."""
    often = averaged("easgd", 2, 30, averaging={"elasticity": 0.0})
    limit = {"train_limit": often.data.train_limit}
    seldom = averaged("sma", 2, 10, averaging={"elasticity": 0.0, "period": 3}).with_(data=limit)
    more = averaged("easgd", 5, 12, averaging={"elasticity": 0.0}).with_(data=limit)
    runs = [train(run.with_(training={"epochs": n})) for run, n in ((often, 2), (seldom, 2), (more, 5))]
    for other in runs[1:]:
        assert torch.equal(runs[0].weights, other.weights)  # which never move
        for learner in range(2):
            assert torch.equal(replica(runs[0], learner), replica(other, learner))
    assert not torch.equal(replica(runs[0], 0), replica(runs[0], 1))


def test_easgd_is_sma_without_momentum() -> None:
    ours = train(averaged("easgd", 4, 20))
    other = train(averaged("sma", 4, 20, averaging={"outer": {"momentum": 0.0}, "restart": False}))
    assert torch.equal(ours.weights, other.weights)
    assert all(torch.equal(replica(ours, learner), replica(other, learner)) for learner in range(4))


@pytest.mark.parametrize(
    "topology", [{"name": "replicas"}, {"name": "hierarchical", "options": {"blocks": 2}}], ids=str
)
def test_replicas_restart_where_the_rate_drops(topology: dict[str, Any]) -> None:
    """As if a run began there, with other weights and the lower rate; so do references."""
    run = averaged("sma", 4, 12, epochs=3, optimizer={"momentum": 0.9, "milestones": [1]}, topology=topology)
    trained = train(run)
    events = trained.rows["events"]
    assert [int(t) for t in events["timestamp"][events["kind"] == b"averaging"]] == [4]
    first = train(run.with_(results={"checkpoint_every": "1 epoch"})).saved[0]
    alone = TrialCheckpoint(first.position, {k: v for k, v in first.tensors.items() if k == "weights"})
    assert torch.equal(train(run, resumed=alone).weights, trained.weights)
    kept = train(run.with_(averaging={"keep_momentum": True}))
    never = train(run.with_(averaging={"restart": False}))
    assert not torch.equal(kept.weights, trained.weights)
    assert not torch.equal(never.weights, kept.weights)
    assert "events" not in never.rows.tables


def test_averages_are_made_beside_the_next_minibatch_where_the_rule_allows_it() -> None:
    slow = {"bandwidth_bytes_per_s": 1e6, "latency_jitter_s": 0.0, "jitter": 0.0, "slowdown": {}, "compute_s": 1.0}
    runs = {
        name: averaged(name, 4, 10, simulation=slow).with_(cluster={"buckets": "off"}) for name in ("easgd", "average")
    }
    runs["in buckets"] = runs["average"].with_(cluster={"buckets": "auto"})
    times = {name: timing(run, 320).totals["time_s"] for name, run in runs.items()}
    exposed_s = 2 * 3 / 4 * 350_000 / 1e6
    assert times["average"] == pytest.approx(10 * (1 + exposed_s), rel=0.1)
    assert times["easgd"] == pytest.approx(10 + exposed_s, rel=0.1)
    last_s = exposed_s / 59  # of a bucket, which the backward pass does not hide
    assert times["in buckets"] == pytest.approx(10 * (1 + last_s), abs=0.01)


def test_averages_after_the_step_go_on_from_the_weights_when_a_learner_dies() -> None:
    faults = [{"dies_at_s": 0.4, "learner": 2}]
    run = averaged("average", 4, 10, epochs=2, simulation={"faults": faults, "compute_s": 0.1, "jitter": 0.3})
    trained = train(run)
    rows = trained.rows
    lost = rows["events"]["text"][rows["events"]["kind"] == b"lost"]
    assert len(lost) == 1
    assert len(trained.plan.learners) == 4
    assert rows.totals["samples"] >= 2 * (run.data.train_limit or 0)
    last = rows["gradients"][rows["gradients"]["update"] == rows["gradients"]["update"].max()]
    assert sorted(last["learner"]) == [0, 1, 3]
    assert torch.isfinite(trained.weights).all()


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"averaging": {"elasticity": 0.9}},
            r"elasticity = 0.9 and outer.learning_rate = 3.6 diverge with 4 .*; use .* less than 0.6441",
        ),
        ({"topology": {"name": "base"}}, "base' is not supported with protocol sma; use topology replicas or hier"),
        (
            {"protocol": {"name": "hardsync"}},
            "replicas' is not supported with protocol hardsync; use protocol average, diloco",
        ),
        ({"averaging": {"outer": {"name": "sdg"}}}, "unknown 'sdg'|did you mean"),
        (
            {"simulation": {"batching": "big-batch"}},
            "'big-batch' is not supported with protocol sma; use batching = 'none' or",
        ),
        ({"protocol": {"modulation": "sqrt"}}, "modulation = 'sqrt' is not supported with protocol sma; use none"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        averaged("sma", 4, 4).with_(**tables)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rule", "given", "outer", "accepted"),
    [
        (EASGD, {"elasticity": 0.3}, {"learning_rate": 3.0}, False),
        (EASGD, {"elasticity": 0.9}, {"learning_rate": 0.1}, True),  # radius 0
        (EASGD, {"elasticity": 0.0}, {"learning_rate": 3.0}, False),
        (EASGD, {"elasticity": 0.0}, {"learning_rate": 0.02}, True),
        (EASGD, {"elasticity": 0.0}, {}, True),  # independent trainings
        (SMA, {"elasticity": 0.0}, {}, True),
        (Average, {"elasticity": 0.1}, {"learning_rate": 3.0}, False),
        (Average, {"elasticity": 1.0}, {"learning_rate": 3.0}, True),  # all begin at the new weights
    ],
)
def test_replicas_and_weights_do_not_run_away(
    rule: Any, given: dict[str, float], outer: dict[str, float], accepted: bool
) -> None:
    with nullcontext() if accepted else pytest.raises(ValueError, match=r"diverge with 4 replicas .*; use a smaller "):
        rule(4, **given, outer=outer)


@pytest.mark.parametrize(("learners", "most"), [(1, 1.0), (2, 2 / 3), (3, 0.5), (8, 0.5)])
def test_exchanges_with_a_server_shrink_what_lies_between_in_any_order(learners: int, most: float) -> None:
    """Numbers in place of vectors. Between a learner's replica and its answer others may move the weights."""
    least = 0.0 if learners < 3 else 1e-6
    with pytest.raises(ValueError, match=r"elasticity = .* diverges with . replicas and a server; use "):
        EASGD(learners, elasticity=most + least, served=True)
    orders = np.random.default_rng(learners)
    for α in (0.1, 0.5 * most, 0.95 * most):
        rule = EASGD(learners, elasticity=α, served=True)
        w, z, waiting = orders.normal(size=learners), 0.0, np.zeros(learners, bool)
        for j in [*range(learners)] * 2 + orders.integers(learners, size=800 * learners).tolist():
            if waiting[j]:
                w[j] += rule.answered_elasticity * (z - w[j])
            else:
                z += rule.outer_rate * (w[j] - z)
            waiting[j] = not waiting[j]
        assert np.abs(w - z).max() < 1e-6


def test_two_learners_with_a_server_run_away_with_more_than_is_valid() -> None:
    """Both send their replicas before either has its answer."""
    w, z, α = np.array([1.0, -1.0]), 0.0, 0.68
    for _ in range(50):
        for each in w:
            z += α * (each - z)
        w += α / (1 - α) * (z - w)
    assert np.abs(w - z).max() > 10


@cases(100)
@given(
    rule=st.sampled_from([EASGD, Average]),
    α=st.floats(0.02, 1.9),
    rate=st.floats(0.02, 4),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    options=st.sampled_from([{}, {"nesterov": True}, {"dampening": 0.5}]),
)
def test_the_outer_rate_decides_with_the_elasticity(
    rule: Any, α: float, rate: float, momentum: float, options: dict[str, Any]
) -> None:
    """Numbers in place of vectors, which nothing but torch's optimiser and the corrections move."""
    options = options if momentum else {}
    α = α if rule.early else α / 2
    accepted = True
    try:
        rule(3, elasticity=α, outer={"learning_rate": rate, "momentum": momentum, "options": options})
    except ValueError:
        accepted = False
    w, z = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([z], lr=rate, momentum=momentum, **options)
    gaps = []
    for _ in range(300):
        apart = w - z.detach()
        z.grad = -apart.mean(0, keepdim=True)
        outer.step()
        w = w - α * (apart if rule.early else w - z.detach())
        gaps.append(float((w - z.detach()).abs().max()))
    grown = (max(gaps[-20:]) / max(gaps[130:150])) ** (1 / 150) if gaps[-1] > 1e-12 else 0.0
    assert accepted == (grown < 1) or grown == pytest.approx(1, abs=2e-2)


@pytest.mark.parametrize("protocol", ["average", "diloco", "easgd", "sma"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("replicas", {}),
        ("replicas, options.groups", {"groups": 2}),
        ("replicas, options.parameter_server", {"parameter_server": True}),
        ("hierarchical", {"blocks": 2}),
    ],
)
def test_the_table_of_pairs_says_what_jobs_may_have(protocol: str, shape: str, options: dict[str, Any]) -> None:
    allowed = {(pair.protocol, pair.shape): pair.synchronous for pair in averaging_pairs()}
    tables: dict[str, Any] = {"topology": {"name": shape.partition(",")[0], "options": options}}
    if (protocol, shape) in allowed:
        run = averaged(protocol, 4, 4, averaging={"period": 2}, **tables)
        assert run.make_protocol().waits == allowed[protocol, shape]
    else:
        with pytest.raises(ConfigError, match="use protocol "):
            averaged(protocol, 4, 4, averaging={"period": 2}, **tables)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_one_group_averages_its_weights_over_time(alpha: float) -> None:
    """Hardsync, and a moving average of its weights: of each update's before its step, a tenth; against plain torch."""
    run = averaged(
        "easgd",
        3,
        40,
        averaging={"elasticity": alpha, "outer": {"learning_rate": 0.1}},
        topology={"name": "replicas", "options": {"groups": 1}},
    )
    split, _, info, _ = load(run.data, test=False)
    network = models.build(run.model, info, run.training.seed)
    stepper, moving = sgd(0.02)(network.parameters()), flat(network)
    samplers = [Sampler(run.training.seed, j, run.data.train_limit or 0) for j in range(3)]
    for step in range(40):
        inputs, labels = split.batch(np.concatenate([sampler.indices(step * MU, MU) for sampler in samplers]))
        stepper.zero_grad()
        functional.cross_entropy(network(inputs), labels).backward()
        before = flat(network)
        torch.nn.utils.vector_to_parameters(before + alpha * (moving - before), network.parameters())
        moving.lerp_(before, 0.1)
        stepper.step()
    assert (train(run).weights - moving).abs().max() <= 1e-5


def test_averaging_is_refused_with_other_protocols() -> None:
    with pytest.raises(ConfigError, match=r"\[averaging\] period is not supported with protocol softsync; remove"):
        Job(averaging={"period": 2}, cluster={"learners": 2})


def test_an_outer_optimiser_is_refused_with_options_that_it_does_not_take() -> None:
    run = averaged("average", 2, 4, averaging={"outer": {"name": "adam", "options": {"nesterov": True}}})
    with pytest.raises(ConfigError, match=r"\[averaging.outer\] unknown option 'nesterov' of adam"):
        train(run)


def test_a_simulation_replays_identical(tmp_path: Any) -> None:
    run = job("sma", 3, topology={"name": "replicas"}, data={"train_limit": 120}, optimizer={"momentum": 0.9})
    results = rudra.simulate(run, output=tmp_path / "sma.h5")
    assert results.averages["learner"].tolist()[:3] == [0, 1, 2]
    replayed = rudra.replay(tmp_path / "sma.h5")
    assert replayed.identical, str(replayed)


# Each learner with a server alone.

ALONE = {"name": "replicas", "options": {"parameter_server": True}}


def exchanging(k: int, period: int, updates: int, epochs: int = 1, **tables: Any) -> Job:
    run = averaged("easgd", k, updates // k, averaging={"period": period}, epochs=epochs, **tables)
    return run.with_(topology=ALONE)


def test_a_replica_and_a_server_come_to_what_both_are_in_one_place() -> None:
    """Of one learner: what the server is told is what an average finds a mini-batch later; the first finds nothing."""
    momentum = {"momentum": 0.5}
    together, alone = (
        train(run).rows["averages"]["distance"]
        for run in (averaged("easgd", 1, 30, optimizer=momentum), exchanging(1, 1, 30, optimizer=momentum))
    )
    assert together[0] == 0
    assert alone[:29] == pytest.approx(together[1:30], rel=1e-4)


@pytest.mark.parametrize(("k", "period"), [(1, 1), (3, 1), (3, 2), (4, 3)])
def test_exchanges_in_any_order_are_repeated(tmp_path: Any, k: int, period: int) -> None:
    for seed in range(3):
        slow = {"slowdown": {seed % k: 3.0}, "jitter": 0.9, "latency_jitter_s": 0.1, "compute_s": 0.05}
        run = exchanging(k, period, 12, epochs=2, simulation=slow, optimizer={"momentum": 0.9, "milestones": [1]})
        path = tmp_path / f"{seed}.h5"
        # A callable cannot be read from a file.
        named = run.with_(model={"name": "mlp"}, training={"seed": seed})
        rudra.simulate(named, output=path, progress="quiet").close()
        assert rudra.replay(path, quiet=True).identical


def test_exchanges_are_counted_and_end() -> None:
    for stop_at in (None, 0.9):
        run = exchanging(4, 2, 24, epochs=2, simulation={"compute_s": 0.1, "jitter": 0.9})
        trained = train(run, stop_at=stop_at)
        totals = trained.rows.totals
        assert totals["pushed"] == totals["applied"] + totals["discarded"]
        assert totals["timestamp"] == totals["applied"]
        assert set(trained.rows["gradients"]["samples"]) == {2 * MU}
        assert trained.rows.learners["samples"].sum() == 2 * MU * totals["pushed"]


def test_when_a_learner_of_a_server_dies_the_others_go_on() -> None:
    faults = [{"dies_at_s": 0.55, "learner": 2}]
    run = exchanging(4, 2, 24, epochs=2, simulation={"faults": faults, "compute_s": 0.1, "jitter": 0.3})
    rows = train(run).rows
    (lost,) = rows["events"][rows["events"]["kind"] == b"lost"]
    after = rows["gradients"][rows["gradients"]["update"] > lost["timestamp"] + 1]
    assert set(after["learner"]) == {0, 1, 3}


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"protocol": {"name": "sma"}}, "server = true is not supported with protocol sma; use protocol easgd"),
        (
            {"averaging": {"outer": {"momentum": 0.5}}},
            r"server = true is not supported with \[averaging.outer\]; remove \[averaging.outer\]",
        ),
        (
            {"averaging": {"restart": True}},
            r"not supported with \[averaging\] restart = true; remove \[averaging\] restart",
        ),
        (
            {"optimizer": {"schedule": "plateau"}, "training": {"evaluate": True}},
            "'plateau' is not supported with replicas and a server; use another",
        ),
        (
            {"cluster": {"gradient_format": "float16"}},
            "float16' is not supported with replicas and a server; use 'float32'",
        ),
    ],
)
def test_what_makes_no_sense_with_a_server_is_refused(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        exchanging(2, 1, 4).with_(**tables)


def test_hooks_see_the_weights_or_the_replica_of_a_learner_that_they_name() -> None:
    seen: dict[str | None, list[np.ndarray[Any, Any]]] = {}

    def keep(moment: rudra.Moment, who: str | None) -> None:
        seen.setdefault(who, []).append(np.concatenate([value.ravel() for value in moment.weights().values()]))

    whose = (None, "learner 0", "learner 2")
    hooks = [{"at": "update", "call": keep, "role": who, "options": {"who": who}} for who in whose]
    run = averaged("average", 3, 4).with_(averaging={"elasticity": 0.5}).with_(hooks=hooks)
    trained = train(run)
    assert [len(found) for found in seen.values()] == [4, 4, 4]
    assert np.array_equal(seen[None][-1], trained.weights.numpy())
    # Before the last move, by half of the way.
    for learner in (0, 2):
        halfway = (seen[f"learner {learner}"][-1] + seen[None][-1]) / 2
        assert halfway == pytest.approx(replica(trained, learner).numpy(), abs=1e-6)


def test_losses_of_a_period_are_joined_by_samples() -> None:
    made = [
        Gradient(-1, 1, n, step, 10 * step, 0, -1, 1.0, loss, e, 1)
        for step, n, loss, e in [(4, 8, 1.0, 3.0), (5, 2, 6.0, 1.0)]
    ]
    whole = joined(made, 7)
    assert (whole.loss, whole.errors, whole.samples) == (2.0, 4.0, 10)
    assert (whole.step, whole.first, whole.timestamp) == (5, 40, 7)


def test_replicas_warm_up_with_every_mini_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of all learners count, up to the mini-batch whose step it is."""
    rates: list[float] = []
    step_at = Averager._step_at
    monkeypatch.setattr(Averager, "_step_at", lambda self, rate: rates.append(rate) or step_at(self, rate))
    run = averaged("average", 2, 4, averaging={"period": 3}, optimizer={"warm_up": 0.5})
    timing(run, run.data.train_limit or 0)
    expected = [0.02 * min(1.0, (number + 1) / 6) for number in range(12)]
    assert sorted(rates) == pytest.approx(sorted(2 * expected))


@pytest.mark.parametrize(
    ("protocol", "period", "tables", "waits"),
    [
        ("average", 1, {}, True),
        ("average", 3, {"cluster": {"shares": (1, 2)}}, True),
        ("diloco", 2, {}, True),
        ("sma", 2, {}, False),
        ("average", 2, {"topology": {"options": {"groups": 2}}}, False),
    ],
)
def test_the_last_mini_batch_of_a_period_says_what_follows(
    monkeypatch: pytest.MonkeyPatch, protocol: str, period: int, tables: dict[str, Any], waits: bool
) -> None:
    """The step and the samples that each replica contributes to an average that training waits for."""
    told: dict[int, list[Any]] = {}
    came: dict[int, list[Any]] = {}

    class Recorded(TimingOnly):
        def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
            if isinstance(action, Compute) and action.then is not None:
                told.setdefault(role, []).append((action.then, action.averaged))
            if isinstance(action, StepReplica) and action.difference:
                came.setdefault(role, []).append(action)
            return super().perform(role, action, seconds)

        def reduce(self, actions: Mapping[int, Reduce], sums: Any) -> None:
            for role, action in actions.items():
                if action.buffer == DIFFERENCE:
                    came[role][-1] = (came[role][-1], action.gradient.samples)

    monkeypatch.setattr("rudra.simulation.checked_run.TimingOnly", Recorded)
    about = {"averaging": {"period": period}, "optimizer": {"warm_up": 0.5, "schedule": "cosine"}}
    run = averaged(protocol, 2, 12, **about).with_(**tables)
    timing(run, run.data.train_limit or 0)
    assert told == (came if waits else {})
    assert sorted(map(len, came.values())) == [12, 12]


@pytest.mark.parametrize(("timestamp", "made", "rate"), [(0, 3, 0.5), (3, 3, 0.5), (4, 1, 0.05), (9, 2, 0.05)])
def test_rates_at_a_server_go_by_periods(timestamp: int, made: int, rate: float) -> None:
    """A timestamp stands for the three mini-batches of one learner; an epoch has 12 of them in all."""
    options = {"name": "replicas", "options": {"parameter_server": True}}
    about = {"learning_rate": 0.5, "milestones": (1,)}
    run = averaged("easgd", 2, 2, averaging={"period": 3}, topology=options, optimizer=about)
    setup: Any = SimpleNamespace(
        job=run,
        plan=run.plan(),
        training_samples=96,
        schedule=Schedule.stepped(run.optimizer, (1,)),
        position=BEGINNING,
    )
    assert ReplicaSteps(setup).step(timestamp, made, corrects=False).learning_rate == pytest.approx(rate)
