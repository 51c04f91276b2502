"""Accounts that the statistics server collects until a run can end."""

from collections.abc import Iterable

import numpy as np

from rudra.core import records
from rudra.core.actions import Action, Finish, Halt, Send
from rudra.core.messages import LearnerRows, Rows, Shutdown
from rudra.errors import EXIT_FAILED, EXIT_STOPPED
from topologies import Plan


class Accounts:
    """Closing accounts of all learners and of the owner of the weights.

    Args:
        role: id of the statistics server.
        plan: roles of the run and their connections.

    Attributes:
        totals: account of the owner, or None if it has not arrived.
        code: exit code of the run.
        gone: ids of roles whose rank has died.
        dropped: ids of roles that were dropped because they were too slow, and may never report.
    """

    def __init__(self, role: int, plan: Plan) -> None:
        self._role, self._roles = role, range(len(plan.roles))
        self._learners = np.zeros(plan.learner_numbers, records.LEARNER)
        self._known: set[int] = set()  # learners whose row has arrived
        self._reported: set[int] = set()  # roles that have reported rows of their own
        self.totals: Rows | None = None
        self.code = 0
        self.gone: set[int] = set()
        self.dropped: set[int] = set()

    def enter(self, message: LearnerRows) -> None:
        """Takes rows of learners. A learner's first row counts: the owner also reports a learner that died."""
        self._reported.add(message.sender)
        for row in message.rows:
            if int(row["learner"]) not in self._known:
                self._learners[row["learner"]] = row
                self._known.add(int(row["learner"]))

    def note_events(self, rows: Rows) -> None:
        """Takes note of roles that were dropped, and of those that died, which another rank may notice first."""
        self.dropped |= set(rows["role"][rows["kind"] == b"dropped"].tolist())
        self.gone |= set(rows["role"][rows["kind"] == b"lost"].tolist())

    def stop(self, timestamp: int) -> None:
        """Notes that the run was stopped; `timestamp` names the last checkpoint, and is -1 if there is none."""
        self.code = EXIT_FAILED if timestamp < 0 else EXIT_STOPPED

    @property
    def missing(self) -> int:
        """Number of learners without an account."""
        return len(self._learners) - len(self._known)

    @property
    def complete(self) -> bool:
        return self.totals is not None and not self.missing

    def finish(self, weights: str | None, *, stops_at_loss: bool) -> Iterable[Action]:
        """Ends the run for all roles.

        Args:
            weights: buffer of the final weights, or None if the run was stopped.
            stops_at_loss: whether the death of a learner may have stopped the run.
        """
        assert self.totals is not None
        assert (weights is None) == bool(self.code)
        apart = not self.dropped <= self._reported
        reason = "a learner died" if self.gone and stops_at_loss else "stopped on request"
        done = Shutdown(self._role, self.code, apart)
        yield Finish(self.totals, self._learners, weights, reason if self.code else "")
        yield from (Send(i, done) for i in self._roles if i != self._role and i not in self.gone)
        yield Halt(self.code, apart)
