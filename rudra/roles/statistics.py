"""The statistics server: gathers what the others measured, tests the weights, records everything.

Source: rudra.txt §3.2. Nobody waits for it: it holds one snapshot of the weights in work (hashed, and if the job says
so kept in the file and tested) and one waiting, gives the parameter server a credit for each that it is done with, and
the parameter server skips an epoch for which it has no credit. The last epoch is always worked on. Where workers test
the weights, it adds up what they found.

It answers for the disk, too: a checkpoint counts when the rows up to it, and those of its epochs, are there.

    GATHERING  totals, every learner's account and every epoch recorded -> DONE  finish, tell everybody
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from enum import auto
from typing import Any, ClassVar

import numpy as np

from rudra.core import records
from rudra.core.events import (
    Action,
    Arrange,
    Evaluate,
    Evaluated,
    Fail,
    Finish,
    Halt,
    Hash,
    Hashed,
    Keep,
    Lost,
    Receive,
    Received,
    Record,
    Send,
    Started,
    Sum,
    Sync,
)
from rudra.core.messages import (
    AverageRows,
    CheckpointWritten,
    ChildDone,
    EpochEvaluated,
    EpochRows,
    EventRows,
    GradientRows,
    LearnerRows,
    Message,
    MessageKind,
    MinibatchRows,
    PlateauReached,
    Rows,
    RowsFlushed,
    RunStopped,
    Shutdown,
    Snapshot,
    SnapshotCredit,
    StageReported,
    StageRows,
    TargetReached,
    TotalsRows,
    TrainingStarted,
    UpdateRows,
    WeightsPart,
)
from rudra.errors import EXIT_FAILED, EXIT_STOPPED
from rudra.job.target import Best, Target, Watch
from rudra.roles.machine import Machine, Setup, States, Transition
from rudra.roles.snapshots import CREDITS

SNAPSHOTS = tuple(f"snapshot {i}" for i in range(CREDITS))


class StatisticsState(States):
    GATHERING = auto()
    DONE = auto()


class StatisticsServer(Machine):
    """The only role that records.

    Args:
        role: id in the plan.
        setup: what it is made from.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        (StatisticsState.GATHERING, Started): Transition("_start", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.START): Transition("_begin", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.GRADIENTS): Transition("_gradients", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.UPDATES): Transition("_updates", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.MINIBATCHES): Transition("_minibatches", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.AVERAGES): Transition("_averages", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.STAGES): Transition("_stages", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.CHILD_DONE): Transition(
            "_stage_left", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, MessageKind.EPOCHS): Transition(
            "_epoch", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, MessageKind.SNAPSHOT): Transition("_snapshot", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.WEIGHTS_PART): Transition("_snapshot_part", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, Hashed): Transition("_hashed", StatisticsState.GATHERING, StatisticsState.DONE),
        (StatisticsState.GATHERING, Evaluated): Transition(
            "_evaluated", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, MessageKind.EPOCH_EVALUATED): Transition("_assessed", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.LEARNERS): Transition(
            "_learner", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, MessageKind.TOTALS): Transition(
            "_account", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, MessageKind.EVENTS): Transition("_events", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.CHECKPOINT): Transition("_checkpoint", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.REPORTED): Transition("_stage_reported", StatisticsState.GATHERING),
        (StatisticsState.GATHERING, MessageKind.RUN_STOPPED): Transition(
            "_end_early", StatisticsState.GATHERING, StatisticsState.DONE
        ),
        (StatisticsState.GATHERING, Lost): Transition("_lose", StatisticsState.GATHERING),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        job, plan = setup.job, setup.plan
        super().__init__(role, plan)
        self.state = StatisticsState.GATHERING
        self.epochs = job.training.epochs
        self._evaluates, self._sums_up = bool(job.training.evaluate), job.training.evaluate == "workers"
        self._sums: dict[int, list[Rows]] = {}  # epoch -> what workers' tests of its weights came to, in order
        self._digested = 0  # the last epoch whose weights are
        self._tested: dict[int, float] = {}  # epoch -> seconds that the test took, if that is all of it
        self._keep_every = job.results.keep_every
        self._best = Best(job.training.target) if job.results.keep_best else None
        self._best_epoch = 0
        self._surpassed: list[int] = []  # epochs that were the best ones, and are still kept
        self._stops_at_loss = job.fault_tolerance.on_learner_loss == "stop"
        self._learners = np.zeros(plan.learner_numbers, records.LEARNER)
        self._accounts: set[int] = set()  # learners whose row is there, or who are no more
        self._totals: Rows | None = None
        self._rows: dict[int, Rows] = {}  # epoch -> its row, until those before it are recorded
        target = job.training.target
        self._watch = None if target is None else Watch(Target.parse(target), job.training.target_window)
        self._target, self._stops_at_target = target, job.training.stop_at_target
        self._patience = job.training.patience
        self._plateau = job.optimizer.plateau
        self._progress = Best(target)  # as patience and plateau see it
        self._worse = self._lowered = 0  # tests since the rate fell or there was progress; how often it fell
        self._enough = False  # the run was to end before it was resumed
        self._metrics: dict[int, list[tuple[Any, ...]]] = {}  # epoch -> its rows of `records.METRIC`
        self._rooms: deque[str] = deque()  # buffers for the next snapshots
        self._parts: Counter[str] = Counter()  # of a snapshot that are here
        self._waiting: deque[tuple[str, int]] = deque()  # snapshots to work on: buffer and epoch
        self._working: tuple[str, int] | None = None
        self._recorded = setup.position.epoch
        self._last_epoch = self.epochs  # unless the run is stopped
        self._code = 0
        self._gone: set[int] = set()  # roles whose rank has died
        self._dropped: set[int] = set()  # roles that were too slow, and may never be heard of again
        self._answered: set[int] = set()  # learners that have given their account themselves
        self._checkpointed: CheckpointWritten | None = None  # asked for, and not safe yet
        self._began = 0.0
        self._final_weights: str | None = None
        self._reported = dict.fromkeys(plan.stages, -1)  # timestamp of the last checkpoint whose rows of each are here

    @property
    def waiting_for(self) -> str:
        if self._totals is None:
            return f"the account of the {self.plan.roles[self.plan.server].name}"
        if len(self._accounts) < len(self._learners):
            return f"the accounts of {len(self._learners) - len(self._accounts)} learners"
        if self._reported and self._recorded == self._last_epoch:
            return "the last rows of the stage server"
        return f"the weights of epoch {self._recorded + 1}"

    def validate(self) -> None:
        assert len(self._waiting) <= CREDITS
        assert self._recorded <= self.epochs

    @property
    def split(self) -> str:
        """Whose tests decide."""
        return "test" if self._target is None else Target.parse(self._target).split

    def recall(self, tests: Mapping[int, Mapping[str, float | None]], kept: Collection[int]) -> None:
        """Takes note, before it starts, of the epochs before the checkpoint.

        Args:
            tests: epoch -> what the test of its weights measured on `split`.
            kept: epochs whose weights are in the results; of others none is the best.
        """
        for epoch, scores in tests.items():
            if self._watch is not None and self._watch.reached(self._watch.target.of(scores)):
                self._watch, self._enough = None, self._stops_at_target
            tired, _ = self._look_for_progress(scores)
            self._enough |= tired
            if epoch in kept:
                self._judge(epoch, scores)

    def _look_for_progress(self, scores: Mapping[str, float | None]) -> tuple[bool, bool]:
        """Takes note of a test; whether it ends the training for lack of progress, and whether it lowers the rate."""
        better = self._progress.improved(scores)
        self._worse = 0 if better else self._worse + 1
        lowers = self._worse == self._plateau
        if lowers:
            self._worse, self._lowered = 0, self._lowered + 1
        return not better and self._progress.since == self._patience, lowers

    def _judge(self, epoch: int, scores: Mapping[str, float | None]) -> bool:
        """Whether an epoch is the best one so far, and its weights are to be kept for that."""
        if self._best is None or not self._best.improved(scores):
            return False
        if self._best_epoch and not self._is_kept(self._best_epoch):
            self._surpassed.append(self._best_epoch)
        self._best_epoch = epoch
        return not self._is_kept(epoch)

    def _is_kept(self, epoch: int) -> bool:
        """Whether the weights of an epoch are kept, however good they are; the last ones are the final ones."""
        return epoch == self.epochs or (self._keep_every is not None and epoch % self._keep_every == 0)

    def _start(self, event: Started, now: float) -> list[Action]:
        return [receive for buffer in SNAPSHOTS for receive in self._let_in(buffer)]

    def _let_in(self, buffer: str) -> list[Action]:
        """Lets a snapshot in, or all its parts."""
        self._rooms.append(buffer)
        return [Receive(buffer, owner) for owner in self.plan.owners]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self._began = event.message.began_ns * 1e-9
        actions = [self._lower()] if self._lowered else []
        return [*actions, self._to_server(TargetReached(self.id))] if self._enough else actions

    def _lower(self) -> Action:
        return Send(self.plan.server, PlateauReached(self.id, self._lowered))

    def _gradients(self, event: Received[GradientRows], now: float) -> list[Action]:
        return [Record("gradients", event.message.rows)]

    def _updates(self, event: Received[UpdateRows], now: float) -> list[Action]:
        return [Record("updates", event.message.rows)]

    def _minibatches(self, event: Received[MinibatchRows], now: float) -> list[Action]:
        return [Record("minibatches", event.message.rows)]

    def _averages(self, event: Received[AverageRows], now: float) -> list[Action]:
        return [Record("averages", event.message.rows)]

    def _stages(self, event: Received[StageRows], now: float) -> list[Action]:
        return [Record("stages", event.message.rows)]

    def _stage_reported(self, event: Received[StageReported], now: float) -> list[Action]:
        if event.message.sender in self._reported:  # else it has told of all its rows
            self._reported[event.message.sender] = event.message.timestamp
        return self._secure()

    def _stage_left(self, event: Received[ChildDone], now: float) -> list[Action]:
        self._reported.pop(event.message.sender, None)  # who decides may say twice that all have left
        return self._secure() + self._finish()

    def _epoch(self, event: Received[EpochRows], now: float) -> list[Action]:
        rows = event.message.rows
        self._rows[int(rows[0]["epoch"])] = rows
        return self._record() + self._secure() + self._finish()

    def _snapshot(self, event: Received[Snapshot], now: float) -> list[Action]:
        rows = event.message.rows
        epoch = int(rows[0]["epoch"])
        self._rows[epoch] = rows
        buffer = event.buffer or self._rooms[0]  # parts come in the order in which they were let in
        self._rooms.remove(buffer)
        self.epochs = self._last_epoch = event.message.epochs
        if epoch == self.epochs:
            self._final_weights = buffer
        self._waiting.append((buffer, epoch))
        self._parts[buffer] += len(self.plan.owners) if event.buffer else 0
        return self._work()

    def _snapshot_part(self, event: Received[WeightsPart], now: float) -> list[Action]:
        assert event.buffer is not None
        self._parts[event.buffer] += 1
        return self._work()

    def _work(self) -> list[Action]:
        if self._working is not None or not self._waiting:
            return []
        if self._parts[self._waiting[0][0]] < len(self.plan.owners):
            return []
        self._working = self._waiting.popleft()
        buffer = self._working[0]
        del self._parts[buffer]
        arranges = [Arrange(buffer)] if self.plan.stage is not None else []
        return [*arranges, Hash(buffer)]

    def _hashed(self, event: Hashed, now: float) -> list[Action]:
        assert self._working is not None
        buffer, epoch = self._working
        rows = self._rows[epoch]
        rows["weights_sha256"] = event.digest.encode()
        keep: list[Action] = [Keep(buffer, epoch)] if self._is_kept(epoch) and epoch != self.epochs else []
        if not self._evaluates:
            return keep + self._done(now)
        self._digested = epoch
        if self._sums_up:
            rows["evaluation_began_s"] = rows["time_s"]
            return [*keep, *self._sum_up()]
        rows["evaluation_began_s"] = now - self._began
        return [*keep, Evaluate(buffer)]

    def _assessed(self, event: Received[EpochEvaluated], now: float) -> list[Action]:
        message = event.message
        found = self._sums.setdefault(message.epoch, [])
        if message.rows is not None:
            found.append(message.rows)
        if not message.last:
            return []
        self._tested[message.epoch] = message.seconds
        return self._sum_up()

    def _sum_up(self) -> list[Action]:
        """Adds up an evaluation by workers once, when its weights are digested and all of it is here."""
        if self._working is None or self._working[1] not in self._tested:
            return []
        buffer, epoch = self._working
        if epoch != self._digested or epoch not in self._sums:  # its sum is already being made
            return []
        return [Sum(buffer, np.concatenate([*self._sums.pop(epoch), np.empty(0, records.SUM)]))]

    def _evaluated(self, event: Evaluated, now: float) -> list[Action]:
        assert self._working is not None
        buffer, epoch = self._working
        rows = self._rows[epoch]
        rows["evaluated"], rows["evaluation_s"] = 1, self._tested.pop(epoch, event.seconds)
        for score in event.scores:
            if score.split != "train":  # whose columns are of the gradients
                rows[f"{score.split}_loss"], rows[f"{score.split}_error"] = score.loss, score.error
        self._metrics[epoch] = [
            (epoch, 0, score.split, name, value) for score in event.scores for name, value in score.metrics
        ]
        keep: list[Action] = []
        if self._judge(epoch, _scores(rows[0], self._metrics[epoch], self.split)):
            keep.append(Keep(buffer, epoch, tuple(self._surpassed)))
            self._surpassed = []
        return keep + self._done(now)

    def _done(self, now: float) -> list[Action]:
        assert self._working is not None
        buffer, epoch = self._working
        self._working = None
        actions = self._record(buffer, epoch)  # while the buffer still holds that epoch's weights
        if epoch != self.epochs:  # the last snapshot holds the final weights, which are still to be written
            actions += [*self._let_in(buffer), self._to_server(SnapshotCredit(self.id))]
        return actions + self._work() + self._secure() + self._finish()

    def _record(self, buffer: str | None = None, of: int = 0) -> list[Action]:
        """Records the epochs that are complete, in order; a buffer holds the weights of one of them."""
        actions: list[Action] = []
        later = {epoch for _, epoch in (*self._waiting, self._working or ("", 0))}
        while (following := self._recorded + 1) in self._rows and following not in later:
            rows, metrics = self._rows.pop(following), self._metrics.pop(following, [])
            if metrics:
                actions.append(Record("metrics", np.array(metrics, records.METRIC)))
            weights = buffer if following == of else None
            actions += [Record("epochs", rows, weights), *self._look_at(rows[0], metrics)]
            self._recorded = following
        return actions

    def _look_at(self, row: np.void, metrics: list[tuple[Any, ...]]) -> list[Action]:
        """Whether an epoch reaches the target, or is one too many without progress."""
        if not row["evaluated"]:
            return []
        scores = _scores(row, metrics, self.split)
        actions: list[Action] = []
        if self._watch is not None and self._watch.reached(self._watch.target.of(scores)):
            self._watch = None
            actions.append(_event("target", row, f"{self._target}: reached with epoch {row['epoch']}"))
            actions += [self._to_server(TargetReached(self.id))] if self._stops_at_target else []
        tired, lowers = self._look_for_progress(scores)
        if lowers:
            actions.append(self._lower())
        if tired:
            tests = f"the last {self._patience} tests, up to epoch {row['epoch']}, bring no new best"
            text = f"patience = {self._patience}: {tests}"
            actions += [_event("patience", row, text), self._to_server(TargetReached(self.id))]
        return actions

    def _events(self, event: Received[EventRows], now: float) -> list[Action]:
        rows = event.message.rows
        self._dropped |= set(rows["role"][rows["kind"] == b"dropped"].tolist())
        return [Record("events", rows)]

    def _checkpoint(self, event: Received[CheckpointWritten], now: float) -> list[Action]:
        self._checkpointed = event.message
        return self._secure()

    def _secure(self) -> list[Action]:
        """Brings all rows to the disk, once those are here that a checkpoint wants: of epochs and of a stage server."""
        wanted = self._checkpointed
        if wanted is None or self._recorded < wanted.epochs:
            return []
        if any(reported < wanted.timestamp for reported in self._reported.values()):
            return []
        self._checkpointed = None
        return [Sync(), Send(self.plan.server, RowsFlushed(self.id, wanted.timestamp))]

    def _end_early(self, event: Received[RunStopped], now: float) -> list[Action]:
        self._last_epoch = event.message.epochs
        self._code = EXIT_FAILED if event.message.timestamp < 0 else EXIT_STOPPED
        return self._finish()

    def _learner(self, event: Received[LearnerRows], now: float) -> list[Action]:
        self._answered.add(event.message.sender)
        for row in event.message.rows:
            if int(row["learner"]) not in self._accounts:  # the server's of one that died may come second
                self._learners[row["learner"]] = row
                self._accounts.add(int(row["learner"]))
        return self._finish()

    def _account(self, event: Received[TotalsRows], now: float) -> list[Action]:
        self._totals = event.message.rows
        return self._finish()

    def _finish(self) -> list[Action]:
        complete = len(self._accounts) == len(self._learners) and self._recorded == self._last_epoch
        if self._totals is None or not complete or self._reported:
            return []
        assert (self._final_weights is None) == bool(self._code)
        self.state = StatisticsState.DONE
        apart = not self._dropped <= self._answered
        done = Shutdown(self.id, self._code, apart)
        others = (i for i in range(len(self.plan.roles)) if i != self.id and i not in self._gone)
        reason = "a learner died" if self._gone and self._stops_at_loss else "stopped on request"
        return [
            Finish(self._totals, self._learners, self._final_weights, reason if self._code else ""),
            *(Send(i, done) for i in others),
            Halt(self._code, apart),
        ]

    def _lose(self, event: Lost, now: float) -> list[Action]:
        role, lost = event.role, self.plan.roles[event.role]
        if role in self.plan.owners or role in self.plan.stages:
            return [Fail(f"{lost.title} died, and the run cannot go on without it", lost=True)]
        self._gone.add(role)  # the owner of the weights gives the account of a learner that is no more
        return []

    def _to_server(self, message: Message) -> Action:
        return Send(self.plan.server, message)


def _event(kind: str, row: np.void, text: str) -> Record:
    """Something to be noted of an epoch."""
    about = (kind.encode(), -1, 0, row["timestamp"], 0, row["time_s"], 0.0, text.encode()[:512])
    return Record("events", np.array([about], records.EVENT))


def _scores(row: np.void, metrics: list[tuple[Any, ...]], split: str) -> dict[str, float]:
    """What the test of an epoch measured on a split."""
    scores = {name: float(row[f"{split}_{name}"]) for name in ("loss", "error")}
    return scores | {name: value for _, _, of, name, value in metrics if of == split}
