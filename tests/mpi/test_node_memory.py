"""The training data lies in each node's memory once."""

import pytest
import user_code

from rudra.bench.ranks import on_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("what", ["arrays", "tensors"])
def test_arrays_are_one_memory_until_somebody_writes(what: str) -> None:
    told = on_ranks(user_code.sharing, 2, what=what)
    assert len(told) == 4
    assert all(rank["private_kb"] <= 64 for rank in told), "a page or two, not a copy"
    assert sum(rank["share_kb"] for rank in told) < 1.1 * user_code.SHARED_MB * 1024


@pytest.mark.parametrize("what", ["lock", "mapped"])
def test_what_cannot_be_shared_stays_with_whom_made_it(what: str) -> None:
    assert [rank["got"] for rank in on_ranks(user_code.sharing, 1, what=what)] == [False, True, False]
