"""How messages travel: a fixed header, rows, and at most one tensor.

A control message is header and rows alone. A message with a tensor carries header and rows in a tail
behind the floats, so that one transfer from one buffer delivers all of it. A part of a tensor, which lies between
others, travels bare: an earlier message has described it.
"""

import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

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


class _Format(NamedTuple):
    """How a kind travels.

    A `timestamp` has its own place in the header. Of other whole numbers the first travels as `value`, and a second one
    as the timestamp; a float travels as `seconds`, and a bool as `flag`.

    Attributes:
        kind: which.
        type: class of its messages.
        fields: timestamp, value, seconds, flag, rows and gradients of a message.
        order: the places, among those, of what the class takes after `sender`.
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
    """The bytes of a message, without its tensor.

    Args:
        message: of any kind.
        generation: how often ranks had regrouped when it was sent.
    """
    timestamp, value, seconds, flag, rows, gradients = _FORMATS[message.kind].fields(message)
    count = len(gradients) if rows is None else len(rows)
    code = message.kind | generation << _KIND_BITS
    header = _HEADER.pack(code, message.sender, timestamp, value, seconds, count, flag)
    if gradients:
        return header + b"".join(_GRADIENT.pack(*msgspec.structs.astuple(gradient)) for gradient in gradients)
    return header if rows is None else header + rows.tobytes()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message that `encode` made these bytes of; they may be followed by others."""
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


_FLAGS = struct.Struct("<Qi???xd")
FLAGS_BYTES = _FLAGS.size


def encode_flags(flags: GroupFlags) -> bytes:
    """The `FLAGS_BYTES` bytes of flags, which travel in a reduction."""
    return _FLAGS.pack(*msgspec.structs.astuple(flags))


def decode_flags(data: bytes | bytearray | memoryview) -> GroupFlags:
    """The flags that `encode_flags` made these bytes of; they may be followed by others."""
    return GroupFlags(*_FLAGS.unpack_from(data))


def generation_of(data: bytes | bytearray | memoryview) -> int:
    """With which `encode` was called."""
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


def in_pieces(rows: Rows) -> list[Rows]:
    """The rows in pieces of which each has room in a control message."""
    room = (CONTROL_BYTES - _HEADER.size) // rows.dtype.itemsize
    return [rows[i : i + room] for i in range(0, len(rows), room)]


def reported(kind: MessageKind, sender: int, rows: Rows) -> list[Message]:
    """Messages with the rows of a table for the statistics server."""
    return [MESSAGES[kind](sender, piece) for piece in in_pieces(rows)]


def in_pieces_or_none(rows: Rows) -> list[tuple[Rows | None, bool]]:
    """The same pieces, or None if there are no rows; and whether each is the last one."""
    pieces: list[Rows | None] = [*in_pieces(rows)] or [None]
    return [(piece, place == len(pieces)) for place, piece in enumerate(pieces, 1)]
