"""What a role works with: buffers, and the arithmetic that its actions ask for. Both drivers use it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.averaging import CHUNK, slices
from rudra.compute.devices import CPU
from rudra.compute.flat import sha256
from rudra.compute.rows import RowForm
from rudra.compute.staging import Staging
from rudra.compute.statedict import StateEntry
from rudra.compute.vectors import BorrowedBuffer, Buffer, Deferred, DirectBuffer, Memory, RowBuffer, Take
from rudra.core.events import (
    GRADIENT,
    SNAPSHOT,
    WEIGHTS,
    Copy,
    Event,
    ExecutorAction,
    Hash,
    Hashed,
    ReorderParts,
)
from rudra.core.hooks import RoleHooks
from rudra.core.layout import Entry, Part
from rudra.core.messages import PARTS, Message
from rudra.core.wire import tail_bytes
from rudra.job.job import Job
from rudra.probe import probed


@contextmanager
def torch_as_in(job: Job) -> Iterator[None]:
    """Threads and denormals as the job has them; afterwards as they were."""
    restore = arithmetic_of_thread()
    torch.set_num_threads(job.cluster.threads_per_rank or 1)
    torch.set_flush_denormal(job.cluster.flush_denormals)
    try:
        yield
    finally:
        restore()


def arithmetic_of_thread() -> Callable[[], None]:
    """Gives what another thread calls to compute as this one does: these settings are a thread's own."""
    threads, flushed = torch.get_num_threads(), not torch.tensor(1e-40).mul(1.0).any()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def adopt() -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)
        if gpu is not None:
            torch.cuda.set_device(gpu)

    return adopt


Does = TypeVar("Does", bound=Callable[..., Any])


def performs(action: type[ExecutorAction]) -> Callable[[Does], Does]:
    """Marks the method of an executor that does a local action; those of subclasses take its place without a mark."""

    def mark(method: Does) -> Does:
        method.performs = action  # type: ignore[attr-defined]
        return method

    return mark


def _marked(cls: type) -> dict[type[ExecutorAction], str]:
    """Actions, and names of the methods of a class that do them."""
    return {method.performs: name for name, method in vars(cls).items() if hasattr(method, "performs")}


class Executor:
    """Buffers and arithmetic of one role: does its local actions, each in the method that `performs` marks.

    Args:
        layout: what the flat vector holds.
        parameters: how many of its floats are parameters; the others are model buffers.
        gradients: that one message may stand for.
        device: where the buffers are.
        stage: where the role computes, if not on its buffers themselves.
        direct: MPI reads and writes the buffers on that device.
        memory: where buffers in main memory are to lie.

    Attributes:
        parts: of the vector, by the role that owns them, where they travel one by one, and where they lie when they
            have come; to a shard its part is a whole.
        parted: what the owners of those hold of the vector.
        sizes: floats of buffers that hold something else than such a vector, by their names or the first word.
        state_dict: what that of the model lists, for the result file; only the statistics server's executor has it.
        step_bytes: of tensors that a step of all learners sends where layers are placed; only the statistics server's
            executor has it.
        form: of gradients, if they are rows; None: they are flat vectors.
        hooks: of this role; None: there are none.
        lent: how many transfers from each buffer are under way.
        fuses: averages wait for who needs them, so that an update takes them in with its step. Only where nobody writes
            to a buffer that he did not `renew`.
        tail: bytes of the largest message that comes with a tensor.
        direct: MPI reads and writes the buffers on that device.
    """

    _METHODS: ClassVar[dict[type[ExecutorAction], str]] = {}

    parts: Mapping[int, slice] = {}
    parted: Sequence[Part] = ()
    sizes: Mapping[str, int] = {}
    state_dict: tuple[StateEntry, ...] = ()
    step_bytes = 0
    form: RowForm | None = None
    hooks: RoleHooks | None = None
    fuses = False

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
        self._idle: list[Buffer] = []  # without a name, some of them held by others still
        self.layout = layout
        self.size = size
        self.parameters = parameters
        self.device = device
        self._stage = stage
        self.direct = direct
        self._pinned = stage is not None and stage.device.type == "cuda"
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
        """It computes with its buffers themselves, and not with copies on a GPU."""
        return self._stage is None

    def perform(self, action: ExecutorAction) -> Iterator[Event | None]:
        """Does a local action: gives None after each piece of long work but the last, and then what has come of it."""
        done = getattr(self, self._METHODS[type(action)])(action)
        return done if isinstance(done, Iterator) else iter((done,))

    def moves(self, name: str) -> bool:
        """Who changes this buffer does so in other memory while it is held."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the buffers that are there."""
        return tuple(self._buffers)

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name, made at its first use; what was deferred is in it then."""
        if name in self._deferred:
            self._settle(name)
        if name not in self._buffers:
            self._buffers[name] = self.spare(name)
        return self._buffers[name]

    def size_of(self, name: str) -> int:
        """Floats of the buffer of that name."""
        sizes = self.sizes
        return sizes.get(name, sizes.get(name.partition(" ")[0], self.size)) if sizes else self.size

    @property
    def largest(self) -> int:
        """Floats of the largest buffer."""
        return max(self.size, *self.sizes.values()) if self.sizes else self.size

    def defer(self, name: str, take: Take, of: Sequence[str] = (), fill: Callable[[], None] | None = None) -> None:
        """The buffer of that name is to hold what `take` gives, as soon as somebody needs it.

        Args:
            name: of the buffer.
            take: for a slice, it may read that slice of what the buffer has held so far, and no other.
            of: names of buffers that it reads. Before their content changes it is asked for all that it has to give.
            fill: as for `Deferred`.
        """
        self._void(name)
        self._deferred[name] = Deferred(take, tuple(of), fill)

    def taking(self, name: str) -> Take:
        """For who takes the content of a buffer slice by slice, before anything else is done to it."""
        deferred = self._deferred.get(name)
        return self.buffer(name).vector.__getitem__ if deferred is None else deferred.take

    def _void(self, name: str) -> None:
        """The content of a buffer goes: what is made of it is made now, and what it was to hold is forgotten."""
        if self._deferred:
            self._settle_made_of(name)
            self._deferred.pop(name, None)

    def _settle_made_of(self, name: str) -> None:
        for other in [other for other, deferred in self._deferred.items() if name in deferred.of and other != name]:
            self._settle(other)

    def _settle(self, name: str) -> None:
        """Puts into a buffer what it is to hold, after those that are made of it."""
        self._settle_made_of(name)
        deferred = self._deferred.pop(name, None)
        if deferred is None:  # one of those has seen to it
            return
        if deferred.fill is not None:
            deferred.fill()
            return
        into = self._buffers.get(name)
        if into is None or into.held or into.borrowed or self.lent[name]:
            into = self.spare(name)
        for part in slices(0, self.size, CHUNK):
            into.vector[part].copy_(deferred.take(part))
        into.version += 1
        self._replace(name, into)

    def _replace(self, name: str, buffer: Buffer) -> None:
        """As `put`, and what had the name serves again, once nobody reads it."""
        before = self._buffers.get(name)
        self.put(name, buffer)
        self._use_again(before)

    def _use_again(self, buffer: Buffer | None) -> None:
        """A buffer that has lost a name is spare, unless it has another one or is not ours."""
        if buffer is not None and not buffer.borrowed and buffer not in self._buffers.values():
            self._idle.append(buffer)

    def use_rows(self, form: RowForm) -> None:
        """Gradients are rows from now on."""
        self.form, self.sizes = form, {GRADIENT: form.floats}

    def new_buffer(self, name: str = WEIGHTS) -> Buffer:
        """A buffer without a name, as large as one of that name."""
        if self.form is not None and name.startswith(GRADIENT):
            return RowBuffer(self.form, self.tail, self._memory)
        size = self.size_of(name)
        if self.direct:
            return DirectBuffer(size, self.tail, self.device)
        return Buffer(size, self.tail, self.device, pinned=self._pinned, memory=self._memory)

    def put(self, name: str, buffer: Buffer) -> None:
        """Gives a buffer a name; other roles in this process may hold the same one."""
        self._void(name)
        before = self._buffers.get(name)
        self._buffers[name] = buffer
        if isinstance(before, BorrowedBuffer) and before is not buffer:
            before.give_back()

    def spare(self, name: str = WEIGHTS) -> Buffer:
        """A buffer without a name that nobody reads, as large as one of that name."""
        size = self.size_of(name)
        fits = (i for i, buffer in enumerate(self._idle) if not buffer.held and len(buffer.vector) == size)
        free = next(fits, None)
        return self.new_buffer(name) if free is None else self._idle.pop(free)

    def reserve(self, count: int) -> None:
        """Makes so many buffers that will be needed, before anybody waits for them."""
        self._idle += [self.new_buffer() for _ in range(count)]

    def renew(self, name: str) -> Buffer:
        """The buffer of that name, with other memory if others read what it had; its content is void."""
        self._void(name)
        before = self.buffer(name)
        if before.held or before.borrowed:
            self._replace(name, self.spare(name))
        return self._buffers[name]

    def held(self, but: str) -> int:
        """How many buffers others read, beside that of this name."""
        buffers = {id(buffer): buffer for name, buffer in self._buffers.items() if name != but}
        return sum(bool(buffer.held) for buffer in (*buffers.values(), *self._idle))

    def _give_back(self, *names: str) -> None:
        """These gradients have served: who lent them may have them back before the role asks for others."""
        for name in names:
            if isinstance(self._buffers.get(name), BorrowedBuffer):
                self.release(name)

    def release(self, name: str, *, again: bool = False) -> Buffer | None:
        """Forgets a buffer, and frees it unless somebody else holds it; memory that others see serves again.

        Args:
            name: of the buffer.
            again: any memory serves again.
        """
        self._void(name)
        buffer = self._buffers.pop(name, None)
        if isinstance(buffer, BorrowedBuffer):
            buffer.give_back()
        elif again or self._memory is not None:
            self._use_again(buffer)
        return buffer

    def part(self, name: str, owner: int) -> torch.Tensor:
        """The part of a vector that travels to or from a role that owns it, float32."""
        return self.buffer(name).vector[self.parts.get(owner, slice(None))]

    def bare(self, name: str, owner: int) -> npt.NDArray[np.float32]:
        """That part in main memory, as it travels."""
        return self.buffer(name).array[self.parts.get(owner, slice(None))]

    def send(
        self, name: str, message: Message, to: int, *, halves: bool = False, near: bool = False
    ) -> npt.NDArray[Any]:
        """What is to travel of a buffer to a role; it is lent until `sent`.

        Args:
            name: of the buffer.
            message: travels with it.
            to: who gets it.
            halves: as float16.
            near: it is read where it lies, and need not have the message behind it.
        """
        self.lent[name] += 1
        if message.kind in PARTS:
            return self.bare(name, to)
        buffer = self.buffer(name)
        if buffer.borrowed:
            own = self.spare(name)
            own.vector[: len(buffer.vector)] = buffer.vector
            self.put(name, own)
            buffer = own
        if halves:
            return buffer.write_half(message)
        return buffer.array if near else buffer.write(message)

    def sent(self, name: str) -> None:
        """A transfer from the buffer is over."""
        self.lent[name] -= 1
        if name == SNAPSHOT:
            self.release(name)

    @probed
    def sha256(self, name: str) -> str:
        """SHA-256 of a buffer's floats, in hexadecimal."""
        return sha256(self.buffer(name).array)

    @performs(Hash)
    def hash(self, action: Hash) -> Hashed:
        return Hashed(self.sha256(action.buffer))

    @performs(ReorderParts)
    def arrange(self, action: ReorderParts) -> None:
        if all(len(part.stretches) == 1 for part in self.parted):  # they have come where they belong
            return
        vector = self.buffer(action.buffer).vector
        came = vector.clone()
        start = 0
        for place in (stretch for part in self.parted for stretch in part.stretches):
            size = place.stop - place.start
            vector[place] = came[start : start + size]
            start += size

    @performs(Copy)
    def copy(self, action: Copy) -> None:
        self.renew(action.target).vector.copy_(self.buffer(action.source).vector)

    def state(self, *, alone: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """A copy of all that a checkpoint needs of this role; it is good until the next one is asked for.

        Args:
            alone: the checkpoint has nothing of other roles.
        """
        return {}

    def prepare(self) -> None:
        """Allocates what training needs, once the model that it was made from is gone."""

    def close(self) -> None:
        """The role is done: ends threads, and calls the hooks of the end."""
        if self.hooks is not None:
            self.hooks.ended()


Executor._METHODS = _marked(Executor)
