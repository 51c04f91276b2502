"""Collective operations that sleep: the answers of MPI's own, at little cost to the rank that is waited for."""

import parts_on_ranks
import pytest

from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def test_operations_that_sleep_give_what_those_of_mpi_give_and_leave_the_core_to_others() -> None:
    for rank, figures in enumerate(on_ranks(parts_on_ranks.quiet_operations, 2)):
        assert figures["quiet"] == figures["plain"]
        assert figures["split"] == [other for other in range(4) if other % 2 == rank % 2]
        assert figures["nothing"]
        if rank:
            assert figures["waiting_s"] < 0.1, "of half a second of waiting for rank 0"
