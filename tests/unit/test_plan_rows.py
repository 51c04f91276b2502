"""A plan as rows of the result file, and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from rudra.core.records import ROLE
from rudra.results import plan_rows
from topologies import Plan

JOBS: list[tuple[str, dict[str, Any]]] = [
    ("base", {}),
    ("adv", {}),
    ("adv", {"fan_out": [1, 3]}),
    ("adv*", {"fan_out": 2, "weight_fan_out": 3}),
    ("groups", {}),
    ("groups", {"groups": 2, "reduction": "mpi"}),
    ("groups", {"groups": 2, "reduction": "nodes"}),
    ("replicas", {"groups": 2}),
    ("hierarchical", {}),
]


def back(plan: Plan) -> Plan:
    """As it comes out of a file, where attributes are NumPy's."""
    attributes = {
        name: value if isinstance(value, str) else np.int64(value) for name, value in plan_rows.about(plan).items()
    }
    return plan_rows.plan_of(np.frombuffer(plan_rows.rows_of(plan).tobytes(), ROLE), attributes)


@given(st.sampled_from(JOBS), st.lists(st.integers(0, 4), min_size=2, max_size=20).map(sorted))
def test_a_plan_comes_back(job: tuple[str, dict[str, Any]], nodes: list[int]) -> None:
    plan = topologies.load(*job).plan(len(nodes), nodes)
    found = back(plan)
    assert found.roles == plan.roles
    assert plan_rows.about(found) == plan_rows.about(plan)
    assert (found.children, found.receivers, found.groups) == (plan.children, plan.receivers, plan.groups)


@pytest.mark.parametrize(("name", "options"), JOBS)
def test_a_plan_comes_back_as_it_was_fitted(name: str, options: dict[str, Any]) -> None:
    plan = topologies.load(name, options).fit([2, 0, 2, 1, 0, 1, 2, 0, 0, 2, 1, 1])
    assert back(plan).roles == plan.roles


def test_what_is_nobody_is_minus_one() -> None:
    rows = plan_rows.rows_of(topologies.load("base").plan(1))
    assert rows["parent"].tolist() == [-1, 0, 0]
    assert rows["source"].tolist() == rows["group"].tolist() == [-1, -1, -1]
    assert rows["kind"].tolist() == [b"parameter server", b"statistics server", b"learner"]
