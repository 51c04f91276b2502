"""Threads beside the one that owns a rank's roles: transfers that go on while the rank computes, and computing itself.

Source: rudra.txt §3.3, the pushGradient and pullWeights threads. MPI makes no progress on large messages while nobody
is inside it, so somebody must be. A thread that blocks in MPI spins on a whole core, which it takes from the
computation; so these start transfers, test them, and sleep in between.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

from mpi4py import MPI

from rudra.mpi.failures import outcome

SHORTEST_S, LONGEST_S = 20e-6, 1e-3
"""Pauses between two looks at transfers under way: they grow while nothing happens."""

Post = Callable[[Callable[[], None]], None]
"""Hands something over to the thread that owns the roles, which calls it there."""


class WorkerThread(threading.Thread):
    """A thread that does one thing after the other.

    Args:
        name: as shown to people.
        post: how its results, and an exception that ends it, reach the rank's own thread.
    """

    def __init__(self, name: str, post: Post) -> None:
        super().__init__(name=name, daemon=True)
        self._post = post
        # No SimpleQueue: CPython 3.11's get may wait forever where the thread is held up for longer than its timeout.
        self._todo: Queue[Callable[[], None] | None] = Queue()
        self.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Has something done after all that was submitted before."""
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
        """Ends the thread, when it has done what was submitted."""
        self._todo.put(None)
        self.join()


@dataclass(slots=True)
class _Carried:
    """A transfer."""

    request: MPI.Request
    done: Callable[[], None]
    receives: bool


class CommThread(WorkerThread):
    """A thread that carries out transfers, any number at a time.

    Args:
        name: as shown to people.
        post: as of a `WorkerThread`.
        wait: does so until a request is over that was cancelled.
    """

    def __init__(
        self, name: str, post: Post, wait: Callable[[MPI.Request], object] = lambda request: request.Wait()
    ) -> None:
        self._carried: list[_Carried] = []
        self._forgotten: list[_Carried] = []  # receives that may still write
        self._untaken: list[_Carried] = []  # sends for which nobody waits; their memory stays
        self._quiet: Callable[[], None] | None = None  # to be told when none does
        self._wait = wait
        super().__init__(name, post)

    def carry(self, start: Callable[[], MPI.Request], done: Callable[[], None], *, receives: bool = False) -> None:
        """Starts a transfer; `done` is called in the rank's own thread when it is over."""
        self.submit(lambda: self._carried.append(_Carried(start(), done, receives)))

    def abandon(self, quiet: Callable[[], None]) -> None:
        """Takes all receives back, as all begin anew; `quiet` is called when none writes here any more.

        Sends go on, or wait for ever for somebody who takes them. What was over before may still be told.
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
        for carried in self._carried:  # receives that nobody will send to any more
            carried.request.Cancel()
            self._wait(carried.request)

    def _over(self, carried: _Carried) -> bool:
        """Whether a transfer is over, which is told if it has not failed; then a rank has died, and all regroup."""
        what = outcome(carried.request)
        if what == "done":
            self._post(carried.done)
        return what != "no"
