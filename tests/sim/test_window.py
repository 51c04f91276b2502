"""Weights in a window, in virtual time: the bits of plainer ways to train, what races do, and what a death leaves."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from clusters import TrialResult, TrialRows, timing, train
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from workers import ALONE, UNLIKE, async_alone, check_epochs, check_served, clusters, digits, job, replayed_plainly

import rudra
from rudra.compute import models, tasks
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.core import records
from rudra.core.buffer_names import GRADIENT
from rudra.core.digest import sha256
from rudra.core.work import Work
from rudra.data.load import load
from rudra.errors import EXIT_STOPPED, ConfigError, ReplayError, RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of

DIGITS = digits(480)
LOCKED: dict[str, Any] = {"weights": "shared", "locking": True}
RACING: dict[str, Any] = {"weights": "shared", "locking": False}


@pytest.mark.slow
@cases(100)
@given(st.data())
def test_every_sample_of_an_epoch_is_served_once(data: st.DataObject) -> None:
    """Whoever dies when, and whatever is torn; invariants are checked after every event."""
    run, samples = data.draw(clusters())
    weights = {
        "weights": "shared",
        "locking": data.draw(st.sampled_from([False, True])),
        "gpu_write": data.draw(st.sampled_from(["add", "overwrite"])),
    }
    simulation: dict[str, Any] = {"race_slices": data.draw(st.sampled_from([1, 5]))}
    if not weights["locking"] and data.draw(st.booleans()):
        simulation |= {"nodes": data.draw(st.integers(2, 3)), "faults": ()}
    run = run.with_(hogbatch=weights, simulation=simulation)
    rows = timing(run, samples)
    check_served(run, rows, samples)
    assert (rows["gradients"]["staleness"] >= 0).all()


@pytest.mark.parametrize(("weights", "most", "near"), [(LOCKED, 2, 0.2), (RACING, 5, 0.6)], ids=["locked", "racing"])
@pytest.mark.parametrize("rule", ["fixed", "adaptive"])
def test_staleness_is_at_most_what_is_expected(weights: Any, most: int, near: float, rule: str) -> None:
    """In a locked window each part of a batch reads anew; in a racing one, parts of one worker do not count."""
    workers = [
        {"learners": [0], "kind": "small", "threads": 4, "max": 16, "compute_s": {1: 0.04, 16: 0.64}},
        {"kind": "large", "min": 32, "max": 256, "compute_s": {32: 0.01, 256: 0.02}},
    ]
    run = job(workers, 3, rule, simulation={"jitter": 0.3, "latency_s": 1e-6}, training={"epochs": 3}, hogbatch=weights)
    assert run.make_protocol().expected_staleness == most
    mean = timing(run, 4000)["gradients"]["staleness"].mean()
    assert most * (1 - near) <= mean <= most


@pytest.mark.parametrize(
    "weights", [LOCKED, RACING, {**RACING, "gpu_write": "overwrite"}], ids=lambda w: " ".join(map(str, w.values()))
)
@pytest.mark.parametrize("kind", ["small", "large"])
def test_one_worker_is_async_with_one_learner(weights: dict[str, Any], kind: str) -> None:
    """On the same stream of samples, whose epochs are whole batches."""
    optimizer: dict[str, Any] = {"learning_rate": 0.1, "milestones": (1,)}
    if weights["locking"]:  # else it has its rate before its turn
        optimizer["warm_up"] = 1.5
    protocol = {"reference_batch_size": 16}
    workers = [{**ALONE[0], "kind": kind}]
    hogbatch = {**weights, "shuffle": "epoch"}
    about: dict[str, Any] = {"hogbatch": hogbatch, "protocol": protocol, "optimizer": optimizer}
    alone = train(job(workers, 1, "fixed", **about, **DIGITS))
    other = async_alone(optimizer=optimizer, **DIGITS)
    assert torch.equal(alone.weights, other.weights)
    for name in ("first", "samples", "step", "loss", "timestamp"):
        assert np.array_equal(alone.rows["gradients"][name], other.rows["gradients"][name])
    if weights["locking"]:
        assert np.array_equal(alone.rows["updates"]["digest"], other.rows["updates"]["digest"])


@pytest.mark.parametrize("rule", ["fixed", "adaptive"])
def test_a_locked_run_replays_and_its_record_alone_makes_the_weights(tmp_path: Path, rule: str) -> None:
    simulation = {"jitter": 0.5, "latency_s": 0.001, "update_s": 0.002, "copy_s_per_byte": 1e-9}
    run = job(UNLIKE, 2, rule, simulation=simulation, optimizer={"learning_rate": 0.2}, hogbatch=LOCKED, **DIGITS)
    trained = train(run)
    check_epochs(trained.rows, 480)
    assert trained.rows["gradients"]["staleness"].max() > 1
    assert torch.equal(replayed_plainly(run, trained.rows), trained.weights)
    path = tmp_path / "out.h5"
    rudra.simulate(run, output=path, progress="quiet").close()
    assert rudra.replay(path, quiet=True).identical


@pytest.mark.parametrize(
    ("locking", "more", "why"),
    [
        (False, {}, "its workers raced .* the order of their reads and writes is not recorded"),
        (True, {"hogbatch": {"gpu_write": "overwrite"}}, "workers overwrote weights"),
        (True, {"optimizer": {"warm_up": 1.0}}, "workers had rates of when they got work"),
    ],
)
def test_what_no_record_determines_is_not_replayed(
    tmp_path: Path, locking: bool, more: dict[str, Any], why: str
) -> None:
    run = job(UNLIKE, 2, "fixed", hogbatch={"weights": "shared", "locking": locking}, training={"epochs": 1}, **DIGITS)
    path = tmp_path / "out.h5"
    rudra.simulate(run.with_(**more), output=path, progress="quiet").close()
    with pytest.raises(ReplayError, match=f"cannot be replayed: {why}"):
        rudra.replay(path, quiet=True)


def small(threads: int = 4, **tables: Any) -> Job:
    tables = {**DIGITS, **tables}
    workers = [{"kind": "small", "threads": threads, "min": 4, "compute_s": 0.01}]
    simulation = {"jitter": 0.3, "update_s": 0.004, **tables.pop("simulation", {})}
    about: dict[str, Any] = {"optimizer": {"learning_rate": 0.5}, "hogbatch": RACING, "training": {"epochs": 2}}
    return job(workers, 2, "fixed", simulation=simulation, **{**about, **tables})


def test_torn_reads_and_writes_repeat_themselves_and_lose_updates(tmp_path: Path) -> None:
    weights, survived = {}, {}
    for name, tear in (("whole", 1), ("torn", 8), ("again", 8)):
        with rudra.simulate(
            small(simulation={"race_slices": tear}), output=tmp_path / f"{name}.h5", progress="quiet"
        ) as found:
            weights[name] = found.state["weights_sha256"]
            (*_, last) = found.events[found.events["kind"] == b"window"]
            survived[name] = float(last["text"].decode().split(" of all updates ")[1].split()[0])
    assert weights["torn"] == weights["again"] != weights["whole"]
    assert survived["whole"] == 1.0 > survived["torn"] == survived["again"] > 0.3


def test_threads_of_a_small_worker_read_at_once_and_their_staleness_is_an_interval() -> None:
    found = train(small(threads=6, simulation={"race_slices": 20})).rows
    stale = found["gradients"]["staleness"]
    assert stale.max() >= 6, "the others of the worker, and those of the other one"
    texts = [row["text"].decode() for row in found["events"] if row["kind"] == b"window"]
    low, high = (float(texts[-1].split("staleness ")[1].split(";")[0].split(" to ")[i]) for i in (0, 1))
    assert 0 <= low < high == pytest.approx(stale[len(stale) // 2 :].mean(), abs=1.0)


@pytest.mark.each_value
@pytest.mark.parametrize("locking", [False, True])
@pytest.mark.parametrize("when", [0.0101, 0.0112, 0.0123, 0.0135, 0.214])
def test_what_a_worker_did_that_died_counts_and_the_rest_is_served_again(
    tmp_path: Path, locking: bool, when: float
) -> None:
    """Before, during and after its update, and before its word of it has come, which takes 5 ms."""
    faults = [{"learner": 1, "dies_at_s": when}]
    simulation = {"jitter": 0.0, "latency_s": 0.005, "faults": faults, "race_slices": 3}
    run = small(threads=1, hogbatch={"weights": "shared", "locking": locking}, simulation=simulation)
    path = tmp_path / "out.h5"
    with rudra.simulate(run, output=path, progress="quiet") as found:
        assert found.status == "finished"
        rows = found.gradients, found.updates
        mine = rows[0][rows[0]["learner"] == 1]
        (lost,) = found.events[found.events["kind"] == b"lost"]
        assert f"when {len(mine)} of its gradients had been applied" in lost["text"].decode()
        for epoch in (1, 2):
            of = np.sort(rows[0][rows[1]["epoch"][rows[0]["update"] - 1] == epoch], order="first")
            ends = of["first"] + of["samples"]
            assert (of["first"][0], ends[-1]) == (0, 480)
            assert (of["first"][1:] == ends[:-1]).all()
    if locking:
        assert rudra.replay(path, quiet=True).identical


def write_resumed(path: Path, run: Job, parts: tuple[TrialResult, TrialResult]) -> None:
    """The file of a run that was stopped and resumed, as real ranks leave it."""
    rudra.simulate(run, output=path, progress="quiet", force=True).close()
    position, last = parts[0].saved[-1].position, parts[1]
    restart = np.zeros(1, records.EVENT)
    restart["kind"], restart["timestamp"], restart["gradients"] = b"restart", position.timestamp, position.applied
    names = ("gradients", "updates", "epochs")
    tables = {name: np.concatenate([row for part in parts for row in part.rows.tables.get(name, [])]) for name in names}
    with h5py.File(path, "r+") as file:
        for name, rows in {**tables, "events": restart}.items():
            file[name].resize(len(rows), axis=0)
            file[name][:] = rows
        for name, fields in (("totals", last.rows.totals), ("state", {"weights_sha256": sha256(last.weights)})):
            row = file[name][()]
            for key, value in fields.items():
                row[key] = value
            file[name][...] = row


@pytest.mark.parametrize("rule", ["fixed", "adaptive"])
def test_a_locked_run_that_was_stopped_and_resumed_replays(tmp_path: Path, rule: str) -> None:
    """Updates that come in after the wish to stop count for the sizes of the batches that follow."""
    simulation = {"jitter": 0.5, "latency_s": 0.01, "update_s": 0.002}
    run = job(UNLIKE, 3, rule, simulation=simulation, optimizer={"learning_rate": 0.2}, hogbatch=LOCKED, **DIGITS)
    for stop_at in np.linspace(0.05, 0.25, 9).tolist():
        first = train(run, stop_at=stop_at)
        assert first.rows.code == EXIT_STOPPED
        write_resumed(tmp_path / "out.h5", run, (first, train(run, resumed=first.saved[-1])))
        replayed = rudra.replay(tmp_path / "out.h5", quiet=True)
        assert replayed.identical, (stop_at, replayed.difference)


@pytest.mark.parametrize("weights", [LOCKED, RACING])
def test_a_run_that_is_stopped_resumes_with_the_samples_that_are_left(weights: dict[str, Any]) -> None:
    run = small(hogbatch=weights, results={"checkpoint_every": "1 epoch"})
    stopped = train(run, stop_at=0.3)
    position = stopped.saved[-1].position
    assert 0 < position.samples < 960
    resumed = train(run, resumed=stopped.saved[-1])
    assert resumed.rows.totals["samples"] == 960
    assert position.timestamp + len(resumed.rows["updates"]) == resumed.rows.totals["timestamp"]
    assert torch.isfinite(resumed.weights).all()


def test_stop_whose_last_batches_end_an_epoch_records_it_without_evaluation() -> None:
    """The workers are leaving: nobody is left to evaluate the weights, and nobody waits for that."""
    workers = [{"kind": "large", "min": 40, "max": 200, "compute_s": 0.05}]
    run = job(workers, 4, "balanced", hogbatch=RACING, training={"evaluate": "workers"}, **DIGITS)
    found = [train(run, stop_at=stop_at).rows["epochs"]["evaluated"] for stop_at in np.linspace(0.01, 0.4, 14).tolist()]
    assert any(len(evaluated) and not evaluated[-1] for evaluated in found), found
    assert all(evaluated[:-1].all() for evaluated in found)


def test_the_coordinator_has_no_gradients() -> None:
    trained = train(small())
    names = [*trained.executors[trained.plan.server].names]
    assert not [name for name in names if name.startswith(GRADIENT)]


# Several nodes.


def on_nodes(nodes: int, **tables: Any) -> Job:
    """A worker on each, whose updates come one after another."""
    workers = [
        {"learners": [node], "kind": "large", "min": 8, "max": 8, "compute_s": 0.01 * (node + 1)}
        for node in range(nodes)
    ]
    simulation = {"nodes": nodes, "jitter": 0.3, **tables.pop("simulation", {})}
    return job(workers, nodes, "fixed", simulation=simulation, hogbatch=RACING, **{**DIGITS, **tables})


def mixed_plainly(run: Job, rows: TrialRows) -> torch.Tensor:
    """Every node's chain of updates in each epoch, and their mean by samples, in a loop that knows nothing of roles."""
    data = load(run.data)
    model = FlatModel(models.build(run.model, data.info, run.training.seed), tasks.make(run.task, data.info.classes), 1)
    weights, gradient = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    alone = (Work(0, 0, 1, 0), model, data.training)
    sources = [GradientSource(run, learner, *alone, prefetch=False) for learner in range(run.learners)]
    of, rates = rows["updates"]["epoch"], rows["updates"]["learning_rate"]
    for epoch in range(1, run.training.epochs + 1):
        total = 0
        mean = weights.clone()
        for node, source in enumerate(sources):
            own, samples = weights.clone(), 0
            mine = (of[rows["gradients"]["update"] - 1] == epoch) & (rows["gradients"]["learner"] == node)
            for row in rows["gradients"][mine]:
                source.compute(int(row["step"]), Work(0, int(row["first"]), int(row["samples"]), 0), own, gradient)
                own.add_(gradient, alpha=-float(rates[row["update"] - 1]))
                samples += int(row["samples"])
            total += samples
            mean = torch.lerp(mean, own, samples / total) if samples else mean
        weights = mean
    return weights


@pytest.mark.parametrize("nodes", [2, 3])
def test_windows_of_several_nodes_are_averaged_at_epochs_ends(nodes: int) -> None:
    run = on_nodes(nodes, optimizer={"learning_rate": 0.2}, training={"evaluate": "workers"})
    trained = train(run)
    check_epochs(trained.rows, 480)
    assert torch.equal(trained.weights, mixed_plainly(run, trained.rows))
    assert trained.rows["epochs"]["evaluated"].all()
    stopped = train(run, stop_at=0.5)
    saved = stopped.saved[-1]
    assert 0 < saved.position.samples < 3 * 480
    rest = train(run, resumed=saved)
    assert rest.rows.totals["samples"] == 3 * 480


def test_a_worker_that_dies_on_one_of_several_nodes_ends_the_run() -> None:
    run = on_nodes(2, simulation={"faults": [{"learner": 1, "dies_at_s": 0.2}]})
    with pytest.raises(
        RunError, match=r"learner 1 \(rank 3\) died, and perhaps its node's progress in this epoch is lost"
    ):
        train(run)


def places_and_plan(run: Job, tables: dict[str, Any]) -> None:
    changed = run.with_(**tables)
    changed.plan(nodes_of(changed))


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (
            {"optimizer": {"momentum": 0.9}},
            r"with an \[optimizer\] that has a state; use name = 'sgd' and momentum = 0",
        ),
        ({"optimizer": {"name": "adam"}}, r"with an \[optimizer\] that has a state; use name = 'sgd' and momentum = 0"),
        (
            {"optimizer": {"weight_decay": 0.1}},
            r"is not supported with \[optimizer\] weight_decay; remove weight_decay",
        ),
        ({"protocol": {"modulation": "mean_staleness"}}, "modulation = 'mean_staleness'; use modulation = 'none'"),
        ({"cluster": {"device": "cuda"}}, "is not supported with small workers on GPUs; use device = 'cpu' in their"),
        (
            {"simulation": {"nodes": 2}, "hogbatch": {"locking": True}},
            "locking = true on 2 nodes; use locking = false, or one node",
        ),
        ({"hooks": [{"call": "csv", "at": "update", "role": "learner 0"}]}, "at = 'update'; use at = 'epoch' or 'end'"),
        ({"results": {"keep_checkpoints": "10 updates"}}, "keep_checkpoints = '10 updates'; use a number of epochs"),
    ],
)
def test_what_a_window_cannot_do_is_said_in_a_line(tables: dict[str, Any], line: str) -> None:
    run = small(threads=1)
    with pytest.raises(ConfigError, match=rf"^\[hogbatch\] weights = 'shared' .*{line}") as found:
        places_and_plan(run, tables)
    assert "\n" not in str(found.value)


def test_a_model_with_buffers_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^\[hogbatch\] weights = 'shared': the model has buffers \(.*valid: server, or models without",
    ):
        train(small(model={"name": "resnet32"}))
