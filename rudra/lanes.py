"""Threads beside the one that owns a rank's roles: transfers that go on while the rank computes, and computing itself.

Source: rudra.txt §3.3, the pushGradient and pullWeights threads. MPI makes no progress on large messages while nobody
is inside it, so somebody must be. A thread that blocks in MPI spins on a whole core, which it takes from the
computation; so these start transfers, test them, and sleep in between.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING

from rudra.failures import outcome

if TYPE_CHECKING:
    from mpi4py import MPI

SHORTEST_S, LONGEST_S = 20e-6, 1e-3
"""Pauses between two looks at transfers under way: they grow while nothing happens."""

Post = Callable[[Callable[[], None]], None]
"""Hands something over to the thread that owns the roles, which calls it there."""


class Worker(threading.Thread):
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


class Lane(Worker):
    """A thread that carries out transfers, any number at a time."""

    def __init__(self, name: str, post: Post) -> None:
        self._requests: list[MPI.Request] = []
        self._done: list[Callable[[], None]] = []
        super().__init__(name, post)

    def carry(self, start: Callable[[], "MPI.Request"], done: Callable[[], None]) -> None:
        """Starts a transfer; `done` is called in the rank's own thread when it is over."""

        def begin() -> None:
            self._requests.append(start())
            self._done.append(done)

        self.submit(begin)

    def _serve(self) -> None:
        pause_s = SHORTEST_S
        while True:
            with suppress(Empty):
                work = self._todo.get(timeout=pause_s if self._requests else None)
                if work is None:
                    break
                work()
                pause_s = SHORTEST_S
            over = {place: what for place, r in enumerate(self._requests) if (what := outcome(r)) != "no"}
            if not over:
                pause_s = min(LONGEST_S, 1.5 * pause_s)
                continue
            pause_s = SHORTEST_S
            for place, what in over.items():
                if what == "done":  # else a rank has died; the run ends, and says so
                    self._post(self._done[place])
            self._requests = [r for i, r in enumerate(self._requests) if i not in over]
            self._done = [d for i, d in enumerate(self._done) if i not in over]
        for request in self._requests:  # receives that nobody will send to any more
            request.Cancel()
            request.Wait()
