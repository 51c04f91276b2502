"""Who is who on which rank."""

from types import SimpleNamespace
from typing import Any

import pytest

import topologies
from topologies import Plan, Role
from topologies.plan import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER


def test_base() -> None:
    plan = topologies.load("base").plan(2)
    assert plan == Plan(
        (
            Role("parameter server", 0, 0),
            Role("statistics server", 0, 1, parent=0),
            Role("learner", 0, 2, parent=0),
            Role("learner", 1, 3, parent=0),
        )
    )
    assert [role.name for role in plan.roles] == ["parameter server", "statistics server", "learner 0", "learner 1"]
    assert (plan.server, plan.statistics, plan.learners, plan.ranks) == (0, 1, (2, 3), 4)


@pytest.mark.parametrize("name", topologies.shipped())
@pytest.mark.parametrize("learners", [1, 2, 7, 64])
def test_every_shipped_plan_is_sound(name: str, learners: int) -> None:
    topology = topologies.load(name)
    plan = topology.plan(learners)
    assert topology.learners_for(plan.ranks) == learners
    assert sorted(i for rank in range(plan.ranks) for i in plan.on_rank(rank)) == list(range(len(plan.roles)))
    assert [plan.roles[i].index for i in plan.learners] == list(range(learners))
    assert [role.kind for role in plan.roles].count(PARAMETER_SERVER) >= 1
    assert [role.kind for role in plan.roles].count(STATISTICS_SERVER) == 1
    assert plan.roles[plan.server].parent is None
    for role in plan.roles:
        if role.kind == LEARNER:
            assert role.parent is not None
            assert plan.roles[role.parent].kind == PARAMETER_SERVER


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_too_few_ranks_leave_no_learner(ranks: int) -> None:
    assert topologies.load("base").learners_for(ranks) < 1


def test_a_rank_may_host_several_roles() -> None:
    plan = Plan(
        (Role(PARAMETER_SERVER, 0, 0), Role(LEARNER, 1, 1, 0), Role(STATISTICS_SERVER, 0, 0), Role(LEARNER, 0, 0, 0))
    )
    assert (plan.on_rank(0), plan.on_rank(1), plan.on_rank(2)) == ((0, 2, 3), (1,), ())
    assert (plan.ranks, plan.statistics) == (2, 2)


def test_a_topology_of_the_user() -> None:
    def plan(learners: int, spare: int = 0) -> Plan:
        roles = [Role(PARAMETER_SERVER, 0, 0), Role(STATISTICS_SERVER, 0, 0)]
        return Plan((*roles, *(Role(LEARNER, i, 1 + spare + i, 0) for i in range(learners))))

    def learners_for(ranks: int, spare: int = 0) -> int:
        return ranks - 1 - spare

    mine = topologies.load(SimpleNamespace(plan=plan, learners_for=learners_for), {"spare": 2})
    assert (mine.plan(3).ranks, mine.learners_for(6)) == (6, 3)


class Half:
    def plan(self, learners: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("tree", {}, "name: 'tree' is unknown; valid: base or package.module:object"),
        ("plan", {}, "name: 'plan' is unknown; valid: base or package.module:object"),
        (Half(), {}, "name: Half has no function learners_for"),
        (int, {}, "name: int has no function plan"),
        ("base", {"depth": 2}, "options: base.plan: got an unexpected keyword argument 'depth'"),
    ],
)
def test_what_is_no_topology_is_one_line(name: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        topologies.load(name, options)
    assert str(error.value) == f"[topology] {text}"
