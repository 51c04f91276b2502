"""Who is who on which rank: exact plans of small cases, and what must hold for any."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from topologies import Plan, Role
from topologies.kinds import ELSEWHERE, EVERYBODY, LEARNER, PARAMETER_SERVER, SHARD, STATISTICS_SERVER, TREE_SERVER


def blocks(sizes: Sequence[int]) -> list[int]:
    return [node for node, size in enumerate(sizes) for _ in range(size)]


NODES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(blocks)
"""The node of every learner: any number of learners, unevenly spread."""
FAN_OUTS = st.one_of(
    st.none(),
    st.integers(1, 5),
    st.tuples(st.integers(1, 5), st.lists(st.integers(2, 5), max_size=3)).map(lambda f: [f[0], *f[1]]),
)


def drawn(name: str, nodes: Sequence[int], **options: Any) -> Plan:
    return topologies.load(name, options).plan(len(nodes), nodes)


def check(plan: Plan, nodes: Sequence[int]) -> None:
    """What must hold for every plan of the shipped topologies."""
    roles = plan.roles
    assert sorted(i for rank in range(plan.ranks) for i in plan.on_rank(rank)) == list(range(len(roles)))
    assert len(roles) == plan.ranks, "a rank for every role, and none without"
    assert [roles[i].index for i in plan.learners] == list(range(len(nodes)))
    assert [roles[i].node for i in plan.learners] == list(nodes)
    for kind, count in Counter(role.kind for role in roles).items():
        first = int(kind == SHARD)  # the first part is the parameter server's
        assert [role.index for role in roles if role.kind == kind] == list(range(first, first + count))
    assert sum(role.kind == STATISTICS_SERVER for role in roles) == 1
    assert plan.served == (roles[plan.server].kind == PARAMETER_SERVER)
    assert roles[plan.server].parent is None
    assert plan.learners_below(plan.server) == len(nodes)
    check_children(plan)


def check_children(plan: Plan) -> None:
    """Children and receivers are the parents and sources, read backwards, and begin at the owner of the weights."""
    for id_, role in enumerate(plan.roles):
        if role.kind == STATISTICS_SERVER or role.parent is None:
            assert not any(id_ in below for below in plan.children)
        else:
            assert [i for i, below in enumerate(plan.children) if id_ in below] == [role.parent]
        assert list(plan.children[id_]) == sorted(plan.children[id_]), "learner order"
    for edges, kinds in ((plan.children, {TREE_SERVER, LEARNER}), (plan.receivers, {LEARNER})):
        reached = everybody_below(edges, plan.server)
        assert len(reached) == len(set(reached)), "each is reached once"
        wanted = {i for i, role in enumerate(plan.roles) if role.kind in kinds}
        assert wanted <= {plan.server, *reached}


def everybody_below(edges: Sequence[Sequence[int]], top: int) -> list[int]:
    return [i for below in edges[top] for i in (below, *everybody_below(edges, below))]


@given(NODES, st.integers(1, 5))
def test_shards_are_spread_over_the_nodes_of_the_learners(nodes: list[int], shards: int) -> None:
    plan = drawn("sharded", nodes, shards=shards)
    check(plan, nodes)
    assert plan.owners == (0, *range(1, shards))
    assert plan.parted == (shards > 1)
    there = dict.fromkeys(nodes)
    used = [plan.roles[owner].node for owner in plan.owners[1:]]
    assert set(used) <= {*there, ELSEWHERE}
    if len(there) > 1:
        most = -(-shards // len(there))
        assert max(Counter(used).values(), default=0) <= most
    one, now = plan.unparted()
    assert [role.kind for role in one.roles] == [r.kind for r in plan.roles if r.kind != SHARD]
    assert [one.roles[now[i]].name for i in plan.learners] == [plan.roles[i].name for i in plan.learners]
    assert one.children[0] == one.learners
    assert not one.parted


def test_base() -> None:
    plan = topologies.load("base").plan(2)
    assert plan == Plan(
        (
            Role("parameter server", 0, 0),
            Role("statistics server", 0, 1, parent=0),
            Role("learner", 0, 2, parent=0, node=0),
            Role("learner", 1, 3, parent=0, node=0),
        )
    )
    assert [role.name for role in plan.roles] == ["parameter server", "statistics server", "learner 0", "learner 1"]
    assert (plan.server, plan.statistics, plan.learners, plan.ranks) == (0, 1, (2, 3), 4)
    assert (plan.children[0], plan.receivers[0], plan.groups, plan.workers) == ((2, 3), (2, 3), (), 2)


@pytest.mark.parametrize("name", topologies.shipped())
@pytest.mark.parametrize("learners", [1, 2, 7, 64])
def test_every_shipped_plan_is_sound(name: str, learners: int) -> None:
    topology = topologies.load(name)
    plan = topology.plan(learners)
    check(plan, [0] * learners)
    assert plan.workers == (len(plan.groups) if plan.groups and name != "replicas" else learners)
    fitted = topology.fit([7] * plan.ranks)
    assert fitted == plan, "as many ranks as it needs, all on one node, in its own order"


@given(st.sampled_from(sorted(topologies.shipped())), NODES)
def test_every_shipped_plan_is_sound_on_any_nodes(name: str, nodes: list[int]) -> None:
    check(drawn(name, nodes), nodes)


# Trees.


@pytest.mark.parametrize(
    ("nodes", "fan_out", "tree"),
    [
        # Node and number of children of every tree server, from the top down; the root's children.
        ([0, 0, 0], None, ([], 3)),
        ([0, 0, 1], None, ([(0, 2), (1, 1)], 2)),
        ([0, 0, 0], 3, ([(0, 3)], 1)),
        ([0, 0, 0], 1, ([(0, 1), (0, 2), (0, 1), (0, 1), (0, 1)], 2)),
        ([0] * 4, 2, ([(0, 2), (0, 2)], 2)),
        ([0] * 5, 2, ([(0, 1), (0, 2), (0, 1), (0, 2), (0, 2)], 2)),
        ([0] * 5, 4, ([(0, 2), (0, 3)], 2)),
        ([0] * 6, [3, 2], ([(0, 3), (0, 3)], 2)),
        ([0, 0, 1, 1, 2, 2], [2, 2], ([(0, 1), (1, 2), (0, 2), (1, 2), (2, 2)], 2)),
        ([0] * 3 + [1], 2, ([(0, 1), (0, 2), (0, 1), (0, 2), (1, 1)], 2)),
        ([0] * 8, [1, 8], ([(0, 1)] * 8, 8)),
        ([0] * 8, [1, 4, 2], ([(0, 4), (0, 4), *[(0, 1)] * 8], 2)),
    ],
)
def test_trees_of_servers(nodes: list[int], fan_out: Any, tree: tuple[list[tuple[int, int]], int]) -> None:
    plan = drawn("adv", nodes, fan_out=fan_out)
    servers = [i for i, role in enumerate(plan.roles) if role.kind == TREE_SERVER]
    assert ([(plan.roles[i].node, len(plan.children[i])) for i in servers], len(plan.children[0])) == tree
    check(plan, nodes)


def levels(plan: Plan) -> list[list[int]]:
    """Servers by their distance from the learners, the root last."""
    height: dict[int, int] = {}
    for id_ in reversed(range(len(plan.roles))):
        if plan.children[id_]:
            (height[id_],) = {height.get(child, 0) + 1 for child in plan.children[id_]}
    return [[i for i in height if height[i] == level] for level in range(1, 1 + max(height.values()))]


@given(st.sampled_from(["adv", "adv*"]), NODES, FAN_OUTS)
def test_a_tree_has_its_leaves_beside_the_learners_and_no_more_children_than_allowed(
    name: str, nodes: list[int], fan_out: Any
) -> None:
    plan = drawn(name, nodes, fan_out=fan_out)
    check(plan, nodes)
    given_ = [fan_out] if isinstance(fan_out, int) else list(fan_out or [])
    limits = given_ + [2] * (given_ == [1])
    if not limits and len(set(nodes)) == 1:
        assert plan.children[0] == plan.learners, "the root is the leaf"
        assert plan.roles[0].node == nodes[0]
        return
    *servers, top = levels(plan)
    assert top == [0]
    for level, ids in enumerate([*servers, top]):
        most = limits[min(level, len(limits) - 1)] if limits else len(nodes)
        assert max(len(plan.children[i]) for i in ids) <= most
    for id_ in plan.learners:
        leaf = plan.roles[id_].parent
        assert leaf is not None
        assert plan.roles[leaf].kind == TREE_SERVER
        assert plan.roles[leaf].node == plan.roles[id_].node
    for level, ids in enumerate(servers):
        for id_ in ids:
            below = {plan.roles[child].node for child in plan.children[id_]}
            assert plan.roles[id_].node in below
            assert level or len(below) == 1
    for node in set(nodes):
        sizes = [len(plan.children[i]) for i in servers[0] if plan.roles[i].node == node]
        assert max(sizes) - min(sizes) <= 1
        assert not limits or len(sizes) == -(-nodes.count(node) // limits[0]), "no more leaves than it takes"
    assert plan.max_gradients_per_message >= 2 * len(nodes) - 1


@pytest.mark.parametrize(
    ("nodes", "width", "sources"),
    [
        # By learner: who gives it weights; -1 is the root.
        ([0, 0, 0], 2, [-1, 0, 0]),
        ([0] * 7, 2, [-1, 0, 0, 1, 1, 2, 2]),
        ([0] * 4, 1, [-1, 0, 1, 2]),
        ([0, 1, 2, 3, 4, 5, 6], 2, [-1, -1, 0, 0, 1, 1, 2]),
        ([0, 0, 1, 1, 2, 2], 1, [-1, 0, 0, 2, 2, 4]),
        ([0, 0, 1, 1, 2], 3, [-1, 0, -1, 2, -1]),
    ],
)
def test_weights_trees(nodes: list[int], width: int, sources: list[int]) -> None:
    plan = drawn("adv*", nodes, weight_fan_out=width)
    found = [plan.roles[i].source for i in plan.learners]
    assert [-1 if s == 0 else plan.roles[s or 0].index for s in found] == sources
    assert plan.overlapped


@given(NODES, FAN_OUTS, st.integers(1, 5))
def test_a_weights_tree_reaches_every_learner_once_and_crosses_to_a_node_once(
    nodes: list[int], fan_out: Any, width: int
) -> None:
    plan = drawn("adv*", nodes, fan_out=fan_out, weight_fan_out=width)
    reached = everybody_below(plan.receivers, plan.server)
    assert sorted(reached) == list(plan.learners), "and no server of the tree"
    crossing: Counter[int] = Counter()
    for id_ in plan.learners:
        source = plan.roles[id_].source
        assert source is not None
        if source == plan.server or plan.roles[source].node != plan.roles[id_].node:
            crossing[plan.roles[id_].node] += 1
    assert crossing == dict.fromkeys(nodes, 1)
    assert len(plan.receivers[plan.server]) <= width
    assert max(map(len, plan.receivers)) <= 2 * width, "of the first of a node: other nodes' and its own"


# Groups.


@pytest.mark.parametrize(
    ("learners", "groups", "sizes"),
    [(1, 1, [1]), (4, 1, [4]), (4, 2, [2, 2]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (3, 3, [1, 1, 1])],
)
def test_groups(learners: int, groups: int, sizes: list[int]) -> None:
    plan = drawn("groups", [0] * learners, groups=groups)
    assert [len(members) for members in plan.groups] == sizes
    assert plan.served is (groups > 1)
    assert plan.max_gradients_per_message == max(sizes)
    served = drawn("groups", [0] * learners, groups=groups, parameter_server=True)
    assert served.served
    assert served.groups[0][0] == (2 if groups == 1 else plan.groups[0][0]), "after both servers"
    assert [served.roles[members[0]].parent for members in served.groups] == [0] * groups


def test_whether_one_group_has_a_server_is_yes_or_no() -> None:
    with pytest.raises(ValueError, match=r"options.parameter_server = 1 is not supported; use true or false"):
        drawn("groups", [0, 0], groups=1, parameter_server=1)


@given(NODES, st.integers(1, 12), st.sampled_from(["ordered", "nodes", "mpi"]))
def test_groups_are_blocks_whose_first_members_stand_for_them(nodes: list[int], groups: int, reduction: str) -> None:
    groups = min(groups, len(nodes))
    plan = drawn("groups", nodes, groups=groups, reduction=reduction)
    check(plan, nodes)
    assert [i for members in plan.groups for i in members] == list(plan.learners)
    sizes = [len(members) for members in plan.groups]
    assert max(sizes) - min(sizes) <= 1
    assert (len(plan.groups), plan.workers) == (groups, groups)
    for members in plan.groups:
        sums = plan.partial_sums(members)
        assert sorted(place for of in sums for place in of) == list(range(len(members)))
        assert [of[0] for of in sums] == sorted(of[0] for of in sums), "in the order of first members"
        on = [{plan.roles[members[place]].node for place in of} for of in sums]
        assert len(on) == (len({plan.roles[i].node for i in members}) if reduction == "nodes" else 1)
        assert reduction != "nodes" or all(len(its) == 1 for its in on)
    heads = [members[0] for members in plan.groups]
    assert [plan.roles[i].parent for i in heads] == [0 if groups > 1 else None] * groups
    for number, (head, *others) in enumerate(plan.groups):
        assert {plan.roles[i].group for i in (head, *others)} == {number}
        assert list(plan.children[head]) == others
        assert sorted(everybody_below(plan.receivers, head)) == others
        assert all(len(plan.receivers[i]) <= 2 for i in (head, *others))
        assert plan.learners_below(head) == 1 + len(others)
    assert plan.replayable is (reduction != "mpi")
    assert sum(role.kind == PARAMETER_SERVER for role in plan.roles) == (groups > 1)


@given(NODES, st.integers(1, 12), st.sampled_from(["ordered", "nodes"]), st.sampled_from(["replicas", "hierarchical"]))
def test_blocks_of_learners_add_up_by_themselves_and_then_one_sum_of_each(
    nodes: list[int], blocks: int, reduction: str, name: str
) -> None:
    blocks = min(blocks, len(nodes))
    options = {"groups": blocks} if name == "replicas" else {"blocks": blocks}
    plan = drawn(name, nodes, reduction=reduction, **options)
    check(plan, nodes)
    alike = drawn("groups", nodes, groups=blocks, parameter_server=True)
    numbers = [[plan.roles[i].index for i in members] for members in plan.groups]
    assert numbers == [[alike.roles[i].index for i in members] for members in alike.groups]
    assert plan.workers == len(plan.groups) == blocks
    everybody = plan.together(plan.learners[-1], EVERYBODY)
    assert everybody == plan.learners
    sums = [[everybody[place] for place in of] for of in plan.partial_sums(everybody)]
    assert sums == ([*map(list, plan.groups)] if blocks > 1 or reduction == "ordered" else by_node(plan))
    assert plan.keepers == (tuple(members[0] for members in plan.groups) if name == "replicas" else plan.learners)


def by_node(plan: Plan) -> list[list[int]]:
    nodes = dict.fromkeys(plan.roles[i].node for i in plan.learners)
    return [[i for i in plan.learners if plan.roles[i].node == node] for node in nodes]


@given(NODES)
def test_blocks_are_nodes_unless_their_number_is_given(nodes: list[int]) -> None:
    plan = drawn("hierarchical", nodes)
    check(plan, nodes)
    assert [*map(list, plan.groups)] == by_node(plan)


# Fitting a plan to ranks.


@pytest.mark.parametrize(
    ("name", "options", "places", "ranks"),
    [
        # The world rank of every role, in the plan's order.
        ("base", {}, [0, 0, 0, 0], [0, 1, 2, 3]),
        ("base", {}, [0, 1, 0, 1], [0, 2, 1, 3]),
        ("base", {}, [5, 5, 5, 3], [0, 1, 2, 3]),
        ("base", {}, [0, 1, 1, 1], [0, 1, 2, 3]),  # no room for both servers on the first node
        ("base", {}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ("adv", {}, [0] * 4 + [1], [0, 4, 1, 2, 3]),  # no room for a leaf server and a learner on the second node
        ("adv", {}, [0] * 5 + [1] * 3, [0, 1, 2, 5, 3, 4, 6, 7]),
        ("adv", {}, [0, 1] * 4, [0, 2, 4, 1, 6, 3, 5, 7]),
        ("adv", {"fan_out": 2}, [0] * 6, [0, 1, 2, 3, 4]),  # one more learner would need two leaves, and two ranks more
        ("adv*", {}, [4, 4, 4, 4], [0, 1, 2, 3]),
        ("groups", {"groups": 1}, [0, 0, 1], [0, 1, 2]),
        ("groups", {"groups": 2}, [1, 0, 1, 0], [0, 2, 1, 3]),
    ],
)
def test_fitting(name: str, options: dict[str, Any], places: list[int], ranks: list[int]) -> None:
    plan = topologies.load(name, options).fit(places)
    assert [role.world_rank for role in plan.roles] == ranks


@pytest.mark.parametrize(
    ("name", "options", "per_rank", "places", "learners", "ranks"),
    [
        # As many learners as the ranks can host, or as many as the job gives; the world rank of each.
        ("base", {}, 2, [0] * 5, None, [2, 2, 3, 3, 4, 4]),
        ("base", {}, 2, [0] * 5, 5, [2, 2, 3, 3, 4]),
        ("base", {}, 100, [0] * 3, 7, [2] * 7),
        ("base", {}, 3, [0, 0, 0, 1, 1], 8, [2, 2, 2, 3, 3, 3, 4, 4]),
        ("base", {}, 3, [0, 1, 0, 1, 0], None, [4, 4, 4, 1, 1, 1, 3, 3, 3]),
        ("groups", {}, 2, [0] * 4, None, [1, 1, 2, 2, 3, 3]),
        ("groups", {"groups": 2}, 2, [0] * 6, 6, [2, 2, 3, 4, 4, 5]),  # nobody shares a rank with another group
        ("groups", {"groups": 2}, 3, [0] * 4, None, [2, 2, 2, 3, 3, 3]),
        ("groups", {"groups": 2}, 2, [0] * 5, None, [2, 2, 3, 3, 4]),
        ("adv", {}, 2, [0] * 4 + [1] * 3, None, [3, 3, 5, 5, 6, 6]),
        ("adv", {"fan_out": 2}, 4, [0] * 6, None, [4, 4, 4, 4]),
        ("adv*", {}, 2, [0] * 4, 3, [2, 2, 3]),
    ],
)
def test_fitting_where_learners_share_ranks(
    name: str, options: dict[str, Any], per_rank: int, places: list[int], learners: int | None, ranks: list[int]
) -> None:
    plan = topologies.load(name, options, per_rank).fit(places, learners)
    assert [plan.roles[i].world_rank for i in plan.learners] == ranks


def fits(plan: Plan, sizes: Sequence[int]) -> bool:
    """Whether nodes of so many ranks can host a plan; servers that are bound to no node go wherever there is room."""
    bound = Counter({role.world_rank: role.node for role in plan.roles if role.node >= 0}.values())
    return plan.ranks <= sum(sizes) and all(bound[node] <= size for node, size in enumerate(sizes))


TOPOLOGIES = st.one_of(
    st.just(("base", {})),
    st.tuples(st.sampled_from(["adv", "adv*"]), FAN_OUTS.map(lambda fan_out: {"fan_out": fan_out})),
    st.just(("groups", {"groups": 1})),
    st.just(("groups", {"groups": 2})),
    st.just(("replicas", {"groups": 2})),
    st.just(("hierarchical", {})),
)


def no_more_groups_than(learners: int, topology: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    name, options = topology
    return name, {"groups": min(options["groups"], learners)} if "groups" in options else options


@given(TOPOLOGIES, NODES, st.data())
def test_a_plan_without_some_is_one_of_all_others(
    topology: tuple[str, dict[str, Any]], nodes: list[int], data: st.DataObject
) -> None:
    name, options = no_more_groups_than(len(nodes), topology)
    plan = drawn(name, nodes, **options)
    needed = {plan.server, plan.statistics}
    lost = data.draw(st.sets(st.sampled_from(range(len(plan.roles)))))
    if lost & needed or lost >= set(plan.learners):
        with pytest.raises(ValueError, match=r"no run continues without the|no learner is left"):
            plan.without(lost)
        return
    left = plan.without(lost)
    assert set(left.learners) == set(plan.learners) - lost
    again = plan.without(sorted(lost)[:1]).without(lost)
    assert (again.children, again.receivers, again.groups) == (left.children, left.receivers, left.groups)
    assert left.learners_below(left.server) == len(left.learners)
    assert [role.world_rank for role in left.roles] == [role.world_rank for role in plan.roles]
    for edges in (left.children, left.receivers):
        reached = everybody_below(edges, left.server)
        assert len(reached) == len(set(reached))
        assert not lost & {left.server, *reached}
        assert set(left.learners) <= {left.server, *reached}
    for id_, role in enumerate(left.roles):
        if role.kind == TREE_SERVER and id_ not in lost:
            assert (role.parent is None) == (not left.children[id_]), "who serves nobody is nobody's child"
    assert [set(members) for members in left.groups] == [s for m in plan.groups if (s := set(m) - lost)]


@given(TOPOLOGIES, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_plan_that_is_fitted_uses_the_ranks_as_well_as_they_can_be(
    topology: tuple[str, dict[str, Any]], sizes: list[int], random: Any
) -> None:
    name, options = topology
    places = [10 * node for node in blocks(sizes)]
    random.shuffle(places)
    loaded = topologies.load(name, options)
    try:
        plan = loaded.fit(places)
    except ValueError:
        fitting = fits(loaded.plan(options.get("groups", 1)), sorted(sizes, reverse=True))
        assert not fitting
        return
    order = list(dict.fromkeys(places))
    real = [role.world_rank for role in plan.roles]
    assert len(set(real)) == len(real), "a rank of its own for every role"
    for role in plan.roles:
        assert role.node < 0 or places[role.world_rank] == order[role.node]
    on_node = Counter(plan.roles[i].node for i in plan.learners)
    counts = [on_node[node] for node in range(len(order))]
    assert [role.kind for role in plan.roles] == [role.kind for role in loaded.draw(blocks(counts)).roles]
    for node in range(len(order)):
        more = loaded.draw(blocks([count + (i == node) for i, count in enumerate(counts)]))
        assert not fits(more, [places.count(place) for place in order]), f"one more learner fits on node {node}"
    assert loaded.fit(places, len(plan.learners)) == plan


@given(TOPOLOGIES, NODES, st.integers(2, 5))
def test_learners_that_share_a_rank_are_neighbours_on_one_node_and_in_one_group(
    topology: tuple[str, dict[str, Any]], nodes: list[int], per_rank: int
) -> None:
    name, options = no_more_groups_than(len(nodes), topology)
    alone, plan = drawn(name, nodes, **options), topologies.load(name, options, per_rank).plan(len(nodes), nodes)
    assert [replace(role, world_rank=0) for role in plan.roles] == [replace(role, world_rank=0) for role in alone.roles]
    assert (plan.children, plan.receivers, plan.groups) == (alone.children, alone.receivers, alone.groups)
    assert {role.world_rank for role in plan.roles} == set(range(plan.ranks)), "none without a role"
    for rank in range(plan.ranks):
        here = plan.on_rank(rank)
        if not plan.roles[here[0]].kind_traits.trains:
            assert len(here) == 1
            continue
        assert len(here) <= per_rank
        assert here == tuple(range(here[0], here[0] + len(here)))
        assert len({(plan.roles[i].node, plan.roles[i].group) for i in here}) == 1
    shared = Counter((role.node, role.group) for role in plan.roles if role.kind_traits.trains)
    servers = sum(not role.kind_traits.trains for role in plan.roles)
    assert plan.ranks == servers + sum(-(-count // per_rank) for count in shared.values())


@given(TOPOLOGIES, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(2, 4), st.data())
def test_ranks_host_as_many_learners_as_they_can(
    topology: tuple[str, dict[str, Any]], sizes: list[int], per_rank: int, data: st.DataObject
) -> None:
    name, options = topology
    places, loaded = blocks(sizes), topologies.load(name, options, per_rank)
    try:
        plan = loaded.fit(places)
    except ValueError:
        with pytest.raises(ValueError, match=r"ranks are too few|options\.groups = "):
            topologies.load(name, options).fit(places)
        return
    assert len(plan.learners) >= len(topologies.load(name, options).fit(places).learners)
    used = {role.world_rank: role.node for role in plan.roles if role.node >= 0}
    assert all(places[rank] == node for rank, node in used.items())
    assert max(Counter(plan.roles[i].world_rank for i in plan.learners).values()) <= per_rank
    fewer = data.draw(st.integers(1, len(plan.learners)))
    try:
        fitted = loaded.fit(places, fewer)
    except ValueError:
        assert fewer < len(plan.learners)
        with pytest.raises(ValueError, match=rf"^{fewer} learners with topology .* need|options\.groups = "):
            loaded.fit(places, fewer)
        return
    assert len(fitted.learners) == fewer
    assert len({role.world_rank for role in fitted.roles}) == len({role.world_rank for role in plan.roles})


@pytest.mark.parametrize(
    ("name", "options", "places", "learners", "text"),
    [
        ("base", {}, [0, 0], None, "2 ranks are too few for topology base; start 3 or more"),
        ("base", {}, [0], None, "1 ranks are too few for topology base; start 3 or more"),
        ("base", {}, [0, 1], 4, "2 ranks are too few for topology base; start 6"),
        (
            "base",
            {},
            [0, 0, 0, 0],
            3,
            "3 learners with topology base need 5 ranks, but the launcher started 4; "
            "start 5, or set cluster.learners = 2",
        ),
        (
            "adv",
            {"fan_out": 2},
            [0] * 12,
            4,
            "4 learners with topology adv need 8 ranks, but the launcher started 12; "
            "start 8, or set cluster.learners = 5",
        ),
        (
            "groups",
            {"groups": 3},
            [0] * 3,
            None,
            "[topology] options.groups = 3 is not supported with 2 learners; use 1 to 2",
        ),
    ],
)
def test_ranks_that_do_not_suit(
    name: str, options: dict[str, Any], places: list[int], learners: int | None, text: str
) -> None:
    with pytest.raises(ValueError) as error:
        topologies.load(name, options).fit(places, learners)
    assert str(error.value) == text


def test_a_rank_may_host_several_roles() -> None:
    plan = Plan(
        (Role(PARAMETER_SERVER, 0, 0), Role(LEARNER, 1, 1, 0), Role(STATISTICS_SERVER, 0, 0), Role(LEARNER, 0, 0, 0))
    )
    assert (plan.on_rank(0), plan.on_rank(1), plan.on_rank(2)) == ((0, 2, 3), (1,), ())
    assert (plan.ranks, plan.statistics) == (2, 2)


def together(nodes: Sequence[int], each: int = 1) -> Plan:
    """A user's: both servers on one rank, and as many learners on a rank as it likes."""
    learners = (Role(LEARNER, i, 1 + i // each, 0, node=node) for i, node in enumerate(nodes))
    return Plan((Role(PARAMETER_SERVER, 0, 0), Role(STATISTICS_SERVER, 0, 0), *learners))


def test_a_topology_of_the_user_shares_ranks_also_when_it_is_fitted() -> None:
    mine = topologies.load(SimpleNamespace(plan=together), {"each": 1})
    assert mine.plan(3).ranks == 4
    assert [role.world_rank for role in mine.fit([3, 8, 8, 3]).roles] == [0, 0, 3, 1, 2]


def test_one_rank_hosts_all_roles_of_one_node() -> None:
    alone = topologies.load("base", one_rank=True)
    assert {role.world_rank for role in alone.fit([0, 0, 0], 2).roles} == {0}
    assert alone.plan(2).local
    assert not topologies.load("base").plan(2).local
    assert topologies.load("groups", one_rank=True).plan(2).local
    with pytest.raises(
        ValueError, match=r"^\[cluster\] one_rank = true: the learners are on several nodes; use one_ra"
    ):
        alone.plan(2, [0, 1])


def test_a_topology_that_shares_ranks_itself_says_who_shares_one() -> None:
    mine = SimpleNamespace(plan=together, __name__="mine")
    assert topologies.load(mine, {"each": 1}, 2).plan(4).ranks == 3, "servers may share one with each other"
    with pytest.raises(ValueError) as error:
        topologies.load(mine, {"each": 2}, 2).plan(4)
    assert str(error.value) == (
        "[cluster] learners_per_rank = 2 is not supported with topology mine, which assigns several roles to a "
        "learner's rank; use 1"
    )


def test_servers_may_share_the_rank_of_a_learner() -> None:
    def plan(nodes: Sequence[int]) -> Plan:
        learners = (Role(LEARNER, i, i, 0, node=node) for i, node in enumerate(nodes))
        return Plan((*learners, Role(PARAMETER_SERVER, 0, 0), Role(STATISTICS_SERVER, 0, 1)))

    fitted = topologies.load(SimpleNamespace(plan=plan)).fit([0, 1, 0])
    assert [role.world_rank for role in fitted.roles] == [0, 2, 1, 0, 2]


class Half:
    def draw(self, nodes: Sequence[int]) -> None: ...


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (Half(), {}, "name: Half has no function plan; define plan(nodes)"),
        (int, {}, "name: int has no function plan; define plan(nodes)"),
        ("base", {"depth": 2}, "options: base.plan: got an unexpected keyword argument 'depth'; valid: none"),
        (
            "adv",
            {"weight_fan_out": 2},
            "options: adv.plan: got an unexpected keyword argument 'weight_fan_out'; valid: fan_out",
        ),
    ],
)
def test_what_is_no_topology_is_one_line(name: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        topologies.load(name, options)
    assert str(error.value) == f"[topology] {text}"


WHOLE = "use a whole number >= 1"


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        *(
            (
                name,
                {"fan_out": value},
                f"fan_out = {value!r} is not supported; {WHOLE}, or a list of these, all but the first >= 2",
            )
            for name in ("adv", "adv*")
            for value in (0, -1, 2.5, True, "4", [0], [2, 1], [1, 2, 1], [2, 2.0], [[2]], {"a": 1})
        ),
        *(
            ("adv*", {"weight_fan_out": value}, f"weight_fan_out = {value!r} is not supported; {WHOLE}")
            for value in (0, 1.5, "2", True, None, [], [2])
        ),
        *(
            ("adv*", {"outstanding": value}, f"outstanding = {value!r} is not supported; {WHOLE}")
            for value in (0, 1.5, "2", True, [])
        ),
        *(
            ("groups", {"groups": value}, f"groups = {value!r} is not supported with 4 learners; use 1 to 4")
            for value in (0, 5, -1, 1.5, "2", True, None, [2])
        ),
        *(
            ("groups", {"reduction": value}, f"reduction = {value!r} is unknown; use ordered, nodes, mpi")
            for value in ("tree", None, ["mpi"])
        ),
    ],
)
def test_a_bad_option_is_one_line(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        topologies.load(name, options).plan(4)
    assert str(error.value) == f"[topology] options.{text}"


@given(st.integers(1, 200), st.one_of(st.none(), st.integers(1, 20)))
def test_blocks_are_even_and_no_more_than_it_takes(count: int, most: int | None) -> None:
    sizes = topologies.tree.even(count, most)
    assert list(accumulate(sizes))[-1] == count
    assert max(sizes) - min(sizes) <= 1
    assert most is None or (max(sizes) <= most and len(sizes) == -(-count // most))


def test_old_names_of_a_plan_are_answered_with_the_new_ones() -> None:
    roles = topologies.load("base").plan(2).roles
    with pytest.raises(ValueError, match=r"^Plan has no records; use max_gradients_per_message$"):
        Plan(roles, records=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=r"^Plan has no numbers; use learner_numbers$"):
        Plan(roles).numbers  # noqa: B018
    assert not hasattr(Plan(roles), "nothing")
    assert pickle.loads(pickle.dumps(Plan(roles))) == Plan(roles)


@pytest.mark.parametrize(
    ("learners", "names"),
    [
        ([0], "learner 0"),
        ([0, 1, 2, 3], "learner 0, learner 1, learner 2, learner 3"),
        ([0, 1, 2, 3, 4], "learners 0 to 4"),
        ([7, 1, 2, 3, 4, 5, 9], "learner 7, learners 1 to 5, learner 9"),
    ],
)
def test_a_rank_is_named_in_a_few_words(learners: Sequence[int], names: str) -> None:
    roles = [Role(PARAMETER_SERVER, 0, 0), *(Role(LEARNER, learner, 1) for learner in learners)]
    plan = Plan(tuple(roles))
    assert plan.names_on(1) == names
    assert plan.names_on(0) == "parameter server"
    assert replace(plan, roles=tuple(replace(role, world_rank=0) for role in roles)).names_on(0) == (
        f"parameter server, {names}"
    )
