"""The checkpoints of whoever owns weights.

Each is made in three steps, one after the other, while training goes on: weights and optimiser state are copied and
written to a file beside the last one; the statistics server brings the rows up to there to the disk; the new file
takes the last one's place. So whatever a checkpoint needs of the result file is there. One that is kept, for other runs
to begin with, is such a checkpoint under a second name.
"""

from rudra.core.events import WEIGHTS, Action, Commit, Committed, Received, Save, Saved, Send, Warn
from rudra.core.messages import CheckpointWritten, RowsFlushed, RunStopped
from rudra.core.training_state import TrainingState
from rudra.roles.ledger import Ledger


def name_of(keep: tuple[int, str], before: int, epoch: int, timestamp: int) -> str:
    """What a checkpoint is called that is kept; empty: it is not.

    Args:
        keep: how many updates or epochs from one to the next.
        before: epochs that were complete before its update.
        epoch: those that are complete with it.
        timestamp: of the update.
    """
    count, unit = keep
    if unit == "update":
        return "" if timestamp % count else f"update{timestamp}"
    return str(epoch) if epoch // count > before // count else ""


class CheckpointCycle:
    """One checkpoint after the other.

    Args:
        ledger: the books of the weights.
        every: how many updates, epochs or seconds from one to the next; None: there are none.
        position: where training begins.
        keep: how many updates or epochs from one that is kept to the next; None: none is.

    Attributes:
        saving: what is on its way to the disk.
        alone: it has nothing of other roles.
    """

    def __init__(
        self,
        ledger: Ledger,
        every: tuple[int, str] | None,
        position: TrainingState,
        keep: tuple[int, str] | None = None,
    ) -> None:
        self._ledger, self._every, self._keep = ledger, every, keep
        self._looked = position.epoch  # complete when it was last looked whether to keep one
        self._name = ""  # of the one on its way, if it is kept
        self._last = position
        self.saving: TrainingState | None = None
        self.alone = False
        self._kept = position.timestamp if position.steps else -1  # timestamp of the last one that is safe
        self._ending = False

    def updated(self, now: float) -> list[Action]:
        """An update was made; begins a checkpoint if one is due."""
        ledger = self._ledger
        wanted = self.saving is None and self.wanted(ledger.timestamp, ledger.epoch, now)
        actions = self.begin(now) if wanted else []
        self._looked = ledger.epoch
        return actions

    def wanted(self, timestamp: int, epoch: int, now: float) -> bool:
        """Whether one is due with the update of a timestamp, with which so many epochs are complete."""
        if epoch >= self._ledger.epochs:
            return False
        due = self.saving is None and self._every is not None and self._due(self._every, timestamp, epoch, now)
        return due or bool(self._kept_name(timestamp, epoch))

    def begin(self, now: float) -> list[Action]:
        """Begins the one of the last update, which is kept if it has a name."""
        name = self._kept_name(self._ledger.timestamp, self._ledger.epoch)
        actions = self.save(now)
        self._name, self._looked = name, self._ledger.epoch
        return actions

    def _kept_name(self, timestamp: int, epoch: int) -> str:
        """What the checkpoint of an update is called if it is to be kept; else nothing."""
        return "" if self._keep is None else name_of(self._keep, self._looked, epoch, timestamp)

    @property
    def is_ahead(self) -> bool:
        """Whether the checkpoint of the next update is perhaps to be kept, while one before it is being written."""
        if self._keep is None or self.saving is None:
            return False
        count, unit = self._keep
        ledger = self._ledger
        return not (ledger.timestamp + 1) % count if unit == "update" else ledger.ends_epoch

    def _due(self, every: tuple[int, str], timestamp: int, epoch: int, now: float) -> bool:
        (count, unit), last = every, self._last
        if unit == "s":
            return now - self._ledger.clock.start_time - last.time_s >= count
        return (timestamp - last.timestamp if unit == "update" else epoch - last.epoch) >= count

    def save(self, now: float, *, alone: bool = False) -> list[Action]:
        """Begins a checkpoint, `alone` without what other roles keep."""
        self.saving, self._name = self._ledger.position(now), ""
        self._last, self.alone = self.saving, alone
        return [Save(WEIGHTS, self.saving, alone)]

    def take(self, event: Saved | Received[RowsFlushed] | Committed, now: float) -> list[Action]:
        """The next step: it is written, its rows are on the disk, or it has taken the last one's place."""
        if isinstance(event, Received):
            return [Commit(event.message.timestamp, self._name)]
        assert self.saving is not None
        if event.error:
            text = f"no checkpoint at update {self.saving.timestamp}: {event.error}; training continues without it"
            self.saving = None
            return [Warn(text), *self._end(now, failed=True)]
        if isinstance(event, Saved):
            message = CheckpointWritten(self._ledger.id, self.saving.timestamp, self.saving.epoch)
            return [*self._ledger.outbox.flush(now), Send(self._ledger.rules.plan.statistics, message)]
        position, self.saving = self.saving, None
        self._kept = position.timestamp
        text = f"written in {now - self._ledger.clock.start_time - position.time_s:.2f} s, in parallel with training"
        self._ledger.tell("checkpoint", position.timestamp, position.time_s, text)
        return self._ledger.outbox.due(now) + self._end(now)

    def end(self, now: float) -> list[Action]:
        """Ends a run that was stopped and is accounted for, once its last checkpoint is made, or cannot be."""
        self._ending = True
        return self._end(now)

    def _end(self, now: float, *, failed: bool = False) -> list[Action]:
        ledger = self._ledger
        if not self._ending or self.saving is not None:
            return []
        if self._kept < ledger.timestamp and not failed:
            return self.save(now)
        end = RunStopped(ledger.id, self._kept, ledger.epoch)
        return [*ledger.outbox.flush(now), Send(ledger.rules.plan.statistics, end)]
