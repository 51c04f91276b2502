"""Jobs that change after an epoch: what must hold in virtual time, however messages and deaths fall."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import SAMPLES, TrialResult, TrialRows, job, timing, train
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from test_losses import EXPECTED, TOPOLOGIES, Bounded, Eager, lost
from test_resume import ALONE, GROUPS, TREE, check_rows, make_job

import rudra
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.prepare.resolve import nodes_of
from topologies.kinds import TREE_SERVER

GROWING = {"at_epoch": 1, "training": {"minibatch_size": 16}}
SHARED = {"at_epoch": 2, "cluster": {"shares": (1.0, 2.0, 3.0, 2.0)}}
SLOWER = {"at_epoch": 1, "optimizer": {"learning_rate": 0.01}}


def rule(protocol: Any, **keys: Any) -> dict[str, Any]:
    return {"protocol": {"name": protocol, **keys}}


# Resumed.

SETTINGS = {
    "growing": make_job("hardsync", changes=[GROWING, SHARED]),
    "rate": make_job("hardsync", changes=[SLOWER, {"at_epoch": 2, "optimizer": {"milestones": (2,)}}]),
    "tree": make_job("hardsync", topology=TREE, changes=[GROWING]),
    "allreduce": make_job("hardsync", topology=ALONE, changes=[GROWING, SHARED]),
    "groups": make_job(
        "hardsync",
        topology=GROUPS,
        changes=[{"at_epoch": 1, "topology": {"options": {"groups": 4}}}, {**GROWING, "at_epoch": 2}],
    ),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, TrialResult]:
    return {name: train(job_) for name, job_ in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("at", [3, 11, 12, 13, 18])
def test_resumed_before_at_and_after_a_change_it_reaches_the_same_bits(
    undisturbed: dict[str, TrialResult], name: str, at: int
) -> None:
    whole = undisturbed[name]
    ends = whole.rows["epochs"]["timestamp"]
    assert ends[0] == 12 < 18 <= ends[1] < whole.rows.totals["timestamp"]
    saved = next(s for s in whole.saved if s.position.timestamp >= at)
    resumed = train(SETTINGS[name], resumed=saved)
    assert torch.equal(resumed.weights, whole.weights)
    check_rows(whole, saved, resumed)
    assert all(resumed.rows.totals[key] == whole.rows.totals[key] for key in ("timestamp", "samples", "applied"))
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("topology", "protocol", "then"),
    [
        ({"name": "base"}, "hardsync", WARM),
        ({"name": "base"}, "hardsync", THERE_AND_BACK),
        ({"name": "base"}, "hardsync", [GROWING, SHARED]),
        (TREE, "hardsync", WARM),
        (TREE, "softsync", [{"at_epoch": 1, **rule("hardsync")}, {"at_epoch": 2, "training": {"minibatch_size": 4}}]),
        ({"name": "adv*"}, "async", [{"at_epoch": 1, **rule("softsync", n=2)}, {**GROWING, "at_epoch": 2}]),
        (ALONE, "hardsync", [GROWING, SHARED]),
        (GROUPS, "hardsync", GROUPED),
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
    """A job that changes once or twice, with learners and servers of a tree that die, and the samples of an epoch."""
    learners = draw(st.integers(1 if topology != "groups" else 4, 9))
    options = draw(st.sampled_from(TOPOLOGIES[topology]))
    alone = options.get("groups") == 1
    rules = ["hardsync", "softsync", "softsync", "async", Eager, *([Bounded] if topology == "base" else [])]
    if topology == "adv*":
        rules.remove("hardsync")

    def protocol() -> dict[str, Any]:
        name = "hardsync" if alone else draw(st.sampled_from(rules))
        most = 2 if topology == "groups" else learners
        return {"name": name} | ({"n": draw(st.integers(1, most))} if name == "softsync" else {})

    times = st.sampled_from([0.0, 1e-3, 0.05])
    simulation = {
        "compute_s": draw(st.sampled_from([1e-3, 0.05])),
        "jitter": draw(st.sampled_from([0.0, 0.9])),
        "slowdown": {i: draw(st.sampled_from([1.0, 20.0])) for i in range(learners)},
        "latency_s": draw(times),
        "latency_jitter_s": draw(times),
        "bandwidth_bytes_per_s": draw(st.sampled_from([1e6, 1e9])),
        "nodes": draw(st.sampled_from([None, 2])),
        "message_s": draw(times),
        "update_s": draw(st.sampled_from([0.0, 0.3])),
        "evaluation_s": draw(st.sampled_from([0.0, 1.0])),
        "detection_s": draw(st.sampled_from([0.0, 0.1])),
    }
    epochs = draw(st.integers(2, 4))
    starts = sorted(draw(st.sets(st.integers(1, epochs - 1), min_size=1, max_size=2)))
    entries: list[dict[str, Any]] = []
    for start in starts:
        entry = {"at_epoch": start, "training": {"minibatch_size": draw(st.sampled_from([1, SAMPLES, 7]))}}
        if topology == "groups" and not alone:
            entry["topology"] = {"options": {"groups": draw(st.sampled_from([2, 3]))}}
        if draw(st.booleans()):
            entry["protocol"] = protocol()
        entries.append(entry)
    undisturbed = job(
        "hardsync" if topology != "adv*" else "async",
        learners,
        epochs=epochs,
        seed=draw(st.integers(0, 2**20)),
        topology={"name": topology, "options": options},
        simulation=simulation,
        training={"evaluate": draw(st.booleans())},
        changes=entries,
    ).with_(protocol=protocol())
    samples = draw(st.integers(1, 120))
    if draw(st.booleans()):
        return undisturbed, samples
    ended_s = timing(undisturbed, samples).time_s
    moments = st.floats(0.05, 1.0).map(lambda part: part * ended_s)
    dying = draw(st.lists(st.integers(0, learners - 1), min_size=1, max_size=2, unique=True))
    faults: list[dict[str, Any]] = [{"learner": i, "dies_at_s": draw(moments)} for i in dying]
    servers = [role.index for role in undisturbed.plan(nodes_of(undisturbed)).roles if role.kind == TREE_SERVER]
    if servers and draw(st.booleans()):
        faults.append({"tree_server": draw(st.sampled_from(servers)), "dies_at_s": draw(moments)})
    if draw(st.booleans()):
        faults.append({"learner": 0, "slows_at_s": draw(moments), "factor": 10.0, "for_s": ended_s / 4})
    return undisturbed.with_(simulation={"faults": faults}), samples


@pytest.mark.slow
@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "sharded"])
@cases(60)
@given(st.data())
def test_a_run_that_changes_ends_whoever_dies(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run_, samples = data.draw(changing(topology))
    try:
        rows = timing(run_, samples)
    except RunError as error:
        if run_.simulation.faults and any(text in str(error) for text in EXPECTED):
            return
        raise
    totals, gradients, updates = rows.totals, rows["gradients"], rows["updates"]
    assert rows.code == 0
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    assert totals["applied"] == len(gradients) == updates["gradients"].sum()
    assert np.array_equal(updates["timestamp"], np.arange(1, len(updates) + 1))
    for learner in range(run_.learners):
        mine = gradients[gradients["learner"] == learner]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "applied once, in order, without holes"
    epochs = rows["epochs"]
    assert list(epochs["epoch"]) == list(range(1, run_.training.epochs + 1))
    ends = {int(row["epoch"]): int(row["timestamp"]) for row in epochs}
    starts = [0, *(ends[change.at_epoch] for change in run_.changes)]
    over = updates["timestamp"][-1]
    assert [row["timestamp"] for row in changes(rows)] == [start for start in starts[1:] if start < over]
    for place, start in enumerate(starts):
        until = starts[place + 1] if place + 1 < len(starts) else np.inf
        here = gradients[(gradients["update"] > start) & (gradients["update"] <= until)]
        part = run_.at(0 if not place else run_.changes[place - 1].at_epoch)
        assert (here["timestamp"] >= start).all(), "nothing from before a change is applied after it"
        assert (here["samples"] == part.training.minibatch_size).all()
        if part.protocol.name == "hardsync":
            assert (here["staleness"] == 0).all()


def test_learners_that_die_before_and_after_a_change_are_missed_once(tmp_path: Path) -> None:
    faults = [{"learner": 1, "dies_at_s": 0.5}, {"learner": 2, "dies_at_s": 2.5}]
    job_ = make_job("hardsync", changes=WARM).with_(
        simulation={"faults": faults, "compute_s": 0.05, "slowdown": {}, "latency_jitter_s": 0.0}
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
