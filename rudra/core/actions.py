"""Actions that a role requests of the driver. With `rudra.core.events`, the whole interface between roles and drivers.

Buffers are named by strings (`rudra.core.buffer_names`). An action that names a buffer borrows it. The driver sends,
receives and records. The role's executor carries out each `ExecutorAction`. Actions are msgspec structures, as events.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct

from rudra.core.buffer_names import WEIGHTS
from rudra.core.messages import GroupFlags, Message, Rows
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import Work
from topologies import Plan

TableName = Literal[
    "gradients",
    "updates",
    "minibatches",
    "epochs",
    "metrics",
    "events",
    "averages",
    "stages",
    "gradient_norms",
    "update_norms",
]


class Send(Struct, frozen=True, gc=False):
    """Send a message, and a tensor if a buffer is named. With a tensor, `Sent` follows.

    Attributes:
        to: Receiving role.
        message: The message.
        buffer: Buffer of the tensor. None: there is none.
    """

    to: int
    message: Message
    buffer: str | None = None


class Receive(Struct, frozen=True, gc=False):
    """Receive one tensor. `Received` follows.

    Attributes:
        buffer: Buffer for the tensor.
        source: Sending role. None: any role.
        gradient: Whether the tensor is a gradient. Otherwise it is weights.
    """

    buffer: str
    source: int | None = None
    gradient: bool = False


class CancelReceive(Struct, frozen=True, gc=False):
    """Cancel a `Receive`. `ReceiveCancelled` follows, or `Received` if a tensor was on its way.

    Attributes:
        buffer: Buffer of the receive.
    """

    buffer: str


class DeclareLost(Struct, frozen=True, gc=False):
    """Treat a living role that keeps this one waiting as dead. `Lost` follows.

    Attributes:
        role: Id of that role.
    """

    role: int


class ExecutorAction(Struct, frozen=True, gc=False):
    """Action that the role's executor carries out without other roles.

    Attributes:
        long: Whether other actions continue at the same time. Otherwise the action ends before the next one begins.
        reads: Fields that name buffers whose content the action reads.
        changes: Fields that name buffers whose content the action changes.
    """

    long: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[tuple[str, ...]] = ()


class Hash(ExecutorAction, frozen=True, gc=False):
    """Compute the digest of a buffer's floats. `Hashed` follows."""

    reads = ("buffer",)
    buffer: str


class ReorderParts(ExecutorAction, frozen=True, gc=False):
    """Move parts of the weights, which arrived one after the other, to their places in the model's order."""

    changes = ("buffer",)
    buffer: str


class Compute(ExecutorAction, frozen=True, gc=False):
    """Compute the gradient of a mini-batch. `Computed` follows.

    Attributes:
        step: Number of the mini-batch.
        work: Samples of the mini-batch.
        weights: Buffer with the weights.
        gradient: Buffer for the gradient.
        timestamp: Timestamp of the weights, for hooks.
        time_s: Seconds of training at the beginning, for hooks.
        then: Step that follows with this gradient, if all replicas are then averaged and the role waits for it. The
            step and the average can begin while the gradient is computed.
        averaged: Number of samples of this replica in that average.
    """

    long = True
    reads, changes = ("weights",), ("gradient",)
    step: int
    work: Work
    weights: str
    gradient: str
    timestamp: int = -1
    time_s: float = 0.0
    then: "StepReplica | None" = None
    averaged: int = 0


class RunFirstStage(ExecutorAction, frozen=True, gc=False):
    """Compute the activations of the first layers for a mini-batch. `ActivationsReady` follows.

    The values that the gradient needs are kept until `BackpropFirstStage`. The weights must not change until then.

    Attributes:
        step: Number of the mini-batch.
        work: Samples of the mini-batch.
        weights: Buffer with the weights.
        activations: Buffer for the activations.
    """

    long = True
    reads, changes = ("weights",), ("activations",)
    step: int
    work: Work
    weights: str
    activations: str


class BackpropFirstStage(ExecutorAction, frozen=True, gc=False):
    """Compute the gradient of the first layers for the last `RunFirstStage`. `Computed` follows.

    Attributes:
        step: Number of the mini-batch.
        weights: Buffer with the weights.
        returned: Buffer with the gradient of the activations.
        gradient: Buffer for the gradient.
        loss, errors, samples: Results of the mini-batch from the stage server, repeated in `Computed`.
        timestamp: Timestamp of the weights, for hooks.
        time_s: Seconds of training at the beginning, for hooks.
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
    """Compute the loss and both gradients of a learner's mini-batch from its activations. `Computed` follows.

    Attributes:
        learner: Number of the learner.
        step: Number of the mini-batch.
        work: Samples of the mini-batch.
        activations: Buffer with the activations.
        weights: Buffer with the weights of the last layers.
        gradient: Buffer for the gradient of these weights.
        returned: Buffer for the gradient of the activations.
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
"""Actions that compute a gradient, or values for one, into buffers of their own."""


class TrainInPlace(ExecutorAction, frozen=True, gc=False):
    """Compute gradients at the weights in the window, and apply each of them at once. `TrainedInPlace` follows.

    Attributes:
        step: Number of the first gradient.
        works: Samples of each gradient. The gradients may be computed at the same time.
        rates: Learning rate α of each gradient.
    """

    long = True
    step: int
    works: tuple[Work, ...]
    rates: tuple[float, ...]


class WriteShared(ExecutorAction, frozen=True, gc=False):
    """Write the first weights of the window. No worker reads or updates it yet.

    Attributes:
        weights: Buffer with the weights.
        timestamp: Their timestamp.
    """

    reads = ("weights",)
    weights: str
    timestamp: int


class ReadShared(ExecutorAction, frozen=True, gc=False):
    """Copy the window's weights to a buffer while no worker updates them. `SharedRead` follows."""

    changes = ("weights",)
    weights: str


class FindUpdates(ExecutorAction, frozen=True, gc=False):
    """Find a role's latest updates in the window. `UpdatesFound` follows.

    Attributes:
        role: Role that made the updates.
        after: Number of the last known update: among all updates in a locked window, among the role's own in a racing
            one.
    """

    role: int
    after: int


class Reduce(Struct, frozen=True, gc=False):
    """Average a buffer over a compute group, or over `EVERYBODY`, weighted by samples. `Reduced` follows.

    Attributes:
        buffer: Buffer to average.
        group: Number of the group.
        sequence: Number of the reduction. All members of the group name the same number.
        gradient: Description of this member's gradient.
        to_all: Whether every member gets the average. Otherwise only the first member does, and the buffers of all
            others are undefined.
        word: Flags of this member.
        rate: Predicted learning rate of the update by this average, so that the update can begin while parts of the
            average are under way. None: it is unknown, or no gradient follows.
    """

    buffer: str
    group: int
    sequence: int
    gradient: Gradient
    to_all: bool
    word: GroupFlags = GroupFlags()
    rate: float | None = None


class Accumulate(ExecutorAction, frozen=True, gc=False):
    """Add a gradient to a running average, in one pass: into = (1 − fraction) · into + fraction · scale · gradient.

    If both names are the same, the first gradient of an update is scaled in place. `scale` does not apply to model
    buffers (BatchNorm statistics), which are averaged unscaled.

    Attributes:
        into: Buffer of the average.
        gradient: Buffer of the gradient.
        fraction: Weight of the gradient in the average.
        scale: Factor of the gradient.
    """

    reads, changes = ("gradient",), ("into",)
    into: str
    gradient: str
    fraction: float
    scale: float


class Correct(ExecutorAction, frozen=True, gc=False):
    """Change a gradient by the job's correction (`protocols.Correction`), before it is averaged or applied.

    Attributes:
        gradient: Buffer with the gradient.
        weights: Buffer with the present weights.
        pulled: Buffer with the weights that the gradient was computed from. Empty: the correction does not need them.
        learner, step, timestamp, staleness, samples: As in `protocols.GradientRecord`.
    """

    reads, changes = ("weights", "pulled"), ("gradient",)
    gradient: str
    weights: str
    pulled: str
    learner: int
    step: int
    timestamp: int
    staleness: int
    samples: int


class AverageGroup(ExecutorAction, frozen=True, gc=False):
    """Average the gradients of a stage server, weighted by samples, in the same way as a compute group.

    Attributes:
        into: Buffer of the average, which is one of the gradients' buffers.
        gradients: Names of the buffers, in group_rank order.
        samples: Number of samples of each gradient.
        sums: Order of addition (`Plan.partial_sums`).
    """

    changes = ("into",)
    into: str
    gradients: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    sums: tuple[tuple[int, ...], ...] = ()


class Update(ExecutorAction, frozen=True, gc=False):
    """Step the weights by the averaged gradient with the optimiser. `Updated` follows.

    Averaged model buffers replace the previous ones. Epoch, samples and time are for hooks, as in `records.UPDATE`.

    Attributes:
        gradient: Buffer with the averaged gradient.
        weights: Buffer with the weights.
        learning_rate: Learning rate of the step.
        timestamp: Timestamp of the new weights.
        epoch, samples, time_s: Progress of the training.
        norms: Norms of the gradients of other owners, for the parameters before and after this owner's, float32.
            Clipping uses the norm of all of them.
        average: Buffer with the average of the weights over time. Empty: there is none.
        average_weight: Weight of the new weights in this average.
    """

    reads, changes = ("gradient",), ("weights", "average")
    gradient: str
    weights: str
    learning_rate: float
    timestamp: int
    epoch: int = 0
    samples: int = 0
    time_s: float = 0.0
    norms: tuple[bytes, bytes] = (b"", b"")
    average: str = ""
    average_weight: float = 0.0


class ComputeNorms(ExecutorAction, frozen=True, gc=False):
    """Compute the norm of the gradient of each parameter. `NormsComputed` follows."""

    reads = ("gradient",)
    gradient: str


class StepReplica(ExecutorAction, frozen=True, gc=False):
    """Step a replica by a gradient with its own optimiser. `ReplicaStepped` follows.

    Attributes:
        gradient: Buffer with the gradient.
        replica: Buffer with the replica.
        learning_rate: Learning rate of the step.
        weights: Buffer with the weights.
        difference: Buffer for the parameters of the weights minus the parameters of the replica, and for the replica's
            model buffers. Empty: it is not needed.
        elasticity: Fraction of the difference before the step that is added to the replica after the step. None: the
            difference after the step is stored, and nothing is added.
    """

    reads, changes = ("gradient", "weights"), ("replica", "difference")
    gradient: str
    replica: str
    learning_rate: float
    weights: str = WEIGHTS
    difference: str = ""
    elasticity: float | None = None


class PullReplica(ExecutorAction, frozen=True, gc=False):
    """Move the parameters of a replica towards the weights.

    Attributes:
        replica: Buffer with the replica.
        weights: Buffer with the weights.
        elasticity: Fraction of the distance.
    """

    reads, changes = ("weights",), ("replica",)
    replica: str
    weights: str
    elasticity: float


class ResetReplica(ExecutorAction, frozen=True, gc=False):
    """Reset a replica to the weights, and all optimisers to their initial state.

    Attributes:
        replica: Buffer with the replica.
        weights: Buffer with the weights.
        keeps_momentum: Whether the replica's own optimiser keeps its state.
    """

    reads, changes = ("weights",), ("replica",)
    replica: str
    weights: str
    keeps_momentum: bool = False


class SetOptimizer(ExecutorAction, frozen=True, gc=False):
    """Use other settings of an optimiser from now on. Its state remains, except the velocity if the momentum is 0.

    Attributes:
        weights: Buffer that the optimiser steps: the weights, or a replica.
        momentum: Momentum, if the optimiser has one.
        options: Further keyword arguments of the torch.optim class.
    """

    weights: str
    momentum: float
    options: Mapping[str, Any]


class Copy(ExecutorAction, frozen=True, gc=False):
    """Copy a tensor into a buffer that exists from now until it is sent."""

    reads, changes = ("source",), ("target",)
    source: str
    target: str


class Evaluate(ExecutorAction, frozen=True, gc=False):
    """Evaluate the weights in a buffer, in small pieces between other work. `Evaluated` follows."""

    long = True
    reads = ("buffer",)
    buffer: str


class ComputeEvaluationPart(ExecutorAction, frozen=True, gc=False):
    """Compute a part of an evaluation. `EvaluationPartComputed` follows.

    If the weights are in a window, they are evaluated there. No worker updates them at that time.

    Attributes:
        weights: Buffer with the weights.
        part: Number of the part.
        parts: Number of all parts.
    """

    long = True
    reads = ("weights",)
    weights: str
    part: int
    parts: int


class MergeEvaluation(ExecutorAction, frozen=True, gc=False):
    """Add up the parts of an evaluation. `Evaluated` follows.

    Attributes:
        buffer: Buffer with the evaluated weights.
        rows: Sums of all parts in their order, `records.SUM`.
    """

    buffer: str
    rows: Rows


class Save(Struct, frozen=True, gc=False):
    """Copy weights and optimiser state now, and write them to a checkpoint in the background. `Saved` follows.

    Attributes:
        weights: Buffer with the weights.
        position: Position in the training.
        alone: Whether to save only this role's state, because other roles have died.
    """

    weights: str
    position: TrainingState
    alone: bool = False


class Commit(Struct, frozen=True, gc=False):
    """Replace the previous checkpoint by the saved one. `Committed` follows.

    Attributes:
        timestamp: Timestamp of its weights.
        keep: Name of a copy that outlasts the run. Empty: there is none.
    """

    timestamp: int
    keep: str = ""


class Sync(Struct, frozen=True, gc=False):
    """Write all recorded rows to the disk before the next action."""


class Reconfigure(Struct, frozen=True, gc=False):
    """Make all roles again by another plan, except the owner of the weights and the statistics server.

    Messages between them are dropped. The owner is `Started` when none of its own transfers is under way.

    Attributes:
        plan: The new plan.
        position: Position in the training.
        replicas_stay: Whether learners keep their replicas, which the checkpoint of the position has. Learners without
            one begin with the weights.
    """

    plan: Plan
    position: TrainingState
    replicas_stay: bool = False


class FollowJob(Struct, frozen=True, gc=False):
    """Continue with the job at a position. Simulations then take its costs. Real ranks have nothing to do.

    Attributes:
        position: Position in the training.
    """

    position: TrainingState


class Record(Struct, frozen=True, gc=False):
    """Append rows to a table of the results. `Decided` follows an epoch, if the job has `[decisions]`.

    Attributes:
        table: Name of the table.
        rows: The rows.
        weights: With a row of an epoch, the buffer that still holds the weights of its end. None: there is none.
    """

    table: TableName
    rows: Rows
    weights: str | None = None


class StoreEpochWeights(Struct, frozen=True, gc=False):
    """Write the weights of an epoch's end to the results.

    Attributes:
        buffer: Buffer with the weights.
        epoch: Number of the epoch.
        instead_of: Epochs whose weights are deleted afterwards.
    """

    buffer: str
    epoch: int
    instead_of: tuple[int, ...] = ()


class Finish(Struct, frozen=True, gc=False):
    """Write the end of a run: totals, one row for each learner, and the final weights.

    Attributes:
        totals: Row of `/totals`.
        learners: Rows of `/learners`.
        weights: Buffer with the final weights. None: there are none.
        reason: Reason why the run was stopped early. Empty: it was not.
    """

    totals: Rows
    learners: Rows
    weights: str | None
    reason: str = ""


class Warn(Struct, frozen=True, gc=False):
    """Print a warning once, on stderr.

    Attributes:
        text: The warning.
    """

    text: str


class Fail(Struct, frozen=True, gc=False):
    """End the whole run.

    Attributes:
        text: Line for the user.
        lost: Whether the reason is a dead rank, so that another try may succeed.
        cause: Id of the role that caused it. None: the role that fails.
    """

    text: str
    lost: bool = False
    cause: int | None = None


class Halt(Struct, frozen=True, gc=False):
    """End this role. The rank ends with the largest exit code of its roles.

    Attributes:
        code: Exit code of this role.
        apart: Whether some rank may never end, so that no rank waits for all others.
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
    | FollowJob
    | Record
    | StoreEpochWeights
    | Finish
    | Warn
    | Fail
    | Halt
)
Actions = Sequence[Action]
