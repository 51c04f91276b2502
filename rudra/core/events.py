"""What happens to a role, and what a role wants done: the whole language between roles and drivers.

Buffers are named by strings. An action that names a buffer borrows it; `Sent`, `Received`, `Computed`
and `Evaluated` give it back. Drivers send and receive, and record; what is `ExecutorAction` a role's executor does.

A simulation makes hundreds of millions of them, hence msgspec's structures, which cost a tenth of frozen dataclasses.
They hold no cycles (`gc=False`).
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Generic, Literal, TypeVar

from msgspec import Struct

from rudra.core.messages import GroupFlags, Message, Rows
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import Work
from topologies import Plan

WEIGHTS, GRADIENT = "weights", "gradient"
REPLICA, DIFFERENCE = "replica", "difference"
REFERENCE, CORRECTION = "reference", "correction"
SNAPSHOT, DOWNCAST = "snapshot", "downcast"
"""Names of buffers, or how they begin, that mean something to executors, too: what a role trains, its gradients; where
learners average, their own replica and by how much the weights differ from it, and where a reference stands between
these, that and by how much it differs from the replica; copies for tests, and copies that go down the weights' tree."""

ACTIVATIONS, ACTIVATION_GRADIENT = "activations", "returned"
"""What the first layers make of a mini-batch, and its gradient; of another size than the weights."""

TableName = Literal["gradients", "updates", "minibatches", "epochs", "metrics", "events", "averages", "stages"]


class Started(Struct, frozen=True, gc=False):
    """The driver is ready; the first event of every role."""


M = TypeVar("M", bound=Message, covariant=True)


class Received(Struct, Generic[M], frozen=True, gc=False):
    """A message arrived; `buffer` holds its tensor, if it has one."""

    message: M
    buffer: str | None = None


class Sent(Struct, frozen=True, gc=False):
    """A tensor was delivered, so its buffer is no longer lent to that message."""

    buffer: str
    to: int


class ReceiveCancelled(Struct, frozen=True, gc=False):
    """A receive was taken back: its buffer is the role's again, its content void."""

    buffer: str


class Hashed(Struct, frozen=True, gc=False):
    """The SHA-256 that `Hash` asked for, in hexadecimal."""

    digest: str


class Updated(Struct, frozen=True, gc=False):
    """An update is over: how long the optimiser's step took, and a digest of a sample of the new weights.

    Of a part of the weights there is the sample itself, float32, of each stretch of theirs (`rudra.core.layout`).
    """

    timestamp: int
    digest: int
    seconds: float
    sampled: tuple[bytes, ...] = ()


class NormsComputed(Struct, frozen=True, gc=False):
    """A `ComputeNorms` is over: the norms, float32, in the order of the parameters."""

    norms: bytes


class ReplicaStepped(Struct, frozen=True, gc=False):
    """A `StepReplica` is over: how long it took, and how far apart replica and weights are, where it looked at that."""

    seconds: float
    distance: float = math.nan


class ActivationsReady(Struct, frozen=True, gc=False):
    """The activations of a mini-batch are ready in the buffer that `RunFirstStage` named."""

    step: int


class Computed(Struct, frozen=True, gc=False):
    """A gradient is ready in the buffer that `Compute`, `BackpropFirstStage` or `RunLastStage` named."""

    step: int
    loss: float
    errors: float
    samples: int


class AppliedGradient(Struct, frozen=True, gc=False):
    """One gradient that is in the window's weights.

    Attributes:
        gradient: its `update` is the number of that update in a locked window, else -1; `timestamp` counts the updates
            that were complete when its weights were read.
        rate: α.
        digest: of a sample of the new weights (`rudra.core.digest`); 0 in a racing window.
        seconds: that the update took.
        most: σ at most, where others may have updated while this one read or wrote; `gradient.staleness` is the least.
    """

    gradient: Gradient
    rate: float
    digest: int
    seconds: float
    most: int


class TrainedInPlace(Struct, frozen=True, gc=False):
    """The work that `TrainInPlace` named is in the weights, gradient by gradient."""

    made: tuple[AppliedGradient, ...]


class SharedRead(Struct, frozen=True, gc=False):
    """The window's weights are in the buffer that `ReadShared` named; this part of the updates has survived races."""

    surviving: float


class UpdatesFound(Struct, frozen=True, gc=False):
    """What `FindUpdates` asked for: updates of a role, in order."""

    role: int
    made: tuple[AppliedGradient, ...]


class Reduced(Struct, frozen=True, gc=False):
    """A group's gradients are added up; what its members gave and said, in group_rank order."""

    sequence: int
    gradients: tuple[Gradient, ...]
    words: tuple[GroupFlags, ...]
    group: int = 0


class SplitMetrics(Struct, frozen=True, gc=False):
    """What one split came to; the error is a fraction, NaN where the task knows none."""

    split: str
    loss: float
    error: float
    metrics: tuple[tuple[str, float], ...] = ()


class Evaluated(Struct, frozen=True, gc=False):
    """A test of the weights in `buffer` is over, on each split that there is."""

    buffer: str
    scores: tuple[SplitMetrics, ...]
    seconds: float


class EvaluationPartComputed(Struct, frozen=True, gc=False):
    """The part of a test that `ComputeEvaluationPart` named came to these rows of `records.SUM`."""

    part: int
    rows: Rows


class Saved(Struct, frozen=True, gc=False):
    """The checkpoint that `Save` asked for lies beside the one before; `error` says why it does not."""

    timestamp: int
    error: str = ""


class Committed(Struct, frozen=True, gc=False):
    """The checkpoint that `Commit` spoke of is the one to resume from; `error` says why it is not."""

    timestamp: int
    error: str = ""


class Lost(Struct, frozen=True, gc=False):
    """The rank of a role has died. Receives that were for it alone are gone, what was sent to it counts as `Sent`."""

    role: int


class Tick(Struct, frozen=True, gc=False):
    """Nothing has happened for a while; for roles that ask for it (`Machine.tick_s`)."""


class Stopped(Struct, frozen=True, gc=False):
    """Somebody asked the run to stop in order."""


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
    | EvaluationPartComputed
    | Saved
    | Committed
    | Lost
    | Tick
    | Stopped
)


class Send(Struct, frozen=True, gc=False):
    """Send a message, with the tensor in `buffer` if one is named; its end is `Sent`, for tensors only."""

    to: int
    message: Message
    buffer: str | None = None


class Receive(Struct, frozen=True, gc=False):
    """Let one tensor in, from role `source` or from anybody: a gradient, or weights; its end is `Received`."""

    buffer: str
    source: int | None = None
    gradient: bool = False


class CancelReceive(Struct, frozen=True, gc=False):
    """Take back a `Receive`; its end is `ReceiveCancelled`, or `Received` if something was coming already."""

    buffer: str


class DeclareLost(Struct, frozen=True, gc=False):
    """Treat a role that lives, but keeps this one waiting, as one that has died; its end is `Lost`."""

    role: int


class ExecutorAction(Struct, frozen=True, gc=False):
    """What a role's executor does by itself.

    Attributes:
        long: other things go on meanwhile; else it is done before the next action.
        reads: fields that name buffers whose content it needs.
        changes: fields that name buffers whose content it changes.
    """

    long: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[tuple[str, ...]] = ()


class Hash(ExecutorAction, frozen=True, gc=False):
    """Digest a buffer's floats; its end is `Hashed`."""

    reads = ("buffer",)
    buffer: str


class ReorderParts(ExecutorAction, frozen=True, gc=False):
    """Put weights whose parts have come one behind the other where the model has them."""

    changes = ("buffer",)
    buffer: str


class Compute(ExecutorAction, frozen=True, gc=False):
    """Compute the gradient of mini-batch `step`, which is made of this work, at the weights; its end is `Computed`.

    What follows is for hooks: the weights' timestamp, and when it begins, in seconds of training.
    """

    long = True
    reads, changes = ("weights",), ("gradient",)
    step: int
    work: Work
    weights: str
    gradient: str
    timestamp: int = -1
    time_s: float = 0.0


class RunFirstStage(ExecutorAction, frozen=True, gc=False):
    """Compute what the first layers make of mini-batch `step`; its end is `ActivationsReady`.

    What the gradient will need is kept until `BackpropFirstStage`, and the weights must not change until then.
    """

    long = True
    reads, changes = ("weights",), ("activations",)
    step: int
    work: Work
    weights: str
    activations: str


class BackpropFirstStage(ExecutorAction, frozen=True, gc=False):
    """Compute the first layers' gradient of the last `RunFirstStage` from its activations'; its end is `Computed`.

    Loss, errors and samples are what the stage server says of the mini-batch, and `Computed` repeats. What follows is
    for hooks, as in `Compute`.
    """

    long = True
    reads, changes = ("weights", "returned"), ("gradient",)
    step: int
    weights: str
    returned: str
    gradient: str
    loss: float
    errors: float
    samples: int
    timestamp: int = -1
    time_s: float = 0.0


class RunLastStage(ExecutorAction, frozen=True, gc=False):
    """Compute the loss of a learner's mini-batch, of its activations, and both gradients; its end is `Computed`.

    Attributes:
        learner: its number.
        step: of the mini-batch, which is made of this work.
        gradient: takes that of the weights.
        returned: takes that of the activations.
    """

    long = True
    reads, changes = ("weights", "activations"), ("gradient", "returned")
    learner: int
    step: int
    work: Work
    activations: str
    weights: str
    gradient: str
    returned: str


COMPUTATIONS = (Compute, RunFirstStage, BackpropFirstStage, RunLastStage)
"""What leaves a gradient, or what one is made of, in buffers of its own."""


class TrainInPlace(ExecutorAction, frozen=True, gc=False):
    """Compute gradients at the weights in the window, and bring each into them at once; its end is `TrainedInPlace`.

    Attributes:
        step: of the first gradient.
        works: of each gradient its samples; those of one action may be computed at the same time.
        rates: α of each.
    """

    long = True
    step: int
    works: tuple[Work, ...]
    rates: tuple[float, ...]


class WriteShared(ExecutorAction, frozen=True, gc=False):
    """Have the window begin with these weights, of a timestamp; nobody reads or updates it yet."""

    reads = ("weights",)
    weights: str
    timestamp: int


class ReadShared(ExecutorAction, frozen=True, gc=False):
    """Copy the window's weights to a buffer, while nobody updates them; its end is `SharedRead`."""

    changes = ("weights",)
    weights: str


class FindUpdates(ExecutorAction, frozen=True, gc=False):
    """Find the updates of the window that a role made, and that came after so many; its end is `UpdatesFound`.

    They are counted among all updates of a locked window, and among those of that role in a racing one.
    """

    role: int
    after: int


class Reduce(Struct, frozen=True, gc=False):
    """Average a buffer over the compute group, or over `EVERYBODY`, weighted by samples; its end is `Reduced`.

    Every member of the group must say the same `sequence`. The average is then in the buffer of every member, or,
    unless it goes `to_all`, in that of the first alone, and the others' buffers are void.
    """

    buffer: str
    group: int
    sequence: int
    gradient: Gradient
    to_all: bool
    word: GroupFlags = GroupFlags()


class Accumulate(ExecutorAction, frozen=True, gc=False):
    """`into` becomes `(1 - fraction) * into + fraction * scale * gradient`: a running average, in one pass.

    Where both are one buffer, the first gradient of an update is scaled in place. `scale` is not for model buffers
    (BatchNorm statistics), which are averaged as they are.
    """

    reads, changes = ("gradient",), ("into",)
    into: str
    gradient: str
    fraction: float
    scale: float


class AverageGroup(ExecutorAction, frozen=True, gc=False):
    """`into` becomes the mean of a stage server's gradients, weighted by samples, as a compute group adds them.

    Attributes:
        into: one of the gradients' buffers.
        gradients: names of the buffers, in group_rank order.
        samples: of each.
        sums: the order of addition (`Plan.partial_sums`).
    """

    changes = ("into",)
    into: str
    gradients: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    sums: tuple[tuple[int, ...], ...] = ()


class Update(ExecutorAction, frozen=True, gc=False):
    """Let the optimiser step the weights by the averaged gradient; its end is `Updated`.

    Averaged model buffers replace those of before. The new weights have this timestamp. What follows is for hooks, as
    in `records.UPDATE`.

    Attributes:
        norms: of gradients that others have, of the parameters before these and of those behind, float32 each; the norm
            of all is what clipping goes by.
    """

    reads, changes = ("gradient",), ("weights",)
    gradient: str
    weights: str
    learning_rate: float
    timestamp: int
    epoch: int = 0
    samples: int = 0
    time_s: float = 0.0
    norms: tuple[bytes, bytes] = (b"", b"")


class ComputeNorms(ExecutorAction, frozen=True, gc=False):
    """Take the norm of the gradient of each parameter; its end is `NormsComputed`."""

    reads = ("gradient",)
    gradient: str


class StepReplica(ExecutorAction, frozen=True, gc=False):
    """Let a replica's own optimiser step it by a gradient; its end is `ReplicaStepped`.

    Attributes:
        difference: buffer for the parameters of the weights minus those of the replica, and the replica's model
            buffers; empty: nobody asks.
        elasticity: the difference is that of before the step, and so much of it is added after it; None: it is that of
            after the step.
    """

    reads, changes = ("gradient", "weights"), ("replica", "difference")
    gradient: str
    replica: str
    learning_rate: float
    weights: str = WEIGHTS
    difference: str = ""
    elasticity: float | None = None


class PullReplica(ExecutorAction, frozen=True, gc=False):
    """Move the parameters of a replica towards the weights, by such a part of the way."""

    reads, changes = ("weights",), ("replica",)
    replica: str
    weights: str
    elasticity: float


class ResetReplica(ExecutorAction, frozen=True, gc=False):
    """Let a replica be what the weights are, all optimisers as at the beginning; its own may keep its state."""

    reads, changes = ("weights",), ("replica",)
    replica: str
    weights: str
    keeps_momentum: bool = False


class Copy(ExecutorAction, frozen=True, gc=False):
    """Copy a tensor into a buffer that exists from now until it was sent."""

    reads, changes = ("source",), ("target",)
    source: str
    target: str


class Evaluate(ExecutorAction, frozen=True, gc=False):
    """Test the weights in a buffer, in small pieces between other work; its end is `Evaluated`."""

    long = True
    reads = ("buffer",)
    buffer: str


class ComputeEvaluationPart(ExecutorAction, frozen=True, gc=False):
    """Compute a part of a test, of so many, of the weights in a buffer; its end is `EvaluationPartComputed`.

    Where the weights are in a window, they are tested there: nobody updates them.
    """

    long = True
    reads = ("weights",)
    weights: str
    part: int
    parts: int


class MergeEvaluation(ExecutorAction, frozen=True, gc=False):
    """Add up what the parts of a test came to, rows of `records.SUM` in the order of the parts; its end is `Evaluated`.

    The weights that were tested are in `buffer`.
    """

    buffer: str
    rows: Rows


class Save(Struct, frozen=True, gc=False):
    """Copy weights and optimiser state now, and write them to a checkpoint meanwhile; its end is `Saved`.

    Attributes:
        alone: the state of other roles, who keep something, too, is not to be had.
    """

    weights: str
    position: TrainingState
    alone: bool = False


class Commit(Struct, frozen=True, gc=False):
    """Let the checkpoint that was saved take the place of the one before; its end is `Committed`.

    Attributes:
        keep: it is to outlast the run, too, and is called this; empty: it is not.
    """

    timestamp: int
    keep: str = ""


class Sync(Struct, frozen=True, gc=False):
    """Have everything recorded so far on the disk before the next action."""


class Reconfigure(Struct, frozen=True, gc=False):
    """Have all roles but the owner of the weights and the statistics server made again, by another plan.

    What is under way between them is dropped. The owner is `Started` when nothing of its own is under way any more.
    """

    plan: Plan
    position: TrainingState


class Record(Struct, frozen=True, gc=False):
    """Append rows to a table of the results; with an epoch's, `weights` is the buffer that still holds its weights."""

    table: TableName
    rows: Rows
    weights: str | None = None


class StoreEpochWeights(Struct, frozen=True, gc=False):
    """Write the weights in a buffer to the results, as those of an epoch's end.

    Attributes:
        instead_of: epochs whose weights need not be kept any longer, once these are.
    """

    buffer: str
    epoch: int
    instead_of: tuple[int, ...] = ()


class Finish(Struct, frozen=True, gc=False):
    """Write what a run leaves: totals, one row per learner, and the final weights; or why it was stopped early."""

    totals: Rows
    learners: Rows
    weights: str | None
    reason: str = ""


class Warn(Struct, frozen=True, gc=False):
    """Tell the user, once, on stderr."""

    text: str


class Fail(Struct, frozen=True, gc=False):
    """End the whole run with this line; `lost`: because a rank died, so that another try may do better."""

    text: str
    lost: bool = False


class Halt(Struct, frozen=True, gc=False):
    """This role is done; the rank ends with this exit code, or that of another role of its that is larger.

    `apart`: some rank may never end by itself, so that nobody is to wait for all.
    """

    code: int = 0
    apart: bool = False


Action = (
    Send
    | Receive
    | CancelReceive
    | DeclareLost
    | ExecutorAction
    | Reduce
    | Save
    | Commit
    | Sync
    | Reconfigure
    | Record
    | StoreEpochWeights
    | Finish
    | Warn
    | Fail
    | Halt
)
Actions = Sequence[Action]
