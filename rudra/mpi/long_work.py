"""Long work of a rank, done in pieces between other work, or in other threads."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from rudra.compute.device.streams import Pending, finished
from rudra.compute.executor import arithmetic_of_thread
from rudra.core.bursts import BankDone, BurstMade
from rudra.core.events import Event
from rudra.mpi.comm_threads import WorkerThread


class _Action(NamedTuple):
    """An action of an executor that is not over.

    Attributes:
        work: rest of the action.
        pending: work of a device that the action waits for. None: it waits for none.
    """

    work: Iterator[Event | BurstMade | BankDone | Pending | None]
    pending: Pending | None = None


_Queue = tuple[int, bool]
"""A role, and whether its actions are long. The actions of a queue end in order."""


class LongWork:
    """Long work of a rank and its results.

    Args:
        wake: wakes up this rank. Any thread may call it.

    Attributes:
        beside: number of computations and checkpoints that run in other threads.
        results: results that other threads have posted.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.beside = 0
        self._wake = wake
        self.results: deque[Callable[[], None]] = deque()
        self._actions: dict[_Queue, deque[_Action]] = {}  # the queues take turns
        self._computer: WorkerThread | None = None

    def post(self, result: Callable[[], None]) -> None:
        """Accepts the result of another thread."""
        self.results.append(result)
        self._wake()

    def take_results(self) -> None:
        """Processes the results that other threads have posted."""
        while self.results:
            self.results.popleft()()

    def compute_beside(self) -> None:
        """Lets a thread of its own perform long actions from now on."""
        self._computer = WorkerThread("compute", self.post)
        self._computer.submit(arithmetic_of_thread())

    def do_beside(self, thread: WorkerThread, work: Callable[[], Event], done: Callable[[Event], None]) -> None:
        """Submits work to another thread. `done` is called with the resulting event."""

        def take(event: Event) -> None:
            self.beside -= 1
            done(event)

        self.beside += 1
        thread.submit(lambda: self.post(partial(take, work())))

    def begin(self, role: int, work: Iterator[Event | Pending | None], done: Callable[[Event], None]) -> None:
        """Begins a long action of a role. `done` is called with its event if a separate thread performs the action."""
        if self._computer is None:
            self._append((role, True), _Action(work))
        else:
            self.do_beside(self._computer, lambda: finished(work)[0], done)

    def do_now(self, role: int, work: Iterator[Event | Pending | None]) -> list[Event]:
        """Does a short action of a role. Returns its events, unless it or an earlier action waits for a device."""
        queue, events = (role, False), list[Event]()
        for found in work:
            if isinstance(found, Pending):
                self._append(queue, _Action(work, found))
                return events
            if found is not None:
                events.append(found)
        if events and queue in self._actions:
            self._append(queue, _Action(iter(events)))
            return []
        return events

    def _append(self, queue: _Queue, action: _Action) -> None:
        if action.pending is not None:
            action.pending.when_done(self._wake)
        self._actions.setdefault(queue, deque()).append(action)

    def begin_here(self, role: int, work: Iterator[BurstMade | BankDone | Pending | None]) -> None:
        """Begins long work of a role in this thread, behind the role's other long work."""
        self._append((role, True), _Action(work))

    def advance(self) -> tuple[int, Event | BurstMade | BankDone | None] | None:
        """Does a piece of long work. Returns its role, and its event after the last piece.

        None: there is no work, or all of it waits for a device.
        """
        for queue in list(self._actions):
            actions = self._actions.pop(queue)
            action = actions.popleft()
            found = next(action.work)
            if isinstance(found, Pending):
                if found is not action.pending:
                    found.when_done(self._wake)
                actions.appendleft(action._replace(pending=found))
            elif found is None:
                actions.appendleft(action)
            if actions:
                self._actions[queue] = actions  # the last one in turn
            if not isinstance(found, Pending):
                return queue[0], found
        return None

    def works_for(self, roles: Collection[int]) -> bool:
        """Returns whether work of some of these roles is not over in this thread, and needs no request to end."""
        pending = (actions[0].pending for (role, _), actions in self._actions.items() if role in roles)
        return any(each is None or not each.gathers for each in pending)

    @property
    def under_way(self) -> bool:
        """Whether other threads or devices work for this rank."""
        return bool(self.beside or self._actions)

    @property
    def threaded(self) -> bool:
        """Whether other threads work for this rank."""
        pending = (actions[0].pending for actions in self._actions.values())
        return bool(self.beside) or any(each is not None and each.threaded for each in pending)

    def drop(self, roles: Collection[int]) -> None:
        """Drops the unfinished work of some roles. Waits for their devices, which would still write into buffers."""
        for queue in [queue for queue in self._actions if queue[0] in roles]:
            for action in self._actions.pop(queue):
                if action.pending is not None:
                    with suppress(Exception):  # its result is not needed
                        action.pending.numbers()

    def close(self) -> None:
        """Ends the computing thread."""
        if self._computer is not None:
            self._computer.close()
