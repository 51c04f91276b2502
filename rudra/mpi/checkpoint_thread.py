"""Checkpoints of a run: the states of all owners are gathered, and a thread writes them, because disks may be slow."""

from collections.abc import Callable

from rudra.compute.parts import joined
from rudra.core.actions import Save
from rudra.core.events import Committed, Event, Saved
from rudra.core.layout import NamedVectors
from rudra.mpi.comm_threads import WorkerThread
from rudra.mpi.long_work import LongWork
from rudra.mpi.states import StateTransfer
from rudra.results.checkpoint import CheckpointWriter


class CheckpointThread:
    """Thread that saves and commits checkpoints.

    Args:
        writer: checkpoint writer, on the rank of the weights' owner. None on other ranks, which only send their states.
        work: long work of the rank, which counts what this thread does.
        states: transfer of the owners' states to the rank that writes checkpoints.
    """

    def __init__(self, writer: CheckpointWriter | None, work: LongWork, states: StateTransfer) -> None:
        self._writer, self._work, self._states = writer, work, states
        self._thread: WorkerThread | None = None

    def save(self, action: Save, state: NamedVectors, done: Callable[[Event], None]) -> None:
        """Saves the state of the weights' owner together with the states of all other owners.

        Args:
            action: save action of the weights' owner.
            state: state of the weights' owner.
            done: called with the event that follows.
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
            self._states.gather(position.timestamp, write)

    def commit(self, timestamp: int, keep: str, done: Callable[[Event], None]) -> None:
        """Commits the checkpoint that was saved last."""
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
        """Ends the thread after it has written everything that was submitted."""
        if self._thread is not None:
            self._thread.close()
