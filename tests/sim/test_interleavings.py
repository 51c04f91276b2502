"""Whole clusters under random interleavings: what must hold whoever is fast and whoever is late."""

from typing import Any

import numpy as np
import pytest
from clusters import SAMPLES, check_updates, job, timing
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

WIDTHS = st.integers(2, 4)
FAN_OUTS = st.none() | st.integers(1, 4) | st.tuples(st.integers(1, 3), WIDTHS) | st.tuples(WIDTHS, WIDTHS, WIDTHS)


@st.composite
def options(draw: st.DrawFn, topology: str, learners: int) -> dict[str, Any]:
    if topology == "sharded":
        return {"shards": draw(st.integers(1, 4))}
    if topology == "groups":
        return {"groups": draw(st.integers(1, learners)), "reduction": draw(st.sampled_from(["ordered", "mpi"]))}
    drawn: dict[str, Any] = {} if topology == "base" else {"fan_out": draw(FAN_OUTS)}
    if topology == "adv*":
        drawn |= {"weight_fan_out": draw(st.integers(1, 4)), "outstanding": draw(st.sampled_from([None, 1, 2, 3]))}
    return drawn


@st.composite
def clusters(draw: st.DrawFn, topology: str) -> tuple[Any, int]:
    learners = draw(st.integers(1, 7 if topology in {"base", "sharded"} else 11))
    chosen = draw(options(topology, learners))
    protocol = draw(st.sampled_from(["softsync", "async", *(["hardsync"] if topology != "adv*" else [])]))
    n = draw(st.integers(1, chosen.get("groups", learners))) if protocol == "softsync" else None
    times = st.sampled_from([0.0, 1e-4, 1e-3, 0.05])
    simulation = {
        "compute_s": draw(st.sampled_from([1e-3, 0.05])),
        "jitter": draw(st.sampled_from([0.0, 0.1, 0.9])),
        "slowdown": {i: draw(st.sampled_from([1.0, 3.0, 20.0])) for i in range(learners)},
        "latency_s": draw(times),
        "latency_jitter_s": draw(times),
        "bandwidth_bytes_per_s": draw(st.sampled_from([1e6, 1e9, 1e13])),
        "nodes": draw(st.sampled_from([None, 1, 2, 3])),
        "servers_on_first_node": draw(st.booleans()),
        "local_latency_s": draw(st.sampled_from([None, 0.0, 0.05])),
        "local_bandwidth_bytes_per_s": draw(st.sampled_from([None, 1e5, 1e13])),
        "cores_per_node": draw(st.sampled_from([None, 1, 3])),
        "node_slowdown": draw(st.sampled_from([0.0, 0.5])),
        "straggler_probability": draw(st.sampled_from([0.0, 0.1])),
        "distribution": draw(st.sampled_from(["uniform", "lognormal", "exponential"])),
        "message_s": draw(times),
        "gradient_s": draw(times),
        "update_s": draw(times),
        "evaluation_s": draw(st.sampled_from([0.0, 0.01, 10.0])),
    }
    results = {"report_s": draw(st.sampled_from([0.0, 0.25, 100.0]))}
    run = job(
        protocol,
        learners,
        n=n,
        epochs=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**20)),
        topology={"name": topology, "options": chosen},
        simulation=simulation,
        results=results,
        training={"evaluate": draw(st.booleans())},
    )
    return run, draw(st.integers(1, 90))


@pytest.mark.parametrize("topology", ["base", "sharded", "adv", "adv*", "groups"])
@cases(100)
@given(st.data())
def test_every_run_ends_and_every_gradient_is_accounted_for(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run, training_samples = data.draw(clusters(topology))
    rows = timing(run, training_samples)
    totals, updates, gradients, epochs = rows.totals, rows["updates"], rows["gradients"], rows["epochs"]
    assert totals["pushed"] == totals["applied"] + totals["pending"] + totals["discarded"] + totals["lost"]
    assert totals["pending"] == totals["lost"] == 0
    assert rows.learners is not None
    assert list(rows.learners["learner"]) == list(range(run.learners))
    assert rows.learners["pushed"].sum() == totals["pushed"]
    assert np.array_equal(updates["timestamp"], np.arange(1, len(updates) + 1)), "timestamps grow by one"
    assert totals["applied"] == len(gradients) == updates["gradients"].sum()
    check_updates(run, rows)
    assert (gradients["staleness"] == gradients["update"] - 1 - gradients["timestamp"]).all()
    assert (gradients["staleness"] >= 0).all()
    mean = np.bincount(gradients["update"], gradients["staleness"])[1:] / updates["gradients"]
    assert np.allclose(mean, updates["mean_staleness"])
    # The last update is the first that completes the last epoch.
    needed = run.training.epochs * training_samples
    assert totals["samples"] >= needed > totals["samples"] - updates["gradients"][-1] * SAMPLES
    assert list(epochs["epoch"]) == list(range(1, run.training.epochs + 1))
    assert epochs["evaluated"][-1] == run.training.evaluate
    assert (updates["update_s"] == run.simulation.update_s * (1 / len(run.plan().owners))).all()
    for learner, account in enumerate(rows.learners):
        mine = gradients[gradients["learner"] == learner]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "each learner's gradients are applied once, in order"
        assert (np.diff(mine["timestamp"]) >= 0).all(), "nobody goes back to older weights"
        if bound := run.topology.options.get("outstanding"):
            assert (mine["timestamp"][bound:] >= mine["update"][:-bound]).all(), "it computes with weights that hold it"
        assert len(mine) <= account["pushed"]
    if run.protocol.name == "hardsync":
        assert totals["discarded"] == 0
        assert (gradients["staleness"] == 0).all()
