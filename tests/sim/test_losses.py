"""Learners that die or slow down in virtual time: what must hold whoever dies, and whenever."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clusters import SAMPLES, Rows, job, timing, validate
from hypothesis import given, settings
from hypothesis import strategies as st

from rudra.config import Job
from rudra.costs import places
from rudra.errors import EXIT_STOPPED, RunError
from rudra.roles import Machine, ParameterServer

TOPOLOGIES: dict[str, list[dict[str, Any]]] = {
    "base": [{}],
    "adv": [{"fan_out": 2}, {"fan_out": 3}, {"fan_out": (2, 2)}, {"fan_out": (2, 2, 2)}],
}
EXPECTED = ("no learner is left", "died before training began")


def duration(run_: Job, training_samples: int) -> tuple[float, float]:
    """When training begins, and when the run ends."""
    began_s = 0.0

    def look(machine: Machine) -> None:
        nonlocal began_s
        if isinstance(machine, ParameterServer):
            began_s = machine._began

    ended_s = timing(run_, training_samples, look).time_s
    return began_s, ended_s


@st.composite
def clusters(draw: st.DrawFn, topology: str) -> tuple[Job, int]:
    """A job with learners that die at any time of its run, and the samples of an epoch."""
    learners = draw(st.integers(1, 11))
    protocol = draw(st.sampled_from(["hardsync", "softsync", "softsync", "async"]))
    n = draw(st.integers(1, learners)) if protocol == "softsync" else None
    times = st.sampled_from([0.0, 1e-4, 1e-3, 0.05])
    simulation = {
        "compute_s": draw(st.sampled_from([1e-3, 0.05])),
        "jitter": draw(st.sampled_from([0.0, 0.1, 0.9])),
        "slowdown": {i: draw(st.sampled_from([1.0, 3.0, 20.0])) for i in range(learners)},
        "latency_s": draw(times),
        "latency_jitter_s": draw(times),
        "bandwidth_bytes_per_s": draw(st.sampled_from([1e6, 1e7, 1e9])),  # a tensor takes 0.35 s, …
        "nodes": draw(st.sampled_from([None, 1, 2])),
        "servers_on_first_node": draw(st.booleans()),
        "blocking_servers": draw(st.booleans()),
        "cores_per_node": draw(st.sampled_from([None, 1])),
        "message_s": draw(times),
        "gradient_s": draw(times),
        "update_s": draw(st.sampled_from([0.0, 1e-3, 0.3])),
        "evaluation_s": draw(st.sampled_from([0.0, 1.0])),
        "detection_s": draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0])),
    }
    undisturbed = job(
        protocol,
        learners,
        n=n,
        epochs=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**20)),
        topology={"name": topology, "options": draw(st.sampled_from(TOPOLOGIES[topology]))},
        simulation=simulation,
        results={"report_s": draw(st.sampled_from([0.0, 0.25, 100.0]))},
        training={"evaluate": draw(st.booleans())},
    )
    training_samples = draw(st.integers(1, 150))
    began_s, ended_s = duration(undisturbed, training_samples)
    # Two may die at once; a few before training begins.
    moments = (st.sampled_from([0.3, 0.6]) | st.floats(-0.01, 1.0)).map(
        lambda part: max(0.0, began_s + part * (ended_s - began_s))
    )
    most = draw(st.sampled_from([1, 2, learners]))
    dying = draw(st.lists(st.integers(0, learners - 1), min_size=1, max_size=most, unique=True))
    faults: list[dict[str, Any]] = [{"learner": i, "dies_at_s": draw(moments)} for i in dying]
    if draw(st.booleans()):
        faults.append({"learner": 0, "slows_at_s": draw(moments), "factor": 10.0, "for_s": ended_s / 4})
    return undisturbed.with_(simulation={"faults": faults}), training_samples


def run(run_: Job, training_samples: int, after: Callable[[Machine], None] = validate) -> Rows | None:
    """None: the run failed, as it may."""
    try:
        return timing(run_, training_samples, after)
    except RunError as error:
        assert any(text in str(error) for text in EXPECTED), error
        return None


def lost(rows: Rows) -> Any:
    """Of the table of events."""
    if "events" not in rows.tables:
        return np.empty(0, [("kind", "S16"), ("role", "<i2"), ("timestamp", "<i8")])
    return rows["events"][rows["events"]["kind"] == b"lost"]


def check(run_: Job, rows: Rows) -> None:
    plan, totals, gradients, updates = run_.plan(places(run_)), rows.totals, rows["gradients"], rows["updates"]
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    assert totals["applied"] == len(gradients) == updates["gradients"].sum()
    assert np.array_equal(updates["timestamp"], np.arange(1, len(updates) + 1))
    assert (gradients["staleness"] == gradients["update"] - 1 - gradients["timestamp"]).all()
    assert (gradients["staleness"] >= 0).all()
    for learner in range(run_.learners):
        mine = gradients[gradients["learner"] == learner]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "applied once, in order, without holes"
    rule = run_.make_protocol(plan)
    if rule.ordered:
        assert (gradients["staleness"] == 0).all()
    gone = lost(rows)
    alive = set(range(run_.learners)) - {plan.roles[role].index for role in gone["role"]}
    since = gone["timestamp"].max(initial=0)
    c = run_.make_protocol(plan, len(gone)).gradients_per_update if alive else 1
    later = updates[updates["timestamp"] > since]
    if rule.ordered:
        for timestamp in later["timestamp"]:
            learners = list(gradients["learner"][gradients["update"] == timestamp])
            assert set(learners) >= alive
            # The first may hold what the dead had pushed in time, on their way through a tree longer.
            assert len(set(learners)) == len(learners)
            if run_.topology.name == "base" and timestamp > since + 1:
                assert learners == sorted(alive)
    elif run_.topology.name == "base":
        # What was pending when c became smaller than that is in the first update after it.
        assert (later["gradients"][1:] == c).all()
    else:
        assert (later["gradients"] >= c).all()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_run_ends_whoever_dies(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run_, training_samples = data.draw(clusters(topology))
    rows = run(run_, training_samples)
    if rows is None:
        return
    assert rows.code == 0
    check(run_, rows)
    assert list(rows["epochs"]["epoch"]) == list(range(1, run_.training.epochs + 1))
    needed = run_.training.epochs * training_samples
    assert rows.totals["samples"] >= needed > rows.totals["samples"] - rows["updates"]["gradients"][-1] * SAMPLES
    assert rows.learners is not None
    assert list(rows.learners["learner"]) == list(range(run_.learners))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_run_that_stops_with_the_first_loss_ends_in_order(topology: str, data: st.DataObject) -> None:
    run_, training_samples = data.draw(clusters(topology))
    run_ = run_.with_(faults={"on_learner_loss": "stop"})
    rows = run(run_, training_samples)
    if rows is None:
        return
    if rows.code == 0:
        assert rows["epochs"]["epoch"][-1] == run_.training.epochs
    else:
        assert rows.code == EXIT_STOPPED
    if rows.totals["timestamp"]:
        check(run_, rows)
