"""Reductions of groups on real ranks, on one node and on several: the bits of the average, however it is made."""

import pytest
import random_reductions

from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cases", [8, pytest.param(60, marks=CAMPAIGN)])
def test_members_get_the_bits_of_the_average_wherever_they_are(cases: int) -> None:
    """Slow readers would see it if a gradient changed too early."""
    for told in on_ranks(random_reductions.reductions, 3, seed=5, cases=cases):
        assert told["wrong"] == []
