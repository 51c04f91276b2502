"""Reports of failures: sent by the rank that fails, and raised on the rank of the statistics server."""

from types import SimpleNamespace
from typing import Any

import pytest

from rudra.mpi import failure_reports
from rudra.mpi.failure_reports import Reported, raise_reported, report


class Comm:
    """A rank that sends to itself."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def Isend(self, data: bytes, to: int, tag: int) -> None:
        self.sent.append(data)

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:
        return bool(self.sent)

    def Recv(self, into: bytearray, source: int, tag: int) -> None:
        into[:] = self.sent.pop()


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Any:
    comm = Comm()
    status = SimpleNamespace(Get_count=lambda kind: len(comm.sent[0]), Get_source=lambda: 0)
    stub = SimpleNamespace(Status=lambda: status, ANY_SOURCE=-1, BYTE=None, Exception=RuntimeError)
    monkeypatch.setattr(failure_reports, "MPI", stub)
    return comm


def test_reported_failure_has_its_code_and_its_whole_text(comm: Any) -> None:
    report(comm, 0, 3, "learner 0 (rank 2): a text – of several words\nand lines", lost=True)
    with pytest.raises(Reported) as caught:
        raise_reported(comm)
    assert caught.value.text == "learner 0 (rank 2): a text – of several words\nand lines"
    assert (caught.value.exit_code, caught.value.lost) == (3, True)


def test_no_report_raises_nothing(comm: Any) -> None:
    raise_reported(comm)
