"""Whole clusters under random interleavings: what must hold whoever is fast and whoever is late."""

import numpy as np
import pytest
from clusters import SAMPLES, check_accounts, check_updates, timing
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import undisturbed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("topology", ["base", "sharded", "adv", "adv*", "groups"])
@cases(100)
@given(st.data())
def test_every_run_ends_and_every_gradient_is_accounted_for(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run, training_samples = data.draw(undisturbed(topology))
    rows = timing(run, training_samples)
    totals, updates, gradients, epochs = rows.totals, rows["updates"], rows["gradients"], rows["epochs"]
    check_accounts(rows)
    assert totals["pending"] == totals["lost"] == 0
    assert list(rows.learners["learner"]) == list(range(run.learners))
    assert rows.learners["pushed"].sum() == totals["pushed"]
    check_updates(run, rows)
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
        assert (np.diff(mine["timestamp"]) >= 0).all(), "a learner never goes back to older weights"
        if bound := run.topology.options.get("outstanding"):
            assert (mine["timestamp"][bound:] >= mine["update"][:-bound]).all(), "it computes with weights that hold it"
        assert len(mine) <= account["pushed"]
    if run.protocol.name == "hardsync":
        assert totals["discarded"] == 0
        assert (gradients["staleness"] == 0).all()
