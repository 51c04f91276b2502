"""Duties of an owner of weights, except decisions about updates.

Parameter servers, and learners without a server, have an `OwnerDuties` object. It counts updates, makes checkpoints and
sends snapshots. It also notes when all owners have made an update, records lost roles, and reports the totals at the
end of training.
"""

from collections.abc import Mapping
from typing import Any

from rudra.core.actions import Action, Fail, Send
from rudra.core.events import Committed, Received, Saved, Updated
from rudra.core.messages import MessageKind, OwnerStepped, RowsFlushed, SnapshotCredit, Stop
from rudra.core.records import Gradient
from rudra.roles.checkpoint_cycle import CheckpointCycle
from rudra.roles.ledger import Ledger
from rudra.roles.machine import Setup
from rudra.roles.multi_owner import OwnerSteps
from rudra.roles.stage_log import StageLog

MAINTENANCE: Mapping[Any, str] = dict.fromkeys(
    (Saved, MessageKind.ROWS_FLUSHED, Committed, MessageKind.SNAPSHOT_CREDIT), "_maintain"
)
"""Events of checkpoints and snapshots. A waiting update may proceed after them."""

WISHES: Mapping[Any, str] = {
    MessageKind.TARGET_REACHED: "_end_with_epoch",
    MessageKind.PLATEAU: "_lower_rate",
    MessageKind.CHANGE_DECIDED: "_decide",
    MessageKind.EXHAUSTED: "_end_with_checkpoint",
}
"""Decisions of the statistics server."""


class OwnerDuties:
    """Duties of one owner.

    Args:
        role: id of the owner.
        setup: arguments of the owner's role.
        leads: whether this owner reports, makes checkpoints, and decides for the owners of other layers.

    Attributes:
        ledger: counters and records of the owner's weights.
        cycle: schedule of the owner's checkpoints.
        stages: log that the owners of other layers follow.
        steps: updates that some owners have not made yet.
    """

    def __init__(self, role: int, setup: Setup, *, leads: bool = True) -> None:
        plan, results, position = setup.plan, setup.job.results, setup.position
        self.ledger = Ledger(role, setup, reports=leads)
        self._leads = leads
        intervals = (results.checkpoint_interval, results.kept_interval) if leads else (None, None)
        self.cycle = CheckpointCycle(self.ledger, intervals[0], position, intervals[1])
        self.stages = StageLog(role, setup, plan.stages if leads else ())
        owners = plan.front_owners if plan.served else (role,)
        self.steps = OwnerSteps(plan.owners if self.stages.synchronous else owners)

    @property
    def are_ahead(self) -> bool:
        """Whether the next update must wait for the statistics server or for a checkpoint."""
        return self.are_ahead_of(ends_epoch=self.ledger.ends_epoch)

    def are_ahead_of(self, *, ends_epoch: bool) -> bool:
        """Whether the next update must wait, given whether it ends an epoch."""
        return self.ledger.is_ahead_of(ends_epoch=ends_epoch) or self.cycle.is_ahead_of(ends_epoch=ends_epoch)

    @property
    def waiting_for(self) -> str:
        """Reason why the next update must wait, as text for people."""
        evaluates = self.ledger.is_ahead_of(ends_epoch=self.ledger.ends_epoch)
        return "the statistics server to evaluate the weights" if evaluates else "a checkpoint to be written"

    def count(self, gradients: tuple[Gradient, ...], scale: float) -> int:
        """Counts gradients for the next update and returns their number of samples."""
        samples = self.ledger.count(gradients, scale)
        self.stages.add(gradients, scale)
        return samples

    def update(self, gradient: str, now: float) -> list[Action]:
        """Updates the weights by the average of all counted gradients, and begins a checkpoint if one is due."""
        return self.ledger.update(gradient, now) + self.cycle.updated(now)

    def note(self, made: Updated | OwnerStepped, now: float) -> list[Action] | None:
        """Notes that an owner has made an update. Returns the resulting actions, or None if other owners have not."""
        whole: Updated | None
        if isinstance(made, Updated):
            whole = made if self.steps.alone and not made.sampled else self.steps.here(made)
        else:
            whole = self.steps.there(made)
        return None if whole is None else self.ledger.note(whole, now) + self.cycle.noted(now)

    def maintain(
        self, event: Saved | Received[RowsFlushed] | Committed | Received[SnapshotCredit], now: float
    ) -> list[Action]:
        """Takes the next step of a checkpoint, or sends a snapshot that was waiting for credit."""
        if isinstance(event, Received) and isinstance(event.message, SnapshotCredit):
            return self.ledger.credit()
        return self.cycle.take(event, now)

    def lose(self, role: int, now: float, *, ended: bool) -> list[Action] | None:
        """Handles the death of a role. Returns the resulting actions, or None if training must continue without it.

        Args:
            role: id of the dead role.
            now: seconds on the driver's clock.
            ended: whether training has ended.
        """
        ledger = self.ledger
        title = ledger.rules.plan.roles[role].title
        if role == ledger.rules.plan.statistics:
            return [Fail(f"the {title} died", lost=True)]
        if role in ledger.recorded_losses:
            return []
        if ended:
            return ledger.record_late_loss(role, now)
        return None if ledger.clock.started else [Fail(f"{title} died before training began", lost=True)]

    def account(
        self, now: float, *, pushed: int, pending: int = 0, discarded: int = 0, lost: int = 0, stopped: bool
    ) -> list[Action]:
        """Reports the totals of the training. Makes a last checkpoint if the training was stopped.

        The other roles know the end of training. Dormant learners are notified.
        """
        ledger = self.ledger
        totals = ledger.totals(now, pushed, pending, discarded, lost)
        told = [Send(i, Stop(ledger.id)) for i in sorted(ledger.rules.plan.dormant) if self._leads]
        return [*totals, *told, *(self.cycle.end(now) if stopped else ()), *self.stages.end()]
