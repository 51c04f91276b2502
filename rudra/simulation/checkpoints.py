"""Checkpoints of a simulation, in the format of a run on ranks.

Writing takes no virtual time. The owner of the weights continues at once, and the file is written when all roles have
given their parts.
"""

from collections.abc import Mapping

from rudra.compute.executor import Executor
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.core.actions import Commit, Save, Sync
from rudra.core.events import Committed, Saved
from rudra.core.layout import NamedVectors
from rudra.core.training_state import TrainingState
from rudra.log import log
from rudra.results.checkpoint import CheckpointWriter, discard_piece
from rudra.results.recorder import Recorder
from rudra.roles.checkpoint_cycle import final_name
from rudra.roles.ledger import Owner
from rudra.simulation.actor import Actor
from rudra.simulation.driver import Simulation


class SimulatedCheckpoints:
    """Checkpoints of a simulation.

    Args:
        simulation: Simulation whose roles save their state.
        executors: Executors by role.
        writer: Writer of the checkpoints.
        recorder: Recorder of the result file, which must have all rows of a checkpoint.
    """

    def __init__(
        self, simulation: Simulation, executors: Mapping[int, Executor], writer: CheckpointWriter, recorder: Recorder
    ) -> None:
        self._simulation, self._executors, self._writer = simulation, executors, writer
        self._parts: dict[int, NamedVectors] = {}  # by role, of the checkpoint that is being made
        self._position: TrainingState | None = None
        self._saved = False  # but not committed
        self._keep: str | None = None  # name under which the owner wants to keep the checkpoint that it commits
        self._error = ""
        simulation.do |= {
            Save: self._save,
            Commit: self._commit,
            Sync: lambda actor, action, time: recorder.sync(),
        }

    def _save(self, actor: Actor, action: Save, time: float) -> None:
        role, plan = actor.role, self._simulation.plan
        if action.alone:  # other roles may have died before they gave their parts
            self._parts.clear()
        self._parts[role] = self._owner(role).state(alone=action.alone)
        if role == plan.server:
            self._position = action.position
            self._later(actor, Saved(action.position.timestamp))
        keepers = (plan.server,) if action.alone else plan.keepers
        if self._position is not None and self._parts.keys() >= {*keepers}:
            self._write([self._parts[keeper] for keeper in keepers])

    def _write(self, parts: list[NamedVectors]) -> None:
        assert self._position is not None
        try:
            self._writer.save(self._position, joined(parts))
            self._saved = True
        except OSError as error:
            self._error = f"{self._writer.path}: {error.strerror or error}"
        self._parts, self._position = {}, None
        if self._keep is not None:  # the owner has committed it already
            self._end(self._keep)
            if why := self._take_error():
                log.warning(f"a checkpoint was not written: {why}")

    def _commit(self, actor: Actor, action: Commit, time: float) -> None:
        if self._saved or self._error:
            self._end(action.keep)
        else:  # the last part is still to come
            self._keep = action.keep
        self._later(actor, Committed(action.timestamp, self._take_error()))

    def _take_error(self) -> str:
        error, self._error = self._error, ""
        return error

    def _end(self, keep: str) -> None:
        """Makes the saved file the checkpoint."""
        try:
            if self._saved:
                self._writer.commit(keep)
        except OSError as error:
            self._error = f"{self._writer.path}: {error.strerror or error}"
        self._saved, self._keep = False, None

    def close(self) -> None:
        """Removes a file that was not committed, after an error or an interruption."""
        self._writer.release()
        discard_piece(self._writer.path)

    def finish(self, *, interval: tuple[int, str] | None, leaves: bool) -> None:
        """Writes the final checkpoint after the last update.

        Args:
            interval: Interval between kept checkpoints, or None.
            leaves: Whether the simulation leaves its last checkpoint. Otherwise it leaves only kept ones.
        """
        owner = self._simulation.actors[self._simulation.plan.server].machine
        assert isinstance(owner, Owner)
        position = owner.ledger.last_position
        state = joined([self._owner(role).last_state() for role in self._simulation.plan.keepers])
        try:
            self._writer.finish(position, state, final_name(interval, position), leaves=leaves)
        except OSError as error:
            log.warning(
                f"{self._writer.path}: the final checkpoint was not written: {error.strerror or error}; everything "
                "else is complete"
            )

    def _owner(self, role: int) -> OwnerExecutor:
        executor = self._executors[role]
        assert isinstance(executor, OwnerExecutor)
        return executor

    def _later(self, actor: Actor, event: Saved | Committed) -> None:
        queue = self._simulation.queue
        queue.later(max(queue.now, actor.busy_until), actor.take, actor, event)
