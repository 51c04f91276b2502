"""A device for tests that does work as late as it may, and in any order that its streams allow.

If the host uses a result before it waits for it, the result differs. So a test finds a missing wait without a GPU.
"""

import inspect
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rudra.compute.device.collectives import Collective
from rudra.compute.device.graphs import Graph, Lanes, NotRecordedError, waited
from rudra.compute.device.kind import CPU, DeviceKind, Result
from rudra.compute.device.streams import Number, Pending, Stream, known

Operation = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]
"""Operation of torch: function, arguments, named arguments and results."""


class AdverseDevice(DeviceKind):
    """CPU whose order of work is random. Mini-batches are copied, as if its memory were apart.

    Args:
        seed: Decides the order.
        free: Bytes of memory that it says it has. None: it knows no limit.

    Attributes:
        asked: How often the host asked whether work is done.
    """

    apart = True
    records = True

    def __init__(self, seed: int, free: int | None = None) -> None:
        self._chance, self._free = random.Random(seed), free
        self._queues: list[deque[AdverseWork]] = []
        self._lock = threading.RLock()  # any thread that asks may do the work of others
        self.asked = self._epoch = 0

    def free_bytes(self, device: torch.device) -> int | None:
        return self._free

    def stream(self, device: torch.device = CPU, *, own: bool = False) -> Stream:
        self._queues.append(deque())
        return AdverseStream(self, self._queues[-1])

    def streams(
        self, device: torch.device, count: int, at_once: int, begin: Callable[[], None] = lambda: None
    ) -> list[Stream]:
        found = [self.stream(device, own=True) for _ in range(min(count, at_once))]
        return [found[place % len(found)] for place in range(count)]

    def go_on(self) -> None:
        """Does some work, perhaps none."""
        with self._lock:
            self.asked += 1
            for _ in range(self._chance.choice((0, 0, 1, 1, 2))):
                self.do_one()

    def do_one(self) -> None:
        """Does the first work of one stream that waits for no other, if there is any."""
        with self._lock:
            if waiting := [queue for queue in self._queues if queue and queue[0].may_begin]:
                self._chance.choice(waiting).popleft().do()

    def collective(self, device: torch.device, store: Any, place: int, size: int) -> Collective:
        return _LateCollective(super().collective(device, store, place, size), self.stream(device))

    def record(self, device: torch.device, work: Callable[[], Result]) -> tuple[Graph, Result]:
        recorder = _Recorder()
        try:
            with recorder:
                made = work()
        except RuntimeError as error:
            raise NotRecordedError(waited(error)) from error
        epoch = self._epoch
        return RecordedGraph(recorder.operations, lambda: epoch == self._epoch), made

    def lanes(self, device: torch.device, count: int) -> Lanes:
        return _AdverseLanes(self._chance)

    def invalidate(self) -> None:
        """Makes all recorded work invalid."""
        self._epoch += 1


class _LateCollective(Collective):
    """Group whose sums begin late.

    Args:
        group: The group.
        stream: Stream that begins them, in order.
    """

    def __init__(self, group: Collective, stream: Stream) -> None:
        self._late, self._stream = group, stream
        self.abort, self.close = group.abort, group.close  # type: ignore[method-assign]

    def sum(self, vector: torch.Tensor) -> Pending:
        begun: list[Pending] = []

        def begin() -> tuple[()]:
            begun.append(self._late.sum(vector))
            return ()

        return _LateSum(self._stream.submit(begin), begun)


class _LateSum(Pending):
    """Sum of such a group. `begun` has the sum as soon as `start` is done."""

    def __init__(self, start: Pending, begun: list[Pending]) -> None:
        self._start, self._begun = start, begun

    def done(self) -> bool:
        return self._start.done() and self._begun[0].done()

    def numbers(self) -> list[float]:
        self._start.numbers()
        return self._begun[0].numbers()


class RecordedGraph(Graph):
    """Torch's operations with the tensors that they have read and written, in order.

    As on a GPU, a repetition runs no Python code of the model. It uses the numbers and the memory of the recording.
    """

    def __init__(self, operations: list[Operation], is_valid: Callable[[], bool]) -> None:
        super().__init__(is_valid)
        self._operations = operations

    def replay(self) -> None:
        for function, arguments, named, results in self._operations:
            again = function(*arguments, **named)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and not _same_memory(old, new):
                    old.copy_(new)


class _AdverseLanes(Lanes):
    """Lanes whose work is done at the end, in any order that they allow."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._work: list[tuple[int, Callable[[], object], set[int]]] = []  # lane, work, and numbers of earlier work

    def do(self, lane: int, work: Callable[[], object], after: Sequence[int] = ()) -> None:
        before = {number for number, (other, *_) in enumerate(self._work) if other == lane or other in after}
        self._work.append((lane, work, before))

    def join(self) -> None:
        left, done = dict(enumerate(self._work)), set[int]()
        while left:
            number = self._chance.choice([each for each, (_, _, before) in left.items() if before <= done])
            left.pop(number)[1]()
            done.add(number)
        self._work.clear()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all operations of torch.

    Attributes:
        operations: The operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NUMBERS or (func in _CHOOSING and any(_chooses(each) for each in args[1])):
            raise RuntimeError("the host waits for a number")
        results = func(*args, **(kwargs or {}))
        self.operations.append(tree_map(_memory, (func, args, kwargs or {}, results)))
        return results


# Without torch's compiler wrapper, whose import takes over a second in each rank.
_Recorder.__torch_dispatch__ = inspect.unwrap(_Recorder.__torch_dispatch__)  # type: ignore[method-assign]


_ATEN = torch.ops.aten
_NUMBERS = (
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
)
"""Operations whose result the host waits for."""

_CHOOSING = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default)
"""Operations that the host waits for if an index says which elements are chosen."""


def _chooses(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _memory(value: Any) -> Any:
    """Returns another tensor with the memory of a tensor: models and optimisers move theirs to other memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class AdverseStream(Stream):
    """Stream of such a device."""

    def __init__(self, device: AdverseDevice, queue: "deque[AdverseWork]") -> None:
        self._device, self._queue = device, queue

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        self._queue.append(AdverseWork(self._device, work, after))
        return self._queue[-1]


class AdverseWork(Pending):
    """Work of such a stream."""

    def __init__(self, device: AdverseDevice, work: Callable[[], Sequence[Number]], after: Sequence[Pending]) -> None:
        self._device, self._work = device, work
        self._after = [each for each in after if isinstance(each, AdverseWork)]
        self._numbers = [math.nan]
        self._over = False

    @property
    def may_begin(self) -> bool:
        """Whether the work that must be done before is done."""
        return all(each._over for each in self._after)

    def do(self) -> None:
        try:
            self._numbers = known(self._work())
        finally:
            self._over = True

    def done(self) -> bool:
        self._device.go_on()
        return self._over

    def numbers(self) -> list[float]:
        while not self._over:
            self._device.do_one()
        return self._numbers
