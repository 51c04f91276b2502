"""What a rank does in pieces between other things, or in other threads."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial

from rudra.compute.executor import arithmetic_of_thread
from rudra.core.events import Event
from rudra.mpi.comm_threads import WorkerThread


class LongWork:
    """Work that lasts, and what has come of it.

    Args:
        wake: wakes this rank up; any thread may call it.

    Attributes:
        beside: computations and checkpoints under way in other threads.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.beside = 0
        self._wake = wake
        self._results: deque[Callable[[], None]] = deque()  # of other threads
        self._pieces: deque[tuple[int, Iterator[Event | None]]] = deque()  # local actions, a piece of each in turn
        self._computer: WorkerThread | None = None

    def post(self, result: Callable[[], None]) -> None:
        """Lets another thread's result in."""
        self._results.append(result)
        self._wake()

    def take_results(self) -> None:
        """Takes in what other threads have posted."""
        while self._results:
            self._results.popleft()()

    def compute_beside(self) -> None:
        """From now on long actions are performed in a thread of their own."""
        self._computer = WorkerThread("compute", self.post)
        self._computer.submit(arithmetic_of_thread())

    def do_beside(self, thread: WorkerThread, work: Callable[[], Event], done: Callable[[Event], None]) -> None:
        """Has another thread do something, and takes in what has come of it."""

        def take(event: Event) -> None:
            self.beside -= 1
            done(event)

        self.beside += 1
        thread.submit(lambda: self.post(partial(take, work())))

    def begin(self, role: int, work: Iterator[Event | None], done: Callable[[Event], None]) -> None:
        """Begins a long action of a role; `done` takes its event, if a thread of its own performs it."""
        if self._computer is None:
            self._pieces.append((role, work))
        else:
            self.do_beside(self._computer, lambda: next(event for event in work if event is not None), done)

    def go_on(self) -> tuple[int, Event | None] | None:
        """Does a piece of long work: the role and the event, if it was the last piece; None: there is no work."""
        if not self._pieces:
            return None
        role, work = self._pieces.popleft()
        if (event := next(work)) is None:
            self._pieces.append((role, work))
        return role, event

    def drop(self, roles: Collection[int]) -> None:
        """Leaves the work of some roles undone."""
        self._pieces = deque(work for work in self._pieces if work[0] not in roles)

    def close(self) -> None:
        """Ends the thread that computes."""
        if self._computer is not None:
            self._computer.close()
