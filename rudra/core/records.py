"""Rows of measurement: the same bytes in messages, in memory and in the HDF5 file.

Every dtype here is packed and little-endian, so a row goes over MPI and into a data set as it is. Times are seconds
since the server started training, on one clock for all ranks.
"""

import numpy as np
from msgspec import Struct

GRADIENT = np.dtype(
    [
        ("update", "<i8"),  # timestamp of the weights that this gradient helped to make; -1 on the way to the server
        ("learner", "<i4"),
        ("samples", "<i4"),
        ("step", "<i8"),  # counts the gradients of one learner, from 0
        ("timestamp", "<i8"),  # of the weights that it was computed from
        ("staleness", "<i8"),  # server's timestamp on arrival - timestamp
        ("scale", "<f8"),  # weight inside the average, before division by the number of gradients
        ("loss", "<f8"),  # mean over the samples
        ("errors", "<f4"),  # samples, each by the share of it that is wrong; NaN where the task knows no error
        ("pad", "<i4"),
    ]
)
"""One gradient that was applied, in order of application."""


class Gradient(Struct, frozen=True, gc=False):
    """A row of `GRADIENT` as plain numbers: NumPy is slow on one row."""

    update: int
    learner: int
    samples: int
    step: int
    timestamp: int
    staleness: int
    scale: float
    loss: float
    errors: float
    pad: int = 0


UPDATE = np.dtype(
    [
        ("timestamp", "<i8"),  # of the weights after the update: 1, 2, …
        ("epoch", "<i4"),  # 1, 2, …: the epoch that its samples are of
        ("gradients", "<i4"),
        ("samples", "<i8"),
        ("learning_rate", "<f8"),
        ("mean_staleness", "<f8"),  # eq. 2
        ("time_s", "<f8"),  # when it began
        ("update_s", "<f8"),  # how long the optimiser's step took
        ("digest", "<u8"),  # of a sample of the weights after the update, another one each time
    ]
)
"""One update of the weights."""

MINIBATCH = np.dtype(
    [
        ("learner", "<i4"),
        ("samples", "<i4"),
        ("step", "<i8"),
        ("timestamp", "<i8"),
        ("loss", "<f8"),  # mean over the samples
        ("errors", "<f4"),  # samples, each by the share of it that is wrong; NaN where the task knows no error
        ("pad", "<i4"),
        ("time_s", "<f8"),  # when the gradient was ready
        ("compute_s", "<f8"),  # until then; what follows it is 0 for a gradient that was not pushed
        ("reduce_s", "<f8"),  # adding up the gradients of a compute group
        ("push_s", "<f8"),  # until the server has it
        ("wait_s", "<f8"),  # from asking for weights to the server's answer
        ("pull_s", "<f8"),  # transfer of the weights
        ("update_s", "<f8"),  # of the learner's own weights
    ]
)
"""Training error and times of one mini-batch, as a learner reports them."""

EPOCH = np.dtype(
    [
        ("epoch", "<i4"),  # 1, 2, …: the epoch that has ended
        ("evaluated", "<i4"),  # 0: skipped, because the statistics server was behind
        ("timestamp", "<i8"),
        ("samples", "<i8"),  # applied since the start of training
        ("time_s", "<f8"),
        ("mean_staleness", "<f8"),  # over the gradients of this epoch; NaN without any, as the next two means
        ("learning_rate", "<f8"),  # of the epoch's last update
        ("train_loss", "<f8"),  # mean over the samples of the gradients applied in this epoch
        ("train_error", "<f8"),
        ("test_loss", "<f8"),  # NaN where not evaluated, as the three below
        ("test_error", "<f8"),
        ("validation_loss", "<f8"),  # NaN without a validation split, too
        ("validation_error", "<f8"),
        ("evaluation_began_s", "<f8"),
        ("evaluation_s", "<f8"),  # how long the test took, off the training path
        ("weights_sha256", "S64"),  # of the weights at the epoch's end; empty where the statistics server was behind
    ]
)
"""One epoch; errors are fractions in 0…1, and NaN where the task knows none.

Where one update ends several epochs, its gradients are of the first of them, and the others have none.
"""

METRIC = np.dtype(
    [
        ("epoch", "<i4"),
        ("pad", "<i4"),
        ("split", "S16"),  # test, validation
        ("name", "S64"),
        ("value", "<f8"),  # mean over the samples
    ]
)
"""What a test of the weights measured beside loss and error."""

ROLE = np.dtype(
    [
        ("kind", "S20"),
        ("index", "<i4"),  # counts the roles of one kind
        ("world_rank", "<i4"),
        ("parent", "<i4"),  # row of the role that takes this one's gradients; -1: nobody
        ("source", "<i4"),  # row of the role that gives it weights; -1: its parent
        ("node", "<i4"),  # -1: of its own, or the first
        ("group", "<i4"),  # compute group; -1: none
    ]
)
"""Who was who: one role; its id in messages is the number of its row."""

LEARNER = np.dtype(
    [
        ("learner", "<i4"),
        ("world_rank", "<i4"),
        ("pushed", "<i8"),  # gradients delivered to the server
        ("samples", "<i8"),
        ("pulls", "<i8"),  # weights received
        ("skipped_pulls", "<i8"),  # asked, and the weights were current
        ("compute_s", "<f8"),
        ("reduce_s", "<f8"),
        ("push_s", "<f8"),  # as far as the learner waited for it
        ("wait_s", "<f8"),
        ("pull_s", "<f8"),
        ("update_s", "<f8"),
    ]
)
"""Where one learner's time went."""

TIMES = ("compute_s", "reduce_s", "push_s", "wait_s", "pull_s", "update_s")
"""Where a learner's time goes, in this order: columns of `MINIBATCH` and `LEARNER`."""

TOTALS = np.dtype(
    [
        ("timestamp", "<i8"),  # of the final weights = number of updates
        ("samples", "<i8"),  # applied
        ("pushed", "<i8"),  # pushed = applied + pending + discarded + lost
        ("applied", "<i8"),
        ("pending", "<i8"),
        ("discarded", "<i8"),
        ("lost", "<i8"),
        ("time_s", "<f8"),  # training only: from the common start to the last update
    ]
)
"""The server's closing account."""

EVENT = np.dtype(
    [
        ("kind", "S16"),  # checkpoint, restart, lost, dropped, straggler, target, patience, plateau
        ("role", "<i4"),  # row of /roles; -1: none
        ("pad", "<i4"),
        ("timestamp", "<i8"),  # of the weights at that moment
        ("gradients", "<i8"),  # added up by then: applied, and pending
        ("time_s", "<f8"),
        ("wall_s", "<f8"),  # seconds since 1970; 0 in a simulation
        ("text", "S512"),
    ]
)
"""Something that happened to the run, beside training."""
