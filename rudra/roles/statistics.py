"""Statistics server: collects the measurements of all roles, evaluates the weights, and records the results.

Source: rudra.txt §3.2. Other roles do not wait for the statistics server. It holds at most two snapshots of the
weights: one in process and one waiting. It hashes each snapshot. Depending on the job, it also evaluates the snapshot
and stores it in the result file. It sends the parameter server a credit for each finished snapshot. Without a credit,
the parameter server skips the snapshot of an epoch. The snapshot of the last epoch is always processed. If workers
evaluate the weights, the statistics server adds up their results.

The statistics server also writes to the disk. A checkpoint is valid only after all rows up to the checkpoint, and the
rows of its epochs, are on the disk.

    GATHERING  totals, every learner's account and every epoch recorded -> DONE  finish, notify all roles
"""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import auto
from typing import Any, ClassVar

import numpy as np

from rudra.core import records
from rudra.core.actions import Action, Evaluate, Fail, MergeEvaluation, Record, Send, StoreEpochWeights, Sync, TableName
from rudra.core.decisions import MeasuredBanks
from rudra.core.events import Decided, Evaluated, Hashed, Lost, MemoryExhausted, Received, Started
from rudra.core.messages import (
    AverageRows,
    CheckpointWritten,
    ChildDone,
    EpochEvaluated,
    EpochRows,
    EventRows,
    GradientNormRows,
    GradientRows,
    LearnerRows,
    MessageKind,
    MinibatchRows,
    RoleExhausted,
    RowsFlushed,
    RunStopped,
    Snapshot,
    SnapshotCredit,
    StageReported,
    StageRows,
    TotalsRows,
    TrainingStarted,
    UpdateNormRows,
    UpdateRows,
    WeightsPart,
)
from rudra.roles.accounts import Accounts
from rudra.roles.decisions import Decisions
from rudra.roles.epoch_rows import BUFFERS, EpochTable, ReceivedSnapshots, WorkersEvaluations
from rudra.roles.goals import Goals, KeptEpochs, scores_of
from rudra.roles.machine import Machine, Setup, States, Transition, self_loops

Recorded = GradientRows | UpdateRows | MinibatchRows | AverageRows | StageRows | GradientNormRows | UpdateNormRows
TABLES: dict[MessageKind, TableName] = {
    MessageKind.GRADIENTS: "gradients",
    MessageKind.UPDATES: "updates",
    MessageKind.MINIBATCHES: "minibatches",
    MessageKind.AVERAGES: "averages",
    MessageKind.STAGES: "stages",
    MessageKind.GRADIENT_NORMS: "gradient_norms",
    MessageKind.UPDATE_NORMS: "update_norms",
}
"""Messages with rows that are recorded on arrival, and their tables."""


class StatisticsState(States):
    GATHERING = auto()
    DONE = auto()


GATHERING = StatisticsState.GATHERING


class StatisticsServer(Machine):
    """Only role that writes results.

    Args:
        role: id of the statistics server in the plan.
        setup: arguments of the role.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(
            [GATHERING],
            {
                Started: "_start",
                MessageKind.START: "_begin",
                **dict.fromkeys(TABLES, "_record_rows"),
                MessageKind.UPDATES: "_record_updates",
                MessageKind.MINIBATCHES: "_record_minibatches",
                MessageKind.SNAPSHOT: "_snapshot",
                MessageKind.WEIGHTS_PART: "_snapshot_part",
                MessageKind.EPOCH_EVALUATED: "_evaluated_by_workers",
                MessageKind.EVENTS: "_events",
                MessageKind.CHECKPOINT: "_checkpoint",
                MessageKind.EXHAUSTED: "_exhausted_elsewhere",
                MessageKind.REPORTED: "_stage_reported",
                Decided: "_decide",
                Lost: "_lose",
            },
        ),
        (StatisticsState.DONE, Decided): Transition("_ignore", StatisticsState.DONE),
        **{
            (GATHERING, trigger): Transition(method, GATHERING, StatisticsState.DONE)
            for trigger, method in {
                MessageKind.CHILD_DONE: "_stage_left",
                MessageKind.EPOCHS: "_epoch",
                Hashed: "_hashed",
                Evaluated: "_evaluated",
                MemoryExhausted: "_exhausted_here",
                MessageKind.LEARNERS: "_learner",
                MessageKind.TOTALS: "_account",
                MessageKind.RUN_STOPPED: "_end_early",
            }.items()
        },
    }

    def __init__(self, role: int, setup: Setup) -> None:
        job, plan = setup.job, setup.plan
        super().__init__(role, plan)
        self.state = GATHERING
        self._evaluates, self._sums_up = bool(job.training.evaluate), job.training.evaluate == "workers"
        self._stops_at_loss = job.fault_tolerance.on_learner_loss == "stop"
        self._goals = Goals(role, plan.server, job)
        self._decisions = Decisions(role, setup)
        self._kept = KeptEpochs(job)
        self._accounts = Accounts(role, plan)
        self._epochs = EpochTable(setup.position.epoch, self._kept.last)
        self._snapshots = ReceivedSnapshots(plan)
        self._workers = WorkersEvaluations()
        self._checkpointed: CheckpointWritten | None = None  # written, but not all of its rows are on the disk yet
        self._began = 0.0
        self._final_weights: str | None = None
        self._lacking = ""  # what to say about an evaluation without memory
        self._reported = dict.fromkeys(plan.stages, -1)  # by stage server: last checkpoint with all its rows

    @property
    def waiting_for(self) -> str:
        if self._accounts.totals is None:
            return f"the account of the {self.plan.roles[self.plan.server].name}"
        if self._accounts.missing:
            return f"the accounts of {self._accounts.missing} learners"
        if self._reported and self._epochs.recorded == self._epochs.last:
            return "the last rows of the stage server"
        return f"the weights of epoch {self._epochs.recorded + 1}"

    def validate(self) -> None:
        self._snapshots.validate()
        assert self._epochs.recorded <= self._kept.last

    @property
    def split(self) -> str:
        """Name of the data split whose evaluations decide about goals and the best epoch."""
        return self._goals.split

    def recall(
        self,
        tests: Mapping[int, Mapping[str, float | None]],
        kept: Collection[int],
        decisions: Sequence[str] = (),
        measured: Sequence[MeasuredBanks] = (),
    ) -> None:
        """Records the epochs before the checkpoint. The caller does this before the role starts.

        Args:
            tests: epoch -> results of the evaluation of its weights on `split`.
            kept: epochs with weights in the results. Only one of these can be the best epoch.
            decisions: JSON of the changes that were decided in these epochs.
            measured: measurements of banks that grow.
        """
        self._decisions.recall(decisions, measured)
        for epoch, scores in tests.items():
            self._goals.recall(scores)
            if epoch in kept:
                self._kept.is_best(epoch, scores)

    def _start(self, event: Started, now: float) -> list[Action]:
        return [receive for buffer in BUFFERS for receive in self._snapshots.receive(buffer)]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self._began = event.message.began_ns * 1e-9
        return self._goals.resume() + self._decisions.resume()

    def _record_rows(self, event: Received[Recorded], now: float) -> list[Action]:
        return [Record(TABLES[event.message.kind], event.message.rows)]

    def _record_minibatches(self, event: Received[MinibatchRows], now: float) -> list[Action]:
        self._decisions.time(event.message.rows)
        return self._record_rows(event, now)

    def _record_updates(self, event: Received[UpdateRows], now: float) -> list[Action]:
        return self._record_rows(event, now) + self._decisions.measure(event.message.rows)

    def _stage_reported(self, event: Received[StageReported], now: float) -> list[Action]:
        if event.message.sender in self._reported:  # else it has reported all its rows
            self._reported[event.message.sender] = event.message.timestamp
        return self._flush_rows()

    def _stage_left(self, event: Received[ChildDone], now: float) -> list[Action]:
        self._reported.pop(event.message.sender, None)  # a deciding owner may report twice that all learners left
        return self._flush_rows() + self._finish()

    # Epochs, their snapshots and evaluations.

    def _epoch(self, event: Received[EpochRows], now: float) -> list[Action]:
        self._epochs.enter(event.message.rows)
        return self._record() + self._flush_rows() + self._finish()

    def _snapshot(self, event: Received[Snapshot], now: float) -> list[Action]:
        epoch = self._epochs.enter(event.message.rows)
        buffer = self._snapshots.enter(event.buffer, epoch)
        self._kept.last = self._epochs.last = event.message.epochs
        if epoch == self._kept.last:
            self._final_weights = buffer
        return self._snapshots.begin()

    def _snapshot_part(self, event: Received[WeightsPart], now: float) -> list[Action]:
        assert event.buffer is not None
        self._snapshots.enter_part(event.buffer)
        return self._snapshots.begin()

    def _hashed(self, event: Hashed, now: float) -> list[Action]:
        buffer, epoch = self._snapshots.in_work
        rows = self._epochs.of(epoch)
        rows["weights_sha256"] = event.digest.encode()
        is_kept = self._kept.is_kept(epoch) and epoch != self._kept.last
        keep: list[Action] = [StoreEpochWeights(buffer, epoch)] if is_kept else []
        if not self._evaluates:
            return keep + self._done()
        if self._sums_up:
            self._workers.digested(epoch)
            rows["evaluation_began_s"] = rows["time_s"]
            return [*keep, *self._sum_up()]
        rows["evaluation_began_s"] = now - self._began
        return [*keep, Evaluate(buffer)]

    def _evaluated_by_workers(self, event: Received[EpochEvaluated], now: float) -> list[Action]:
        return self._sum_up() if self._workers.enter(event.message) else []

    def _sum_up(self) -> list[Action]:
        """Adds up an evaluation by workers if its weights are hashed and all its parts have arrived."""
        if self._snapshots.working is None:
            return []
        buffer, epoch = self._snapshots.working
        sums = self._workers.sums(epoch)
        if sums is None:
            return []
        if math.isnan(self._workers.seconds(epoch)):
            self._epochs.of(epoch)["evaluation_began_s"] = math.nan
            return self._done()
        return [MergeEvaluation(buffer, sums)]

    def _evaluated(self, event: Evaluated, now: float) -> list[Action]:
        buffer, epoch = self._snapshots.in_work
        metrics = self._epochs.measure(epoch, event, self._workers.seconds(epoch, event.seconds))
        keep: list[Action] = []
        if self._kept.is_best(epoch, scores_of(self._epochs.of(epoch)[0], metrics, self.split)):
            keep.append(StoreEpochWeights(buffer, epoch, self._kept.surpassed()))
        return keep + self._done()

    def _done(self) -> list[Action]:
        buffer, epoch = self._snapshots.in_work
        self._snapshots.working = None
        actions = self._record(buffer, epoch)  # while the buffer still holds the epoch's weights
        if epoch != self._kept.last:  # the last buffer is kept, because the final weights must be written
            actions += [*self._snapshots.receive(buffer), Send(self.plan.server, SnapshotCredit(self.id))]
        return actions + self._snapshots.begin() + self._flush_rows() + self._finish()

    def _record(self, buffer: str | None = None, of: int = 0) -> list[Action]:
        """Records the complete epochs, in order. `buffer` holds the weights of epoch `of`."""
        actions: list[Action] = []
        for epoch, rows, metrics in self._epochs.complete(self._snapshots.epochs):
            if metrics:
                actions.append(Record("metrics", np.array(metrics, records.METRIC)))
            actions.append(Record("epochs", rows, buffer if epoch == of else None))
            self._decisions.expect()
            if rows[0]["evaluated"]:
                actions += self._goals.judge(rows[0], scores_of(rows[0], metrics, self.split))
        return actions

    def _decide(self, event: Decided, now: float) -> list[Action]:
        return self._decisions.enter(event) + self._flush_rows()

    def _exhausted_elsewhere(self, event: Received[RoleExhausted], now: float) -> list[Action]:
        return self._decisions.exhausted(event.message)

    def _exhausted_here(self, event: MemoryExhausted, now: float) -> list[Action]:
        """Records the epoch in work without its evaluation. The run then stops with an error, unless it is over."""
        _, epoch = self._snapshots.in_work
        self._epochs.of(epoch)["evaluation_began_s"] = math.nan
        if epoch == self._epochs.last:
            return [*self._decisions.left_out(event.text, epoch), *self._done()]
        self._lacking = event.text
        return [*self._decisions.exhausted(self.exhaustion(event)), *self._done()]

    # Checkpoints.

    def _checkpoint(self, event: Received[CheckpointWritten], now: float) -> list[Action]:
        self._checkpointed = event.message
        return self._flush_rows()

    def _flush_rows(self) -> list[Action]:
        """Writes all rows to the disk if the rows of epochs and stage servers for a checkpoint have arrived.

        The rows include decisions of the user's function about these epochs.
        """
        wanted = self._checkpointed
        if wanted is None or self._epochs.recorded < wanted.epochs or self._decisions.awaited:
            return []
        if any(reported < wanted.timestamp for reported in self._reported.values()):
            return []
        self._checkpointed = None
        return [Sync(), Send(self.plan.server, RowsFlushed(self.id, wanted.timestamp))]

    # Accounts, losses and the end.

    def _events(self, event: Received[EventRows], now: float) -> list[Action]:
        self._accounts.note_events(event.message.rows)
        return [Record("events", event.message.rows)]

    def _end_early(self, event: Received[RunStopped], now: float) -> list[Action]:
        self._epochs.last = event.message.epochs
        self._accounts.stop(event.message.timestamp)
        return self._finish()

    def _learner(self, event: Received[LearnerRows], now: float) -> list[Action]:
        self._accounts.enter(event.message)
        return self._finish()

    def _account(self, event: Received[TotalsRows], now: float) -> list[Action]:
        self._accounts.totals = event.message.rows
        return self._finish()

    def _finish(self) -> list[Action]:
        if not self._accounts.complete or self._epochs.recorded != self._epochs.last or self._reported:
            return []
        self.state = StatisticsState.DONE
        if self._accounts.code and self._lacking:
            return [Fail(self._lacking, cause=self.id)]
        return [*self._accounts.finish(self._final_weights, stops_at_loss=self._stops_at_loss)]

    def _lose(self, event: Lost, now: float) -> list[Action]:
        role, lost = event.role, self.plan.roles[event.role]
        if role in self.plan.owners or role in self.plan.stages:
            return [Fail(f"{lost.title} died, and the run cannot continue without it", lost=True)]
        self._decisions.lose(role)
        self._accounts.gone.add(role)  # the owner of the weights reports the account of a lost learner
        return []
