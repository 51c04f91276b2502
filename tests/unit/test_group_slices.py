"""How ranks divide the vector of a compute group, and under which tags tensors travel."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.mpi.group_slices import GroupSlices
from rudra.mpi.tags import GRADIENTS, WEIGHTS
from rudra.mpi.tensor_traffic import TensorTags
from topologies import Plan, Role


def division(me: int, ranks: list[int], size: int = 1000, shared: tuple[int, ...] = (), **about: object) -> GroupSlices:
    members = {100 + i: rank for i, rank in enumerate(ranks)}
    sums = about.get("sums", ())
    return GroupSlices(me, members, size, shared, sums, library=bool(about.get("library")))  # type: ignore[arg-type]


@given(st.integers(1, 5000), st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_group_slices_cover_the_vector_once(size: int, ranks: list[int]) -> None:
    its = division(ranks[0], ranks, size)
    elements = [i for rank in dict.fromkeys(ranks) for i in range(*its.of_rank[rank].indices(size))]
    assert elements == list(range(size))
    assert sum(its.length(rank) for rank in its.of_rank) == size


def test_group_slices_of_one_sum_are_added_by_their_owners() -> None:
    its = division(1, [0, 1, 1, 2])
    assert (its.roles, its.mine, its.others) == ((101, 102), [1, 2], {0: [0], 2: [3]})
    assert its.adders == [{0: 0, 1: 1, 2: 2}]
    assert (its.near, its.far, its.alone, its.has_first) == ([], [0, 2], False, False)


def test_group_slices_of_two_nodes_have_an_adder_on_each() -> None:
    its = division(2, [0, 1, 2, 3], shared=(3,), sums=[[0, 1], [2, 3]])
    assert (its.home, its.home_of_first) == (1, 0)
    assert its.adders == [{0: 0, 1: 1, 2: 0, 3: 1}, {0: 2, 1: 3, 2: 2, 3: 3}]
    assert its.added_by(2) == [0, 2], "rank 2 adds its own slice, and one of the other node's"
    assert (its.near, its.far) == ([3], [])


@pytest.mark.parametrize(("shared", "alone"), [((1,), True), ((), False)])
def test_group_slices_of_two_neighbours_are_added_by_each_alone(shared: tuple[int, ...], alone: bool) -> None:
    assert division(0, [0, 1], shared=shared).alone is alone


def test_group_slices_that_the_library_adds_come_from_nobody() -> None:
    its = division(0, [0, 1, 2], library=True)
    assert (its.near, its.far, its.alone) == ([], [], False)


def test_tensor_tags_differ_by_role_channel_sender_and_generation() -> None:
    """Two learners share rank 1; the statistics server's tensors outlast all generations."""
    servers = Role("parameter server", 0, 0), Role("statistics server", 0, 0, parent=0)
    plan = Plan((*servers, *(Role("learner", i, 1, parent=0) for i in range(2))))
    generation = 0
    tags = TensorTags(plan, lambda: generation)
    ways = product(range(4), (GRADIENTS, WEIGHTS), (2, 3))
    before = [tags.tag(*way) for way in ways]
    assert len(set(before)) == len(before)
    assert {tags.tag(0, GRADIENTS, sender) for sender in (2, 3)} == set(tags.any_tag(0, GRADIENTS))
    kept = tags.tag(plan.statistics, WEIGHTS)
    generation = 1
    assert tags.tag(plan.statistics, WEIGHTS) == kept
    assert tags.tag(2, WEIGHTS) not in before
