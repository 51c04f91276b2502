"""Messages between roles, with the fields of each kind. `rudra.core.wire` describes how they travel."""

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
    """Kind of a message, which is a number on the wire. `Message` has a subclass with named fields for each kind."""

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
    CHANGE_DECIDED = auto()
    GRADIENT_NORMS = auto()
    UPDATE_NORMS = auto()
    MEASURED = auto()
    EXHAUSTED = auto()


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
    MessageKind.CHANGE_DECIDED: records.TEXT,
    MessageKind.EXHAUSTED: records.TEXT,
    MessageKind.GRADIENT_NORMS: records.GRADIENT_NORM,
    MessageKind.UPDATE_NORMS: records.UPDATE_NORM,
}
"""Dtype of the rows of each kind that has rows."""

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
"""Kinds whose tensors are sent by learners and read once, and kinds of parts."""

DESCRIBED = frozenset(
    {MessageKind.GRADIENT, MessageKind.ACTIVATIONS, MessageKind.ACTIVATION_GRADIENT, MessageKind.APPLIED_IN_PLACE}
)
"""Kinds that describe the mini-batches of their tensors."""

URGENT = frozenset({MessageKind.LOG, MessageKind.TAKEN})
"""Kinds that start long work on another rank in parallel with the work of the sender."""

BETWEEN_OWNERS = frozenset({MessageKind.LOG, MessageKind.STEPPED, MessageKind.MEASURED})
"""Kinds between owners of the weights, which are valid even if all other roles restart."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """Message of any kind.

    A header has space for at most two integers, one float, one flag, rows and gradients. So no kind has more fields.

    Attributes:
        kind: Kind of the message.
        sender: Id of the sending role.
    """

    kind: ClassVar[MessageKind]
    _ABSENT_NUMBER: ClassVar[int] = 0
    _ABSENT_FLOAT: ClassVar[float] = 0.0
    _ABSENT_FLAG: ClassVar[bool] = False
    _ABSENT_ROWS: ClassVar[None] = None
    _ABSENT_GRADIENTS: ClassVar[tuple[Gradient, ...]] = ()

    sender: int

    def with_own_rows(self) -> "Message":
        """Returns the message with a copy of its rows, which the receiver may change."""
        rows = getattr(self, "rows", None)
        return self if rows is None else msgspec.structs.replace(self, rows=rows.copy())


class StampedMessage(Message, frozen=True, gc=False):
    """Message about weights of one timestamp.

    Attributes:
        timestamp: Timestamp of these weights.
    """

    timestamp: int


# With a tensor.


class Weights(StampedMessage, frozen=True, gc=False):
    """Server -> learner or tree server, or learner -> learner: the weights."""

    kind = MessageKind.WEIGHTS


class PushedGradient(StampedMessage, frozen=True, gc=False):
    """Learner or tree server -> server: a gradient, or an average of several.

    Attributes:
        timestamp: If the sender also pulls, the timestamp of the weights that it asks about.
        held: If the sender also asks for newer weights (`Pull`), the timestamp of the weights that it holds. Otherwise
            `NOT_PULLING`.
        gradients: Descriptions of the gradients in the tensor.
        asks: Whether the sender requests work.
    """

    kind = MessageKind.GRADIENT
    held: int
    gradients: tuple[Gradient, ...]
    asks: bool = False


NOT_PULLING = -1
"""`PushedGradient.held` without a request for weights."""


class Snapshot(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: the weights at the end of an epoch.

    Attributes:
        epochs: Number of epochs of the run, as far as the owner knows.
        rows: Row of the epoch, `records.EPOCH`.
    """

    kind = MessageKind.SNAPSHOT
    epochs: int
    rows: Rows


class GradientPart(Message, frozen=True, gc=False):
    """Learner -> shard: a tensor without a header, part of a gradient. A `PushedGradient` without a tensor describes
    it."""

    kind = MessageKind.GRADIENT_PART


class WeightsPart(Message, frozen=True, gc=False):
    """Shard -> learner or statistics server: a tensor without a header, part of the weights of a `PullAnswer` or
    `Snapshot`."""

    kind = MessageKind.WEIGHTS_PART


class Activations(StampedMessage, frozen=True, gc=False):
    """Learner -> stage server: the activations of the first layers for one mini-batch.

    Attributes:
        gradients: Description of the gradient of the mini-batch.
    """

    kind = MessageKind.ACTIVATIONS
    gradients: tuple[Gradient, ...]


class ActivationGradient(StampedMessage, frozen=True, gc=False):
    """Stage server -> learner: the gradient of the activations, with the results of the mini-batch.

    Attributes:
        gradients: Description of the gradient, with loss and errors.
    """

    kind = MessageKind.ACTIVATION_GRADIENT
    gradients: tuple[Gradient, ...]


class PartialSum(Message, frozen=True, gc=False):
    """Stage server -> another one: the sum of the gradients of some learners, or of all."""

    kind = MessageKind.SUM


class WindowWeights(Message, frozen=True, gc=False):
    """First worker of a node -> coordinator: the weights of its window, the answer to `CollectWindow`.

    Attributes:
        surviving: Fraction of all updates that were not overwritten by races.
    """

    kind = MessageKind.WINDOW_WEIGHTS
    surviving: float


# Between owners of weights.


class LogEntries(Message, frozen=True, gc=False):
    """Deciding owner -> other shards, or stage servers: actions to carry out.

    Attributes:
        rows: Actions, `records.LOG`.
    """

    kind = MessageKind.LOG
    rows: Rows


class PartTaken(Message, frozen=True, gc=False):
    """Shard -> first server: its part of a gradient has arrived.

    Attributes:
        number: Number of the gradient in the log.
    """

    kind = MessageKind.TAKEN
    number: int


class OwnerStepped(StampedMessage, frozen=True, gc=False):
    """Another owner -> deciding owner: its part of the weights has the given timestamp.

    Attributes:
        stretch: Number of the stretch of the weights that the sample is from.
        seconds: Duration of the update.
        last: Whether this is the last stretch.
        rows: Sample of the weights, `records.FLOATS`. None: there is none.
    """

    kind = MessageKind.STEPPED
    stretch: int
    seconds: float
    last: bool
    rows: Rows | None


class OwnerMeasured(StampedMessage, frozen=True, gc=False):
    """Shard -> first shard, before `OwnerStepped`: norm of its part of the gradient.

    Attributes:
        norm: Euclidean norm of the part.
    """

    kind = MessageKind.MEASURED
    norm: float


class GradientNorms(Message, frozen=True, gc=False):
    """Parameter server <-> stage server: norms of the gradients of one update.

    Attributes:
        parameters: Number of norms in all messages of the update.
        rows: Norms, `records.FLOATS`.
    """

    kind = MessageKind.NORMS
    parameters: int
    rows: Rows


# Between servers and learners.


class Pull(StampedMessage, frozen=True, gc=False):
    """Tree server -> server: a request for weights newer than the given timestamp.

    Attributes:
        held: Timestamp of the weights that the sender holds.
    """

    kind = MessageKind.PULL
    held: int


class PullAnswer(StampedMessage, frozen=True, gc=False):
    """Server -> learner or tree server: the newest timestamp. `Weights` follow if they are newer than the ones held."""

    kind = MessageKind.TIMESTAMP


class Ready(Message, frozen=True, gc=False):
    """Learner -> server: the learner has the initial weights.

    Attributes:
        digest: Digest of these weights, `short_digest`.
    """

    kind = MessageKind.READY
    digest: int


class TrainingStarted(Message, frozen=True, gc=False):
    """Server -> all: training begins.

    Attributes:
        began_ns: Start of training in nanoseconds on the driver's clock.
    """

    kind = MessageKind.START
    began_ns: int


class GradientApplied(StampedMessage, frozen=True, gc=False):
    """Server -> learner: one gradient of the learner is applied, and the weights have the given timestamp."""

    kind = MessageKind.APPLIED


class Stop(Message, frozen=True, gc=False):
    """Server -> learner, or first member of a compute group -> other members: push no more gradients.

    Attributes:
        pushed: Number of gradients that each member of the group has pushed. `DROPPED`: the last one is not accepted
            either.
    """

    kind = MessageKind.STOP
    pushed: int = 0


class LearnerLate(Message, frozen=True, gc=False):
    """Tree server -> server: all others wait for a learner.

    Attributes:
        learner: Role id of the learner.
        silence_s: Seconds since its last message.
    """

    kind = MessageKind.LATE
    learner: int
    silence_s: float


class LearnerDropped(Message, frozen=True, gc=False):
    """Server -> tree servers above a learner: the learner was removed.

    Attributes:
        learner: Role id of the learner.
    """

    kind = MessageKind.DROP
    learner: int


class ChildDone(Message, frozen=True, gc=False):
    """Learner -> server: its last gradient was sent. Stage server -> statistics server: its last rows were sent.

    Attributes:
        pushed: Number of gradients that it has pushed.
    """

    kind = MessageKind.CHILD_DONE
    pushed: int = 0


class LearnersLeft(Message, frozen=True, gc=False):
    """Deciding owner -> stage server: all learners have left."""

    kind = MessageKind.LEARNERS_LEFT


# Between a coordinator and its workers.


class AssignWork(StampedMessage, frozen=True, gc=False):
    """Coordinator -> worker: compute these samples. `Weights` follow if they are newer than the ones held.

    Attributes:
        began_ns: Start of training, by a clock that pauses while workers evaluate the weights.
        learning_rate: Learning rate before it is scaled by the samples of each gradient.
        rows: Batches, `records.WORK`.
    """

    kind = MessageKind.ASSIGN_WORK
    began_ns: int
    learning_rate: float
    rows: Rows


class EvaluatePart(StampedMessage, frozen=True, gc=False):
    """Coordinator -> worker: compute a part of an evaluation. `Weights` follow if they are newer than the ones held.

    Attributes:
        part: Number of the part.
    """

    kind = MessageKind.EVALUATE_PART
    part: int


class PartEvaluated(Message, frozen=True, gc=False):
    """Worker -> coordinator: results of a part of an evaluation, in one message or several.

    Attributes:
        part: Number of the part.
        last: Whether this is the last message of the part.
        rows: Sums, `records.SUM`. None: there are none.
    """

    kind = MessageKind.PART_EVALUATED
    part: int
    last: bool
    rows: Rows | None


class AppliedInPlace(Message, frozen=True, gc=False):
    """Worker -> coordinator: these gradients are applied in the window.

    Attributes:
        digest: Digest of a sample of the weights, as a signed number.
        wanted: Number of batches that the worker requests.
        seconds: Duration of the updates.
        gradients: Descriptions of the gradients.
    """

    kind = MessageKind.APPLIED_IN_PLACE
    digest: int = 0
    wanted: int = 0
    seconds: float = 0.0
    gradients: tuple[Gradient, ...] = ()


class CollectWindow(Message, frozen=True, gc=False):
    """Coordinator -> first worker of a node: send the weights of the node's window.

    Attributes:
        average_follows: Whether the worker will receive the average of all windows.
    """

    kind = MessageKind.COLLECT_WINDOW
    average_follows: bool


class WindowUpdated(StampedMessage, frozen=True, gc=False):
    """First worker of a node -> coordinator: the average is in the window."""

    kind = MessageKind.WINDOW_UPDATED


# Training as a whole.


class StopRequested(Message, frozen=True, gc=False):
    """Any rank -> owner: a request to stop the run. It may come at any time."""

    kind = MessageKind.INTERRUPT


class TargetReached(Message, frozen=True, gc=False):
    """Statistics server -> owner: end the run with the current epoch."""

    kind = MessageKind.TARGET_REACHED


class PlateauReached(Message, frozen=True, gc=False):
    """Statistics server -> owner: evaluations have not improved, so lower the learning rate.

    Attributes:
        times: Number of such messages, including this one.
    """

    kind = MessageKind.PLATEAU
    times: int


class ChangeDecided(Message, frozen=True, gc=False):
    """Statistics server -> owner: a change of the job is decided.

    Attributes:
        number: Number of such messages, including this one.
        rows: JSON of the change, `records.TEXT`.
        at_once: Whether the change takes effect after the present update, which is the last one that can be made. Work
            under way is dropped.
    """

    kind = MessageKind.CHANGE_DECIDED
    number: int
    rows: Rows
    at_once: bool = False


class RoleExhausted(Message, frozen=True, gc=False):
    """Role -> statistics server -> owner: memory was exhausted, and an action of a role has no result.

    Attributes:
        role: Id of the role.
        learners: Number of learners that take part.
        rows: What to say about it, `records.TEXT`.
    """

    kind = MessageKind.EXHAUSTED
    role: int
    learners: int
    rows: Rows


class SnapshotCredit(Message, frozen=True, gc=False):
    """Statistics server -> owner: one more snapshot may be sent."""

    kind = MessageKind.SNAPSHOT_CREDIT


class CheckpointWritten(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: a checkpoint is written. The owner asks whether its rows are on the disk.

    Attributes:
        epochs: Number of epochs that are complete at the checkpoint.
    """

    kind = MessageKind.CHECKPOINT
    epochs: int


class RowsFlushed(StampedMessage, frozen=True, gc=False):
    """Statistics server -> owner: the rows up to this timestamp are on the disk."""

    kind = MessageKind.ROWS_FLUSHED


class StageReported(StampedMessage, frozen=True, gc=False):
    """Stage server -> statistics server: all rows up to the checkpoint of this timestamp were sent."""

    kind = MessageKind.REPORTED


class RunStopped(StampedMessage, frozen=True, gc=False):
    """Owner -> statistics server: the run ends early.

    Attributes:
        timestamp: Timestamp of the checkpoint to resume from. -1: there is none.
        epochs: Number of complete epochs.
    """

    kind = MessageKind.RUN_STOPPED
    epochs: int


class Shutdown(Message, frozen=True, gc=False):
    """Statistics server -> all: everything is recorded.

    Attributes:
        exit_code: Exit code of the run.
        apart: Whether ranks end without waiting for each other, because some rank may never answer.
    """

    kind = MessageKind.SHUTDOWN
    exit_code: int
    apart: bool


# Rows for the statistics server.


class ReportedRows(Message, frozen=True, gc=False):
    """Rows of a table.

    Attributes:
        rows: Rows of the dtype `ROWS[kind]`.
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
    """Owner -> statistics server: the row of an epoch whose weights are not evaluated."""

    kind = MessageKind.EPOCHS


class LearnerRows(ReportedRows, frozen=True, gc=False):
    """Learner, or owner in place of a dead learner -> statistics server: its account."""

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


class GradientNormRows(ReportedRows, frozen=True, gc=False):
    """Learner -> statistics server."""

    kind = MessageKind.GRADIENT_NORMS


class UpdateNormRows(ReportedRows, frozen=True, gc=False):
    """Owner -> statistics server."""

    kind = MessageKind.UPDATE_NORMS


class EpochEvaluated(Message, frozen=True, gc=False):
    """Coordinator -> statistics server: sums of an evaluation by workers, in one message or several.

    Attributes:
        epoch: Epoch whose weights were evaluated.
        seconds: Duration of the evaluation. NaN: a stop left no worker to evaluate the weights.
        last: Whether this message is the last one of the epoch.
        rows: Sums, `records.SUM`. None: there are none.
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
"""Class of the messages of each kind."""


class GroupFlags(msgspec.Struct, frozen=True, gc=False):
    """Flags that a learner sends to its compute group with a gradient.

    Attributes:
        digest: Digest of a sample of its weights (`Update`), which must be the same for all members. 0: a server owns
            the weights.
        lowered: Number of drops of the learning rate up to the end of the current epoch.
        enough: Whether training ends with the current epoch.
        stopped: Whether training ends with the current update.
        saves: Whether a checkpoint follows that update.
        decided: Number of decided changes of the job that it has received and does not follow yet, up to 255.
        distance: Distance of its replica from the weights, if it has a replica.
    """

    digest: int = 0
    lowered: int = 0
    enough: bool = False
    stopped: bool = False
    saves: bool = False
    decided: int = 0
    distance: float = 0.0
