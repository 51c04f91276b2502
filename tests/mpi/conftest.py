import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rudra.mpi.forkserver import SERVER, fork_server
from tests.mpi import processes

sys.path.insert(0, str(Path(__file__).parent))  # tests here share `user_code`, and so do the ranks that they start


@pytest.fixture(scope="session", autouse=True)
def _fork_servers() -> Iterator[None]:
    """One for all commands, and one for the ranks of all launches."""
    with fork_server(processes.COMMAND) as command:
        del os.environ[SERVER]
        with fork_server():
            processes.forks.append(command)
            yield
            processes.forks.clear()
