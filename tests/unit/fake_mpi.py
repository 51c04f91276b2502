"""What stands in for `mpi4py.MPI` in tests of transfers: errors, statuses, and the module itself."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rudra.mpi.transfers  # noqa: F401  before what it has imported is replaced

FAILED, PENDING, IN_STATUS, VOID = 75, 76, 18, 7
ANYBODY = -1


class Error(Exception):
    def Get_error_class(self) -> int:
        return int(self.args[0])


class Status:
    source, cancelled = ANYBODY, False

    def Get_source(self) -> int:
        return self.source

    def Is_cancelled(self) -> bool:
        return self.cancelled


def fake_mpi(monkeypatch: pytest.MonkeyPatch, testsome: Callable[[list[Any]], list[int]], **more: Any) -> None:
    """Puts it where `mpi4py.MPI` is; `testsome` says which requests are over, and makes them None in the list."""
    about = {"ANY_SOURCE": ANYBODY, "REQUEST_NULL": None, "Status": Status, "Exception": Error}
    about |= {"ERR_PROC_FAILED": FAILED, "ERR_PROC_FAILED_PENDING": PENDING, "ERR_REVOKED": 77}
    module: Any = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(**about, Request=SimpleNamespace(Testsome=testsome), **more)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setattr("rudra.mpi.transfers.MPI", module.MPI)
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
