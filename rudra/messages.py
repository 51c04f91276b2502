"""Messages between roles: a fixed header, rows, and at most one tensor.

A control message is header and rows alone. A message with a tensor carries header and rows in a tail
behind the floats, so that one transfer from one buffer delivers all of it.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
import numpy.typing as npt

from rudra import records

Rows = npt.NDArray[np.void]


class Kind(IntEnum):
    """What a message says; the comment names sender and receiver."""

    WEIGHTS = auto()  # server -> learner, tensor
    GRADIENT = auto()  # learner -> server, tensor
    SNAPSHOT = auto()  # server -> statistics, tensor: weights at an epoch's end
    READY = auto()  # learner -> server: digest of the initial weights
    START = auto()  # server -> all: training begins
    PULL = auto()  # learner -> server: I hold `timestamp` and have pushed `value` gradients
    TIMESTAMP = auto()  # server -> learner: mine; weights follow if it is newer
    STOP = auto()  # server -> learner: no more gradients
    BYE = auto()  # learner -> server: I have pushed `value` gradients, and that was the last
    CREDIT = auto()  # statistics -> server: room for one more snapshot
    DONE = auto()  # statistics -> all: everything is recorded
    GRADIENTS = auto()  # rows for the statistics server, from here on
    UPDATES = auto()
    MINIBATCHES = auto()
    EPOCHS = auto()
    LEARNERS = auto()
    TOTALS = auto()


ROWS = {
    Kind.GRADIENT: records.GRADIENT,
    Kind.SNAPSHOT: records.EPOCH,
    Kind.GRADIENTS: records.GRADIENT,
    Kind.UPDATES: records.UPDATE,
    Kind.MINIBATCHES: records.MINIBATCH,
    Kind.EPOCHS: records.EPOCH,
    Kind.LEARNERS: records.LEARNER,
    Kind.TOTALS: records.TOTALS,
}
"""Dtype of the rows that a kind carries; the others carry none."""

_KINDS = {int(kind): (kind, ROWS.get(kind)) for kind in Kind}
_HEADER = struct.Struct("<iiqqq")
CONTROL_BYTES = 3584
"""Largest control message; below the eager limit of every transport that we know."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: what it says.
        sender: role id.
        timestamp: of the weights that it speaks of.
        value: a number whose meaning the kind gives.
        rows: (count,) of `ROWS[kind]`, or None.
    """

    kind: Kind
    sender: int
    timestamp: int = 0
    value: int = 0
    rows: Rows | None = None

    def encode(self) -> bytes:
        count = 0 if self.rows is None else len(self.rows)
        header = _HEADER.pack(self.kind, self.sender, self.timestamp, self.value, count)
        return header if self.rows is None else header + self.rows.tobytes()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "Message":
        code, sender, timestamp, value, count = _HEADER.unpack_from(data)
        kind, dtype = _KINDS[code]
        rows = np.frombuffer(data, dtype, count, _HEADER.size).copy() if count else None
        return cls(kind, sender, timestamp, value, rows)


def tail_bytes(gradients: int) -> int:
    """Room behind a tensor for the header and the rows of any kind, `gradients` of them for a gradient."""
    rows = max(gradients * records.GRADIENT.itemsize, records.EPOCH.itemsize)
    return -(-(_HEADER.size + rows) // 64) * 64


def split(kind: Kind, sender: int, rows: Rows) -> list[Message]:
    """As many control messages as the rows need."""
    room = (CONTROL_BYTES - _HEADER.size) // rows.dtype.itemsize
    return [Message(kind, sender, rows=rows[i : i + room]) for i in range(0, len(rows), room)]
