"""Jobs that change after an epoch: what must hold in virtual time, however messages and deaths fall."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workers
from clusters import SAMPLES, TrialResult, TrialRows, check_accounts, train
from fuzzing import cases, in_turn
from hypothesis import given, reject
from hypothesis import strategies as st
from random_clusters import SURVIVABLE, faulty, outlived, survivable
from resumable import ALONE, GROUPS, SHARDED, TREE, check_resumed, lost, make_job
from rules import Bounded, Eager

import rudra
from rudra.compute.schedule import expected_updates
from rudra.errors import ConfigError
from rudra.job.job import Job
from tests.selection import CAMPAIGN, covering

GROWING = {"at_epoch": 1, "training": {"minibatch_size": 16}}
SHARED = {"at_epoch": 2, "cluster": {"shares": (1.0, 2.0, 3.0, 2.0)}}
RATE = {"optimizer": {"learning_rate": 0.01}}
SLOWER = {"at_epoch": 1, **RATE}


def rule(protocol: Any, **keys: Any) -> dict[str, Any]:
    return {"protocol": {"name": protocol, **keys}}


def velocity(momentum: float, **options: Any) -> dict[str, Any]:
    return {"optimizer": {"momentum": momentum, "options": options}}


BLOCKS = {"name": "hierarchical", "options": {"blocks": 2}}


def period(length: int, **outer: Any) -> dict[str, Any]:
    return {"averaging": {"period": length, "outer": outer}}


def replicas(name: str, *changes: dict[str, Any], **tables: Any) -> Job:
    return make_job(name, averaging={"period": 1}, changes=changes, **{"topology": {"name": "replicas"}, **tables})


# Resumed.

SETTINGS = {
    "growing": make_job("hardsync", changes=[GROWING, SHARED]),
    "rate": make_job("hardsync", changes=[SLOWER, {"at_epoch": 2, "optimizer": {"milestones": (2,)}}]),
    "tree": make_job("hardsync", topology=TREE, changes=[GROWING]),
    "allreduce": make_job("hardsync", topology=ALONE, changes=[GROWING, SHARED]),
    "update": make_job("hardsync", changes=[{"at_update": 12, "training": {"minibatch_size": 16}}]),
    "within": make_job("hardsync", changes=[{"at_update": 7, **RATE}, SHARED]),
    "momentum": make_job("hardsync", changes=[{"at_update": 7, **velocity(0.5)}, {"at_epoch": 2, **velocity(0)}]),
    "begun": make_job(
        "hardsync",
        optimizer={"momentum": 0.0},
        topology=ALONE,
        changes=[{"at_epoch": 1, **velocity(0.9)}, {"at_update": 18, **velocity(0.3, dampening=0.1)}],
    ),
    "sma": replicas("sma", {"at_epoch": 1, **period(2)}, {"at_update": 15, **velocity(0.3)}),
    "diloco": replicas("diloco", {"at_update": 13, **period(2, momentum=0.5, learning_rate=0.3)}),
    "average": replicas("average", {"at_epoch": 1, "protocol": {"name": "easgd"}}, {"at_update": 13, **period(2)}),
    "blocks": replicas("easgd", {"at_update": 13, **velocity(0.5)}, {"at_update": 17, **period(3)}, topology=BLOCKS),
    "sharded": make_job("hardsync", topology=SHARDED, changes=[{"at_update": 7, **velocity(0.5)}, SHARED]),
    "groups": make_job(
        "hardsync",
        topology=GROUPS,
        changes=[{"at_epoch": 1, "topology": {"options": {"groups": 4}}}, {**GROWING, "at_epoch": 2}],
    ),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, TrialResult]:
    return {name: train(job_) for name, job_ in SETTINGS.items()}


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "at"), in_turn(SETTINGS, [3, 11, 12, 13, 18]))
def test_resumed_before_at_and_after_a_change_it_reaches_the_same_bits(
    undisturbed: dict[str, TrialResult], name: str, at: int
) -> None:
    whole = undisturbed[name]
    ends = whole.rows["epochs"]["timestamp"]
    assert ends[0] == 12 < 18 <= ends[1] < whole.rows.totals["timestamp"]
    saved, resumed = check_resumed(whole, at)
    told = [row["timestamp"] for row in changes(resumed.rows)]
    assert told == [row["timestamp"] for row in changes(whole.rows) if row["timestamp"] > saved.position.timestamp]


def changes(rows: TrialRows) -> Any:
    return lost(rows, b"change")


# Replayed.

WARM = [{"at_epoch": 1, **rule("softsync", n=1)}]
THERE_AND_BACK = [{"at_epoch": 1, **rule("async")}, {"at_epoch": 2, **rule("hardsync")}]
GROUPED = [
    {"at_epoch": 1, **rule("async"), "topology": {"options": {"groups": 4}}},
    {"at_epoch": 2, "topology": {"options": {"groups": 2}}, "training": {"minibatch_size": 4}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "protocol", "then", "seed"),
    [
        pytest.param({"name": "base"}, "hardsync", WARM, 0, marks=CAMPAIGN),
        ({"name": "base"}, "hardsync", THERE_AND_BACK, 1),
        ({"name": "base"}, "hardsync", [GROWING, SHARED], 2),
        (TREE, "hardsync", WARM, 0),
        pytest.param(
            TREE,
            "softsync",
            [{"at_epoch": 1, **rule("hardsync")}, {"at_epoch": 2, "training": {"minibatch_size": 4}}],
            1,
            marks=CAMPAIGN,
        ),
        ({"name": "adv*"}, "async", [{"at_epoch": 1, **rule("softsync", n=2)}, {**GROWING, "at_epoch": 2}], 2),
        pytest.param(ALONE, "hardsync", [GROWING, SHARED], 0, marks=CAMPAIGN),
        (GROUPS, "hardsync", GROUPED, 1),
    ],
    ids=str,
)
def test_a_run_that_changes_is_repeated_bit_for_bit(
    tmp_path: Path, topology: dict[str, Any], protocol: str, then: list[dict[str, Any]], seed: int
) -> None:
    path = tmp_path / "run.h5"
    delays = {"slowdown": {seed: 5.0}, "update_s": 0.1 * seed, "message_s": 0.01 * seed, "latency_s": 0.02 * seed}
    job_ = make_job(protocol, topology=topology, changes=then).with_(training={"seed": seed}, simulation=delays)
    assert train(job_).weights.isfinite().all(), "with poison wherever nobody may read"
    with rudra.simulate(job_, output=path, progress="quiet") as results:
        summary, events, epochs = results.summary(), results.events, results.epochs
        assert results.job["changes"][0]["at_epoch"] == 1
        assert results.summary()["changes"] == [f"after epoch {c.at_epoch}: {c.text}" for c in job_.changes]
        check_streams(results.gradients, job_)
    ends = {int(row["epoch"]): int(row["timestamp"]) for row in epochs}
    told = events[events["kind"] == b"change"]
    assert list(told["timestamp"]) == [ends[change.at_epoch] for change in job_.changes]
    replayed = rudra.replay(path, quiet=True)
    assert replayed.identical, replayed
    assert (replayed.updates, replayed.weights_sha256) == (summary["updates"], summary["weights_sha256"])


SERVED = {"name": "replicas", "options": {"parameter_server": True}}
PLACED = {"model": {"name": "mlp"}, "placement": {"cut": 2, "rule": "synchronous"}}
RESET = {"optimizer": {"momentum": 0.0, "learning_rate": 0.03}}


def hogbatch(*changes: dict[str, Any], **tables: Any) -> Job:
    return workers.job(workers.UNLIKE, **workers.digits(), changes=changes, **tables)


FAMILIES = {
    "base": make_job("async", changes=[{"at_update": 31, **velocity(0.5)}, {"at_epoch": 2, **RESET}]),
    "adv*": make_job(
        "softsync", topology={"name": "adv*"}, changes=[{"at_epoch": 1, **RESET}, {"at_update": 19, **velocity(0.5)}]
    ),
    "sharded": make_job(
        "async", topology=SHARDED, changes=[{"at_update": 5, **velocity(0.5)}, {"at_update": 6, **RESET}]
    ),
    "groups": make_job("async", topology=GROUPS, changes=[{"at_update": 5, **velocity(0.5)}, {"at_epoch": 2, **RESET}]),
    "sma": replicas("sma", {"at_update": 5, **period(3, momentum=0.3)}, {"at_epoch": 1, **velocity(0.5)}),
    "average": replicas("average", {"at_epoch": 1, **period(2)}, {"at_update": 15, **RESET}),
    "elastic": replicas("easgd", {"at_update": 19, **period(3)}, {"at_epoch": 2, **velocity(0.3)}, topology=SERVED),
    "hogbatch": hogbatch({"at_epoch": 1, **velocity(0.5)}, {"at_update": 35, **RESET}),
    "tests": hogbatch({"at_update": 10, **RESET}, {"at_epoch": 1, **RATE}, training={"evaluate": "workers"}),
    "window": hogbatch({"at_epoch": 1, **RATE}, hogbatch={"weights": "shared", "locking": True}),
    "placed": make_job("hardsync", **PLACED, changes=[{"at_update": 5, **velocity(0.5)}, {"at_epoch": 2, **RESET}]),
    "placed alone": make_job("hardsync", **PLACED, topology=ALONE, changes=[{"at_update": 14, **velocity(0.5)}]),
}
"""Each way in which roles continue after a change: a restart, or none."""


@pytest.mark.parametrize("name", covering(["sharded", "elastic", "tests", "window", "placed alone"], FAMILIES))
def test_every_family_changes_and_is_repeated(tmp_path: Path, name: str) -> None:
    job_, path = FAMILIES[name], tmp_path / "run.h5"
    with rudra.simulate(job_, output=path, progress="quiet", force=True) as results:
        ends = {int(row["epoch"]): int(row["timestamp"]) for row in results.epochs}
        told = results.events[results.events["kind"] == b"change"]["timestamp"].tolist()
        digest = results.summary()["weights_sha256"]
    assert told == [c.at_update or ends[c.at_epoch or 0] for c in job_.changes]
    replayed = rudra.replay(path, job=job_, quiet=True)
    assert (replayed.identical, replayed.weights_sha256) == (True, digest), replayed


def test_workers_that_begin_at_a_change_get_their_work_once(tmp_path: Path) -> None:
    job_ = FAMILIES["tests"].with_(results={"keep_checkpoints": "10 updates"})
    rudra.simulate(job_, output=tmp_path / "run.h5", progress="quiet").close()
    about = {"from_": tmp_path / "run-update10.ckpt", "carry": "all", "progress": "quiet"}
    with rudra.simulate(job_, output=tmp_path / "more.h5", **about) as results:
        assert results.events["timestamp"][results.events["kind"] == b"change"][0] == 10
    assert rudra.replay(tmp_path / "more.h5", quiet=True).identical


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_placed_layers_change_as_all_others(tmp_path: Path, latency_s: float) -> None:
    digests, placed = set(), FAMILIES["placed"].with_(simulation={"latency_s": latency_s, "latency_jitter_s": 0.0})
    for job_ in (placed, placed.with_(placement={"cut": None})):
        with rudra.simulate(job_, output=tmp_path / "run.h5", progress="quiet", force=True) as results:
            digests.add(results.summary()["weights_sha256"])
    assert len(digests) == 1


@pytest.mark.parametrize("topology", [{"name": "base"}, GROUPS, ALONE], ids=str)
def test_big_batches_change_as_single_ones(tmp_path: Path, topology: dict[str, Any]) -> None:
    weights = []
    for batching in ("none", "big-batch"):
        entries = [{"at_update": 7, **velocity(0.5)}, {"at_epoch": 2, "training": {"minibatch_size": 16}}]
        job_ = make_job("hardsync", topology=topology, changes=entries, model={"name": "mlp"})
        job_ = job_.with_(simulation={"batching": batching})
        with rudra.simulate(job_, output=tmp_path / f"{batching}.h5", progress="quiet") as results:
            weights.append(results.weights_of())
            assert results.summary()["updates"] == 12 + 12 + 6
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-5)


def check_streams(gradients: Any, job_: Job) -> None:
    """Every sample of a pass is drawn once, whatever μ and the shares are."""
    for stream in np.unique(gradients["stream"]):
        own = np.sort(gradients[gradients["stream"] == stream], order="first")
        assert own["first"][0] == 0
        assert (own["first"][1:] == own["first"][:-1] + own["samples"][:-1]).all(), "no gap, and nothing twice"


def test_a_warm_start_is_as_long_as_it_says(tmp_path: Path) -> None:
    """Hardsync for an epoch, then updates of as many gradients that may be stale, of nothing from before."""
    trained = train(make_job("hardsync", changes=WARM))
    updates, gradients = trained.rows["updates"], trained.rows["gradients"]
    first = gradients[gradients["update"] <= 12]
    assert (first["staleness"] == 0).all()
    later = gradients[gradients["update"] > 12]
    assert later["staleness"].max() > 0
    assert later["timestamp"].min() == 12
    assert (updates["gradients"] == 4).all()
    assert updates["learning_rate"][11] != updates["learning_rate"][12]  # another modulation


# Whoever dies, and whenever.


@st.composite
def changing(draw: st.DrawFn, topology: str) -> tuple[Job, int]:
    """A job that changes once or twice, often with learners and servers of a tree that die, and samples of an epoch."""
    run_, samples = draw(survivable(topology)), draw(st.integers(1, 120))
    alone = run_.topology.options.get("groups") == 1
    rules = ["hardsync", "softsync", "async", Eager, *([Bounded] if topology == "base" else [])]
    if topology == "adv*":
        rules.remove("hardsync")

    def protocol() -> dict[str, Any]:
        name = "hardsync" if alone else draw(st.sampled_from(rules))
        most = 2 if topology == "groups" else run_.learners
        return {"name": name, "n": draw(st.integers(1, most)) if name == "softsync" else None}

    epochs = draw(st.integers(2, 4))
    entries: list[dict[str, Any]] = []
    for start in sorted(draw(st.sets(st.integers(1, epochs - 1), min_size=1, max_size=2))):
        entry = {"at_epoch": start, "training": {"minibatch_size": draw(st.sampled_from([1, SAMPLES, 7]))}}
        if topology == "groups" and not alone:
            entry["topology"] = {"options": {"groups": draw(st.sampled_from([2, 3]))}}
        if draw(st.booleans()):
            entry["protocol"] = protocol()
        entries.append(entry)
    if len(entries) == 1 and draw(st.booleans()):
        entries[0]["at_update"] = entries[0].pop("at_epoch") * draw(st.integers(1, 12))
    run_ = run_.with_(training={"epochs": epochs}, protocol=protocol(), changes=entries)
    try:
        expected_updates(run_, run_.plan(), samples)
    except ConfigError:  # the run is too short
        reject()
    return draw(faulty(run_, samples)) if draw(st.booleans()) else run_, samples


@pytest.mark.slow
@pytest.mark.parametrize("topology", SURVIVABLE)
@cases(60)
@given(st.data())
def test_a_run_that_changes_ends_whoever_dies(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run_, samples = data.draw(changing(topology))
    rows = outlived(run_, samples)
    if rows is None:
        assert run_.simulation.faults
        return
    gradients, updates = rows["gradients"], rows["updates"]
    assert rows.code == 0
    check_accounts(rows)
    epochs = rows["epochs"]
    assert list(epochs["epoch"]) == list(range(1, run_.training.epochs + 1))
    ends = {int(row["epoch"]): int(row["timestamp"]) for row in epochs}
    starts = [0, *(change.at_update or ends[change.at_epoch or 0] for change in run_.changes)]
    over = updates["timestamp"][-1]
    assert [row["timestamp"] for row in changes(rows)] == [start for start in starts[1:] if start < over]
    for place, start in enumerate(starts):
        until = starts[place + 1] if place + 1 < len(starts) else np.inf
        here = gradients[(gradients["update"] > start) & (gradients["update"] <= until)]
        part = run_.after(place)
        assert (here["timestamp"] >= start).all(), "nothing from before a change is applied after it"
        assert (here["samples"] == part.training.minibatch_size).all()
        if part.protocol.name == "hardsync":
            assert (here["staleness"] == 0).all()


def test_learners_that_die_before_and_after_a_change_are_missed_once(tmp_path: Path) -> None:
    faults = [{"learner": 1, "dies_at_s": 0.5}, {"learner": 2, "dies_at_s": 2.5}]
    job_ = make_job("hardsync", changes=WARM).with_(
        simulation={"faults": faults, "compute_s": 0.05, "slowdown": {}, "latency_jitter_s": 0.0},
        results={"checkpoint_every": "never"},
    )
    path = tmp_path / "run.h5"
    with rudra.simulate(job_, output=path, progress="quiet") as results:
        events, gradients = results.events, results.gradients
        assert results.status == "finished"
    kinds = [kind.decode() for kind in events["kind"]]
    assert kinds == ["lost", "change", "lost"]
    (change,) = events["timestamp"][events["kind"] == b"change"]
    before, after = gradients[gradients["update"] <= change], gradients[gradients["update"] > change]
    assert 1 in before["learner"]
    assert 1 not in after["learner"]
    assert {0, 2, 3} == set(after["learner"])
    assert rudra.replay(path, quiet=True).identical
