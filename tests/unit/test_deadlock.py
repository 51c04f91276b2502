"""Whether all who are left wait for each other: what ranks tell the statistics server's, without MPI."""

from types import SimpleNamespace
from typing import Any

import pytest

from rudra.mpi.deadlock import AGAIN_S, Standstill

ROOT, SERVER, LEARNER = 1, 0, 2


class Comm:
    """Of one rank; what others have sent it waits in a mailbox for each rank."""

    def __init__(self, rank: int, boxes: dict[int, list[tuple[int, bytes]]]) -> None:
        self.rank, self._boxes = rank, boxes

    def tell(self, data: bytes, to: int, tag: int) -> None:
        self._boxes[to].append((self.rank, data))

    def Iprobe(self, source: Any, tag: int, status: Any) -> bool:
        if box := self._boxes[self.rank]:
            status.source, status.data = box[0]
        return bool(box)

    def Recv(self, data: bytearray, source: int, tag: int) -> None:
        data[:] = self._boxes[self.rank].pop(0)[1]


class Status:
    def Get_count(self, kind: Any) -> int:
        return len(self.data)  # type: ignore[attr-defined]

    def Get_source(self) -> int:
        return self.source  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[int, Standstill]:
    stub = SimpleNamespace(ANY_SOURCE=-1, BYTE=None, Status=Status, Exception=OSError)
    monkeypatch.setattr("rudra.mpi.deadlock.MPI", stub)
    boxes: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in (SERVER, ROOT, LEARNER)}
    comms = {rank: Comm(rank, boxes) for rank in boxes}
    return {rank: Standstill(comm, ROOT, 3, comm.tell) for rank, comm in comms.items()}  # type: ignore[arg-type]


def test_a_run_stands_still_when_all_wait(ranks: dict[int, Standstill]) -> None:
    assert ranks[SERVER].wait("server for a gradient", {ROOT, LEARNER}, 40.0) is None
    assert ranks[LEARNER].wait("learner for weights", {ROOT, SERVER}, 41.0) is None
    found = ranks[ROOT].wait("statistics for rows", {SERVER, LEARNER}, 42.0)
    assert found == ["statistics for rows", "server for a gradient", "learner for weights"]


def test_who_does_something_else_holds_the_others_alive(ranks: dict[int, Standstill]) -> None:
    ranks[SERVER].wait("server for a gradient", {ROOT, LEARNER}, 40.0)
    assert ranks[ROOT].wait("statistics for rows", {SERVER, LEARNER}, 41.0) is None, "the learner computes"
    assert ranks[ROOT].wait("statistics for rows", {SERVER}, 45.0) is not None, "it has died, too"
    assert ranks[ROOT].wait("statistics for rows", {SERVER}, 41.0 + 3 * AGAIN_S) is None, "the server goes on"


def test_a_rank_says_it_now_and_then(ranks: dict[int, Standstill]) -> None:
    for now in (40.0, 40.001, 40.002, 40.0 + AGAIN_S):
        ranks[LEARNER].wait("learner for weights", {ROOT, SERVER}, now)
    root = ranks[ROOT]
    root.wait("statistics for rows", {SERVER}, 44.0)
    assert root._waits[LEARNER][0] == 40.0 + AGAIN_S
    assert root._comm._boxes[ROOT] == []  # type: ignore[attr-defined]
