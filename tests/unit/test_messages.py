"""Messages survive the wire, and fit where they are put."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from role_traces import any_message

from rudra.core import records
from rudra.core.messages import (
    MESSAGES,
    ROWS,
    GroupFlags,
    Message,
    MessageKind,
    PushedGradient,
    Ready,
    Snapshot,
    Weights,
)
from rudra.core.records import Gradient
from rudra.core.wire import (
    CONTROL_BYTES,
    MEMBER,
    decode,
    encode,
    in_pieces,
    members,
    tail_bytes,
    write_member,
)

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
COUNT = st.floats(0, 2**20, width=32)
WORDS = st.builds(GroupFlags, st.integers(0, 2**64 - 1), INT32, *[st.booleans()] * 3, st.integers(0, 255), FLOAT)
GRADIENTS = st.builds(Gradient, INT64, INT32, INT32, *[INT64] * 4, FLOAT, FLOAT, COUNT, INT32)


def rows(kind: MessageKind, count: int) -> np.ndarray:
    """Rows whose every byte counts."""
    dtype = ROWS[kind]
    noise = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8)
    return noise.view(dtype)


def same(one: Message, other: Message) -> bool:
    def facts(m: Message) -> list[object]:
        fields = [getattr(m, name) for name in m.__struct_fields__]
        return [type(m), *((f.dtype, f.tobytes()) if isinstance(f, np.ndarray) else f for f in fields)]

    return facts(one) == facts(other)


NUMBERS = {int: INT64, float: FLOAT, bool: st.booleans(), tuple[Gradient, ...]: st.just(())}


@pytest.mark.parametrize("kind", [kind for kind in MessageKind if kind not in ROWS])
@given(data=st.data())
def test_round_trip_without_rows(kind: MessageKind, data: st.DataObject) -> None:
    """No field is lost, or taken for another."""
    fields = {field.name: data.draw(NUMBERS[field.type]) for field in msgspec.structs.fields(MESSAGES[kind])}
    message = MESSAGES[kind](**{**fields, "sender": data.draw(INT32)})
    assert same(decode(encode(message)), message)


def received(message: Any) -> Any:
    """From a buffer that is longer than what arrived, and used again."""
    buffer = bytearray(encode(message) + b"\xff" * 100)
    decoded = decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    return decoded


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_round_trip_with_rows_from_a_buffer_that_is_used_again(kind: MessageKind, count: int) -> None:
    message = any_message(kind, 3, rows=rows(kind, count))
    decoded = received(message)
    assert same(decoded, message)
    assert decoded.rows.flags.writeable, "roles write into the rows that they receive"


def test_a_receiver_may_write_into_rows_of_its_own() -> None:
    message = any_message(MessageKind.UPDATES, 3, rows=rows(MessageKind.UPDATES, 2))
    own: Any = message.with_own_rows()
    assert same(own, message)
    own.rows["timestamp"] = 5
    assert not same(own, message)
    ready = Ready(3, 5)
    assert ready.with_own_rows() is ready


@given(st.lists(GRADIENTS, min_size=1, max_size=6), INT64)
def test_round_trip_of_gradients_from_a_buffer_that_is_used_again(gradients: list[Gradient], timestamp: int) -> None:
    """Steps and timestamps beyond 32 bits included."""
    message = PushedGradient(3, timestamp, 9, tuple(gradients))
    decoded = received(message)
    assert same(decoded, message)
    assert all(type(gradient) is Gradient for gradient in decoded.gradients)


@given(st.lists(st.tuples(INT64, WORDS, GRADIENTS), min_size=1, max_size=4))
def test_round_trip_of_what_the_members_of_a_group_tell(told: list[tuple[int, GroupFlags, Gradient]]) -> None:
    rows = np.full(len(told) * MEMBER.itemsize, 0xFF, np.uint8)
    for place, about in enumerate(told):
        write_member(rows, place, *about)
    assert [*members(rows)] == told
    table = rows.view(MEMBER)
    assert table[[*GroupFlags.__struct_fields__]].tolist() == [msgspec.structs.astuple(word) for _, word, _ in told]
    assert table[[*Gradient.__struct_fields__]].tolist() == [msgspec.structs.astuple(each) for *_, each in told]


def test_gradients_on_the_wire_are_rows_of_their_table() -> None:
    gradient = Gradient(-1, 2, 3, 2**40, 2**42, 2**41, -1, 0.25, 1.5, 7, 5)
    (row,) = np.frombuffer(encode(PushedGradient(0, 0, 0, (gradient,)))[-72:], records.GRADIENT)
    assert row.item() == msgspec.structs.astuple(gradient)


@pytest.mark.parametrize("gradients", [1, 2, 3, 30])
def test_the_tail_behind_a_tensor_holds_what_comes_with_tensors(gradients: int) -> None:
    room = tail_bytes(gradients)
    assert room % 64 == 0, "what follows stays aligned"
    many = tuple(Gradient(-1, i, 4, 0, 0, 0, -1, 1.0, 0.5, 1, i) for i in range(gradients))
    assert len(encode(PushedGradient(0, 0, 0, many))) <= room
    assert len(encode(Snapshot(0, 0, 0, rows(MessageKind.SNAPSHOT, 1)))) <= room
    assert len(encode(Weights(0, 0))) <= room


@pytest.mark.parametrize(("gradients", "room"), [(1, 256), (2, 256), (3, 256), (4, 384), (30, 2240)])
def test_the_tail_is_as_small_as_what_it_holds_allows(gradients: int, room: int) -> None:
    """A simulated tensor is as long as a real one, tail and all."""
    assert tail_bytes(gradients) == room


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("count", [0, 1, 17, 48, 500])
def test_pieces_keep_every_row_in_messages_of_limited_size(kind: MessageKind, count: int) -> None:
    all_ = rows(kind, count)
    messages = [any_message(kind, 5, rows=piece) for piece in in_pieces(all_)]
    encoded = [encode(m) for m in messages]
    assert all(len(data) <= CONTROL_BYTES for data in encoded)
    fill = (CONTROL_BYTES - 64) // ROWS[kind].itemsize
    assert len(messages) <= -(-count // fill), "no more messages than needed"
    parts: list[Any] = [decode(data) for data in encoded]
    assert all((p.kind, p.sender) == (kind, 5) for p in parts)
    assert b"".join(p.rows.tobytes() for p in parts if p.rows is not None) == all_.tobytes()


def test_rows_have_the_same_layout_on_every_machine() -> None:
    for dtype in (*ROWS.values(), records.TOTALS):
        assert not dtype.isalignedstruct
        assert dtype.itemsize == sum(dtype[name].itemsize for name in dtype.names)
        assert all(dtype[name].str[0] in "<|" for name in dtype.names)
