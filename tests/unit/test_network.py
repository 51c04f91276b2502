"""The order in which the network between nodes is measured."""

from itertools import combinations, groupby

import pytest

from rudra.core.buckets import NetworkSpeed
from rudra.mpi.network_test import in_turns, worst


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_all_pairs_of_nodes_are_measured_and_different_nodes_at_the_same_time(count: int) -> None:
    places = [3 * node for node in range(count) for _ in range(2)]  # nodes of two ranks
    pairs = in_turns({*combinations(sorted({*places}), 2)}, places)
    assert sorted(pairs) == [*combinations(range(0, 2 * count, 2), 2)], "the first rank of each node"
    for _, together in groupby(pairs, key=lambda pair: (pair[0] + pair[1]) // 2 % count):
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len({*ranks})


def test_a_server_measures_one_node_after_the_other() -> None:
    assert sorted(in_turns({(0, 2), (0, 5)}, [0, 0, 2, 3, 5])) == [(0, 2), (0, 4)]
    assert in_turns(set(), [0, 0, 1]) == []


def test_the_slowest_network_counts() -> None:
    assert worst([NetworkSpeed(1.0, 5.0), NetworkSpeed(2.0, 7.0), NetworkSpeed(1.5, 4.0)]) == NetworkSpeed(2.0, 4.0)
