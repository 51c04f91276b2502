"""Threads beside the one that owns the roles: order, exceptions, and that nothing is left of them."""

import gc
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rudra.mpi.comm_threads import CommThread, WorkerThread


class Rank:
    """The thread that owns the roles: takes what others post."""

    def __init__(self) -> None:
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def take(self) -> None:
        self.posted.get(timeout=10)()


@pytest.fixture
def rank() -> Rank:
    return Rank()


KINDS = pytest.mark.parametrize("kind", [WorkerThread, CommThread])


@KINDS
def test_work_is_done_in_order_and_in_one_other_thread(kind: type[WorkerThread], rank: Rank) -> None:
    done: list[tuple[int, str]] = []
    worker = kind("pushes", rank.posted.put)
    for i in range(100):
        worker.submit(lambda i=i: done.append((i, threading.current_thread().name)))
    worker.close()
    assert done == [(i, "pushes") for i in range(100)], "closing waits for what was submitted"
    assert not worker.is_alive()


@KINDS
def test_a_thread_that_is_given_nothing_ends(kind: type[WorkerThread], rank: Rank) -> None:
    worker = kind("idle", rank.posted.put)
    worker.close()
    assert not worker.is_alive()
    assert rank.posted.empty()


@KINDS
@pytest.mark.parametrize("error", [ValueError("no luck"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_is_raised_in_the_ranks_own_thread(
    kind: type[WorkerThread], rank: Rank, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    done: list[int] = []
    worker = kind("pulls", rank.posted.put)
    worker.submit(fail)
    worker.submit(lambda: done.append(1))
    with pytest.raises(type(error)) as raised:
        rank.take()
    assert raised.value is error
    assert raised.traceback[-1].name == "fail", "it shows where it was raised"
    worker.close()
    assert done == [], "nothing is done after a failure"


class Request:
    """A transfer that is over when it has been asked so often; MPI is not needed to start and to test it."""

    def __init__(self, tests: int) -> None:
        self.tests = tests
        self.cancelled = self.waited = False

    def Cancel(self) -> None:
        self.cancelled = True

    def Wait(self) -> None:
        assert self.cancelled
        self.waited = True

    def Test(self, status: object = None) -> bool:
        self.tests -= 1
        return self.tests <= 0


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for mpi4py, whose import would start MPI."""
    module: Any = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(Exception=OSError)
    monkeypatch.setitem(sys.modules, "mpi4py", module)


@pytest.mark.usefixtures("mpi")
def test_ends_of_transfers_are_told_whichever_comes_first(rank: Rank) -> None:
    told: list[str] = []
    thread = CommThread("pushes", rank.posted.put)
    all_are_here = threading.Event()
    thread.submit(lambda: all_are_here.wait(10) and None)
    for name, tests in (("slow", 60), ("quick", 1), ("middle", 30)):
        thread.carry(lambda tests=tests: Request(tests), lambda name=name: told.append(name))
    all_are_here.set()
    for _ in range(3):
        rank.take()
    thread.close()
    assert told == ["quick", "middle", "slow"]


@pytest.mark.usefixtures("mpi")
def test_a_transfer_is_started_while_others_are_under_way(rank: Rank) -> None:
    never, told = Request(10**9), []
    thread = CommThread("pulls", rank.posted.put)
    thread.carry(lambda: never, lambda: told.append("never"))
    for i in range(3):
        thread.carry(lambda: Request(2), lambda i=i: told.append(i))
        rank.take()
    assert told == [0, 1, 2]
    thread.close()
    assert never.cancelled
    assert never.waited, "a receive to which nobody sends any more is taken back"
    assert told == [0, 1, 2]


@pytest.mark.usefixtures("mpi")
def test_what_is_abandoned_is_not_told_and_must_not_write_any_more(rank: Rank) -> None:
    """A receive that has begun goes on until it is over; a send that nobody takes may stay for ever."""
    told: list[str] = []
    thread = CommThread("pulls", rank.posted.put)
    thread.carry(lambda: Request(10**9), lambda: told.append("sent"))
    thread.carry(lambda: Request(50), lambda: told.append("received"), receives=True)
    thread.abandon(lambda: told.append("quiet"))
    thread.carry(lambda: Request(100), lambda: told.append("anew"))
    rank.take()
    rank.take()
    thread.close()
    assert told == ["quiet", "anew"]


@pytest.mark.usefixtures("mpi")
def test_a_transfer_that_cannot_start_fails_the_rank(rank: Rank) -> None:
    def start() -> Any:
        raise OSError("no memory")

    thread = CommThread("pushes", rank.posted.put)
    thread.carry(start, lambda: None)
    with pytest.raises(OSError, match="no memory"):
        rank.take()
    thread.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.usefixtures("mpi")
def test_starting_and_stopping_leaves_nothing_behind(rank: Rank) -> None:
    def once() -> None:
        workers = [kind(kind.__name__, rank.posted.put) for kind in (WorkerThread, CommThread, CommThread)]
        for worker in workers:
            worker.submit(lambda: None)
        workers[1].carry(lambda: Request(2), lambda: None)  # type: ignore[attr-defined]
        rank.take()
        for worker in workers:
            worker.close()

    once()
    gc.collect()
    threads, files = threading.active_count(), descriptors()
    for _ in range(50):
        once()
    gc.collect()
    assert (threading.active_count(), descriptors()) == (threads, files)
