"""Reductions of groups on real ranks, on one node and on several: the bits of the average, however it is made."""

import pytest
import user_code

from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


@pytest.mark.parametrize("ranks", [3, 5])
def test_members_get_the_bits_of_the_average_wherever_they_are(ranks: int) -> None:
    """Slow readers would see it if a gradient changed too early."""
    for told in on_ranks(user_code.reductions, ranks - 2, seed=ranks, cases=25):
        assert told["wrong"] == []
