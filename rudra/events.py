"""What happens to a role, and what a role wants done: the whole language between roles and drivers.

Buffers are named by strings. An action that names a buffer borrows it; `Sent`, `Received`, `Computed`
and `Evaluated` give it back. `Accumulate`, `Update` and `Copy` are done before the next action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rudra.messages import Message, Rows

Table = Literal["gradients", "updates", "minibatches", "epochs"]


@dataclass(frozen=True, slots=True)
class Started:
    """The driver is ready; the first event of every role."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived; `buffer` holds its tensor, if it has one."""

    message: Message
    buffer: str | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor was delivered, so its buffer is no longer lent to that message."""

    buffer: str
    to: int


@dataclass(frozen=True, slots=True)
class Hashed:
    """The digest that `Hash` asked for."""

    digest: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A gradient is ready in the buffer that `Compute` named."""

    step: int
    loss: float
    errors: int
    samples: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A test of the weights in `buffer` is over; errors are fractions."""

    buffer: str
    loss: float
    error: float
    error_top5: float
    seconds: float


Event = Started | Received | Sent | Hashed | Computed | Evaluated


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, with the tensor in `buffer` if one is named; its end is `Sent`, for tensors only."""

    to: int
    message: Message
    buffer: str | None = None


@dataclass(frozen=True, slots=True)
class Receive:
    """Let one tensor in, from role `source` or from anybody; its end is `Received`."""

    buffer: str
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Hash:
    """Digest a buffer's floats; its end is `Hashed`."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradient of mini-batch `step` at the weights; its end is `Computed`."""

    step: int
    weights: str
    gradient: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """`into` becomes `(1 - fraction) * into + fraction * scale * gradient`: a running average, in one pass.

    Where both are one buffer, the first gradient of an update is scaled in place. `scale` is not for model buffers
    (BatchNorm statistics), which are averaged as they are.
    """

    into: str
    gradient: str
    fraction: float
    scale: float


@dataclass(frozen=True, slots=True)
class Update:
    """Let the optimiser step the weights by the averaged gradient; averaged model buffers replace those of before."""

    gradient: str
    weights: str
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a tensor into a buffer that exists from now until it was sent."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Test the weights in a buffer, in small pieces between other work; its end is `Evaluated`."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Record:
    """Append rows to a table of the results."""

    table: Table
    rows: Rows


@dataclass(frozen=True, slots=True)
class Finish:
    """Write what a finished run leaves: totals, one row per learner, and the final weights."""

    totals: Rows
    learners: Rows
    weights: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user, once, on stderr."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the whole run with this line."""

    text: str


@dataclass(frozen=True, slots=True)
class Halt:
    """This role is done."""


Action = Send | Receive | Hash | Compute | Accumulate | Update | Copy | Evaluate | Record | Finish | Warn | Fail | Halt
Actions = Sequence[Action]
