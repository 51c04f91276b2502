import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rudra.mpi.forkserver import fork_server

sys.path.insert(0, str(Path(__file__).parent))  # tests here share `user_code`, and so do the ranks that they start


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """One for the ranks of all launches."""
    with fork_server():
        yield
