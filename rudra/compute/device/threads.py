"""Streams of a CPU: threads that compute at the same time."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import ClassVar

from rudra.compute.device.streams import Number, Pending, Stream, known


class ThreadWork(Pending):
    """Work of a thread.

    Args:
        work: As for `Stream.submit`.
        after: Work that must be done before. It was submitted earlier.
        last: Work of the same stream before this one. None: there is none.
    """

    threaded: ClassVar[bool] = True

    def __init__(
        self, work: Callable[[], Sequence[Number]], after: Sequence[Pending], last: "ThreadWork | None"
    ) -> None:
        self._work, self._after, self._last = work, after, last
        self._over = threading.Event()
        self._numbers: list[float] = []
        self._error: BaseException | None = None
        self._raised = False  # whether the host knows of the error, and may try again
        self._call: Callable[[], None] | None = None

    def do(self) -> None:
        """Does the work in this thread."""
        try:
            if self._last is not None:
                self._last._let_pass()
            for each in self._after:
                each.numbers()
            self._numbers = known(self._work())
        except BaseException as error:  # `done` and `numbers` raise it again
            self._error = error
        del self._work, self._after, self._last
        self._over.set()
        if self._call is not None:
            self._call()

    def _let_pass(self) -> None:
        """Waits until this work is over. Raises its error, unless the host knows of it."""
        self._over.wait()
        if self._error is not None and not self._raised:
            raise self._error

    def done(self) -> bool:
        if self._over.is_set() and self._error is not None:
            self._raised = True
            raise self._error
        return self._over.is_set()

    def numbers(self) -> list[float]:
        self._over.wait()
        self.done()
        return self._numbers

    def when_done(self, call: Callable[[], None]) -> None:
        self._call = call
        if self._over.is_set():  # perhaps before the thread knew the function
            call()


class Threads:
    """Threads that do the work of several streams, first come, first served.

    So a thread never waits for work that has not begun.

    Args:
        count: Number of threads.
        begin: Called in each thread first.
    """

    def __init__(self, count: int, begin: Callable[[], None]) -> None:
        self._todo: SimpleQueue[ThreadWork | None] = SimpleQueue()
        about = {"target": self._serve, "args": (begin,), "name": "rudra-learner", "daemon": True}
        self._threads = [threading.Thread(**about) for _ in range(count)]  # type: ignore[arg-type]
        for thread in self._threads:
            thread.start()

    def _serve(self, begin: Callable[[], None]) -> None:
        begin()
        while (work := self._todo.get()) is not None:
            work.do()

    def submit(self, work: ThreadWork) -> None:
        """Appends work for the first thread that is free."""
        self._todo.put(work)

    def close(self) -> None:
        """Ends the threads after they have done all submitted work."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._todo.put(None)
        for thread in threads:
            thread.join()


class ThreadStream(Stream):
    """Stream whose work is done by any of several threads, one piece after another.

    Args:
        threads: The threads, which other streams also use.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._last: ThreadWork | None = None

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        self._last = ThreadWork(work, after, self._last)
        self._threads.submit(self._last)
        return self._last

    def close(self) -> None:
        self._threads.close()
