"""Checkpoints of a run: what all owners keep is gathered, and a thread writes it, because the disk may be slow."""

from collections.abc import Callable

from rudra.compute.parts import joined
from rudra.core.events import Committed, Event, Save, Saved
from rudra.core.layout import NamedVectors
from rudra.mpi.comm_threads import WorkerThread
from rudra.mpi.long_work import LongWork
from rudra.mpi.states import StateTransfer
from rudra.results.checkpoint import CheckpointWriter


class CheckpointThread:
    """Saves and commits checkpoints.

    Args:
        writer: of the weights' owner; None on other ranks, which only give what they keep.
        work: of the rank, in which the thread has its part.
        states: what roles keep that a checkpoint needs, on its way.

    Attributes:
        states: as given; another one after the rank has regrouped.
    """

    def __init__(self, writer: CheckpointWriter | None, work: LongWork, states: StateTransfer) -> None:
        self.states = states
        self._writer, self._work = writer, work
        self._thread: WorkerThread | None = None

    def save(self, action: Save, state: NamedVectors, done: Callable[[Event], None]) -> None:
        """Saves the state of the weights' owner, with those of all others.

        Args:
            action: of the owner.
            state: what it keeps.
            done: takes the event that follows.
        """
        position = action.position

        def write(others: list[NamedVectors] | None) -> None:
            if others is None:
                done(Saved(position.timestamp, "a rank died"))
            else:
                self._do(
                    lambda writer: writer.save(position, joined([state, *others])), Saved, position.timestamp, done
                )

        if action.alone:
            write([])
        else:
            self.states.gather(write)

    def commit(self, timestamp: int, keep: str, done: Callable[[Event], None]) -> None:
        """Makes the checkpoint that was saved the one that counts."""
        self._do(lambda writer: writer.commit(keep), Committed, timestamp, done)

    def _do(
        self,
        step: Callable[[CheckpointWriter], None],
        event: type[Saved] | type[Committed],
        timestamp: int,
        done: Callable[[Event], None],
    ) -> None:
        writer = self._writer
        assert writer is not None

        def work() -> Event:
            error = ""
            try:
                step(writer)
            except OSError as problem:
                error = f"{writer.path}: {problem.strerror or problem}"
            return event(timestamp, error)

        self._thread = self._thread or WorkerThread("checkpoint", self._work.post)
        self._work.do_beside(self._thread, work, done)

    def close(self) -> None:
        """Ends the thread, when it has written what was to be written."""
        if self._thread is not None:
            self._thread.close()
