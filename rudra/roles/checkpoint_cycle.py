"""Checkpoints of a role that owns weights.

A checkpoint is made in three steps while training continues. First, weights and optimiser state are copied and written
to a file next to the last checkpoint. Second, the statistics server writes all rows up to this update to the disk.
Third, the new file replaces the last one. So the result file has every row that a checkpoint needs.

The second step begins when all owners have reported the update. An owner's state may arrive before its report.

A kept checkpoint has a second file name, so that other runs can start from it.
"""

from rudra.core.actions import Action, Commit, Fail, Save, Send, Warn
from rudra.core.buffer_names import WEIGHTS
from rudra.core.decisions import text_of
from rudra.core.events import Committed, Received, Saved
from rudra.core.messages import CheckpointWritten, RoleExhausted, RowsFlushed, RunStopped
from rudra.core.training_state import TrainingState
from rudra.roles.ledger import Ledger


def name_of(keep: tuple[int, str], before: int, epoch: int, timestamp: int) -> str:
    """Returns the name of an update's checkpoint if it is kept, else an empty string.

    Args:
        keep: interval between kept checkpoints: a number of updates or epochs, and the unit.
        before: number of epochs that were complete before the update.
        epoch: number of epochs that are complete with the update.
        timestamp: timestamp of the update.
    """
    count, unit = keep
    if unit == "update":
        return "" if timestamp % count else f"update{timestamp}"
    return str(epoch) if epoch // count > before // count else ""


def final_name(keep: tuple[int, str] | None, position: TrainingState) -> str:
    """Returns the name of the last update's checkpoint if it is kept, else an empty string.

    Args:
        keep: interval between kept checkpoints, or None.
        position: state of training at its end.
    """
    return "" if keep is None else name_of(keep, position.epoch - 1, position.epoch, position.timestamp)


class CheckpointCycle:
    """Schedule and progress of checkpoints, which are made one at a time.

    Args:
        ledger: counters and records of the weights.
        every: interval between checkpoints, in updates, epochs or seconds. None: no checkpoints.
        position: state of training at the start.
        keep: interval between kept checkpoints, in updates or epochs. None: no checkpoint is kept.

    Attributes:
        saving: state of training in the checkpoint that is being made, or None if there is none.
        alone: whether the last checkpoint begun omits the state of other roles.
    """

    def __init__(
        self,
        ledger: Ledger,
        every: tuple[int, str] | None,
        position: TrainingState,
        keep: tuple[int, str] | None = None,
    ) -> None:
        self._ledger, self._every, self._keep = ledger, every, keep
        self._looked = position.epoch  # epochs complete at the last decision whether to keep a checkpoint
        self._name = ""  # of the checkpoint that is being made, if it is kept
        self._last = position
        self.saving: TrainingState | None = None
        self.alone = False
        self._written = False  # whether the file is written, and its rows are not requested yet
        self._kept = position.timestamp if position.steps else -1  # timestamp of the last complete checkpoint, or -1
        self._ending = False
        self._failure: Fail | None = None  # it follows the last checkpoint

    def updated(self, now: float) -> list[Action]:
        """Handles an update, and begins a checkpoint if one is due."""
        ledger = self._ledger
        wanted = self.saving is None and self.wanted(ledger.timestamp, ledger.epoch, now)
        actions = self.begin(now) if wanted else []
        self._looked = ledger.epoch
        return actions

    def wanted(self, timestamp: int, epoch: int, now: float) -> bool:
        """Returns whether a checkpoint is due with an update, after which `epoch` epochs are complete."""
        if epoch >= self._ledger.epochs:
            return False
        due = self.saving is None and self._every is not None and self._due(self._every, timestamp, epoch, now)
        return due or bool(self._kept_name(timestamp, epoch))

    @property
    def counts_updates(self) -> bool:
        """Whether the number of updates decides when a checkpoint is due."""
        return self._keep is not None or (self._every is not None and self._every[1] == "update")

    def begin(self, now: float) -> list[Action]:
        """Begins the checkpoint of the last update, and keeps it if that is due."""
        name = self._kept_name(self._ledger.timestamp, self._ledger.epoch)
        actions = self.save(now)
        self._name, self._looked = name, self._ledger.epoch
        return actions

    def _kept_name(self, timestamp: int, epoch: int) -> str:
        """Returns the name of an update's checkpoint if it must be kept, else an empty string."""
        return "" if self._keep is None else name_of(self._keep, self._looked, epoch, timestamp)

    def is_ahead_of(self, *, ends_epoch: bool) -> bool:
        """Whether the next update's checkpoint may have to be kept, while an earlier one is still being written."""
        if self._keep is None or self.saving is None:
            return False
        count, unit = self._keep
        return not (self._ledger.timestamp + 1) % count if unit == "update" else ends_epoch

    def _due(self, every: tuple[int, str], timestamp: int, epoch: int, now: float) -> bool:
        (count, unit), last = every, self._last
        if unit == "s":
            return now - self._ledger.clock.start_time - last.time_s >= count
        return (timestamp - last.timestamp if unit == "update" else epoch - last.epoch) >= count

    def save(self, now: float, *, alone: bool = False) -> list[Action]:
        """Begins a checkpoint. With `alone` it omits the state of other roles."""
        self.saving, self._name = self._ledger.position(now), ""
        self._last, self.alone = self.saving, alone
        return [Save(WEIGHTS, self.saving, alone)]

    def take(self, event: Saved | Received[RowsFlushed] | Committed, now: float) -> list[Action]:
        """Handles the end of a step: the file is written, the rows are on the disk, or the last file is replaced."""
        if isinstance(event, Received):
            return [Commit(event.message.timestamp, self._name)]
        assert self.saving is not None
        if event.error:
            text = f"no checkpoint at update {self.saving.timestamp}: {event.error}; training continues without it"
            self.saving = None
            return [Warn(text), *self._end(now, failed=True)]
        if isinstance(event, Saved):
            self._written = True
            return self.noted(now)
        position, self.saving = self.saving, None
        self._kept = position.timestamp
        text = f"written in {now - self._ledger.clock.start_time - position.time_s:.2f} s, in parallel with training"
        self._ledger.tell("checkpoint", position.timestamp, position.time_s, text)
        return self._ledger.outbox.due(now) + self._end(now)

    def noted(self, now: float) -> list[Action]:
        """Requests the rows of a written checkpoint, if the row of its update is complete."""
        if not self._written or self.saving is None or self.saving.timestamp > self._ledger.noted:
            return []
        self._written = False
        message = CheckpointWritten(self._ledger.id, self.saving.timestamp, self.saving.epoch)
        return [*self._ledger.outbox.flush(now), Send(self._ledger.rules.plan.statistics, message)]

    def end(self, now: float) -> list[Action]:
        """Ends a stopped run after its closing account, when its last checkpoint is made or has failed."""
        self._ending = True
        return self._end(now)

    def fail(self, message: RoleExhausted, now: float, *, alone: bool) -> list[Action]:
        """Makes a last checkpoint if there are updates since the last one, and then ends the run with an error.

        Args:
            message: error of a role. Only the first one counts.
            now: seconds on the driver's clock.
            alone: as for `save`.
        """
        if self._failure is not None:
            return []
        self._failure = Fail(text_of(message.rows), cause=message.role)
        if self.saving is None and max(self._kept, 0) < self._ledger.timestamp:
            return self.save(now, alone=alone)
        return self._end(now)

    def _end(self, now: float, *, failed: bool = False) -> list[Action]:
        ledger = self._ledger
        if self._failure is not None and self.saving is None:
            return [*ledger.outbox.flush(now), self._failure]
        if not self._ending or self.saving is not None:
            return []
        if self._kept < ledger.timestamp and not failed:
            return self.save(now)
        end = RunStopped(ledger.id, self._kept, ledger.epoch)
        return [*ledger.outbox.flush(now), Send(ledger.rules.plan.statistics, end)]
