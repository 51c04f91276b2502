"""Messages survive the wire, and fit where they are put."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.core import records
from rudra.core.messages import CONTROL_BYTES, ROWS, WORD_BYTES, GroupFlags, Message, MessageKind, tail_bytes
from rudra.core.records import Gradient

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
COUNT = st.floats(0, 2**20, width=32)
GRADIENTS = st.builds(Gradient, INT64, INT32, INT32, *[INT64] * 4, FLOAT, FLOAT, COUNT, INT32)


def rows(kind: MessageKind, count: int) -> np.ndarray:
    """Rows whose every byte counts."""
    dtype = ROWS[kind]
    noise = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8)
    return noise.view(dtype)


def same(one: Message, other: Message) -> bool:
    def facts(m: Message) -> tuple[object, ...]:
        data = None if m.rows is None else (m.rows.dtype, m.rows.tobytes())
        return m.kind, m.sender, m.timestamp, m.value, m.seconds, m.flag, data, m.gradients

    return facts(one) == facts(other)


@pytest.mark.parametrize("kind", MessageKind)
@given(sender=INT32, timestamp=INT64, value=INT64, seconds=FLOAT, flag=st.booleans())
def test_round_trip_without_rows(
    kind: MessageKind, sender: int, timestamp: int, value: int, seconds: float, flag: bool
) -> None:
    message = Message(kind, sender, timestamp, value, seconds=seconds, flag=flag)
    assert same(Message.decode(message.encode()), message)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_round_trip_with_rows_from_a_buffer_that_is_used_again(kind: MessageKind, count: int) -> None:
    message = Message(kind, 3, 7, 9, rows(kind, count))
    buffer = bytearray(message.encode() + b"\xff" * 100)  # a receive buffer is longer than what arrived
    decoded = Message.decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert same(decoded, message)
    assert decoded.rows is not None
    assert decoded.rows.flags.writeable, "roles write into the rows that they receive"


@given(st.lists(GRADIENTS, min_size=1, max_size=6), INT64)
def test_round_trip_of_gradients_from_a_buffer_that_is_used_again(gradients: list[Gradient], timestamp: int) -> None:
    """Steps and timestamps beyond 32 bits included."""
    message = Message(MessageKind.GRADIENT, 3, timestamp, 9, gradients=tuple(gradients))
    buffer = bytearray(message.encode() + b"\xff" * 100)
    decoded = Message.decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert same(decoded, message)
    assert all(type(gradient) is Gradient for gradient in decoded.gradients)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.booleans(), st.booleans())
def test_round_trip_of_what_a_group_is_told(digest: int, lowered: int, enough: bool, stopped: bool) -> None:
    word = GroupFlags(digest, lowered, enough, stopped)
    assert GroupFlags.decode(word.encode() + b"\xff") == word
    assert len(word.encode()) == WORD_BYTES


def test_gradients_on_the_wire_are_rows_of_their_table() -> None:
    gradient = Gradient(-1, 2, 3, 2**40, 2**42, 2**41, -1, 0.25, 1.5, 7, 5)
    (row,) = np.frombuffer(Message(MessageKind.GRADIENT, 0, gradients=(gradient,)).encode()[-72:], records.GRADIENT)
    assert row.item() == msgspec.structs.astuple(gradient)


@pytest.mark.parametrize("gradients", [1, 2, 3, 30])
def test_the_tail_behind_a_tensor_holds_what_comes_with_tensors(gradients: int) -> None:
    room = tail_bytes(gradients)
    assert room % 64 == 0, "what follows stays aligned"
    many = tuple(Gradient(-1, i, 4, 0, 0, 0, -1, 1.0, 0.5, 1, i) for i in range(gradients))
    assert len(Message(MessageKind.GRADIENT, 0, gradients=many).encode()) <= room
    assert len(Message(MessageKind.SNAPSHOT, 0, rows=rows(MessageKind.SNAPSHOT, 1)).encode()) <= room
    assert len(Message(MessageKind.WEIGHTS, 0).encode()) <= room


@pytest.mark.parametrize(("gradients", "room"), [(1, 256), (2, 256), (3, 256), (4, 384), (30, 2240)])
def test_the_tail_is_as_small_as_what_it_holds_allows(gradients: int, room: int) -> None:
    """A simulated tensor is as long as a real one, tail and all."""
    assert tail_bytes(gradients) == room


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("count", [0, 1, 17, 48, 500])
def test_split_keeps_every_row_in_messages_of_limited_size(kind: MessageKind, count: int) -> None:
    all_ = rows(kind, count)
    messages = split(kind, 5, all_)
    encoded = [m.encode() for m in messages]
    assert all(len(data) <= CONTROL_BYTES for data in encoded)
    fill = (CONTROL_BYTES - 64) // ROWS[kind].itemsize
    assert len(messages) <= -(-count // fill), "no more messages than needed"
    parts = [Message.decode(data) for data in encoded]
    assert all((p.kind, p.sender) == (kind, 5) for p in parts)
    assert b"".join(p.rows.tobytes() for p in parts if p.rows is not None) == all_.tobytes()


def test_rows_have_the_same_layout_on_every_machine() -> None:
    for dtype in (*ROWS.values(), records.TOTALS):
        assert not dtype.isalignedstruct
        assert dtype.itemsize == sum(dtype[name].itemsize for name in dtype.names)
        assert all(dtype[name].str[0] in "<|" for name in dtype.names)
