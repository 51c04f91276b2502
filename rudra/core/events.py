"""Events that happen to a role. With `rudra.core.actions`, the whole interface between roles and drivers.

The events `Sent`, `Received`, `Computed` and `Evaluated` return the buffers that actions borrowed.

A simulation makes hundreds of millions of events. So they are msgspec structures, which cost a tenth of frozen
dataclasses. They hold no cycles (`gc=False`).
"""

import math
from typing import Generic, TypeVar

from msgspec import Struct

from rudra.core.messages import GroupFlags, Message, Rows
from rudra.core.records import Gradient


class Started(Struct, frozen=True, gc=False):
    """Start of a role: the driver is ready. It is the first event of every role."""


M = TypeVar("M", bound=Message, covariant=True)


class Received(Struct, Generic[M], frozen=True, gc=False):
    """Arrival of a message.

    Attributes:
        message: The message.
        buffer: Buffer with its tensor. None: it has none.
    """

    message: M
    buffer: str | None = None


class Sent(Struct, frozen=True, gc=False):
    """Delivery of a tensor. The message no longer needs its buffer.

    Attributes:
        buffer: Buffer of the tensor.
        to: Receiving role.
    """

    buffer: str
    to: int


class ReceiveCancelled(Struct, frozen=True, gc=False):
    """End of a receive that was cancelled. The role may use the buffer again, and its content is undefined.

    Attributes:
        buffer: Buffer of the receive.
    """

    buffer: str


class Hashed(Struct, frozen=True, gc=False):
    """Result of `Hash`.

    Attributes:
        digest: SHA-256 in hexadecimal.
    """

    digest: str


class Updated(Struct, frozen=True, gc=False):
    """End of an update.

    Attributes:
        timestamp: Timestamp of the new weights.
        digest: Digest of a sample of the new weights (`rudra.core.digest`).
        seconds: Duration of the optimiser's step.
        sampled: For an owner of a part of the weights, the sample itself, float32, of each stretch of the part
            (`rudra.core.layout`).
        norm: Norm of the gradient. For an owner of a part of the weights, norm of that part. NaN: it is not recorded.
        clipped_norm: Norm of the gradient after clipping. NaN: it is not clipped, or not recorded.
        product: Inner product of the gradient and the gradient of the previous update. NaN: it is not recorded.
    """

    timestamp: int
    digest: int
    seconds: float
    sampled: tuple[bytes, ...] = ()
    norm: float = math.nan
    clipped_norm: float = math.nan
    product: float = math.nan


class NormsComputed(Struct, frozen=True, gc=False):
    """Result of `ComputeNorms`.

    Attributes:
        norms: Norms, float32, in the order of the parameters.
    """

    norms: bytes


class ReplicaStepped(Struct, frozen=True, gc=False):
    """End of `StepReplica`.

    Attributes:
        seconds: Duration of the step.
        distance: Distance between replica and weights. NaN: it was not computed.
    """

    seconds: float
    distance: float = math.nan


class ActivationsReady(Struct, frozen=True, gc=False):
    """Result of `RunFirstStage`: the activations of a mini-batch are in the named buffer.

    Attributes:
        step: Number of the mini-batch.
    """

    step: int


class Computed(Struct, frozen=True, gc=False):
    """Result of `Compute`, `BackpropFirstStage` or `RunLastStage`: a gradient is in the named buffer.

    Attributes:
        step: Number of the mini-batch.
        loss: Mean loss over its samples.
        errors: Number of wrong samples.
        samples: Number of samples.
        norm: Norm of the gradient. NaN: it is not recorded.
    """

    step: int
    loss: float
    errors: float
    samples: int
    norm: float = math.nan


class AppliedGradient(Struct, frozen=True, gc=False):
    """Gradient that a worker applied to the weights in a window.

    Attributes:
        gradient: Description of the gradient. In a locked window its `update` is the number of the update, else -1. Its
            `timestamp` is the number of updates that were complete when the weights were read.
        rate: Learning rate α.
        digest: Digest of a sample of the new weights (`rudra.core.digest`). In a racing window it is 0.
        seconds: Duration of the update.
        most: Upper bound on σ, if other workers may have updated while this one read or wrote. `gradient.staleness` is
            the lower bound.
    """

    gradient: Gradient
    rate: float
    digest: int
    seconds: float
    most: int


class TrainedInPlace(Struct, frozen=True, gc=False):
    """Result of `TrainInPlace`: all of its gradients are applied.

    Attributes:
        made: Applied gradients, in order.
    """

    made: tuple[AppliedGradient, ...]


class SharedRead(Struct, frozen=True, gc=False):
    """Result of `ReadShared`: the weights of the window are in the named buffer.

    Attributes:
        surviving: Fraction of the updates that were not overwritten by races.
    """

    surviving: float


class UpdatesFound(Struct, frozen=True, gc=False):
    """Result of `FindUpdates`.

    Attributes:
        role: Role that made the updates.
        made: Its updates, in order.
    """

    role: int
    made: tuple[AppliedGradient, ...]


class Reduced(Struct, frozen=True, gc=False):
    """Result of `Reduce`: the gradients of a group are averaged.

    Attributes:
        sequence: Number of the reduction.
        gradients: Descriptions of the members' gradients, in group_rank order.
        words: Flags of the members, in group_rank order.
        group: Number of the group.
    """

    sequence: int
    gradients: tuple[Gradient, ...]
    words: tuple[GroupFlags, ...]
    group: int = 0


class SplitMetrics(Struct, frozen=True, gc=False):
    """Results of an evaluation on one split.

    Attributes:
        split: Name of the split.
        loss: Mean loss.
        error: Fraction of wrong samples. NaN: the task has no error.
        metrics: Names and values of all other metrics.
    """

    split: str
    loss: float
    error: float
    metrics: tuple[tuple[str, float], ...] = ()


class Evaluated(Struct, frozen=True, gc=False):
    """End of an evaluation of the weights on all splits.

    Attributes:
        buffer: Buffer with the weights.
        scores: Results on each split.
        seconds: Duration of the evaluation.
    """

    buffer: str
    scores: tuple[SplitMetrics, ...]
    seconds: float


class Decided(Struct, frozen=True, gc=False):
    """Answer of the user's function that may decide a change of the job after an epoch.

    Attributes:
        epoch: Number of the epoch.
        timestamp: Timestamp of the weights at its end.
        time_s: Seconds of training at its end.
        change: JSON of the change: table -> key -> value. Empty: no change.
    """

    epoch: int
    timestamp: int
    time_s: float
    change: str


class EvaluationPartComputed(Struct, frozen=True, gc=False):
    """Result of `ComputeEvaluationPart`.

    Attributes:
        part: Number of the part.
        rows: Sums of the part, `records.SUM`.
    """

    part: int
    rows: Rows


class Saved(Struct, frozen=True, gc=False):
    """Result of `Save`: the checkpoint is written next to the previous one.

    Attributes:
        timestamp: Timestamp of its weights.
        error: Reason why it was not written. Empty: it was.
    """

    timestamp: int
    error: str = ""


class Committed(Struct, frozen=True, gc=False):
    """Result of `Commit`: a resumed run will start from this checkpoint.

    Attributes:
        timestamp: Timestamp of its weights.
        error: Reason why it was not committed. Empty: it was.
    """

    timestamp: int
    error: str = ""


class Lost(Struct, frozen=True, gc=False):
    """Death of the rank of a role. Receives from this role only are removed, and sends to it count as `Sent`.

    Attributes:
        role: Id of the role.
    """

    role: int


class MemoryExhausted(Struct, frozen=True, gc=False):
    """End of an action without its result: its device, or main memory, had too little room.

    Attributes:
        text: What to say about it.
        harms: Whether the action changes weights, so that these may be part old and part new.
    """

    text: str
    harms: bool


class Tick(Struct, frozen=True, gc=False):
    """Passing of time without another event, for roles that request it (`Machine.tick_s`)."""


class Stopped(Struct, frozen=True, gc=False):
    """Request to stop the run in order."""


Event = (
    Started
    | Received[Message]
    | ReceiveCancelled
    | Sent
    | Hashed
    | Updated
    | NormsComputed
    | ReplicaStepped
    | ActivationsReady
    | Computed
    | TrainedInPlace
    | SharedRead
    | UpdatesFound
    | Reduced
    | Evaluated
    | Decided
    | EvaluationPartComputed
    | Saved
    | Committed
    | Lost
    | MemoryExhausted
    | Tick
    | Stopped
)
