"""Rows of measurements: the same bytes in messages, in memory and in the HDF5 file.

Every dtype here is packed and little-endian. So a row is sent by MPI and written to a data set unchanged. Times are
seconds since the start of training, on one clock for all ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

MEANING: dict[np.dtype[np.void], dict[str, str]] = {}
"""Table -> column -> meaning. Columns named pad only align the others."""


def table(*columns: tuple[str, str, str]) -> np.dtype[np.void]:
    """Returns the dtype of a table's rows, from the name, type and meaning of each column. `MEANING` keeps the
    meanings."""
    dtype = np.dtype([(name, kind) for name, kind, _ in columns])
    MEANING[dtype] = {name: meaning for name, _, meaning in columns if name != "pad"}
    return dtype


def joined_rows(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Returns the rows of one or more pieces of a table as one array.

    NumPy's own function compares all columns of each piece, which takes longer than the copy.
    """
    return np.frombuffer(bytearray().join(piece.data for piece in pieces), pieces[0].dtype)


_ERRORS = "wrong samples. A partly wrong sample counts as a fraction. NaN: the task has no error"

GRADIENT = table(
    ("update", "<i8", "timestamp of the update that applied the gradient"),  # -1 on the way to the server
    ("learner", "<i4", "number of the learner that computed the gradient, from 0"),
    ("samples", "<i4", "samples of the gradient's mini-batch"),
    ("step", "<i8", "number of the gradient among its learner's gradients, from 0"),
    ("first", "<i8", "position of the gradient's first sample in its stream; of an average, of its first mini-batch"),
    ("timestamp", "<i8", "timestamp of the weights that the gradient was computed from"),
    ("staleness", "<i8", "σ: the server's timestamp when the gradient arrived, minus `timestamp`"),
    ("scale", "<f8", "weight of the gradient inside the update's average; 1 without modulation `gradient_staleness`"),
    ("loss", "<f8", "mean loss over the samples"),
    ("errors", "<f4", _ERRORS),
    ("stream", "<i4", "number of that stream: the learner's own, or with `cluster.shares` one of several learners"),
)
"""Applied gradient, in order of application."""


class Gradient(Struct, frozen=True, gc=False):
    """Row of `GRADIENT` as plain numbers, because NumPy is slow on single rows."""

    update: int
    learner: int
    samples: int
    step: int
    first: int
    timestamp: int
    staleness: int
    scale: float
    loss: float
    errors: float
    stream: int


UPDATE = table(
    ("timestamp", "<i8", "timestamp of the weights after the update: 1, 2, …"),
    ("epoch", "<i4", "epoch that the update's samples belong to: 1, 2, …"),
    ("gradients", "<i4", "gradients that the update applied"),
    ("samples", "<i8", "samples of these gradients"),
    ("learning_rate", "<f8", "learning rate α of the update, after schedule, warm-up and modulation"),
    ("mean_staleness", "<f8", "⟨σ⟩: mean staleness of the update's gradients"),  # eq. 2
    ("time_s", "<f8", "training time when the update began"),
    ("update_s", "<f8", "time that the optimiser's step took"),
    ("digest", "<u8", "hash of a sample of the updated weights, another sample each time; a replay compares it"),
)
"""Update of the weights."""

MINIBATCH = table(
    ("learner", "<i4", "number of the learner, from 0"),
    ("samples", "<i4", "samples of the mini-batch"),
    ("step", "<i8", "number of the mini-batch among its learner's mini-batches, from 0"),
    ("timestamp", "<i8", "timestamp of the weights that the gradient was computed from"),
    ("loss", "<f8", "mean loss over the samples"),
    ("errors", "<f4", _ERRORS),
    ("pad", "<i4", ""),
    ("time_s", "<f8", "training time when the gradient was ready"),
    (
        "compute_s",
        "<f8",
        "time to compute the gradient, from the learner's request, a stage server's part included",
    ),  # what follows is 0 for a gradient that was not pushed
    ("reduce_s", "<f8", "time to add up the gradients of a compute group"),
    ("push_s", "<f8", "time until the server had the gradient; with `adv*` in parallel with computing"),
    ("wait_s", "<f8", "time from asking for weights until the server's answer"),
    ("pull_s", "<f8", "time to transfer the weights"),
    ("update_s", "<f8", "time to update the learner's own weights, in a run without a parameter server"),
)
"""Training error and times of a mini-batch, as a learner reports them."""

EPOCH = table(
    ("epoch", "<i4", "number of the epoch that has ended: 1, 2, …"),
    ("evaluated", "<i4", "1: the weights at the epoch's end were evaluated. 0: they were not"),
    ("timestamp", "<i8", "timestamp of the weights at the epoch's end"),
    ("samples", "<i8", "samples applied since the start of training"),
    ("time_s", "<f8", "training time when the epoch ended"),
    ("mean_staleness", "<f8", "mean staleness of the epoch's gradients. NaN: the epoch has none"),
    ("learning_rate", "<f8", "learning rate of the epoch's last update"),
    ("train_loss", "<f8", "mean loss over the samples of the epoch's gradients. NaN: the epoch has none"),
    ("train_error", "<f8", "fraction of these samples that were wrong. NaN: the epoch has none"),
    ("test_loss", "<f8", "mean loss over the test set. NaN: the epoch was not evaluated"),
    ("test_error", "<f8", "fraction of the test set that was wrong. NaN: the epoch was not evaluated"),
    ("validation_loss", "<f8", "mean loss over the validation split. NaN: there is no split, or no evaluation"),
    (
        "validation_error",
        "<f8",
        "fraction of the validation split that was wrong. NaN: there is no split, or no evaluation",
    ),
    ("evaluation_began_s", "<f8", "training time when the evaluation began. NaN: the epoch was not evaluated"),
    ("evaluation_s", "<f8", "duration of the evaluation, in parallel with training. NaN: the epoch was not evaluated"),
    (
        "weights_sha256",
        "S64",
        "SHA-256 of the weights at the epoch's end. Empty: the statistics server was too slow",
    ),
)
"""Epoch. Errors are fractions in 0…1, and NaN if the task has no error.

If one update ends several epochs, its gradients belong to the first of them, and the other epochs have none.
"""

METRIC = table(
    ("epoch", "<i4", "number of the epoch whose weights were evaluated"),
    ("pad", "<i4", ""),
    ("split", "S16", "evaluated split: `test`, `validation`, or `train` by workers of protocol hogbatch"),
    ("name", "S64", "name of the metric, such as `top5_error`"),
    ("value", "<f8", "mean of the metric over the samples"),
)
"""Result of an evaluation in addition to loss and error."""

AVERAGE = table(
    ("timestamp", "<i8", "timestamp of the weights after the update that the average made"),
    ("learner", "<i4", "number of the learner"),
    ("pad", "<i4", ""),
    ("distance", "<f8", "Euclidean distance of the learner's replica, or reference, from the weights when averaged"),
    ("correction", "<f8", "distance of the correction; `distance` if the replica moves to the new weights"),
)
"""Contribution of one learner to one average of replicas."""

GRADIENT_NORM = table(
    ("learner", "<i4", "number of the learner that computed the gradient, from 0"),
    ("samples", "<i4", "samples of the gradient's mini-batch"),
    ("step", "<i8", "number of the mini-batch among its learner's mini-batches, from 0"),
    ("norm", "<f8", "Euclidean norm of the gradient, as its learner computed it"),
)
"""Norm of the gradient of a mini-batch. The gradient may not have been applied. The last row of a mini-batch counts."""

UPDATE_NORM = table(
    ("timestamp", "<i8", "timestamp of the weights after the update"),
    ("norm", "<f8", "Euclidean norm of the averaged gradient, or difference of replicas, that the update applied"),
    ("clipped_norm", "<f8", "its norm after `optimizer.clip_norm`. NaN: the optimiser does not clip"),
    (
        "product",
        "<f8",
        "its inner product with the gradient of the update before, of runs with one gradient per update",
    ),
)
"""Norm of the gradient of an update. The last row of an update counts."""

STAGE = table(
    ("timestamp", "<i8", "timestamp of the stage server's weights after the update that applied the mini-batch"),
    ("learner", "<i4", "number of the learner whose mini-batch it is, from 0"),
    ("samples", "<i4", "samples of the mini-batch"),
    ("step", "<i8", "number of the mini-batch among its learner's mini-batches, from 0"),
    ("front", "<i8", "timestamp of the parameter server's weights that the activations were computed with"),
    ("staleness", "<i8", "updates of the stage server's weights between computing and that update"),
    ("learning_rate", "<f8", "learning rate of that update"),
    ("time_s", "<f8", "training time when the stage server began to compute"),
    ("wait_s", "<f8", "time that the activations had waited for their turn by then"),
    ("compute_s", "<f8", "time to compute loss and gradients"),
    ("update_s", "<f8", "time that the optimiser's step took"),
    ("digest", "<u8", "hash of a sample of the updated weights, another sample each time; a replay compares it"),
)
"""Mini-batch at the stage server, in the order of its updates."""

LOG = np.dtype(
    [
        ("what", "<i4"),
        ("role", "<i4"),
        ("buffer", "S16"),
        ("other", "S16"),
        ("number", "<i8"),
        ("fraction", "<f8"),
        ("scale", "<f8"),
        ("samples", "<i8"),
        ("time_s", "<f8"),
        ("epoch", "<i4"),
        ("pad", "<i4"),
    ]
)
"""Action that the first of several servers orders (`rudra.roles.sharded`). It is not in the result file."""

WORK = np.dtype([("first", "<i8"), ("count", "<i8")])
"""Samples that a coordinator assigns to a worker (`rudra.core.work.Work`). They are not in the result file."""

SUM = np.dtype([("split", "S16"), ("name", "S64"), ("samples", "<i8"), ("value", "<f8")])
"""Sum over the samples of a part of an evaluation, for one split and one metric. It is not in the result file."""

FLOATS = np.dtype([("value", "<f4")])
"""Floats in a message."""

TEXT = np.dtype([("text", "S512")])
"""Pieces of a text in a message, ASCII (`rudra.core.decisions`)."""

ROLE = table(
    (
        "kind",
        "S20",
        "`parameter server`, `parameter shard`, `stage server`, `tree server`, `statistics server` or `learner`",
    ),
    ("index", "<i4", "number of the role among roles of its kind, from 0; shards from 1"),
    ("world_rank", "<i4", "MPI rank that hosts the role"),
    ("parent", "<i4", "row of the role that receives this role's gradients. -1: none"),
    ("source", "<i4", "row of the role that sends weights to this role. -1: its parent"),
    ("node", "<i4", "number of the role's node. -1: a node of its own, or the first"),
    ("group", "<i4", "number of the role's compute group. -1: none"),
)
"""Role of the run. Its id in messages is the number of its row."""

LEARNER = table(
    ("learner", "<i4", "number of the learner, from 0"),
    ("world_rank", "<i4", "MPI rank that hosts the learner"),
    ("pushed", "<i8", "gradients that the learner delivered to its server"),
    ("samples", "<i8", "samples of these gradients"),
    ("pulls", "<i8", "times that the learner received weights"),
    ("skipped_pulls", "<i8", "times that the learner requested weights but already had the newest"),
    ("compute_s", "<f8", "time spent computing gradients"),
    ("reduce_s", "<f8", "time spent adding up the gradients of the compute group"),
    ("push_s", "<f8", "time that the learner waited for its gradients to be sent"),
    ("wait_s", "<f8", "time that the learner waited for the server's answers"),
    ("pull_s", "<f8", "time spent receiving weights"),
    ("update_s", "<f8", "time spent updating the learner's own weights, in a run without a parameter server"),
)
"""Time account of a learner."""

TIMES = ("compute_s", "reduce_s", "push_s", "wait_s", "pull_s", "update_s")
"""Parts of a learner's time, in this order: columns of `MINIBATCH` and `LEARNER`."""

TOTALS = table(
    ("timestamp", "<i8", "timestamp of the final weights, which is the number of updates"),
    ("samples", "<i8", "samples of the gradients that were applied"),
    ("pushed", "<i8", "gradients that learners pushed: applied + pending + discarded + lost"),
    ("applied", "<i8", "gradients that updates applied"),
    ("pending", "<i8", "gradients that waited at the end for an update that was not due yet"),
    ("discarded", "<i8", "gradients that arrived after the last update"),
    ("lost", "<i8", "gradients that were lost with a rank"),
    ("time_s", "<f8", "training time, from the common start to the last update"),
)
"""Closing account of the server."""

EVENT_KINDS = {
    "checkpoint": "a checkpoint was written",
    "restart": "all roles started again from a checkpoint or from the present weights",
    "lost": "the rank of a role died",
    "dropped": "a learner was removed, because it was silent for longer than `straggler_timeout_s`",
    "straggler": "a learner was silent for longer than usual",
    "target": "an evaluation reached `training.target`",
    "patience": "`training.patience` evaluations brought no improvement",
    "plateau": "schedule `plateau` lowered the learning rate",
    "change": "a table `[[changes]]`, or a decided change, took effect",
    "decision": "a change was decided, by the function of `[decisions]` or for the growth of banks: its keys as JSON",
    "measured": "throughput of the run with a number of learners on each device, as JSON, for the growth of banks",
    "decided": "a decided change took effect: as JSON, the table `[[changes]]` that would do the same, and its place "
    "among the changes",
    "memory": "a role had too little memory for its work: the error, and what the run does about it",
    "branch": "the run began with the checkpoint of another run",
    "averaging": "all replicas restarted from the weights, because the learning rate dropped",
    "stages": "the stage server added its weights to a snapshot or checkpoint",
    "window": "means of the staleness and of lost updates in a shared window, for an epoch",
    "pause": "training paused while workers evaluated the weights",
}
"""Kinds of events, with their meanings."""

EVENT = table(
    ("kind", "S16", "kind of the event, from the list below"),
    ("role", "<i4", "row of `/roles` that the event is about. -1: none"),
    ("pad", "<i4", ""),
    ("timestamp", "<i8", "timestamp of the weights at that moment"),
    ("gradients", "<i8", "gradients that the server, or the stage server, had added up by then, applied or pending"),
    ("time_s", "<f8", "training time of the event"),
    ("wall_s", "<f8", "wall clock of the event, in seconds since 1970; 0 in a simulation"),
    ("text", "S512", "the event in words"),
)
"""Event of the run outside the usual course of training."""
