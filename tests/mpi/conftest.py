import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import WITHOUT_LIBFABRIC

from rudra.mpi.forkserver import fork_server

sys.path.insert(0, str(Path(__file__).parent))  # for tests and for the ranks that they start


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """One for the ranks of all launches.

    Open MPI looks for networks through libfabric for a second at each launch, but ranks of one node never use them.
    `processes.mpirun(anew=True)` and the page about Python start as a user does, with this look.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(*WITHOUT_LIBFABRIC)
        with fork_server():
            yield


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch.device("cuda", 0)
