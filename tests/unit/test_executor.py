"""Averages and updates slice by slice: the same bits, whoever reads what meanwhile; nothing is written that is lent."""

import ctypes
import mmap
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flat_layout import NO_DECAY, SIZE, SLOW, layout
from fuzzing import cases, in_turn
from hypothesis import given
from hypothesis import strategies as st

from rudra.compute import executor as base
from rudra.compute import owners
from rudra.compute.averaging import CACHE_LINE
from rudra.compute.executor import Executor
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import ServerExecutor
from rudra.compute.parts import cut
from rudra.compute.vectors import BorrowedBuffer
from rudra.core.actions import Accumulate, Copy, Update
from rudra.core.digest import digest_of, sample
from rudra.core.layout import Entry, Part
from rudra.core.messages import PushedGradient
from rudra.job.tables import OptimizerTable

WHOLE = layout()[-1].offset + layout()[-1].size
A, B = "gradient 0", "gradient 1"

TABLES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 5e-4},
    "nesterov": {"momentum": 0.9, "options": {"nesterov": True}},
    "dampening": {"momentum": 0.9, "options": {"dampening": 0.1}},
    "maximize": {"momentum": 0.9, "options": {"maximize": True}},
    "caffe": {"momentum": 0.9, "momentum_form": "caffe", "weight_decay": 5e-4},
    "clipped": {"momentum": 0.9, "clip_norm": 0.5},
    "adam": {"name": "adam", "weight_decay": 0.01},
    "rmsprop": {"name": "rmsprop", "momentum": 0.9},
}
GROUPS: dict[str, list[dict[str, Any]]] = {"one": [], "slow, no decay": [SLOW, NO_DECAY]}


WAYS = [*product(enumerate(GROUPS), (1, 3), (True, False))]
HALVES = [
    [
        (groups, count, prepared)
        for (place, groups), count, prepared in WAYS
        if (place + count // 2 + prepared) % 2 == half
    ]
    for half in (0, 1)
]
"""Groups of parameters, numbers of parts, and whether an optimiser is prepared; each half has every pair of these."""


def in_chunks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Has pieces of that size computed at a time, by whoever divides a vector."""
    for module in (base, owners):
        patch.setattr(module, "CHUNK", size)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def make(
    table: OptimizerTable,
    entries: list[Entry],
    part: slice | None = None,
    *,
    lazy_average: bool = False,
    counters: int = 0,
    prepared: bool = True,
) -> ServerExecutor:
    """A server, of all weights or a part of them; they are always the same."""
    size = entries[-1].offset + entries[-1].size
    parameters = sum(entry.size for entry in entries if entry.kind == "parameter")
    of = part or slice(0, size)
    made = ServerExecutor(tuple(entries), of.stop - of.start, min(of.stop, parameters) - of.start, 1)
    made.lazy_average = lazy_average
    weights = made.buffer("weights").vector
    weights.copy_(random(size, 0)[of])
    made._part, made._of, made._counters = None if part is None else Part((part,)), size, counters
    made._rule = UpdateRule(table, weights[: made.parameters], entries, part)
    if prepared:
        made.prepare()
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def state(executor: ServerExecutor) -> dict[str, torch.Tensor]:
    return {name: bits(value.clone()) for name, value in executor._tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


def lend(executor: Executor, name: str, vector: torch.Tensor) -> list[str]:
    """Gives it memory that a write to would end this process; what is given back is in the list."""
    file = mmap.mmap(-1, vector.nbytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(file, np.float32)
    array[:] = vector.numpy()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(vector.nbytes), mmap.PROT_READ) == 0
    back: list[str] = []
    executor.put(name, BorrowedBuffer(torch.from_numpy(array), lambda: back.append(name)))
    return back


@pytest.mark.each_value
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, half in in_turn(TABLES, HALVES, each=1) for way in half], ids=str
)
def test_in_slices_an_update_has_the_bits_that_it_has_in_one(
    name: str, way: tuple[str, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights move, gradients are borrowed, and model buffers lie behind the parameters."""
    groups, count, prepared = way
    in_chunks(monkeypatch, 1 << 12)
    table = OptimizerTable.model_validate({"learning_rate": 0.02, "groups": GROUPS[groups], **TABLES[name]})
    parts = [None] if count == 1 or name == "clipped" else list(cut(table, layout(), count))  # a norm is of the whole
    for part in parts:
        of = part or slice(0, WHOLE)
        counters = 3 if of.stop == WHOLE else 0
        plain = make(table, layout(), part, counters=counters, prepared=prepared)
        fused = make(table, layout(), part, lazy_average=True, counters=counters, prepared=prepared)
        for turn, scale in enumerate((1.0, 1.0, 0.3, 0.3, 1.0, 0.3)):
            held = fused.buffer("weights") if turn % 2 else None
            before = None
            if held is not None:
                held.readers, before = 1, held.vector.clone()
            gradients = [random(WHOLE, 10 * turn + i)[of] for i in (1, 2, 3)]
            for i, gradient in enumerate(gradients):
                into = B if i else A
                plain.renew(into).vector.copy_(gradient)
                if (turn + i) % 3:
                    fused.renew(into).vector.copy_(gradient)
                else:
                    lend(fused, into, gradient)
                action = Accumulate(A, into, 1 / (1 + i), scale)
                if i or scale != 1.0:
                    plain.accumulate(action)
                    fused.accumulate(action)
            update = Update(A, "weights", 0.02 / (1 + turn), turn + 1)
            theirs, ours = plain.update(update), fused.update(update)
            assert (theirs.digest, theirs.sampled) == (ours.digest, ours.sampled)
            assert same(state(plain), state(fused)), turn
            if held is not None and before is not None:
                assert fused.buffer("weights") is not held
                assert torch.equal(bits(held.vector), bits(before)), "somebody reads it still"
                held.readers = 0
        assert len({id(b) for b in (*fused._buffers.values(), *fused._idle)}) <= 7, "generations serve again"


@cases(120)
@given(
    runs=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    buffers=st.integers(0, 70),
    slow=st.sets(st.integers(0, 8)),
    chunk=st.sampled_from([128, 192, 256, 1 << 20]),
    name=st.sampled_from(["sgd", "momentum", "nesterov", "caffe"]),
    copy_on_write=st.booleans(),
    scale=st.sampled_from([1.0, 0.7]),
)
def test_any_sizes_will_do(
    runs: list[int], buffers: int, slow: set[int], chunk: int, name: str, copy_on_write: bool, scale: float
) -> None:
    entries: list[Entry] = []
    for number, size in enumerate(runs):
        offset = entries[-1].offset + entries[-1].size if entries else 0
        entries.append(Entry(f"{'slow' if number in slow else 'p'}.{number}", (size,), offset, size, "parameter"))
    if buffers:
        entries.append(Entry("mean", (buffers,), sum(runs), buffers, "buffer"))
    groups = [SLOW | {"parameters": "slow.*"}] if any(number < len(runs) for number in slow) else []
    table = OptimizerTable.model_validate({"groups": groups, **TABLES[name]})
    plain, fused = make(table, entries), make(table, entries, lazy_average=True)
    asked: list[slice] = []
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, chunk)
        for turn in range(2):
            for executor in (plain, fused):
                for i, into in enumerate((A, B)):
                    executor.renew(into).vector.copy_(random(executor.size, 10 * turn + i))
            fused.buffer("weights").readers = int(copy_on_write)
            for executor in (plain, fused):
                executor.accumulate(Accumulate(A, B, 0.5, scale))
                if executor is fused:
                    take = executor.taking(A)
                    executor.defer(A, lambda part, take=take: asked.append(part) or take(part), (A, B))  # type: ignore[misc]
                executor.update(Update(A, "weights", 0.1, turn + 1))
            assert same(state(plain), state(fused))
    assert asked
    assert all(part.start % CACHE_LINE == 0 and part.stop - part.start <= chunk for part in asked)


def ways_out() -> dict[str, Any]:
    """What may happen to what an average waits for."""
    return {
        "read": lambda e: e.buffer(A),
        "sent": lambda e: e.send(A, PushedGradient(0, 1, 0, ()), 1),
        "lent": lambda e: e.send(A, PushedGradient(0, 1, 0, ()), 1, near=True),
        "hashed": lambda e: e.sha256(A),
        "a part of it read": lambda e: e.slice_for(A, 1),
        "copied": lambda e: e.copy(Copy(A, "copy")),
        "its gradient renewed": lambda e: e.renew(B).vector.fill_(7.0),
        "its gradient put": lambda e: e.put(B, e.new_buffer()),
        "its gradient released": lambda e: e.release(B),
        "its gradient copied over": lambda e: e.copy(Copy("weights", B)),
        "its gradient scaled": lambda e: e.accumulate(Accumulate(B, B, 1.0, 0.5)),
        "its gradient averaged into": lambda e: e.accumulate(Accumulate(B, A, 0.25, 1.0)),
    }


@pytest.mark.parametrize("borrowed", [(), (A,), (B,), (A, B)], ids=str)
@pytest.mark.parametrize("way", ways_out())
def test_an_average_is_there_for_whoever_needs_it(way: str, borrowed: tuple[str, ...]) -> None:
    executor = make(OptimizerTable(), layout(), lazy_average=True)
    gradients = {name: random(WHOLE, seed) for seed, name in enumerate((A, B), 1)}
    back = []
    for name, gradient in gradients.items():
        if name in borrowed:
            back.append(lend(executor, name, gradient))
        else:
            executor.renew(name).vector.copy_(gradient)
    executor.accumulate(Accumulate(A, B, 0.5, 1.0))
    assert not any(back)
    ways_out()[way](executor)
    assert torch.equal(executor.buffer(A).vector, gradients[A].lerp(gradients[B], 0.5))
    assert not executor.buffer(A).borrowed
    if way in {"its gradient scaled", "its gradient averaged into"}:
        other = gradients[A].lerp(gradients[B], 0.5)
        head = gradients[B].clone()
        head[:SIZE] *= 0.5
        expected = head if way == "its gradient scaled" else gradients[B].lerp(other, 0.25)
        assert torch.equal(executor.buffer(B).vector, expected)
    for name, given_back in zip(borrowed, back, strict=True):
        executor.renew(name)
        assert given_back == [name]


@pytest.mark.parametrize("way", ["renewed", "put", "released", "deferred anew"])
def test_what_nobody_will_read_is_not_computed(way: str) -> None:
    executor = Executor((), 100, 100, 1)
    executor.defer(A, lambda part: pytest.fail("asked for"))
    {
        "renewed": lambda: executor.renew(A),
        "put": lambda: executor.put(A, executor.new_buffer()),
        "released": lambda: executor.release(A),
        "deferred anew": lambda: executor.defer(A, lambda part: torch.ones(100)[part]),
    }[way]()
    assert executor.buffer(A).vector[0] == (way == "deferred anew")


@pytest.mark.parametrize("read", ["", "held", "lent", "borrowed"])
def test_what_is_deferred_lands_in_memory_that_nobody_reads(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 64)
    executor = Executor((), 1000, 1000, 1)
    gradient = random(1000, 1)
    if read == "borrowed":
        lend(executor, A, gradient)
    executor_buffer = executor.buffer(A)
    if read != "borrowed":
        executor_buffer.vector.copy_(gradient)
    executor_buffer.readers = int(read == "held")
    executor.lent[A] = int(read == "lent")
    scratch = torch.empty(64)

    def doubled(part: slice) -> torch.Tensor:
        return torch.mul(executor_buffer.vector[part], 2, out=scratch[: part.stop - part.start])

    executor.defer(A, doubled, (A,))
    assert torch.equal(executor.buffer(A).vector, gradient * 2)
    assert (executor.buffer(A) is executor_buffer) == (not read)
    if read:
        assert torch.equal(executor_buffer.vector, gradient)


def test_what_is_made_of_something_deferred_comes_first() -> None:
    """Each is computed once, though one is read while the other is put in its place."""
    executor = make(OptimizerTable(), layout(), lazy_average=True)
    first, second = random(WHOLE, 1), random(WHOLE, 2)
    executor.buffer(A).vector.copy_(first)
    executor.buffer(B).vector.copy_(second)
    own = executor.buffer(B).vector
    executor.defer(B, lambda part: own[part] * 2, (B,))
    executor.accumulate(Accumulate(A, B, 0.5, 1.0))
    assert torch.equal(executor.buffer(B).vector, second * 2)
    assert torch.equal(executor.buffer(A).vector, first.lerp(second * 2, 0.5))


def test_an_update_takes_all_that_is_deferred_without_writing_it() -> None:
    executor = make(OptimizerTable(), layout(), lazy_average=True)
    weights, first, second = executor.buffer("weights").vector.clone(), random(WHOLE, 1), random(WHOLE, 2)
    back = lend(executor, A, first)
    executor.buffer(B).vector.copy_(second)
    own = executor.buffer(B).vector
    executor.defer(B, lambda part: own[part] * 2, (B,))
    executor.accumulate(Accumulate(A, B, 0.5, 1.0))
    executor.update(Update(A, "weights", 0.1, 1))
    expected = first.lerp(second * 2, 0.5)
    assert torch.equal(executor.buffer("weights").vector[:SIZE], (weights[:SIZE].add(expected[:SIZE], alpha=-0.1)))
    assert torch.equal(executor.buffer("weights").vector[SIZE:], expected[SIZE:])
    assert torch.equal(own, second)
    assert back == [A], "before the role asks for the next"
    assert not executor._idle


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_copies_that_are_lent_or_held_keep_the_weights(name: str, lent: bool, held: bool) -> None:
    executor = make(OptimizerTable.model_validate(TABLES[name]), layout(), lazy_average=True)
    other = make(OptimizerTable.model_validate(TABLES[name]), layout())
    seen: list[Any] = []
    for turn in range(4):
        executor.copy(Copy("weights", "downcast 0"))
        old = executor.buffer("weights")
        assert executor.buffer("downcast 0") is old, "nothing is copied before it must be"
        executor.lent["downcast 0"], old.readers, before = int(lent), int(held), old.vector.clone()
        for each in (executor, other):
            each.renew(A).vector.copy_(random(WHOLE, turn))
            done = each.update(Update(A, "weights", 0.1, turn + 1))
            seen.append(done.digest)
        new = executor.buffer("weights")
        assert (new is old) == (not lent and not held)
        if lent or held:
            assert torch.equal(bits(old.vector), bits(before))
        if lent:
            assert executor.buffer("downcast 0") is old
        assert same(state(executor), state(other))
        assert seen[-1] == seen[-2] == digest_of(new.array[sample(turn + 1, WHOLE)].tobytes())
        executor.lent["downcast 0"] = old.readers = 0
    assert len(executor._idle) <= 2


def test_held_weights_stay_when_others_are_restored() -> None:
    executor = make(OptimizerTable(momentum=0.9), layout())
    held = executor.buffer("weights")
    held.readers, before = 1, held.vector.clone()
    found = {name: value.copy() for name, value in executor.state().items()}
    found["weights"] += 1
    executor.restore(found)
    assert torch.equal(held.vector, before)
    assert torch.equal(executor.buffer("weights").vector, before + 1)
    executor.update(Update(A, "weights", 0.1, 1))
    assert torch.equal(held.vector, before)


@pytest.mark.parametrize("action", [Accumulate(A, A, 1.0, 0.5), Accumulate(A, B, 0.5, 1.0), Accumulate(A, B, 0.5, 0.3)])
@pytest.mark.parametrize("read", ["held", "borrowed"])
@pytest.mark.parametrize("lazy_average", [False, True])
def test_what_others_read_is_averaged_elsewhere(action: Accumulate, read: str, lazy_average: bool) -> None:
    plain, executor = (make(OptimizerTable(), layout(), lazy_average=lazy_average and i == 1) for i in range(2))
    for seed, name in enumerate((A, B), 1):
        plain.buffer(name).vector.copy_(random(WHOLE, seed))
        if read == "borrowed":
            back = lend(executor, name, random(WHOLE, seed))
        else:
            executor.buffer(name).vector.copy_(random(WHOLE, seed))
    old = executor.buffer(A)
    old.readers = int(read == "held")
    before = old.vector.clone()
    plain.accumulate(action)
    executor.accumulate(action)
    assert torch.equal(bits(plain.buffer(A).vector), bits(executor.buffer(A).vector))
    assert executor.buffer(A) is not old
    assert torch.equal(old.vector, before)
    old.readers = 0
    if read == "held":
        assert executor.spare() is old
    else:
        assert back == ([] if lazy_average or action.into == action.gradient else [B]), (
            "what was added goes back at once"
        )
