"""The statistics server: gathers what the others measured, tests the weights, records everything.

Source: rudra.txt §3.2. Nobody waits for it: it holds one snapshot of the weights in work and one
waiting, gives the parameter server a credit for each that it is done with, and the parameter server skips an
epoch for which it has no credit. The last epoch is always tested.

    GATHERING  totals, every learner's account and every epoch recorded -> DONE  finish, tell everybody
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np

from rudra import records
from rudra.config import Job
from rudra.events import Action, Evaluate, Evaluated, Finish, Halt, Receive, Received, Record, Send, Started
from rudra.messages import Kind, Message, Rows
from rudra.roles.machine import Machine
from rudra.roles.server import CREDITS
from topologies import Plan

SNAPSHOTS = tuple(f"snapshot {i}" for i in range(CREDITS))


class State(Enum):
    GATHERING = auto()
    DONE = auto()


class StatisticsServer(Machine):
    """The only role that records.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[Enum, Any], str]] = {
        (State.GATHERING, Started): "_start",
        (State.GATHERING, Kind.START): "_begin",
        (State.GATHERING, Kind.GRADIENTS): "_gradients",
        (State.GATHERING, Kind.UPDATES): "_updates",
        (State.GATHERING, Kind.MINIBATCHES): "_minibatches",
        (State.GATHERING, Kind.EPOCHS): "_epoch",
        (State.GATHERING, Kind.SNAPSHOT): "_snapshot",
        (State.GATHERING, Evaluated): "_evaluated",
        (State.GATHERING, Kind.LEARNERS): "_learner",
        (State.GATHERING, Kind.TOTALS): "_account",
    }

    def __init__(self, role: int, plan: Plan, job: Job) -> None:
        super().__init__(role, plan)
        self.state = State.GATHERING
        self.epochs = job.training.epochs
        self._evaluates = job.training.evaluate
        self._records_minibatches = job.results.minibatches
        self._learners = np.zeros(len(plan.learners), records.LEARNER)
        self._accounts = 0
        self._totals: Rows | None = None
        self._rows: dict[int, Rows] = {}  # epoch -> its row, until those before it are recorded
        self._waiting: deque[tuple[str, int]] = deque()  # snapshots to test: buffer and epoch
        self._testing: int | None = None
        self._recorded = 0
        self._final_weights: str | None = None

    @property
    def waiting_for(self) -> str:
        if self._totals is None:
            return "the parameter server's account"
        if self._accounts < len(self._learners):
            return f"the accounts of {len(self._learners) - self._accounts} learners"
        return f"the weights of epoch {self._recorded + 1}"

    def validate(self) -> None:
        assert len(self._waiting) <= CREDITS
        assert self._recorded <= self.epochs

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Receive(buffer, self.plan.server) for buffer in SNAPSHOTS]

    def _begin(self, event: Received, now: float) -> list[Action]:
        return []

    def _gradients(self, event: Received, now: float) -> list[Action]:
        return [Record("gradients", _rows(event))]

    def _updates(self, event: Received, now: float) -> list[Action]:
        return [Record("updates", _rows(event))]

    def _minibatches(self, event: Received, now: float) -> list[Action]:
        return [Record("minibatches", _rows(event))] if self._records_minibatches else []

    def _epoch(self, event: Received, now: float) -> list[Action]:
        rows = _rows(event)
        self._rows[int(rows[0]["epoch"])] = rows
        return self._record(now)

    def _snapshot(self, event: Received, now: float) -> list[Action]:
        rows = _rows(event)
        epoch = int(rows[0]["epoch"])
        self._rows[epoch] = rows
        assert event.buffer is not None
        if epoch == self.epochs:
            self._final_weights = event.buffer
        if not self._evaluates:
            return self._record(now)
        rows["evaluated"] = 1
        self._waiting.append((event.buffer, epoch))
        return self._test()

    def _test(self) -> list[Action]:
        if self._testing is not None or not self._waiting:
            return []
        buffer, self._testing = self._waiting.popleft()
        return [Evaluate(buffer)]

    def _evaluated(self, event: Evaluated, now: float) -> list[Action]:
        assert self._testing is not None
        rows = self._rows[self._testing]
        rows["test_loss"], rows["test_error"], rows["test_error_top5"] = event.loss, event.error, event.error_top5
        rows["evaluation_s"] = event.seconds
        last = self._testing == self.epochs
        self._testing = None
        actions: list[Action] = []
        if not last:  # the last snapshot holds the final weights, which are still to be written
            actions = [Receive(event.buffer, self.plan.server), self._to_server(Kind.CREDIT)]
        return actions + self._test() + self._record(now)

    def _record(self, now: float) -> list[Action]:
        """Records the epochs that are complete, in order, and finishes after the last."""
        actions: list[Action] = []
        tested_later = {epoch for _, epoch in self._waiting} | {self._testing}
        while (following := self._recorded + 1) in self._rows and following not in tested_later:
            actions.append(Record("epochs", self._rows.pop(following)))
            self._recorded = following
        return actions + self._finish()

    def _learner(self, event: Received, now: float) -> list[Action]:
        for row in _rows(event):
            self._learners[row["learner"]] = row
            self._accounts += 1
        return self._finish()

    def _account(self, event: Received, now: float) -> list[Action]:
        self._totals = _rows(event)
        return self._finish()

    def _finish(self) -> list[Action]:
        complete = self._accounts == len(self._learners) and self._recorded == self.epochs
        if self._totals is None or not complete:
            return []
        assert self._final_weights is not None
        self.state = State.DONE
        done = Message(Kind.DONE, self.id)
        others = (i for i in range(len(self.plan.roles)) if i != self.id)
        return [Finish(self._totals, self._learners, self._final_weights), *(Send(i, done) for i in others), Halt()]

    def _to_server(self, kind: Kind) -> Action:
        return Send(self.plan.server, Message(kind, self.id))


def _rows(event: Received) -> Rows:
    rows = event.message.rows
    assert rows is not None
    return rows
