"""Hogbatch in virtual time: every sample served once, counts kept close, and the bits of plainer ways to train."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import TrialRows, timing, train, validate
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from workers import ALONE, UNLIKE, async_alone, check_epochs, check_served, clusters, digits, job, replayed_plainly

import rudra
from protocols.hogbatch import Hogbatch
from rudra.cli.main import main
from rudra.core.events import Event, Received
from rudra.core.messages import MessageKind
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.roles.machine import States
from rudra.roles.worker import Worker


class Given:
    """Looks at the batches that workers are given."""

    def __init__(self, run: Job, samples: int) -> None:
        self.rule, self._samples = Hogbatch.of(run.make_protocol()), samples
        self.irregular = 0  # batches that are short

    def __call__(self, machine: Machine, before: States, event: Event) -> None:
        validate(machine, before, event)
        execute = isinstance(event, Received) and event.message.kind is MessageKind.ASSIGN_WORK
        if isinstance(machine, Worker) and execute:
            (first, count), about = event.message.rows[0].item(), self.rule.workers[machine.log.learner]  # type: ignore[union-attr]
            assert 1 <= count <= about.most * about.threads
            last = first % self._samples + count == self._samples
            self.irregular += not last and (count % about.threads > 0 or count < about.least * about.threads)


@pytest.mark.slow
@cases(100)
@given(st.data())
def test_every_sample_of_an_epoch_is_served_once(data: st.DataObject) -> None:
    """Invariants, among them that sizes are within their bounds, are checked after every event."""
    run, samples = data.draw(clusters())
    look = Given(run, samples)
    rows = timing(run, samples, look)
    check_served(run, rows, samples)
    assert run.simulation.faults or not look.irregular
    if run.training.evaluate == "workers":
        assert rows["epochs"]["evaluated"].all()
        assert (rows["events"]["kind"] == b"pause").sum() == run.training.epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "share", "busy", "longer"),
    [("fixed", (0.95, 1.0), 0.9, 1.1), ("adaptive", (0.45, 0.6), 0.05, 20), ("balanced", (0.45, 0.62), 0.95, 1.45)],
)
def test_updates_and_busy_time_of_unlike_workers(
    rule: str, share: tuple[float, float], busy: float, longer: float
) -> None:
    """Table 2's batches for w8a, with a CPU of 48 threads that needs 270 times as long for an epoch as a GPU, which is
    half as efficient with its smallest batch. `longer`: than if both were always busy with their best batches.
    """
    sample_s = 1e-6
    cpu_s, gpu_s = {n: 48 * 270 * sample_s * n for n in (1, 64)}, {64: 2 * 64 * sample_s, 8192: 8192 * sample_s}
    workers = [
        {"learners": [0], "kind": "small", "threads": 48, "compute_s": cpu_s},
        {"kind": "large", "min": 64, "compute_s": gpu_s},
    ]
    simulation = {"latency_s": 0.0, "update_s": 0.0, "bandwidth_bytes_per_s": 1e13, "servers_on_first_node": True}
    run = job(workers, 2, rule, simulation=simulation, training={"epochs": 20})
    rows = timing(run, 49_749, lambda *_: None)
    updates = [(rows["gradients"]["learner"] == worker).sum() for worker in (0, 1)]
    time_s, minibatches = rows["epochs"]["time_s"][-1], rows["minibatches"]
    assert share[0] <= updates[0] / sum(updates) <= share[1]
    assert minibatches["compute_s"][minibatches["learner"] == 1].sum() / time_s > busy
    assert 1.0 <= time_s / (20 * 49_749 * sample_s * 270 / 271) < longer


# Bits.


@pytest.mark.each_value
@pytest.mark.parametrize(
    "optimizer", [{"learning_rate": 0.1}, {"name": "adam", "learning_rate": 0.002, "momentum": 0.0}]
)
@pytest.mark.parametrize(("scaling", "reference"), [("none", 128), ("linear", 16), ("sqrt", 16)])
def test_one_worker_is_async_with_one_learner(optimizer: dict[str, Any], scaling: str, reference: int) -> None:
    """On the same stream of samples, whose epochs are whole batches."""
    common = {**digits(480), "optimizer": {**optimizer, "warm_up": 1.5, "milestones": (1,)}}
    protocol, hogbatch = {"reference_batch_size": reference}, {"lr_scaling": scaling, "shuffle": "epoch"}
    alone = train(job(ALONE, 1, "adaptive", hogbatch=hogbatch, protocol=protocol, **common))
    other = async_alone(**common)
    assert torch.equal(alone.weights, other.weights)
    for name in ("first", "samples", "step", "loss"):
        assert np.array_equal(alone.rows["gradients"][name], other.rows["gradients"][name])


@pytest.mark.parametrize("rule", ["fixed", "adaptive"])
def test_the_recorded_work_alone_makes_the_weights(rule: str) -> None:
    simulation = {"jitter": 0.5, "latency_s": 0.001}
    optimizer = {"learning_rate": 0.2, "momentum": 0.9}
    run = job(UNLIKE, 2, rule, simulation=simulation, optimizer=optimizer, **digits())
    trained = train(run)
    check_epochs(trained.rows, 400)
    assert torch.equal(replayed_plainly(run, trained.rows), trained.weights)


def test_a_small_worker_of_48_threads_and_a_fast_large_one(tmp_path: Path) -> None:
    """In virtual time a part is pushed every 48th of what one thread takes; a run replays."""
    workers = [
        {"learners": [0], "kind": "small", "threads": 48, "compute_s": {1: 0.02, 64: 1.28}},
        {"kind": "large", "min": 64, "max": 256, "compute_s": {64: 0.01, 256: 0.02}},
    ]
    simulation = {"jitter": 0.0, "latency_s": 0.0, "update_s": 0.0, "bandwidth_bytes_per_s": 1e13}
    run = job(workers, 2, "fixed", simulation=simulation, **digits(None))
    with rudra.simulate(run, output=tmp_path / "out.h5", progress="quiet") as results:
        mine = results.minibatches[results.minibatches["learner"] == 0]
        assert mine["compute_s"][:48] == pytest.approx(0.02 / 48)
        first = results.gradients[results.gradients["learner"] == 0][:48]
        assert len(set(first["timestamp"])) == 1
        assert np.array_equal(first["staleness"], first["update"] - 1)
        expected = run.make_protocol().expected_staleness
        assert expected == 24.5
        assert results.gradients["staleness"].mean() == pytest.approx(expected, rel=0.1)
        assert results.summary()["workers"][0]["mean_batch"] == pytest.approx(48, rel=0.02)
    assert rudra.replay(tmp_path / "out.h5", quiet=True).identical


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["adaptive", "balanced"])
def test_a_run_that_loses_workers_replays(tmp_path: Path, rule: str, seed: int) -> None:
    workers = [
        {"learners": [0, 1], "kind": "small", "threads": 5, "max": 16, "compute_s": {1: 0.004, 16: 0.064}},
        *UNLIKE[1:],
    ]
    simulation = {
        "jitter": 0.9,
        "latency_jitter_s": 0.01,
        "update_s": 0.002,
        "bandwidth_bytes_per_s": 1e7,
        "faults": [{"learner": 1, "dies_at_s": 0.4 + 0.07 * seed}, {"learner": 3, "dies_at_s": 0.7}],
        "detection_s": 0.03,
    }
    run = job(workers, 4, rule, training={"seed": seed}, simulation=simulation, **digits(None))
    with rudra.simulate(run, output=tmp_path / "out.h5", progress="quiet") as results:
        rows = TrialRows({name: [getattr(results, name)] for name in ("gradients", "updates", "epochs")})
        check_epochs(rows, results.attributes["training_samples"])
        assert (results.events["kind"] == b"lost").sum() == 2
    assert rudra.replay(tmp_path / "out.h5", quiet=True).identical


def test_a_worker_that_dies_before_its_first_gradient_has_no_batches(tmp_path: Path) -> None:
    simulation = {"faults": [{"learner": 1, "dies_at_s": 0.001}]}
    run = job(UNLIKE, 3, simulation=simulation, training={"epochs": 1}, **digits(None))
    with rudra.simulate(run, output=tmp_path / "out.h5", progress="quiet") as results:
        dead = results.summary()["workers"][1]
    assert (dead["updates"], dead["mean_batch"], dead["last_batch"]) == (0, None, None)


def test_a_worker_without_a_gradient_when_the_target_is_reached_has_no_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One batch is an epoch; the target is reached after the first epoch, and the third worker never gets work."""
    target = {"target": "error <= 1", "target_window": 1, "stop_at_target": True}
    training = {"epochs": 9, "evaluate": "workers", **target}
    path, run = tmp_path / "out.h5", job(UNLIKE[1:], 3, "fixed", training=training, **digits(16))
    with rudra.simulate(run, output=path, progress="quiet") as results:
        assert (results.status, results.epochs["epoch"].tolist()) == ("finished", [1, 2])
        workers = results.summary()["workers"]
    assert [worker["updates"] for worker in workers] == [1, 1, 0]
    assert [worker["last_batch"] for worker in workers] == [16, 16, None]
    assert main(["show", str(path)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "large", "0", "0.0%", "0", "–", "–"] in shown


@pytest.mark.parametrize("at", [1, 31, 32, 60])
def test_a_run_goes_on_from_any_checkpoint_with_each_sample_once(at: int) -> None:
    run = job(UNLIKE, results={"checkpoint_every": "1 updates"}, simulation={"jitter": 0.9}, **digits())
    whole = train(run)
    saved = next(s for s in whole.saved if s.position.timestamp >= at)
    resumed = train(run, resumed=saved)
    tables: dict[str, list[Any]] = {}
    for name in ("gradients", "updates", "epochs"):
        clock = {"gradients": "update"}.get(name, "timestamp")
        early = whole.rows[name][whole.rows[name][clock] <= saved.position.timestamp]
        tables[name] = [early, *resumed.rows.tables[name]]
    check_epochs(TrialRows(tables), 400)
    assert resumed.rows.totals["samples"] == 1200
    assert torch.equal(replayed_plainly(run, TrialRows(tables)), resumed.weights)


def test_a_run_that_is_stopped_goes_on(tmp_path: Path) -> None:
    run = job(UNLIKE, simulation={"jitter": 0.9, "bandwidth_bytes_per_s": 1e7, "update_s": 0.01}, **digits())
    for stop_at in (0.35, 0.4, 0.45, 0.5):
        first = train(run, stop_at=stop_at)
        (saved,) = first.saved
        second = train(run, resumed=saved)
        tables = {
            name: [*first.rows.tables.get(name, []), *second.rows.tables[name]]
            for name in ("gradients", "updates", "epochs")
        }
        check_epochs(TrialRows(tables), 400)


# Tests by workers.


TESTED: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits", "validation_split": 0.1}}
ANYWHERE: dict[str, dict[str, Any]] = {
    "server": {"weights": "server"},
    "locked": {"weights": "shared", "locking": True},
    "racing": {"weights": "shared", "locking": False},
}


def first_test(path: Path, evaluate: str, **tables: Any) -> tuple[rudra.Results, list[Any]]:
    """A simulated run, and what the test of its first epoch came to."""
    training = {"evaluate": evaluate, "evaluation_batch_size": 9, "epochs": 2, **tables.pop("training", {})}
    results = rudra.simulate(job(UNLIKE, training=training, **TESTED, **tables), output=path, progress="quiet")
    epoch, metrics = results.epochs[0], results.metrics
    own = metrics[(metrics["epoch"] == 1) & (metrics["split"] != b"train")]
    names = ("weights_sha256", "time_s", "test_loss", "test_error", "validation_loss", "validation_error")
    return results, [*(epoch[name] for name in names), sorted(own.tolist())]


@pytest.mark.parametrize("where", ANYWHERE)
def test_workers_find_what_the_statistics_server_finds_while_the_clock_stands_still(tmp_path: Path, where: str) -> None:
    """To the same bits, whoever computes what, and whoever dies over it; each of the 64 parts is one batch or none."""
    usual, expected = first_test(tmp_path / "usual.h5", "always", hogbatch=ANYWHERE[where])
    by_workers, found = first_test(
        tmp_path / "workers.h5", "workers", hogbatch=ANYWHERE[where], training={"evaluate_training_set": True}
    )
    assert found == expected
    ended, took_s = (by_workers.epochs[0][name] for name in ("time_s", "evaluation_s"))
    assert took_s > 0.01
    assert by_workers.learners["wait_s"].sum() < usual.learners["wait_s"].sum() + took_s / 2
    metrics = by_workers.metrics
    whole = metrics["value"][(metrics["split"] == b"train") & (metrics["name"] == b"loss")]
    assert whole == pytest.approx(by_workers.epochs["test_loss"], rel=0.05)
    again, _ = first_test(
        tmp_path / "again.h5", "workers", hogbatch=ANYWHERE[where], training={"evaluate_training_set": True}
    )
    assert np.array_equal(again.metrics, metrics)
    for share in (0.1, 0.6):
        faults = [{"learner": 0, "dies_at_s": float(ended + share * took_s)}]
        lost, found = first_test(
            tmp_path / f"{share}.h5",
            "workers",
            hogbatch=ANYWHERE[where],
            simulation={"faults": faults, "detection_s": 1e-4},
        )
        assert found == expected
        assert (lost.events["kind"] == b"lost").sum() == 1
        lost.close()
        assert where == "racing" or rudra.replay(tmp_path / f"{share}.h5", quiet=True).identical
    for results in (usual, by_workers, again):
        results.close()


UNSET: dict[str, Any] = {"workers": (), "rule": "fixed"}


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (
            {"protocol": {"name": "softsync"}, "hogbatch": UNSET},
            "'workers' is not supported with protocol softsync; use evaluate = true",
        ),
        (
            {"training": {"evaluate": True, "evaluate_training_set": True}},
            "evaluate_training_set = true is only supported with evaluate = 'workers'; use",
        ),
    ],
)
def test_who_cannot_test_is_told_so(tables: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        job(UNLIKE, training={"evaluate": "workers"}).with_(**tables)
