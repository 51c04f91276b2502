"""Threads next to a rank's own thread: transfers that continue while the rank computes, and the computation itself.

Source: rudra.txt §3.3, the pushGradient and pullWeights threads. MPI makes progress on large messages only inside an
MPI call, so some thread must make such calls. A thread that blocks in MPI spins on a whole core, which the computation
loses. So these threads start transfers, poll them, and sleep in between.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

from mpi4py import MPI

from rudra.mpi.failures import outcome

SHORTEST_S, LONGEST_S = 20e-6, 1e-3
"""Shortest and longest pause between two polls of pending transfers. Pauses grow while nothing happens."""

Post = Callable[[Callable[[], None]], None]
"""Hands a function over to the thread that owns the roles, which calls it there."""


class WorkerThread(threading.Thread):
    """A thread that executes submitted work in order.

    Args:
        name: name of the thread, for people.
        post: hands results, and an exception that ends the thread, to the rank's own thread.
    """

    def __init__(self, name: str, post: Post) -> None:
        super().__init__(name=name, daemon=True)
        self._post = post
        # No SimpleQueue: in CPython 3.11 its get may wait forever if the thread is delayed for longer than the timeout.
        self._todo: Queue[Callable[[], None] | None] = Queue()
        self.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Appends work to the thread's queue."""
        self._todo.put(work)

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            failure = error

            def fail() -> None:
                raise failure

            self._post(fail)

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            work()

    def close(self) -> None:
        """Ends the thread after it has done all submitted work."""
        self._todo.put(None)
        self.join()


@dataclass(slots=True)
class _Carried:
    """A transfer in progress."""

    request: MPI.Request
    done: Callable[[], None]
    receives: bool


class CommThread(WorkerThread):
    """A thread that carries out transfers, any number in parallel.

    Args:
        name: name of the thread, for people.
        post: hands results to the rank's own thread, as in `WorkerThread`.
        wait: waits until a cancelled request is complete.
    """

    def __init__(
        self, name: str, post: Post, wait: Callable[[MPI.Request], object] = lambda request: request.Wait()
    ) -> None:
        self._carried: list[_Carried] = []
        self._forgotten: list[_Carried] = []  # receives that may still write
        self._untaken: list[_Carried] = []  # abandoned sends; their memory must stay
        self._quiet: Callable[[], None] | None = None  # called when no receive can write any more
        self._wait = wait
        super().__init__(name, post)

    def carry(self, start: Callable[[], MPI.Request], done: Callable[[], None], *, receives: bool = False) -> None:
        """Starts a transfer. `done` is called in the rank's own thread when the transfer is complete."""
        self.submit(lambda: self._carried.append(_Carried(start(), done, receives)))

    def abandon(self, quiet: Callable[[], None]) -> None:
        """Cancels all receives because the roles restart. `quiet` is called when no receive can write here any more.

        Sends continue, or stay pending if no rank receives them. Transfers completed earlier may still be reported.
        """

        def forget() -> None:
            receives = [carried for carried in self._carried if carried.receives]
            for carried in receives:
                carried.request.Cancel()
            self._forgotten += receives
            self._untaken += [carried for carried in self._carried if not carried.receives]
            self._carried = []
            self._quiet = quiet

        self.submit(forget)

    def _serve(self) -> None:
        pause_s = SHORTEST_S
        while True:
            with suppress(Empty):
                work = self._todo.get(timeout=pause_s if self._carried or self._forgotten else None)
                if work is None:
                    break
                work()
                pause_s = SHORTEST_S
            before, self._carried = self._carried, [c for c in self._carried if not self._over(c)]
            pause_s = min(LONGEST_S, 1.5 * pause_s) if len(self._carried) == len(before) else SHORTEST_S
            self._forgotten = [c for c in self._forgotten if outcome(c.request) == "no"]
            if self._quiet is not None and not self._forgotten:
                self._post(self._quiet)
                self._quiet = None
        for carried in self._carried:  # receives that no rank will match any more
            carried.request.Cancel()
        for carried in (*self._carried, *self._forgotten):
            self._wait(carried.request)

    def _over(self, carried: _Carried) -> bool:
        """Returns whether a transfer has ended, and reports it unless it failed: then a rank died, and all regroup."""
        what = outcome(carried.request)
        if what == "done":
            self._post(carried.done)
        return what != "no"
