"""Executors: the buffers of a role, and the arithmetic of its actions. Both drivers use them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.averaging import CHUNK, slices
from rudra.compute.device.devices import kind_of, selection
from rudra.compute.device.faults import exhausted, set_deterministic
from rudra.compute.device.kind import CPU
from rudra.compute.device.streams import Pending
from rudra.compute.rows import RowFormat
from rudra.compute.staging import Staging
from rudra.compute.statedict import StateEntry
from rudra.compute.vectors import BorrowedBuffer, Buffer, Deferred, DirectBuffer, Memory, RowBuffer, Take
from rudra.core.actions import Copy, ExecutorAction, Hash, ReorderParts
from rudra.core.buffer_names import GRADIENT, SNAPSHOT, WEIGHTS
from rudra.core.digest import sha256
from rudra.core.events import Event, Hashed
from rudra.core.hooks import RoleHooks
from rudra.core.layout import Entry, Part
from rudra.core.messages import PARTS, Message
from rudra.core.wire import tail_bytes
from rudra.job.tables import ClusterTable
from rudra.probe import probed


@contextmanager
def torch_as_in(cluster: ClusterTable) -> Iterator[None]:
    """Sets threads, denormals and determinism as a job asks, and restores the previous settings afterwards."""
    of_thread = arithmetic_of_thread()
    of_process = prepare_torch(cluster, cluster.torch_threads)
    try:
        yield
    finally:
        of_process()
        of_thread()


def prepare_torch(cluster: ClusterTable, threads: int) -> Callable[[], None]:
    """Sets threads, denormals and determinism as a job asks. Returns a function that restores determinism."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(cluster.flush_denormals)
    return set_deterministic(cluster.deterministic)


def arithmetic_of_thread() -> Callable[[], None]:
    """Returns a function that gives another thread the arithmetic settings of this one, which are per thread."""
    threads, flushed = torch.get_num_threads(), not torch.tensor(1e-40).mul(1.0).any()
    select = selection()

    def adopt() -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)
        select()

    return adopt


Does = TypeVar("Does", bound=Callable[..., Any])


def performs(action: type[ExecutorAction]) -> Callable[[Does], Does]:
    """Marks the executor method that performs a local action. Overriding methods in subclasses need no mark."""

    def mark(method: Does) -> Does:
        method.performs = action  # type: ignore[attr-defined]
        return method

    return mark


def _marked(cls: type) -> dict[type[ExecutorAction], str]:
    """Maps each action to the name of the method that performs it in a class."""
    return {method.performs: name for name, method in vars(cls).items() if hasattr(method, "performs")}


class Executor:
    """Buffers and arithmetic of one role. Each local action is performed by the method that `performs` marks.

    Args:
        layout: Entries of the flat vector.
        parameters: Number of parameters in the vector. The remaining floats are model buffers.
        gradients: Largest number of gradients that one message combines.
        device: Device of the buffers.
        stage: Staging copies on the device that computes, if the role does not compute on its buffers directly.
        direct: Whether MPI reads and writes the buffers on that device.
        memory: Allocator for buffers in main memory.

    Attributes:
        slices_by_owner: Slice of the vector that each owner holds, by its role, if the slices travel separately. A
            shard treats its own slice as the whole vector.
        owner_parts: Part of the vector that each of these owners holds.
        sizes: Number of floats in buffers of another size than the vector, by buffer name or its first word.
        state_dict: Entries of the model's `state_dict`, for the result file. Only the statistics server's executor has
            it.
        step_bytes: Bytes of tensors that all learners send in one step if layers are placed. Only the statistics
            server's executor has it.
        row_format: Row format of gradients. None: gradients are flat vectors.
        hooks: Hooks of this role. None: it has none.
        lent: Number of transfers under way from each buffer.
        lazy_average: Whether averages are deferred until they are needed, so that an update can compute them in its
            step. This requires that every writer to a buffer calls `renew` first.
        tail: Bytes of the largest message that accompanies a tensor.
        direct: Whether MPI reads and writes the buffers on that device.
        roll_back: Called before a buffer is used: a device that does work before the role asks returns to what the role
            knows.
    """

    _METHODS: ClassVar[dict[type[ExecutorAction], str]] = {}

    slices_by_owner: Mapping[int, slice] = {}
    owner_parts: Sequence[Part] = ()
    sizes: Mapping[str, int] = {}
    state_dict: tuple[StateEntry, ...] = ()
    step_bytes = 0
    row_format: RowFormat | None = None
    hooks: RoleHooks | None = None
    lazy_average = False
    roll_back: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        layout: tuple[Entry, ...],
        size: int,
        parameters: int,
        gradients: int,
        device: torch.device = CPU,
        stage: Staging | None = None,
        *,
        direct: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory
        self._idle: list[Buffer] = []  # unnamed buffers; other owners may still hold some of them
        self.layout = layout
        self.size = size
        self.parameters = parameters
        self.device = device
        self._stage = stage
        self.direct = direct
        self._pinned = stage is not None and kind_of(stage.device).page_locks
        self.tail = tail_bytes(gradients)
        self._buffers: dict[str, Buffer] = {}
        self._deferred: dict[str, Deferred] = {}
        self.lent: Counter[str] = Counter()

    def __init_subclass__(cls) -> None:
        cls._METHODS = {}
        for base in reversed(cls.__mro__):
            cls._METHODS |= vars(base).get("_METHODS", {})
        cls._METHODS |= _marked(cls)

    @property
    def computes_in_place(self) -> bool:
        """Whether the role computes on its buffers directly and not on copies on a GPU."""
        return self._stage is None

    @probed
    def perform(self, action: ExecutorAction) -> Iterator[Event | Pending | None]:
        """Performs a local action.

        Yields:
            None after each piece of long work but the last, work of a device as long as it is not done, then an event.
        """
        done = getattr(self, self._METHODS[type(action)])(action)
        return done if isinstance(done, Iterator) else iter((done,))

    def attempt(self, action: ExecutorAction) -> Iterator[Event | Pending | None]:
        """Performs a local action like `perform`. If memory does not suffice, the last event is `MemoryExhausted`."""
        try:
            done = self.perform(action)
        except Exception as error:
            return iter((exhausted(error, action),))
        return _to_the_end(done, action)

    def make_room(self, action: ExecutorAction) -> None:
        """Renews the buffers that an action changes, so that it may run while others read their old content."""
        for field in action.changes:
            self.renew(getattr(action, field))

    def copy_on_write(self, name: str) -> bool:
        """Whether a change to this buffer goes to other memory while readers hold the old content."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all allocated buffers."""
        return tuple(self._buffers)

    def has(self, name: str) -> bool:
        """Returns whether the buffer of that name is allocated."""
        return name in self._buffers

    def buffer(self, name: str) -> Buffer:
        """Returns the buffer of that name, after computing deferred content. Allocates it at its first use."""
        self.roll_back()
        if name in self._deferred:
            self._settle(name)
        if name not in self._buffers:
            self._buffers[name] = self.spare(name)
        return self._buffers[name]

    def size_of(self, name: str) -> int:
        """Number of floats in the buffer of that name."""
        sizes = self.sizes
        return sizes.get(name, sizes.get(name.partition(" ")[0], self.size)) if sizes else self.size

    @property
    def largest(self) -> int:
        """Number of floats in the largest buffer."""
        return max(self.size, *self.sizes.values()) if self.sizes else self.size

    def defer(self, name: str, take: Take, of: Sequence[str] = (), fill: Callable[[], None] | None = None) -> None:
        """Defers filling a buffer until somebody needs its content, which `take` computes.

        Args:
            name: Name of the buffer.
            take: Computes one slice. It may read that slice of the buffer's previous content, and no other slice of it.
            of: Names of the buffers that `take` reads. The deferred content is computed before any of them changes.
            fill: As for `Deferred`.
        """
        self._void(name)
        self._deferred[name] = Deferred(take, tuple(of), fill)

    def taking(self, name: str) -> Take:
        """Returns a function for slices of a buffer's content. Use it before anything else changes the buffer."""
        deferred = self._deferred.get(name)
        return self.buffer(name).vector.__getitem__ if deferred is None else deferred.take

    def _void(self, name: str) -> None:
        """Discards a buffer's content, even if deferred. Content that depends on it is computed first."""
        self.roll_back()
        if self._deferred:
            self._settle_made_of(name)
            self._deferred.pop(name, None)

    def _settle_made_of(self, name: str) -> None:
        for other in [other for other, deferred in self._deferred.items() if name in deferred.of and other != name]:
            self._settle(other)

    def _settle(self, name: str) -> None:
        """Computes the deferred content of a buffer, after all content that depends on the buffer."""
        self._settle_made_of(name)
        deferred = self._deferred.pop(name, None)
        if deferred is None:  # computing the dependent content has done it already
            return
        if deferred.fill is not None:
            deferred.fill()
            return
        into = self._buffers.get(name)
        if into is None or into.readers or into.borrowed or self.lent[name]:
            into = self.spare(name)
        for part in slices(0, self.size, CHUNK):
            into.vector[part].copy_(deferred.take(part))
        into.version += 1
        self._replace(name, into)

    def _replace(self, name: str, buffer: Buffer) -> None:
        """Puts a buffer under a name as `put` does. The previous buffer is reused as soon as it has no readers."""
        before = self._buffers.get(name)
        self.put(name, buffer)
        self._use_again(before)

    def _use_again(self, buffer: Buffer | None) -> None:
        """Makes a buffer that lost a name spare, unless it has another name or belongs to another process."""
        if buffer is not None and not buffer.borrowed and buffer not in self._buffers.values():
            self._idle.append(buffer)

    def use_rows(self, form: RowFormat) -> None:
        """Stores gradients as rows from now on."""
        self.row_format, self.sizes = form, {GRADIENT: form.floats}

    def new_buffer(self, name: str = WEIGHTS) -> Buffer:
        """Allocates an unnamed buffer, as large as the named one."""
        if self.row_format is not None and name.startswith(GRADIENT):
            return RowBuffer(self.row_format, self.tail, self._memory)
        size = self.size_of(name)
        if self.direct:
            return DirectBuffer(size, self.tail, self.device)
        return Buffer(size, self.tail, self.device, pinned=self._pinned, memory=self._memory)

    def put(self, name: str, buffer: Buffer) -> None:
        """Gives a buffer a name. Other roles in this process may hold the same buffer."""
        self._void(name)
        before = self._buffers.get(name)
        self._buffers[name] = buffer
        if isinstance(before, BorrowedBuffer) and before is not buffer:
            before.give_back()

    def borrow(self, name: str, buffer: Buffer) -> None:
        """Gives a name another executor's buffer, which is only read here. The next change goes to other memory."""

        def give_back() -> None:
            buffer.readers -= 1

        buffer.readers += 1
        self._replace(name, BorrowedBuffer(buffer.vector, give_back))

    def put_new(self, name: str) -> None:
        """Gives a name a new buffer, because something may still write to the old one."""
        self.put(name, self.new_buffer(name))

    def spare(self, name: str = WEIGHTS) -> Buffer:
        """Returns an unnamed buffer that has no readers, as large as the named one."""
        size = self.size_of(name)
        fits = (i for i, buffer in enumerate(self._idle) if not buffer.readers and len(buffer.vector) == size)
        free = next(fits, None)
        return self.new_buffer(name) if free is None else self._idle.pop(free)

    def reserve(self, count: int) -> None:
        """Allocates `count` buffers in advance, so that no action waits for them later."""
        self._idle += [self.new_buffer() for _ in range(count)]

    def renew(self, name: str) -> Buffer:
        """Returns the buffer of that name with undefined content, in other memory if the old memory has readers."""
        self._void(name)
        before = self.buffer(name)
        if before.readers or before.borrowed:
            self._replace(name, self.spare(name))
        return self._buffers[name]

    def swap(self, one: str, other: str) -> None:
        """Exchanges the buffers of two names."""
        buffers = self.buffer(one), self.buffer(other)
        self._buffers[other], self._buffers[one] = buffers

    def held(self, but: str) -> int:
        """Number of buffers that have readers, not counting the named one."""
        buffers = {id(buffer): buffer for name, buffer in self._buffers.items() if name != but}
        return sum(bool(buffer.readers) for buffer in (*buffers.values(), *self._idle))

    def _give_back(self, *names: str) -> None:
        """Returns gradients that are no longer needed to their lenders, before the role requests others."""
        for name in names:
            if isinstance(self._buffers.get(name), BorrowedBuffer):
                self.release(name)

    def release(self, name: str, *, again: bool = False) -> Buffer | None:
        """Forgets a buffer and frees it unless others hold it. Memory that other processes see is reused.

        Args:
            name: Name of the buffer.
            again: Whether to reuse any memory.
        """
        self._void(name)
        buffer = self._buffers.pop(name, None)
        if isinstance(buffer, BorrowedBuffer):
            buffer.give_back()
        elif again or self._memory is not None:
            self._use_again(buffer)
        return buffer

    def forget(self, name: str) -> None:
        """Forgets a name of a buffer that another role of this process keeps."""
        self._buffers.pop(name, None)

    def slice_for(self, name: str, owner: int) -> torch.Tensor:
        """Returns the part of a vector that travels to or from its owner, float32."""
        return self.buffer(name).vector[self.slices_by_owner.get(owner, slice(None))]

    def slice_array(self, name: str, owner: int) -> npt.NDArray[np.float32]:
        """Returns that part in main memory, as it travels."""
        return self.buffer(name).array[self.slices_by_owner.get(owner, slice(None))]

    def send(
        self, name: str, message: Message, to: int, *, halves: bool = False, near: bool = False
    ) -> npt.NDArray[Any]:
        """Returns the data of a buffer to send to a role. The buffer stays in use until `sent`.

        Args:
            name: Name of the buffer.
            message: Message that accompanies the tensor.
            to: Receiving role.
            halves: Whether to send float16.
            near: Whether the receiver reads the buffer in place, so that the message need not follow the tensor.
        """
        self.lent[name] += 1
        if message.kind in PARTS:
            return self.slice_array(name, to)
        buffer = self.buffer(name)
        if buffer.borrowed:
            own = self.spare(name)
            own.vector[: len(buffer.vector)] = buffer.vector
            self.put(name, own)
            buffer = own
        if halves:
            return buffer.write_half(message)
        return buffer.array if near else buffer.write(message)

    def lend(self, name: str) -> Buffer:
        """Returns a buffer whose tensor is sent from a copy on its device. It stays in use until `sent`."""
        self.lent[name] += 1
        return self.buffer(name)

    def sent(self, name: str) -> None:
        """Records that a transfer from the buffer has ended."""
        self.lent[name] -= 1
        if name == SNAPSHOT:
            self.release(name)

    @probed
    def sha256(self, name: str) -> str:
        """Returns the SHA-256 of a buffer's floats, in hexadecimal."""
        return sha256(self.buffer(name).array)

    @performs(Hash)
    def hash(self, action: Hash) -> Hashed:
        return Hashed(self.sha256(action.buffer))

    @performs(ReorderParts)
    def arrange(self, action: ReorderParts) -> None:
        if all(len(part.stretches) == 1 for part in self.owner_parts):  # received in their final places
            return
        vector = self.buffer(action.buffer).vector
        came = vector.clone()
        start = 0
        for place in (stretch for part in self.owner_parts for stretch in part.stretches):
            size = place.stop - place.start
            vector[place] = came[start : start + size]
            start += size

    @performs(Copy)
    def copy(self, action: Copy) -> None:
        self.renew(action.target).vector.copy_(self.buffer(action.source).vector)

    def state(self, *, alone: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """Returns a copy of all tensors of this role for a checkpoint. The next call overwrites it.

        Args:
            alone: Whether the checkpoint contains nothing of other roles.
        """
        return {}

    def prepare(self) -> None:
        """Allocates the memory for training, after the model that was built for initialisation is freed."""

    def close(self) -> None:
        """Ends the role's threads and calls the hooks for the end of a run."""
        if self.hooks is not None:
            self.hooks.ended()


Executor._METHODS = _marked(Executor)


def _to_the_end(work: Iterator[Event | Pending | None], action: ExecutorAction) -> Iterator[Event | Pending | None]:
    """Yields what the work of an action yields. If memory is exhausted, the event for it is the last one."""
    try:
        yield from work
    except Exception as error:
        yield exhausted(error, action)
