"""Messages between roles: a fixed header, rows, and at most one tensor.

A control message is header and rows alone. A message with a tensor carries header and rows in a tail
behind the floats, so that one transfer from one buffer delivers all of it. A part of a tensor, which lies between
others, travels bare: what it is has been told before.
"""

import struct
from enum import IntEnum, auto

import msgspec
import numpy as np
import numpy.typing as npt

from rudra.core import records
from rudra.core.records import Gradient

Rows = npt.NDArray[np.void]


class Kind(IntEnum):
    """What a message says; the comment names sender and receiver."""

    WEIGHTS = auto()  # server -> learner or tree server, learner -> learner, tensor
    GRADIENT = auto()  # learner or tree server -> server, tensor; if `value` >= 0 also a PULL; `flag`: give me work
    SNAPSHOT = auto()  # server -> statistics, tensor: weights at an epoch's end
    GRADIENT_PART = auto()  # learner -> shard, bare tensor: part of a gradient, told of by a bare GRADIENT
    WEIGHTS_PART = auto()  # shard -> learner or statistics, bare tensor: likewise, of which TIMESTAMP or SNAPSHOT tells
    ACTIVATIONS = auto()  # learner -> stage server, tensor: what the first layers make of one mini-batch
    RETURNED = auto()  # stage server -> learner, tensor: the gradient of those, and what the mini-batch came to
    SUM = auto()  # stage server -> another one, tensor: the sum of gradients of learners up to here, or of all
    LOG = auto()  # who decides about the weights -> other shards, or the stage server: what to do
    TAKEN = auto()  # shard -> first: my part of the gradient of LOG's number `value` is here
    STEPPED = auto()  # another owner -> who decides: my part is of `timestamp`, took `seconds`; a sample of the weights
    # of stretch `value`; `flag`: that is its last one
    NORMS = auto()  # parameter server <-> stage server: of gradients of one update, by parameter, `value` in all
    PULL = auto()  # tree server -> server: have you newer weights than `timestamp`? I hold those of `value`
    READY = auto()  # learner -> server: digest of the initial weights
    START = auto()  # server -> all: training begins, at `value` nanoseconds
    TIMESTAMP = auto()  # the answer to a pull; weights follow if it is newer than those held
    EXECUTE = auto()  # coordinator -> worker: compute these samples, at the rate `seconds`; weights follow if newer;
    # training began at `value` nanoseconds, by a clock that stands still while workers test weights
    ASSESS = auto()  # coordinator -> worker: compute part `value` of a test; weights follow if newer
    ASSESSED = auto()  # worker -> coordinator: what part `value` came to, and if `flag` that is all of it; likewise
    # coordinator -> statistics: what all parts of the test of epoch `value` came to, in `seconds`
    MADE = auto()  # worker -> coordinator: these are in the window; digest `value`; I want `timestamp` batches
    JOIN = auto()  # coordinator -> first worker of a node: give me your window's weights; if `flag` you get the average
    JOINED = auto()  # the answer, tensor: of all updates `seconds` have survived races
    SHARED = auto()  # first worker of a node -> coordinator: the average is in the window
    APPLIED = auto()  # server -> learner: one gradient of yours is in the weights of `timestamp`
    STOP = auto()  # server -> learner: no more gradients; if `value` is -1 the last one is not taken either
    LATE = auto()  # tree server -> server: all wait for learner `value`, of which nothing came for `seconds`
    DROP = auto()  # server -> tree servers above it: learner `value` is no more
    BYE = auto()  # learner -> server: I have pushed `value` gradients, and that was the last; also to a stage server,
    # and from it to the server once all have left
    INTERRUPT = auto()  # any rank -> owner: somebody asks the run to stop; may come at any time
    ENOUGH = auto()  # statistics -> owner: the target is reached; end with the epoch under way
    PLATEAU = auto()  # statistics -> owner: tests got no better, for the `value`-th time; lower the rate
    CREDIT = auto()  # statistics -> server: room for one more snapshot
    CHECKPOINT = auto()  # owner -> statistics: one of `timestamp` is written, after `value` epochs; are its rows safe?
    SAFE = auto()  # statistics -> owner: the rows up to `timestamp` are on the disk
    REPORTED = auto()  # stage server -> statistics: you have my rows that belong to the checkpoint of `timestamp`
    END = auto()  # owner -> statistics: the run was stopped after `value` epochs; resume at `timestamp`, or -1
    DONE = auto()  # statistics -> all: everything is recorded, end with exit code `value`; if `flag`, apart
    GRADIENTS = auto()  # rows for the statistics server, from here on
    UPDATES = auto()
    MINIBATCHES = auto()
    EPOCHS = auto()
    LEARNERS = auto()
    TOTALS = auto()
    EVENTS = auto()
    AVERAGES = auto()
    STAGES = auto()


ROWS = {
    Kind.SNAPSHOT: records.EPOCH,
    Kind.LOG: records.LOG,
    Kind.EXECUTE: records.WORK,
    Kind.ASSESSED: records.SUM,
    Kind.STEPPED: records.FLOATS,
    Kind.NORMS: records.FLOATS,
    Kind.GRADIENTS: records.GRADIENT,
    Kind.UPDATES: records.UPDATE,
    Kind.MINIBATCHES: records.MINIBATCH,
    Kind.EPOCHS: records.EPOCH,
    Kind.LEARNERS: records.LEARNER,
    Kind.TOTALS: records.TOTALS,
    Kind.EVENTS: records.EVENT,
    Kind.AVERAGES: records.AVERAGE,
    Kind.STAGES: records.STAGE,
}
"""Dtype of the rows that a kind carries; the others carry none."""

GRADIENTS = frozenset({Kind.GRADIENT, Kind.GRADIENT_PART, Kind.ACTIVATIONS, Kind.SUM, Kind.JOINED})
PARTS = frozenset({Kind.GRADIENT_PART, Kind.WEIGHTS_PART})
"""Kinds whose tensors go up, from learners, and are read once; and kinds of parts."""

DESCRIBED = frozenset({Kind.GRADIENT, Kind.ACTIVATIONS, Kind.RETURNED, Kind.MADE})
"""Kinds that tell of which mini-batches their tensors are."""

URGENT = frozenset({Kind.LOG, Kind.TAKEN})
"""Kinds that have another rank begin long work beside that of the sender."""

BETWEEN_OWNERS = frozenset({Kind.LOG, Kind.STEPPED})
"""Kinds that owners of weights tell each other of these, and heed even if everybody else begins anew."""

_KINDS = {int(kind): (kind, ROWS.get(kind)) for kind in Kind}
_HEADER = struct.Struct("<iiqqdi?3x")
_KIND_BITS = 8
_KIND_MASK = (1 << _KIND_BITS) - 1
_CODES = {
    "<i4": "i",
    "<i8": "q",
    "<u8": "Q",
    "<f4": "f",
    "<f8": "d",
    "|S64": "64s",
    "|S16": "16s",
    "|S512": "512s",
}  # NumPy's letters mean other sizes to struct


def _struct(dtype: np.dtype[np.void]) -> struct.Struct:
    return struct.Struct("<" + "".join(_CODES[dtype[name].str] for name in dtype.names or ()))


PACK = {kind: _struct(dtype).pack for kind, dtype in ROWS.items()}
"""Makes one row of a kind from numbers: a third of the time that NumPy takes."""

_GRADIENT = _struct(records.GRADIENT)
CONTROL_BYTES = 3584
"""Largest control message; below the eager limit of every transport that we know."""

CONTROL_GRADIENTS = (CONTROL_BYTES - _HEADER.size) // _GRADIENT.size
"""Gradients of which one can tell."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message.

    Attributes:
        kind: what it says.
        sender: role id.
        timestamp: of the weights that it speaks of.
        value: a number whose meaning the kind gives.
        seconds: a time whose meaning the kind gives.
        flag: yes or no; to what, the kind says.
        rows: (count,) of `ROWS[kind]`, or None.
        gradients: what the tensor stands for, if the kind is one of `DESCRIBED`.
    """

    kind: Kind
    sender: int
    timestamp: int = 0
    value: int = 0
    rows: Rows | None = None
    gradients: tuple[Gradient, ...] = ()
    seconds: float = 0.0
    flag: bool = False

    def encode(self, generation: int = 0) -> bytes:
        """As it travels; how often ranks had regrouped by then goes with it."""
        kind = self.kind | generation << _KIND_BITS
        count = len(self.gradients) if self.rows is None else len(self.rows)
        header = _HEADER.pack(kind, self.sender, self.timestamp, self.value, self.seconds, count, self.flag)
        if self.gradients:
            return header + b"".join(_GRADIENT.pack(*msgspec.structs.astuple(gradient)) for gradient in self.gradients)
        return header if self.rows is None else header + self.rows.tobytes()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "Message":
        code, sender, timestamp, value, seconds, count, flag = _HEADER.unpack_from(data)
        kind, dtype = _KINDS[code & _KIND_MASK]
        if kind in DESCRIBED:
            body = memoryview(data)[_HEADER.size : _HEADER.size + count * _GRADIENT.size]
            gradients = tuple(Gradient(*fields) for fields in _GRADIENT.iter_unpack(body))
            return cls(kind, sender, timestamp, value, None, gradients, seconds, flag)
        rows = np.frombuffer(data, dtype, count, _HEADER.size).copy() if count else None
        return cls(kind, sender, timestamp, value, rows, (), seconds, flag)


class Word(msgspec.Struct, frozen=True, gc=False):
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

    def encode(self) -> bytes:
        return _WORD.pack(*msgspec.structs.astuple(self))

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "Word":
        return cls(*_WORD.unpack_from(data))


_WORD = struct.Struct("<Qi???xd")
WORD_BYTES = _WORD.size


def generation_of(data: bytes | bytearray | memoryview) -> int:
    """With which `Message.encode` was called."""
    code: int = _HEADER.unpack_from(data)[0]
    return code >> _KIND_BITS


def tail_bytes(gradients: int) -> int:
    """Room behind a tensor for the header and the rows of any kind, `gradients` of them for a gradient."""
    rows = max(gradients * records.GRADIENT.itemsize, records.EPOCH.itemsize)
    return -(-(_HEADER.size + rows) // 64) * 64


def behind_bytes(gradients: int) -> int:
    """What travels behind a tensor that is of so many gradients."""
    return _HEADER.size + gradients * _GRADIENT.size


def tensor_bytes(wire_bytes: int) -> int:
    """Of the tensor alone, where so many bytes travel with one gradient's rows."""
    return max(0, wire_bytes - tail_bytes(1))


def split(kind: Kind, sender: int, rows: Rows) -> list[Message]:
    """As many control messages as the rows need."""
    room = (CONTROL_BYTES - _HEADER.size) // rows.dtype.itemsize
    return [Message(kind, sender, rows=rows[i : i + room]) for i in range(0, len(rows), room)]


def whole(sender: int, value: int, rows: Rows, seconds: float = 0.0) -> list[Message]:
    """As many messages ASSESSED as the rows need, of which the last has the flag."""
    told = split(Kind.ASSESSED, sender, rows) or [Message(Kind.ASSESSED, sender)]
    last = len(told) - 1
    return [
        msgspec.structs.replace(message, value=value, seconds=seconds, flag=place == last)
        for place, message in enumerate(told)
    ]
