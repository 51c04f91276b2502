"""Messages between roles: what each kind says. `rudra.core.wire` has how they travel."""

from collections.abc import Iterator
from enum import IntEnum, auto
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from rudra.core import records
from rudra.core.records import Gradient

Rows = npt.NDArray[np.void]


class MessageKind(IntEnum):
    """What a message says, as a number on the wire; `Message` has a class for each, which says the rest."""

    WEIGHTS = auto()
    GRADIENT = auto()
    SNAPSHOT = auto()
    GRADIENT_PART = auto()
    WEIGHTS_PART = auto()
    ACTIVATIONS = auto()
    ACTIVATION_GRADIENT = auto()
    SUM = auto()
    LOG = auto()
    TAKEN = auto()
    STEPPED = auto()
    NORMS = auto()
    PULL = auto()
    READY = auto()
    START = auto()
    TIMESTAMP = auto()
    ASSIGN_WORK = auto()
    EVALUATE_PART = auto()
    PART_EVALUATED = auto()
    APPLIED_IN_PLACE = auto()
    COLLECT_WINDOW = auto()
    WINDOW_WEIGHTS = auto()
    WINDOW_UPDATED = auto()
    APPLIED = auto()
    STOP = auto()
    LATE = auto()
    DROP = auto()
    CHILD_DONE = auto()
    INTERRUPT = auto()
    TARGET_REACHED = auto()
    PLATEAU = auto()
    SNAPSHOT_CREDIT = auto()
    CHECKPOINT = auto()
    ROWS_FLUSHED = auto()
    REPORTED = auto()
    RUN_STOPPED = auto()
    SHUTDOWN = auto()
    GRADIENTS = auto()
    UPDATES = auto()
    MINIBATCHES = auto()
    EPOCHS = auto()
    LEARNERS = auto()
    TOTALS = auto()
    EVENTS = auto()
    AVERAGES = auto()
    STAGES = auto()
    EPOCH_EVALUATED = auto()
    LEARNERS_LEFT = auto()


ROWS = {
    MessageKind.SNAPSHOT: records.EPOCH,
    MessageKind.LOG: records.LOG,
    MessageKind.ASSIGN_WORK: records.WORK,
    MessageKind.PART_EVALUATED: records.SUM,
    MessageKind.EPOCH_EVALUATED: records.SUM,
    MessageKind.STEPPED: records.FLOATS,
    MessageKind.NORMS: records.FLOATS,
    MessageKind.GRADIENTS: records.GRADIENT,
    MessageKind.UPDATES: records.UPDATE,
    MessageKind.MINIBATCHES: records.MINIBATCH,
    MessageKind.EPOCHS: records.EPOCH,
    MessageKind.LEARNERS: records.LEARNER,
    MessageKind.TOTALS: records.TOTALS,
    MessageKind.EVENTS: records.EVENT,
    MessageKind.AVERAGES: records.AVERAGE,
    MessageKind.STAGES: records.STAGE,
}
"""Dtype of the rows that a kind carries; the others carry none."""

GRADIENTS = frozenset(
    {
        MessageKind.GRADIENT,
        MessageKind.GRADIENT_PART,
        MessageKind.ACTIVATIONS,
        MessageKind.SUM,
        MessageKind.WINDOW_WEIGHTS,
    }
)
PARTS = frozenset({MessageKind.GRADIENT_PART, MessageKind.WEIGHTS_PART})
"""Kinds whose tensors go up, from learners, and are read once; and kinds of parts."""

DESCRIBED = frozenset(
    {MessageKind.GRADIENT, MessageKind.ACTIVATIONS, MessageKind.ACTIVATION_GRADIENT, MessageKind.APPLIED_IN_PLACE}
)
"""Kinds that tell of which mini-batches their tensors are."""

URGENT = frozenset({MessageKind.LOG, MessageKind.TAKEN})
"""Kinds that have another rank begin long work beside that of the sender."""

BETWEEN_OWNERS = frozenset({MessageKind.LOG, MessageKind.STEPPED})
"""Kinds that owners of weights tell each other of these, and heed even if everybody else begins anew."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message: what all kinds have.

    A kind has at most two whole numbers, one float, one flag, rows and gradients: there is that much room in a header.

    Attributes:
        kind: what it says.
        sender: role id.
    """

    kind: ClassVar[MessageKind]
    _ABSENT_NUMBER: ClassVar[int] = 0
    _ABSENT_FLOAT: ClassVar[float] = 0.0
    _ABSENT_FLAG: ClassVar[bool] = False
    _ABSENT_ROWS: ClassVar[None] = None
    _ABSENT_GRADIENTS: ClassVar[tuple[Gradient, ...]] = ()

    sender: int

    def with_own_rows(self) -> "Message":
        """The same, with rows that its receiver may write into."""
        rows = getattr(self, "rows", None)
        return self if rows is None else msgspec.structs.replace(self, rows=rows.copy())


class StampedMessage(Message, frozen=True, gc=False):
    """A message that speaks of weights.

    Attributes:
        timestamp: of these weights.
    """

    timestamp: int


# With a tensor.


class Weights(StampedMessage, frozen=True, gc=False):
    """Server -> learner or tree server, or learner -> learner: the weights."""

    kind = MessageKind.WEIGHTS


class PushedGradient(StampedMessage, frozen=True, gc=False):
    """Learner or tree server -> server: a gradient, or an average of several.

    Attributes:
        timestamp: of the weights about which the sender asks, if it does.
        held: of the weights that the sender has, if it also asks for newer ones (`Pull`); else `NOT_PULLING`.
        gradients: what the tensor stands for.
        asks: the sender wants work.
    """

    kind = MessageKind.GRADIENT
    held: int
    gradients: tuple[Gradient, ...]
    asks: bool = False


NOT_PULLING = -1
"""`PushedGradient.held` where nothing is asked about weights."""


class Snapshot(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: the weights at an epoch's end.

    Attributes:
        epochs: that the run is to have, as the owner knows by now.
        rows: that of the epoch, `records.EPOCH`.
    """

    kind = MessageKind.SNAPSHOT
    epochs: int
    rows: Rows


class GradientPart(Message, frozen=True, gc=False):
    """Learner -> shard, a bare tensor: part of a gradient of which a `PushedGradient` without a tensor tells."""

    kind = MessageKind.GRADIENT_PART


class WeightsPart(Message, frozen=True, gc=False):
    """Shard -> learner or statistics server, a bare tensor: part of the weights of a `PullAnswer` or a `Snapshot`."""

    kind = MessageKind.WEIGHTS_PART


class Activations(StampedMessage, frozen=True, gc=False):
    """Learner -> stage server: what the first layers make of one mini-batch.

    Attributes:
        gradients: the one that the mini-batch leads to.
    """

    kind = MessageKind.ACTIVATIONS
    gradients: tuple[Gradient, ...]


class ActivationGradient(StampedMessage, frozen=True, gc=False):
    """Stage server -> learner: the gradient of its activations, and what the mini-batch came to.

    Attributes:
        gradients: the one of that mini-batch, with loss and errors.
    """

    kind = MessageKind.ACTIVATION_GRADIENT
    gradients: tuple[Gradient, ...]


class PartialSum(Message, frozen=True, gc=False):
    """Stage server -> another one: the sum of gradients of learners up to here, or of all."""

    kind = MessageKind.SUM


class WindowWeights(Message, frozen=True, gc=False):
    """First worker of a node -> coordinator: the weights of its window, the answer to `CollectWindow`.

    Attributes:
        surviving: the part of all updates that races have left.
    """

    kind = MessageKind.WINDOW_WEIGHTS
    surviving: float


# Between owners of weights.


class LogEntries(Message, frozen=True, gc=False):
    """Who decides about the weights -> other shards, or stage servers: what to do.

    Attributes:
        rows: `records.LOG`.
    """

    kind = MessageKind.LOG
    rows: Rows


class PartTaken(Message, frozen=True, gc=False):
    """Shard -> the first one: its part of a gradient is here.

    Attributes:
        number: of the gradient in the log.
    """

    kind = MessageKind.TAKEN
    number: int


class OwnerStepped(StampedMessage, frozen=True, gc=False):
    """Another owner -> who decides: its part of the weights is of this timestamp.

    Attributes:
        stretch: number of the stretch of the weights that the rows are a sample of.
        seconds: that the update took.
        last: this is the last stretch.
        rows: the sample, `records.FLOATS`; None: there is none.
    """

    kind = MessageKind.STEPPED
    stretch: int
    seconds: float
    last: bool
    rows: Rows | None


class GradientNorms(Message, frozen=True, gc=False):
    """Parameter server <-> stage server: norms of the gradients of one update.

    Attributes:
        parameters: how many norms there are in all messages of the update.
        rows: some of them, `records.FLOATS`.
    """

    kind = MessageKind.NORMS
    parameters: int
    rows: Rows


# Between servers and learners.


class Pull(StampedMessage, frozen=True, gc=False):
    """Tree server -> server: have you weights newer than of the timestamp?

    Attributes:
        held: timestamp of the weights that the sender has.
    """

    kind = MessageKind.PULL
    held: int


class PullAnswer(StampedMessage, frozen=True, gc=False):
    """The answer to a pull; `Weights` follow if it is newer than those held."""

    kind = MessageKind.TIMESTAMP


class Ready(Message, frozen=True, gc=False):
    """Learner -> server: it has the initial weights.

    Attributes:
        digest: of these, `short_digest`.
    """

    kind = MessageKind.READY
    digest: int


class TrainingStarted(Message, frozen=True, gc=False):
    """Server -> all: training begins.

    Attributes:
        began_ns: when, in nanoseconds on the driver's clock.
    """

    kind = MessageKind.START
    began_ns: int


class GradientApplied(StampedMessage, frozen=True, gc=False):
    """Server -> learner: one gradient of the learner is in the weights of this timestamp."""

    kind = MessageKind.APPLIED


class Stop(Message, frozen=True, gc=False):
    """Server -> learner, or first member of a compute group -> the others: no more gradients.

    Attributes:
        pushed: gradients that each member of the group has pushed; `DROPPED`: the last one is not taken either.
    """

    kind = MessageKind.STOP
    pushed: int = 0


class LearnerLate(Message, frozen=True, gc=False):
    """Tree server -> server: all wait for a learner.

    Attributes:
        learner: its role id.
        silence_s: for how long nothing came of it.
    """

    kind = MessageKind.LATE
    learner: int
    silence_s: float


class LearnerDropped(Message, frozen=True, gc=False):
    """Server -> tree servers above a learner: it is no more.

    Attributes:
        learner: its role id.
    """

    kind = MessageKind.DROP
    learner: int


class ChildDone(Message, frozen=True, gc=False):
    """Learner -> server: that was the last gradient; and stage server -> statistics server: those were all rows.

    Attributes:
        pushed: gradients that it has pushed.
    """

    kind = MessageKind.CHILD_DONE
    pushed: int = 0


class LearnersLeft(Message, frozen=True, gc=False):
    """Who decides about the weights -> stage server: no learner is left."""

    kind = MessageKind.LEARNERS_LEFT


# Between a coordinator and its workers.


class AssignWork(StampedMessage, frozen=True, gc=False):
    """Coordinator -> worker: compute these samples; `Weights` follow if they are newer than those held.

    Attributes:
        began_ns: when training began, by a clock that stands still while workers test weights.
        learning_rate: before it is scaled by the samples of each gradient.
        rows: batches, `records.WORK`.
    """

    kind = MessageKind.ASSIGN_WORK
    began_ns: int
    learning_rate: float
    rows: Rows


class EvaluatePart(StampedMessage, frozen=True, gc=False):
    """Coordinator -> worker: compute a part of a test; `Weights` follow if they are newer than those held.

    Attributes:
        part: its number.
    """

    kind = MessageKind.EVALUATE_PART
    part: int


class PartEvaluated(Message, frozen=True, gc=False):
    """Worker -> coordinator: what a part of a test came to, or a piece of that.

    Attributes:
        part: its number.
        last: that is all of it.
        rows: `records.SUM`, or None.
    """

    kind = MessageKind.PART_EVALUATED
    part: int
    last: bool
    rows: Rows | None


class AppliedInPlace(Message, frozen=True, gc=False):
    """Worker -> coordinator: these gradients are in the window.

    Attributes:
        digest: of a sample of the weights, as a signed number.
        wanted: batches that the worker asks for.
        seconds: that the updates took.
        gradients: which.
    """

    kind = MessageKind.APPLIED_IN_PLACE
    digest: int = 0
    wanted: int = 0
    seconds: float = 0.0
    gradients: tuple[Gradient, ...] = ()


class CollectWindow(Message, frozen=True, gc=False):
    """Coordinator -> first worker of a node: send the weights of your window.

    Attributes:
        average_follows: it gets the average of all windows.
    """

    kind = MessageKind.COLLECT_WINDOW
    average_follows: bool


class WindowUpdated(StampedMessage, frozen=True, gc=False):
    """First worker of a node -> coordinator: the average is in the window."""

    kind = MessageKind.WINDOW_UPDATED


# Training as a whole.


class StopRequested(Message, frozen=True, gc=False):
    """Any rank -> owner: somebody asks the run to stop; it may come at any time."""

    kind = MessageKind.INTERRUPT


class TargetReached(Message, frozen=True, gc=False):
    """Statistics server -> owner: end with the epoch under way."""

    kind = MessageKind.TARGET_REACHED


class PlateauReached(Message, frozen=True, gc=False):
    """Statistics server -> owner: tests got no better; lower the rate.

    Attributes:
        times: how often that was so, this time included.
    """

    kind = MessageKind.PLATEAU
    times: int


class SnapshotCredit(Message, frozen=True, gc=False):
    """Statistics server -> owner: there is room for one more snapshot."""

    kind = MessageKind.SNAPSHOT_CREDIT


class CheckpointWritten(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: a checkpoint is written; are its rows on the disk?

    Attributes:
        epochs: that are complete with it.
    """

    kind = MessageKind.CHECKPOINT
    epochs: int


class RowsFlushed(StampedMessage, frozen=True, gc=False):
    """Statistics server -> owner: the rows up to there are on the disk."""

    kind = MessageKind.ROWS_FLUSHED


class StageReported(StampedMessage, frozen=True, gc=False):
    """Stage server -> statistics server: you have my rows that belong to the checkpoint of this timestamp."""

    kind = MessageKind.REPORTED


class RunStopped(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: the run ends before its time.

    Attributes:
        timestamp: of the checkpoint to resume from; -1: there is none.
        epochs: that are complete.
    """

    kind = MessageKind.RUN_STOPPED
    epochs: int


class Shutdown(Message, frozen=True, gc=False):
    """Statistics server -> all: everything is recorded.

    Attributes:
        exit_code: of the run.
        apart: do not wait for each other, as somebody may never be heard of again.
    """

    kind = MessageKind.SHUTDOWN
    exit_code: int
    apart: bool


# Rows for the statistics server.


class ReportedRows(Message, frozen=True, gc=False):
    """Rows of a table.

    Attributes:
        rows: of `ROWS[kind]`.
    """

    rows: Rows


class GradientRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server."""

    kind = MessageKind.GRADIENTS


class UpdateRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server."""

    kind = MessageKind.UPDATES


class MinibatchRows(ReportedRows, frozen=True, gc=False):
    """Learner -> statistics server."""

    kind = MessageKind.MINIBATCHES


class EpochRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server: an epoch whose weights are not tested."""

    kind = MessageKind.EPOCHS


class LearnerRows(ReportedRows, frozen=True, gc=False):
    """Learner, or owner for one that has died -> statistics server: its account."""

    kind = MessageKind.LEARNERS


class TotalsRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server: the account of the run."""

    kind = MessageKind.TOTALS


class EventRows(ReportedRows, frozen=True, gc=False):
    """Any role -> statistics server."""

    kind = MessageKind.EVENTS


class AverageRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server."""

    kind = MessageKind.AVERAGES


class StageRows(ReportedRows, frozen=True, gc=False):
    """Stage server -> statistics server."""

    kind = MessageKind.STAGES


class EpochEvaluated(Message, frozen=True, gc=False):
    """Coordinator -> statistics server: sums of an evaluation by workers, in one message or several.

    Attributes:
        epoch: the epoch whose weights were evaluated.
        seconds: duration of the evaluation; NaN: a stop left no worker to evaluate the weights.
        last: whether this message is the last one of the epoch.
        rows: `records.SUM`, or None.
    """

    kind = MessageKind.EPOCH_EVALUATED
    epoch: int
    seconds: float
    last: bool
    rows: Rows | None


def _types(base: type[Message]) -> Iterator[type[Message]]:
    for type_ in base.__subclasses__():
        if hasattr(type_, "kind"):
            yield type_
        yield from _types(type_)


MESSAGES: dict[MessageKind, type[Any]] = {type_.kind: type_ for type_ in _types(Message)}
"""The class of the messages of each kind."""


class GroupFlags(msgspec.Struct, frozen=True, gc=False):
    """What a learner tells its compute group with a gradient.

    Attributes:
        digest: of a sample of its weights (`Update`); all must have the same ones. 0: they are a server's.
        lowered: how often the rate has fallen, with the epoch under way at the latest.
        enough: training ends with the epoch under way.
        stopped: training ends with the update under way.
        saves: a checkpoint is made after that update.
        distance: of its replica from the weights, where it has one.
    """

    digest: int = 0
    lowered: int = 0
    enough: bool = False
    stopped: bool = False
    saves: bool = False
    distance: float = 0.0
