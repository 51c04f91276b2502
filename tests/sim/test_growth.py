"""Banks that grow while they train, in virtual time: where growth ends, what learners do, and what is repeated."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rudra
from rudra.core.actions import Compute
from rudra.core.events import Computed
from rudra.errors import ConfigError, RunError
from rudra.results import checkpoint
from rudra.results.progress import summary_table
from rudra.simulation.tensors import RealTensors
from tests.selection import covering

SATURATING = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.026, 16: 0.052}
"""Seconds of a bank of m learners. Up to four, another learner costs little."""


def make_job(name: str = "sma", bank_s: Mapping[int, float] = SATURATING, **tables: Any) -> rudra.Job:
    about: dict[str, Any] = {
        "model": {"name": "mlp"},
        "data": {"train_limit": 384, "test_limit": 40},
        "training": {"minibatch_size": 4, "epochs": 8, "seed": 3, "evaluate": False},
        "optimizer": {"learning_rate": 0.05, "momentum": 0.5},
        "protocol": {"name": name},
        "simulation": {"bank_s": dict(bank_s), "jitter": 0.02, **tables.pop("simulation", {})},
        "results": {"checkpoint_every": "never"},
    }
    cluster = {"learners_per_device": "auto", "learners": 16, "threads_per_rank": 1, **tables.pop("cluster", {})}
    return rudra.Job(**about | tables, cluster=cluster)


def timed(job: rudra.Job, path: Path) -> rudra.Results:
    """Simulates times only, for many epochs."""
    return rudra.simulate(
        job.with_(simulation={"tensors": False}, training={"epochs": 50}), output=path, progress="quiet"
    )


def told(results: rudra.Results, kind: bytes) -> list[dict[str, Any]]:
    return [json.loads(row["text"]) for row in results.events if row["kind"] == kind]


def sizes(results: rudra.Results) -> list[int]:
    """The sizes of a bank that were measured, in their order."""
    return [found["learners_per_device"] for found in told(results, b"measured")]


def active(results: rudra.Results) -> list[int]:
    """The numbers of learners that made updates, in their order."""
    return [count for count, _ in groupby(results.updates["gradients"].tolist())]


CURVES: dict[str, tuple[str, Mapping[int, float], list[int], int]] = {  # growth, seconds, sizes measured, the last one
    "linear": ("double", {1: 0.010, 16: 0.010001}, [1, 2, 4, 8, 16, 12, 14], 16),
    "saturating": ("double", SATURATING, [1, 2, 4, 8, 6, 3], 4),
    "flat": ("double", {1: 0.010}, [1, 2], 1),
    "one": ("one", SATURATING, [1, 2, 3, 4, 5], 4),
    "one, linear": ("one", {1: 0.010, 16: 0.010001}, [*range(1, 12)], 10),
}


@pytest.mark.parametrize("name", covering(["saturating", "flat", "one"], CURVES))
def test_a_bank_grows_as_far_as_the_costs_say(name: str, tmp_path: Path) -> None:
    growth, bank_s, measured, last = CURVES[name]
    simulation = {"jitter": 0.0, "message_s": 0.0, "update_s": 0.0, "latency_s": 0.0}
    job = make_job("average", bank_s, cluster={"growth": growth}, simulation=simulation)
    with timed(job, tmp_path / "run.h5") as results:
        assert sizes(results) == measured
        assert active(results) == measured + [last] * (measured[-1] != last)
        for found in told(results, b"measured"):
            m = found["learners_per_device"]
            assert 4 * m / found["images_per_s"] == pytest.approx(_seconds(bank_s, m), rel=0.02)


def _seconds(bank_s: Mapping[int, float], m: int) -> float:
    if len(bank_s) == 1:
        return bank_s[1] * m
    known = sorted(bank_s)
    return float(np.exp(np.interp(np.log(m), np.log(known), [np.log(bank_s[size]) for size in known])))


@pytest.mark.parametrize("protocol", covering(["sma"], ["sma", "average"]))
def test_a_run_that_grows_learns_on_and_is_replayed(protocol: str, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    with rudra.simulate(make_job(protocol), output=path, progress="quiet") as results:
        assert active(results)[:4] == [1, 2, 4, 8]
        losses = results.epochs["train_loss"]
        assert np.all(np.diff(losses) < 0.1 * losses[0]), "through each change"
        assert losses[-1] < 0.5 * losses[0]
        whole, decided = results.summary(), told(results, b"decided")
        assert whole["learners_per_device"] == active(results)[-1]
        assert [each["cluster"]["active_learners"] for each in decided] == active(results)[1:]
    replayed = rudra.replay(path, quiet=True)
    assert replayed.identical, replayed
    assert replayed.weights_sha256 == whole["weights_sha256"]
    assert rudra.replay(path, job=make_job(protocol), quiet=True).identical
    planned = [{key: value for key, value in each.items() if key != "place"} for each in decided]
    same = make_job(protocol, cluster={"learners_per_device": 16, "active_learners": 1}, changes=planned)
    with rudra.simulate(same, output=tmp_path / "planned.h5", progress="quiet") as results:
        assert results.summary()["weights_sha256"] == whole["weights_sha256"], "decided changes are planned ones"
    with pytest.raises(ConfigError, match=r"ran with cluster.learners_per_device = auto, not 16"):
        rudra.replay(path, job=make_job(protocol, cluster={"learners_per_device": 16}), quiet=True)


def test_all_devices_have_as_many_learners(tmp_path: Path) -> None:
    job = make_job(cluster={"learners": 32, "most_learners_per_device": 16})
    with timed(job, tmp_path / "run.h5") as results:
        assert sizes(results)[:3] == [1, 2, 4]
        assert active(results)[:3] == [2, 4, 8]
        updates, gradients = results.updates, results.gradients
        for count, learners in ((2, {0, 16}), (4, {0, 1, 16, 17}), (8, {0, 1, 2, 3, 16, 17, 18, 19})):
            here = updates["timestamp"][updates["gradients"] == count]
            assert {*gradients["learner"][np.isin(gradients["update"], here)]} == learners


SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {"cluster": {"one_rank": True}},
    "blocks": {
        "cluster": {"most_learners_per_device": 8},
        "topology": {"name": "hierarchical", "options": {"blocks": 2}},
    },
    "groups that share replicas": {
        "cluster": {"most_learners_per_device": 8},
        "topology": {"name": "replicas", "options": {"groups": 2}},
    },
    "an average after five mini-batches": {"name": "diloco", "averaging": {"period": 5}},
    "no outer momentum": {"name": "easgd"},
}


@pytest.mark.parametrize("shape", covering(["one rank", "blocks", "an average after five mini-batches"], SHAPES))
def test_banks_of_any_averages_grow(shape: str, tmp_path: Path) -> None:
    job, path = make_job(**SHAPES[shape]), tmp_path / "run.h5"
    devices = 16 // job.cluster.per_rank
    with timed(job, tmp_path / "timed.h5") as results:
        assert sizes(results) == [1, 2, 4, 8, 6, 3]
        assert active(results) == [m * devices for m in (1, 2, 4, 8, 6, 3, 4)]
    with rudra.simulate(job.with_(training={"epochs": 4}), output=path, progress="quiet") as results:
        assert active(results)[:2] == [devices, 2 * devices]
    assert rudra.replay(path, quiet=True).identical


@pytest.mark.parametrize("epoch", covering([2], [1, 2, 3, 6]))
def test_a_run_continues_to_grow_after_a_checkpoint(epoch: int, tmp_path: Path) -> None:
    """What was measured before is not measured again."""
    job = make_job(results={"keep_checkpoints": "1 epochs"})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        before, ended = sizes(results), active(results)[-1]
    path, origin = tmp_path / "on.h5", tmp_path / f"run-{epoch}.ckpt"
    with rudra.simulate(job, output=path, from_=origin, carry="all", progress="quiet") as results:
        found = sizes(results)
        assert len(found) == len({*found})
        assert found[:4] == before[:4]
        assert active(results)[-1] == pytest.approx(ended, abs=1)
        assert results.status == "finished"
    assert rudra.replay(path, quiet=True).identical


def test_growth_outlives_a_device(tmp_path: Path) -> None:
    """Dormant learners of the other device take the places of its learners."""
    faults = [{"learner": 16, "dies_at_s": 1.0}]
    job = make_job(cluster={"learners": 32, "most_learners_per_device": 16}, simulation={"faults": faults})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.status == "finished"
        assert sizes(results)[:3] == [1, 2, 4]
        assert active(results)[:3] == [2, 4, 8]
        after = results.events["timestamp"][results.events["kind"] == b"lost"].max()
        assert results.gradients["learner"][results.gradients["update"] > after].max() < 16
        totals = results.totals[0]
        assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))


def exhaust(monkeypatch: pytest.MonkeyPatch, role: int, step: int) -> None:
    """A device without memory for a mini-batch of a learner."""
    compute = RealTensors.compute

    def compute_if_it_fits(self: RealTensors, learner: int, action: Compute) -> Computed:
        if (learner, action.step) == (role, step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")
        return compute(self, learner, action)

    monkeypatch.setattr(RealTensors, "compute", compute_if_it_fits)


@pytest.mark.parametrize(("protocol", "step"), [("sma", 0), ("average", 4)])
def test_a_bank_without_memory_returns_to_its_size_before(
    protocol: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learner 5 takes part in banks of eight, and makes some updates there, or none."""
    job, path = make_job(protocol, results={"keep_checkpoints": "1 epochs"}), tmp_path / "run.h5"
    learner = job.plan().whole.learners[5]
    with monkeypatch.context() as patch:
        exhaust(patch, learner, step)
        with rudra.simulate(job, output=path, progress="quiet") as results:
            assert results.status == "finished"
            assert sizes(results) == [1, 2, 4, 8]
            assert told(results, b"measured")[-1]["images_per_s"] == 0
            assert active(results) == [1, 2, 4, *[8, 4] * (step > 0)]
            counts = results.updates["gradients"]
            assert np.sum(counts == 8) == step, "finished updates stay"
            (memory,) = results.events[results.events["kind"] == b"memory"]
            assert memory["role"] == learner
            text = "too little memory: CUDA out of memory. Tried to allocate 2.00 GiB"
            assert memory["text"].decode() == f"{text}; from now on learners of each device: 4"
            losses = results.epochs["train_loss"]
            assert np.all(np.diff(losses) < 0.1 * losses[0]), "training continues"
            totals = results.totals[0]
            assert totals["pushed"] == totals["applied"] == counts.sum()
            assert "8: no memory" in summary_table(results.summary())
    assert rudra.replay(path, quiet=True).identical
    last, origin = tmp_path / "on.h5", tmp_path / "run-6.ckpt"
    with rudra.simulate(job, output=last, from_=origin, carry="all", progress="quiet") as results:
        assert sizes(results) == [1, 2, 4, 8], "the run that continues knows it"
        assert active(results)[-1] == 4


@pytest.mark.parametrize("cluster", [{}, {"learners_per_device": 4, "learners": 4}], ids=["the first size", "fixed"])
def test_a_bank_that_cannot_be_smaller_ends_the_run(
    cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, path = make_job(cluster=cluster, results={"checkpoint_every": "100 epochs"}), tmp_path / "run.h5"
    exhaust(monkeypatch, job.plan().whole.learners[0], 5)
    with pytest.raises(RunError, match=r"^learner 0: too little memory: .*; use .*\(cluster.learners_per_device\)$"):
        rudra.simulate(job, output=path, progress="quiet")
    assert checkpoint.read(checkpoint.path_of(path))[0].position.timestamp == 5


def unequal(**tables: Any) -> rudra.Job:
    """Two devices, of which the second one takes four times as long. Both hold two learners without taking longer."""
    cluster = {"learners": 16, "most_learners_per_device": 8}
    slow = dict.fromkeys(range(8, 16), 4.0)
    return make_job(bank_s={1: 0.010, 2: 0.010, 8: 0.040}, cluster=cluster, simulation={"slowdown": slow}, **tables)


def test_each_of_unequal_devices_gets_its_own_number_of_learners(tmp_path: Path) -> None:
    with timed(unequal(), tmp_path / "run.h5") as results:
        found = {tuple(each["learners_per_device"]): each["images_per_s"] for each in told(results, b"measured")}
        fast, slow = list(found)[-1]
        assert slow <= 2
        assert fast >= 6
        assert found[fast, slow] >= 1.5 * max(speed for (one, other), speed in found.items() if one == other)
        last = results.gradients["learner"][results.gradients["update"] == results.updates["timestamp"][-1]]
        assert {*last} == {*range(fast), *range(8, 8 + slow)}
        assert f"{fast}+{slow}: " in summary_table(results.summary())


def test_memory_limits_one_of_unequal_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, path = unequal(), tmp_path / "run.h5"
    with monkeypatch.context() as patch:
        exhaust(patch, job.plan().whole.learners[3], 1)
        with rudra.simulate(job, output=path, progress="quiet") as results:
            assert results.status == "finished"
            (lacking,) = [each for each in told(results, b"measured") if not each["images_per_s"]]
            assert (lacking["learners_per_device"][0], lacking["lacking"]) == (4, 0)
            decided = [each["cluster"]["active_learners"] for each in told(results, b"decided")]
            assert decided[-1][0] == 2
            losses = results.epochs["train_loss"]
            assert np.all(np.diff(losses) < 0.1 * losses[0]), "through each change"
    assert rudra.replay(path, quiet=True).identical


def test_a_given_elasticity_bounds_the_bank(tmp_path: Path) -> None:
    """With k replicas and an outer momentum of 0.9, averages diverge from α(k + 1.9) = 3.8 on."""
    job = make_job(bank_s={1: 0.01, 16: 0.010001}, averaging={"elasticity": 0.4})
    with timed(job, tmp_path / "run.h5") as results:
        assert max(sizes(results)) == 7
        assert active(results)[-1] == 7


def test_a_planned_number_of_active_learners_ends_the_growth(tmp_path: Path) -> None:
    job = make_job(changes=[{"at_epoch": 2, "cluster": {"active_learners": 5}}])
    with timed(job, tmp_path / "run.h5") as results:
        assert active(results)[-1] == 5
        assert 5 not in sizes(results)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hardsync": (
        {"protocol": {"name": "hardsync"}},
        "[cluster] learners_per_device = 'auto' is not supported with protocol hardsync on topology base, as it would "
        "change the batch of an update; use a number, or a protocol that averages replicas synchronously, such as sma",
    ),
    "allreduce": (
        {"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}},
        "'auto' is not supported with protocol hardsync on topology groups, as",
    ),
    "softsync": ({"protocol": {"name": "softsync"}}, "'auto' is not supported with protocol softsync on topology base"),
    "a server of replicas": (
        {"protocol": {"name": "easgd"}, "topology": {"options": {"parameter_server": True}}},
        "'auto' is not supported with protocol easgd on topology replicas, as",
    ),
    "a later protocol": (
        {"changes": [{"at_epoch": 1, "protocol": {"name": "hardsync"}}]},
        "[[changes]] at_epoch = 1: [cluster] learners_per_device = 'auto' is not supported with protocol hardsync on",
    ),
    "a function": (
        {"decisions": {"call": "a:b"}},
        "'auto' is not supported with [decisions] call; remove call, or use a number",
    ),
    "rates of updates": (
        {"optimizer": {"schedule": "cosine", "schedule_every": "update"}},
        "[cluster] learners_per_device = 'auto' is not supported with [optimizer] schedule_every = 'update'; use",
    ),
    "no whole banks": (
        {"cluster": {"most_learners_per_device": 3}},
        "[cluster] most_learners_per_device = 3 does not divide learners = 16; use learners = 18 or 15, or another m",
    ),
    "another word": (
        {"cluster": {"learners_per_device": "many"}},
        "[cluster] learners_per_device must be a number, or 'auto', not 'many'",
    ),
    "no learners": ({"cluster": {"learners_per_device": 0}}, "[cluster] learners_per_device must be >= 1, not 0"),
    "learners of a rank": (
        {"cluster": {"learners_per_rank": 4}},
        "[cluster] learners_per_device = 'auto' is not supported with learners_per_rank = 4; use one of them",
    ),
    "growth of a number": (
        {"cluster": {"learners_per_device": 4, "growth": "one"}},
        "[cluster] growth is for learners_per_device = 'auto'; use this, or remove growth",
    ),
    "most of a number": (
        {"cluster": {"learners_per_device": 4, "most_learners_per_device": 8}},
        "[cluster] most_learners_per_device is for learners_per_device = 'auto'; use this, or remove",
    ),
    "the library adds": (
        {"topology": {"options": {"reduction": "mpi"}}},
        "[cluster] learners_per_device = 'auto' is not supported with [topology]",
    ),
    "a table without entries": (
        {"simulation": {"bank_s": {0: 1.0}}},
        "[simulation] bank_s has a key 0; use 1 or more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_grow_is_refused_in_one_line(name: str) -> None:
    tables, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        make_job(**tables)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
