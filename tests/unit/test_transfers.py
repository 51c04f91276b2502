"""What becomes of transfers when a rank dies, on requests that behave as Open MPI's were seen to."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rudra.compute.executor import Executor
from rudra.mpi.failures import Losses
from rudra.mpi.transfers import Going, Transfers, Wanted

FAILED, PENDING, IN_STATUS = 75, 76, 18
ANYBODY = -1
SIZE = 5


class Error(Exception):
    def __init__(self, kind: int) -> None:
        super().__init__(str(kind))
        self.kind = kind

    def Get_error_class(self) -> int:
        return self.kind


class Request:
    """Open, until the test says how it ends."""

    def __init__(self, source: int = ANYBODY, wire: Any = None) -> None:
        self.source, self.wire = source, wire
        self.state = "open"  # done, failed, pending, or matched: with a tensor that may never come
        self.cancelled = self.void = False

    def Test(self, status: "Status | None" = None) -> bool:
        assert not self.void, "a request that has failed or ended is not to be tested again"
        if self.state == "pending":
            raise Error(PENDING)
        if self.state == "failed":
            self.void = True
            raise Error(FAILED)
        self.void = self.state == "done"
        if status is not None:
            status.cancelled = self.cancelled
        return self.void

    def Cancel(self) -> None:
        if self.state in {"open", "pending"}:
            self.cancelled, self.state = True, "done"

    def Wait(self) -> None:
        assert self.state == "done", "would wait for ever"


class Status:
    cancelled = False

    def Is_cancelled(self) -> bool:
        return self.cancelled


def _testsome(requests: list[Any]) -> list[int]:
    """Hides which ones failed, and makes them void like those that are done."""
    over = [i for i, r in enumerate(requests) if r.state in {"done", "failed"}]
    failed = any(requests[i].state == "failed" for i in over)
    for i in over:
        requests[i] = MPI.REQUEST_NULL
    if failed:
        raise Error(IN_STATUS)
    return over


MPI: Any = SimpleNamespace(
    ANY_SOURCE=ANYBODY,
    REQUEST_NULL="null",
    Status=Status,
    Exception=Error,
    ERR_PROC_FAILED=FAILED,
    ERR_PROC_FAILED_PENDING=PENDING,
    ERR_REVOKED=77,
    Request=SimpleNamespace(Testsome=_testsome),
)


class Comm:
    """Keeps what was posted; `announced` are tensors that a probe finds."""

    def __init__(self) -> None:
        self.posted: list[Request] = []
        self.announced: list[int] = []

    def Irecv(self, wire: Any, source: int, tag: int) -> Request:
        self.posted.append(Request(source, wire))
        return self.posted[-1]

    def Improbe(self, source: int, tag: int) -> Any:
        if not self.announced:
            return None
        sender = self.announced.pop(0)
        return SimpleNamespace(Irecv=lambda wire: self.Irecv(wire, sender, tag))


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    module: Any = ModuleType("mpi4py")
    module.MPI = MPI
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setattr("rudra.mpi.transfers.MPI", MPI)
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    return Comm()


class Server:
    """A server's transfers, and what it heard of."""

    def __init__(self, comm: Comm) -> None:
        self.executor = Executor((), SIZE, SIZE, 1)
        self.losses = Losses(comm)  # type: ignore[arg-type]
        self.heard: list[str] = []
        self.transfers = Transfers(
            comm,  # type: ignore[arg-type]
            self.losses,
            {0: self.executor},
            lambda wanted: self.heard.append(wanted.name),
            lambda going: self.heard.append(going.name),
        )

    def post(self, name: str, source: int | None = None) -> None:
        self.transfers.receive(Wanted(0, name, source, 7, halves=False))

    def lose(self, rank: int) -> None:
        self.losses.dead.add(rank)
        self.transfers.lose([rank])

    def poll(self) -> list[str]:
        self.heard.clear()
        self.transfers.poll()
        return list(self.heard)


def test_receives_from_anybody_are_taken_back_and_looked_for(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    server.post("b")
    comm.posted[0].state = "pending"
    assert server.poll() == []
    server.lose(3)
    assert all(request.cancelled for request in comm.posted[:2])
    assert server.poll() == []
    comm.announced = [4]
    assert server.poll() == []
    found = comm.posted[2]
    assert found.source == 4
    assert found.wire is server.executor.buffer("a").wire
    found.state = "done"
    assert server.poll() == ["a"]


def test_a_tensor_that_came_as_its_receive_was_taken_back_counts(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    comm.posted[0].state = "done"
    server.lose(3)
    assert server.heard == ["a"]
    assert server.poll() == []


def test_a_receive_that_hangs_is_set_aside_and_its_role_goes_on(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    stuck, memory = comm.posted[0], server.executor.buffer("a")
    stuck.state = "matched"
    server.lose(3)
    assert not stuck.cancelled
    assert server.executor.buffer("a") is not memory
    comm.announced = [4]
    server.poll()
    assert comm.posted[1].wire is server.executor.buffer("a").wire
    comm.posted[1].state = "done"
    assert server.poll() == ["a"]
    server.transfers.close()  # and nobody waits for the one that hangs


def test_a_tensor_that_was_set_aside_and_comes_after_all_is_not_lost(comm: Comm) -> None:
    """It was that of a living rank."""
    server = Server(comm)
    server.post("a")
    memory = server.executor.buffer("a")
    comm.posted[0].state = "matched"
    server.lose(3)
    comm.announced = [4]
    server.poll()
    comm.posted[0].state = comm.posted[1].state = "done"
    memory.vector.fill_(5.0)
    assert server.poll() == ["a"]  # from rank 4, into the other memory
    server.post("b")
    assert server.poll() == ["b"]
    assert server.executor.buffer("b") is memory
    assert server.executor.buffer("b").vector.tolist() == [5.0] * SIZE


def test_what_a_dying_rank_half_sent_is_void(comm: Comm) -> None:
    server = Server(comm)
    server.losses.dead.add(9)  # some loss before, so that tensors are looked for
    server.post("a")
    comm.announced = [3]
    server.poll()
    comm.posted[0].state = "failed"
    assert server.poll() == []
    comm.announced = [4]
    server.poll()
    comm.posted[1].state = "done"
    assert server.poll() == ["a"]


@pytest.mark.parametrize("fails_first", [True, False])
def test_receives_from_the_dead_alone_are_gone(comm: Comm, fails_first: bool) -> None:
    server = Server(comm)
    server.post("a", 3)
    server.post("b", 4)
    if fails_first:
        comm.posted[0].state = "failed"
        assert server.poll() == []
    server.lose(3)
    assert server.poll() == []
    comm.posted[1].state = "done"
    assert server.poll() == ["b"]


def test_sends_end_whatever_became_of_their_receiver(comm: Comm) -> None:
    server = Server(comm)
    requests = [Request() for _ in range(4)]
    for place, request in enumerate(requests):
        server.transfers.send(request, Going(0, f"{place}", 1))  # type: ignore[arg-type]
    requests[1].state, requests[2].state = "done", "failed"
    assert server.poll() == ["1", "2"]
    requests[0].state = requests[3].state = "done"
    assert server.poll() == ["0", "3"]


def test_what_is_abandoned_is_not_heard_of_and_must_end_before_its_memory_serves_again(comm: Comm) -> None:
    server = Server(comm)
    for name, source in (("a", 1), ("b", 2), ("c", 3)):
        server.post(name, source)
    sends = [Request() for _ in range(2)]
    for to, send in enumerate(sends):
        server.transfers.send(send, Going(0, f"to {to}", to))  # type: ignore[arg-type]
    coming, from_dead, open_ = comm.posted
    coming.state = from_dead.state = "matched"
    assert server.transfers.abandon({0}, but_to=1) == [Going(0, "to 1", 1)]
    server.poll()
    assert open_.cancelled
    assert not server.transfers.quiet, "something may still be written"
    before = server.executor.buffer("b")
    server.lose(2)
    assert server.executor.buffer("b") is not before, "what the dead had begun may hang, and has memory of its own"
    assert not server.transfers.quiet
    coming.state = "done"
    for send in sends:
        send.state = "done"
    assert server.poll() == ["to 1"]
    assert server.transfers.quiet


@pytest.mark.parametrize(("state", "withdrawn"), [("open", True), ("matched", False), ("done", False)])
def test_a_receive_is_withdrawn_unless_something_comes(comm: Comm, state: str, withdrawn: bool) -> None:
    server = Server(comm)
    server.post("a")
    comm.posted[0].state = state
    assert server.transfers.withdraw(0, "a") is withdrawn
    assert server.heard == (["a"] if state == "done" else [])
    assert not server.transfers.withdraw(0, "other")
