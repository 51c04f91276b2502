"""Encoding of messages: a fixed header, rows, and at most one tensor.

A control message has only a header and rows. A message with a tensor has header and rows in a tail after the floats, so
that one transfer from one buffer delivers everything. A part of a tensor is in the middle of a buffer and has no
header. An earlier message has described it.
"""

import struct
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rudra.core import records
from rudra.core.messages import DESCRIBED, MESSAGES, ROWS, GroupFlags, Message, MessageKind, Rows
from rudra.core.records import Gradient

_HEADER = struct.Struct("<iiqqdi?3x")
_KIND_BITS = 8
_KIND_MASK = (1 << _KIND_BITS) - 1
_CODES = {
    "<i4": "i",
    "<i8": "q",
    "<u8": "Q",
    "<f4": "f",
    "<f8": "d",
    "|b1": "?",
    "|u1": "B",
    "|S64": "64s",
    "|S16": "16s",
    "|S512": "512s",
}  # NumPy's letters mean other sizes to struct


def _struct(dtype: np.dtype[np.void]) -> struct.Struct:
    return struct.Struct("<" + "".join(_CODES[dtype[name].str] for name in dtype.names or ()))


PACK = {kind: _struct(dtype).pack for kind, dtype in ROWS.items()}
"""Function that packs one row of a kind, in a third of NumPy's time."""

_GRADIENT = _struct(records.GRADIENT)
CONTROL_BYTES = 3584
"""Size of the largest control message. It is below the eager limit of every known transport."""

CONTROL_GRADIENTS = (CONTROL_BYTES - _HEADER.size) // _GRADIENT.size
"""Largest number of gradients that a control message describes."""


class _Format(NamedTuple):
    """Encoding of one kind.

    A `timestamp` has its own place in the header. The first other integer is sent as `value`, and a second one in the
    place of the timestamp. A float is sent as `seconds`, and a bool as `flag`.

    Attributes:
        kind: Kind of the messages.
        type: Class of the messages.
        fields: Function that returns timestamp, value, seconds, flag, rows and gradients of a message.
        order: Places of the constructor's arguments after `sender` among these fields.
    """

    kind: MessageKind
    type: type[Any]
    fields: Callable[[Message], Any]
    order: tuple[int, ...]


_PLACES = ("timestamp", "value", "seconds", "flag", "rows", "gradients")
_ABSENT = ("_ABSENT_NUMBER", "_ABSENT_NUMBER", "_ABSENT_FLOAT", "_ABSENT_FLAG", "_ABSENT_ROWS", "_ABSENT_GRADIENTS")


def _format_of(type_: type[Message]) -> _Format:
    taken: dict[str, str] = {}
    for field in msgspec.structs.fields(type_):
        if field.name == "sender":
            continue
        if field.name in ("timestamp", "rows", "gradients"):
            place = field.name
        elif field.type is int:
            place = "timestamp" if "value" in taken else "value"
        else:
            place = {float: "seconds", bool: "flag"}[field.type]
        assert place not in taken, (type_, field.name)
        taken[place] = field.name
    names = [taken.get(place, absent) for place, absent in zip(_PLACES, _ABSENT, strict=True)]
    order = tuple(_PLACES.index(place) for place in taken)
    return _Format(type_.kind, type_, attrgetter(*names), order)


_FORMATS = {int(kind): _format_of(type_) for kind, type_ in MESSAGES.items()}


def encode(message: Message, generation: int = 0) -> bytes:
    """Encodes a message without its tensor.

    Args:
        message: Message of any kind.
        generation: Number of restarts of the roles when it was sent.
    """
    timestamp, value, seconds, flag, rows, gradients = _FORMATS[message.kind].fields(message)
    count = len(gradients) if rows is None else len(rows)
    code = message.kind | generation << _KIND_BITS
    header = _HEADER.pack(code, message.sender, timestamp, value, seconds, count, flag)
    if gradients:
        return header + b"".join(_GRADIENT.pack(*msgspec.structs.astuple(gradient)) for gradient in gradients)
    return header if rows is None else header + rows.tobytes()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decodes a message from the output of `encode`. Other bytes may follow it."""
    code, sender, timestamp, value, seconds, count, flag = _HEADER.unpack_from(data)
    kind, type_, _, order = _FORMATS[code & _KIND_MASK]
    rows: Rows | None = None
    gradients: tuple[Gradient, ...] = ()
    if kind in DESCRIBED:
        body = memoryview(data)[_HEADER.size : _HEADER.size + count * _GRADIENT.size]
        gradients = tuple(Gradient(*fields) for fields in _GRADIENT.iter_unpack(body))
    elif count:
        rows = np.frombuffer(data, ROWS[kind], count, _HEADER.size).copy()
    found = (timestamp, value, seconds, flag, rows, gradients)
    message: Message = type_(sender, *[found[place] for place in order])
    return message


MEMBER = np.dtype(
    [
        ("offset", "<i8"),
        *(("digest", "<u8"), ("lowered", "<i4"), ("enough", "?"), ("stopped", "?"), ("saves", "?")),
        *(("decided", "u1"), ("distance", "<f8")),
        *records.GRADIENT.descr,
    ]
)
"""Contribution of a member to a reduction: offset of its gradient in shared memory, `GroupFlags`, `GRADIENT`."""

_FLAGS_END = 1 + len(msgspec.structs.fields(GroupFlags))
_MEMBER = _struct(MEMBER)


def write_member(rows: npt.NDArray[np.uint8], place: int, offset: int, word: GroupFlags, gradient: Gradient) -> None:
    """Writes a row of `MEMBER` into the bytes of some rows, in a third of NumPy's time."""
    about = (*msgspec.structs.astuple(word), *msgspec.structs.astuple(gradient))
    _MEMBER.pack_into(rows.data, place * _MEMBER.size, offset, *about)


def members(rows: npt.NDArray[np.uint8]) -> Iterator[tuple[int, GroupFlags, Gradient]]:
    """Yields offset, flags and gradient of each row of `MEMBER` in some bytes."""
    for row in _MEMBER.iter_unpack(rows.data):
        yield row[0], GroupFlags(*row[1:_FLAGS_END]), Gradient(*row[_FLAGS_END:])


def generation_of(data: bytes | bytearray | memoryview) -> int:
    """Returns the generation of an encoded message."""
    code: int = _HEADER.unpack_from(data)[0]
    return code >> _KIND_BITS


def tail_bytes(gradients: int) -> int:
    """Returns the size of the tail for header and rows of any kind, where a gradient has up to `gradients`
    descriptions."""
    rows = max(gradients * records.GRADIENT.itemsize, records.EPOCH.itemsize)
    return -(-(_HEADER.size + rows) // 64) * 64


def behind_bytes(gradients: int) -> int:
    """Returns the size of the tail of a tensor with descriptions of `gradients` gradients."""
    return _HEADER.size + gradients * _GRADIENT.size


def tensor_bytes(wire_bytes: int) -> int:
    """Returns the size of a tensor without its tail, given the size with the description of one gradient."""
    return max(0, wire_bytes - tail_bytes(1))


def in_pieces(rows: Rows) -> list[Rows]:
    """Yields the rows in pieces that each fit into a control message."""
    room = (CONTROL_BYTES - _HEADER.size) // rows.dtype.itemsize
    return [rows[i : i + room] for i in range(0, len(rows), room)]


def reported(kind: MessageKind, sender: int, rows: Rows) -> list[Message]:
    """Yields messages with the rows of a table for the statistics server."""
    return [MESSAGES[kind](sender, piece) for piece in in_pieces(rows)]


def in_pieces_or_none(rows: Rows) -> list[tuple[Rows | None, bool]]:
    """Yields the same pieces, or None if there are no rows, each with the fact whether it is the last."""
    pieces: list[Rows | None] = [*in_pieces(rows)] or [None]
    return [(piece, place == len(pieces)) for place, piece in enumerate(pieces, 1)]
