"""Any front of a stage server under random interleavings, with learners that die: nothing is lost, stale or in vain."""

from typing import Any

import numpy as np
import pytest
from clusters import timing
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import dying, outlived, placed, undisturbed

from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of

pytestmark = pytest.mark.slow

FRONTS = ("base", "groups", "sharded", "adv", "adv*")


@pytest.mark.parametrize("topology", FRONTS)
@cases(60)
@given(st.data())
def test_whoever_is_fast(topology: str, data: st.DataObject) -> None:
    run, samples = data.draw(undisturbed(topology))
    run = data.draw(placed(run))
    rows = timing(run, samples)
    totals, stages, gradients = rows.totals, rows["stages"], rows["gradients"]
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    taken = {(row["learner"], row["step"]): row["front"] for row in stages}
    assert len(taken) == len(stages), "no mini-batch is taken in twice"
    assert all(taken[row["learner"], row["step"]] == row["timestamp"] for row in gradients)
    check_back(run, stages)
    if run.placement.rule == "synchronous":
        stamps = {(row["learner"], row["step"]): row["timestamp"] for row in stages}
        assert all(stamps[row["learner"], row["step"]] == row["update"] for row in gradients)
        assert len(stamps) == len(gradients)


@pytest.mark.parametrize("topology", FRONTS)
@cases(60)
@given(st.data())
def test_whoever_dies(topology: str, data: st.DataObject) -> None:
    run, samples = data.draw(dying(topology))
    run = data.draw(placed(run))
    rows = outlived(run, samples)
    if rows is None:
        return
    totals, stages, gradients = rows.totals, rows["stages"], rows["gradients"]
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    taken = {(row["learner"], row["step"]) for row in stages}
    assert {(row["learner"], row["step"]) for row in gradients} <= taken, "nothing is applied that was not taken in"
    check_back(run, stages)
    if run.placement.rule == "synchronous":
        assert np.array_equal(np.sort(stages["timestamp"]), np.sort(gradients["update"]))


def check_back(run: Job, stages: Any) -> None:
    """Its updates follow each other, each of what was computed with the weights before it."""
    assert not stages["staleness"].any()
    stamps = np.unique(stages["timestamp"])
    assert np.array_equal(stamps, np.arange(1, len(stamps) + 1))
    if run.placement.rule == "merged" and not run.plan(nodes_of(run)).groups:
        assert len(stamps) == len(stages), "one update for each mini-batch"
