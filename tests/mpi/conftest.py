import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from processes import WITHOUT_LIBFABRIC

from rudra.mpi.forkserver import fork_server
from tests import forks

sys.path.insert(0, str(Path(__file__).parent))  # for tests and for the ranks that they start


_SERVERS = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Starts the fork servers before xdist starts its processes, which use them then: each server imports torch."""
    if getattr(config.option, "numprocesses", None):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("XDG_CACHE_HOME", str(Path(__file__) / "no such directory"))  # read by an import
            forks.share()
            _SERVERS.enter_context(fork_server())


def pytest_unconfigure() -> None:
    _SERVERS.close()


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
