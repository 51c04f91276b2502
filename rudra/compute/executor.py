"""What a role works with: buffers, and the arithmetic that its actions ask for. Both drivers use it."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from rudra.compute.averaging import CACHE_LINE, CHUNK, slices
from rudra.compute.devices import CPU, Stage, finish
from rudra.compute.flat import FlatModel, sha256
from rudra.compute.gradients import ERROR, LOSS, BatchResult, GradientSource, Sums, add_batch, evaluate, score_of
from rudra.compute.optim import UpdateRule
from rudra.compute.parts import stretch_names
from rudra.compute.rows import RowForm, RowGradient, alike
from rudra.compute.sparse import Rows
from rudra.compute.statedict import StateEntry
from rudra.compute.vectors import BorrowedBuffer, Buffer, Deferred, DirectBuffer, Memory, RowBuffer, Take
from rudra.core import records
from rudra.core.digest import sample
from rudra.core.events import (
    DOWNCAST,
    GRADIENT,
    SNAPSHOT,
    WEIGHTS,
    Accumulate,
    Arrange,
    Assess,
    Assessed,
    Backward,
    Compute,
    Computed,
    Copy,
    Evaluate,
    Evaluated,
    Event,
    Hash,
    Hashed,
    Local,
    Measure,
    Measured,
    Sum,
    Update,
    Updated,
)
from rudra.core.hooks import RoleHooks
from rudra.core.layout import Entry, Part
from rudra.core.messages import PARTS, Kind, Message, tail_bytes
from rudra.data.load import Samples
from rudra.errors import CheckpointError
from rudra.job.job import Job
from topologies import Plan

TRAIN = "train"
"""The training set, as a split that is tested."""

FirstWeights = Callable[[Path, Sequence[Entry]], npt.NDArray[np.float32]]
"""Gives the weights of a warm start: what a result file holds for a model of that layout, (size,) float32."""


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


class Executor:
    """Buffers and arithmetic of one role: does its local actions, each in the method of that name.

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
        stage: Stage | None = None,
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

    @property
    def computes_in_place(self) -> bool:
        """It computes with its buffers themselves, and not with copies on a GPU."""
        return self._stage is None

    def perform(self, action: Local) -> Iterator[Event | None]:
        """Does a local action: gives None after each piece of long work but the last, and then what has come of it."""
        done = getattr(self, type(action).__name__.lower())(action)
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

    def sha256(self, name: str) -> str:
        """SHA-256 of a buffer's floats, in hexadecimal."""
        return sha256(self.buffer(name).array)

    def hash(self, action: Hash) -> Hashed:
        return Hashed(self.sha256(action.buffer))

    def arrange(self, action: Arrange) -> None:
        if all(len(part.stretches) == 1 for part in self.parted):  # they have come where they belong
            return
        vector = self.buffer(action.buffer).vector
        came = vector.clone()
        start = 0
        for place in (stretch for part in self.parted for stretch in part.stretches):
            size = place.stop - place.start
            vector[place] = came[start : start + size]
            start += size

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


class AveragingExecutor(Executor):
    """Adds gradients, for a server."""

    def accumulate(self, action: Accumulate) -> None:
        if not self.fuses:
            self._accumulate(action)
            if action.gradient != action.into:
                self._give_back(action.gradient)
            return
        into = self.buffer(action.into).vector
        self._void(action.into)
        gradient = into.__getitem__ if action.into == action.gradient else self.taking(action.gradient)
        if action.into not in self._scratch:
            self._scratch[action.into] = torch.empty(min(CHUNK, self.size), device=self.device)
        scratch = self._scratch[action.into]

        def take(part: slice) -> torch.Tensor:
            out = scratch[: part.stop - part.start]
            self._add(action, into[part], gradient(part), out, max(self.parameters - part.start, 0))
            return out

        self.defer(action.into, take, (action.into, action.gradient), partial(self._accumulate, action))

    @cached_property
    def _scratch(self) -> dict[str, torch.Tensor]:
        """Room for a slice of each average that waits."""
        return {}

    def _accumulate(self, action: Accumulate) -> None:
        gradient, before = self.buffer(action.gradient), self.buffer(action.into)
        self._void(action.into)
        after = self.spare(action.into) if before.borrowed or before.held else before
        if self.form is None:
            self._add(action, before.vector, gradient.vector, after.vector, self.parameters)
        else:
            self._add_rows(action, before.gradient, gradient.gradient, after.gradient, self.form)
        if after is not before:
            self._replace(action.into, after)

    def _add_rows(self, action: Accumulate, into: Any, gradient: Any, out: Any, form: RowForm) -> None:
        """As `_add`, for gradients in rows: to the same bits."""
        self._add(action, into.rest, gradient.rest, out.rest, self.parameters - form.features * form.width)
        indices, mine, its = alike(into, gradient)
        if action.into == action.gradient:
            mine = its = mine.clone()
        flat = mine.reshape(-1)
        self._add(action, flat, flat if mine is its else its.reshape(-1), flat, len(flat))
        if indices is None:
            out.put_whole(mine)
        else:
            out.put(Rows(indices, mine))

    def _add(
        self, action: Accumulate, into: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, parameters: int
    ) -> None:
        """Does it to a slice, or all, which begins with so many parameters; `out` may be `into`."""
        if action.into == action.gradient:
            torch.mul(into[:parameters], action.scale, out=out[:parameters])
            if out is not into:
                out[parameters:] = into[parameters:]
        elif action.scale == 1.0:
            torch.lerp(into, gradient, action.fraction, out=out)
        else:
            head = torch.mul(into[:parameters], 1 - action.fraction, out=out[:parameters])
            head.add_(gradient[:parameters], alpha=action.fraction * action.scale)
            torch.lerp(into[parameters:], gradient[parameters:], action.fraction, out=out[parameters:])


class OwnerExecutor(Executor):
    """Lets the optimiser step weights of its own, or a part of the weights."""

    _part: Part | None = None

    def own(
        self,
        job: Job,
        plan: Plan,
        flat: FlatModel,
        first_weights: FirstWeights | None = None,
        part: Part | None = None,
    ) -> None:
        """Takes over the weights that the model was built with, or those of a warm start; or a part of them."""
        own = self.buffer(WEIGHTS).vector
        weights = own if part is None else torch.empty(flat.size)
        flat.read_into(weights)
        if flat.device == weights.device and part is None:
            flat.bind(weights)  # frees the model's own: a server has no room for both
        if job.training.warm_start is not None:
            assert first_weights is not None
            weights.copy_(torch.from_numpy(first_weights(job.training.warm_start, flat.layout)))
        self._part, self._of = part, flat.size
        if part is not None:
            self._take_part(weights)
        self._rule = self._rule_of(job, plan, own[: self.parameters])
        here = [entry for entry in self.layout if part is None or entry in part]
        self._counters = sum(entry.kind == "counter" for entry in here)  # the last ones of them

    def _rule_of(self, job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
        """What updates the weights."""
        table = job.optimizer.model_copy(update={"momentum": job.explicit_momentum(plan)})
        part = None if self._part is None else self._part.stretches[0]
        return UpdateRule(table, weights, self.layout, part, self.form)

    def _take_part(self, weights: torch.Tensor) -> None:
        """Begins with a part of these; only now can it tell their digest."""
        assert self._part is not None
        self.buffer(WEIGHTS).vector.copy_(torch.cat([weights[stretch] for stretch in self._part.stretches]))
        self._first_sha256 = sha256(weights.numpy())

    def sha256(self, name: str) -> str:
        """SHA-256 of a buffer's floats, in hexadecimal; where those are a part, of all weights at the beginning."""
        return super().sha256(name) if self._part is None or name != WEIGHTS else self._first_sha256

    def put(self, name: str, buffer: Buffer) -> None:
        super().put(name, buffer)
        if name == WEIGHTS:
            self._rule.move(buffer.vector[: self.parameters])

    def prepare(self) -> None:
        self._rule.prepare()

    def state_bytes(self) -> int:
        """Memory that the optimiser's state takes now."""
        return self._rule.state_bytes()

    @cached_property
    def _copies(self) -> dict[str, npt.NDArray[np.float32]]:
        return {}

    def _tensors(self, *, alone: bool = False) -> dict[str, torch.Tensor]:
        """All that a checkpoint needs, which has nothing of others if this one is alone."""
        state = {f"optimizer.{name}": value for name, value in self._rule.state().items()}
        return {**dict(zip(stretch_names(len(self.stretches)), self.stretches, strict=True)), **state}

    @property
    def stretches(self) -> tuple[torch.Tensor, ...]:
        """The weights that it owns, as they lie in the vector of all."""
        own = self.buffer(WEIGHTS).vector
        return (own,) if self._part is None else tuple(own[part] for part in self._part.within)

    def last_state(self) -> dict[str, npt.NDArray[np.float32]]:
        """All that a checkpoint needs, when nothing of it changes any more: not copied where it lies in main memory."""
        return {name: tensor.reshape(-1).to("cpu", torch.float32).numpy() for name, tensor in self._tensors().items()}

    def state(self, *, alone: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        tensors = self._tensors(alone=alone)
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = np.full(tensor.numel(), 0, np.float32)  # touched, as all large buffers
            torch.from_numpy(self._copies[name]).copy_(tensor.reshape(-1))
        return {name: self._copies[name] for name in tensors}

    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Takes over what `state` gave; after `prepare`.

        Raises:
            CheckpointError: the tensors are not those of this model and optimiser.
        """
        found = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        weights = found.pop(WEIGHTS, None)
        try:
            if weights is None or len(weights) != self._of:
                raise ValueError(f"the model has {self._of} numbers, not {0 if weights is None else len(weights)}")
            self._rule.restore({name.removeprefix("optimizer."): tensor for name, tensor in found.items()})
        except ValueError as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from None
        buffer = self.renew(WEIGHTS)
        if self._part is None:
            buffer.vector.copy_(weights)
        else:
            self._take_part(weights)
        buffer.version += 1

    def update(self, action: Update) -> Updated:
        began = time.perf_counter()
        before = self.buffer(action.weights)
        if self._is_read():
            self._replace(action.weights, self.spare())
        buffer = self.buffer(action.weights)
        moves, waits = buffer is not before, action.gradient in self._deferred
        if (moves or waits) and self._rule.sliceable and self.form is None:
            self._update_in_slices(action, before.vector, buffer.vector)
        else:
            if moves:
                buffer.vector.copy_(before.vector)
            gradient = self.buffer(action.gradient).gradient
            others = gradient.rest if isinstance(gradient, RowGradient) else gradient
            if behind := self.size - self.parameters:
                buffer.vector[self.parameters :] = others[len(others) - behind :]
            if isinstance(gradient, RowGradient):
                self._rule.step_rows(gradient, action.learning_rate)
            else:
                self._rule.step(gradient[: self.parameters], action.learning_rate, _floats(action.norms))
        self._give_back(action.gradient)
        if self.size > self.parameters:
            buffer.vector[self.size - self._counters :].round_()
        buffer.version += 1
        digest = buffer.digest(action.timestamp) if self._part is None else 0
        sampled = self._sampled(buffer, action.timestamp)
        if self.hooks is not None:
            self.hooks.updated(action, lambda: buffer.array, self._replica())
        return Updated(action.timestamp, digest, time.perf_counter() - began, sampled)

    def measure(self, action: Measure) -> Measured:
        gradient = self.buffer(action.gradient).vector[: self.parameters]
        return Measured(self._rule.norms(gradient).numpy().tobytes())

    def _sampled(self, buffer: Buffer, timestamp: int) -> tuple[bytes, ...]:
        """Of each stretch of a part of the weights, a sample."""
        if self._part is None:
            return ()
        stretches = zip(self._part.within, self._part.stretches, strict=True)
        which = [(place, sample(timestamp, self._of, stretch.start)) for place, stretch in stretches]
        return tuple(buffer.sampled(slice(place.start + those.start, place.stop, those.step)) for place, those in which)

    def _update_in_slices(self, action: Update, before: torch.Tensor, weights: torch.Tensor) -> None:
        """Every slice is averaged, copied if the weights move, and stepped while it is in the cache.

        What was deferred is not written down, and void afterwards: nobody reads a gradient that was applied.
        """
        take = self.taking(action.gradient)

        def gradient(part: slice) -> torch.Tensor:
            if weights is not before:
                weights[part] = before[part]
            over = part.start % CACHE_LINE
            return take(slice(part.start - over, part.stop))[over:]

        sources = self._deferred[action.gradient].of if action.gradient in self._deferred else ()
        self._rule.step_in_slices(gradient, action.learning_rate, CHUNK - CACHE_LINE)
        for part in slices(self.parameters, self.size, CHUNK - CACHE_LINE):
            weights[part] = gradient(part)
        self._void(action.gradient)
        self._give_back(*sources)

    def moves(self, name: str) -> bool:
        return name == WEIGHTS

    def _replica(self) -> Callable[[], npt.NDArray[np.float32]] | None:
        """Gives the floats of a replica beside the weights, where there is one."""
        return None

    def _is_read(self) -> bool:
        """Others read the weights that are about to change."""
        return self.buffer(WEIGHTS).held > 0


def _floats(norms: tuple[bytes, bytes]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Norms as they are computed with, if there are any."""
    before, behind = (torch.from_numpy(np.frombuffer(each, np.float32).copy()) for each in norms)
    return (before, behind) if any(norms) else None


class ServerExecutor(AveragingExecutor, OwnerExecutor):
    """What the parameter server works with.

    Copies of the weights that go down the weights' tree are made when they must be: until the next update, the weights
    themselves will do.
    """

    def copy(self, action: Copy) -> None:
        if not action.target.startswith(DOWNCAST):
            super().copy(action)
            return
        self.release(action.target, again=True)
        self.put(action.target, self.buffer(action.source))

    def send(
        self, name: str, message: Message, to: int, *, halves: bool = False, near: bool = False
    ) -> npt.NDArray[Any]:
        if message.kind is Kind.SNAPSHOT and not near and self._is_lent():  # a message goes behind the weights
            before = self.buffer(WEIGHTS)
            self._replace(WEIGHTS, self.spare())
            self.buffer(WEIGHTS).vector.copy_(before.vector)
        return super().send(name, message, to, halves=halves, near=near)

    def _is_read(self) -> bool:
        return self._is_lent() or super()._is_read()

    def _is_lent(self) -> bool:
        """Copies that the weights stand for are under way; those that are not are forgotten."""
        weights = self.buffer(WEIGHTS)
        sharing = [name for name, buffer in self._buffers.items() if buffer is weights and name.startswith(DOWNCAST)]
        if any(self.lent[name] for name in sharing):
            return True
        for name in sharing:
            self.release(name)
        return False


class Examined(NamedTuple):
    """What weights are tested on.

    Attributes:
        splits: by name.
        batch_size: samples that are computed at a time.
    """

    splits: Mapping[str, Samples]
    batch_size: int


class LearnerExecutor(Executor):
    """Computes gradients.

    Attributes:
        pushes_at_once: a gradient is pushed as soon as it is ready, and what computes it is current.
        examined: what to test, where learners do that.
    """

    source: GradientSource
    pushes_at_once = True
    examined: Examined | None = None

    def learn(self, source: GradientSource, *, pushes_at_once: bool) -> None:
        """What computes, and how its learner goes about it."""
        self.source, self.pushes_at_once = source, pushes_at_once

    def prepare(self) -> None:
        super().prepare()
        self.source.prepare()

    def compute(self, action: Compute) -> Iterator[Computed]:
        weights, gradient = self.buffer(action.weights), self.buffer(action.gradient)
        if self._stage is None:
            outcome = self.source.compute(action.step, action.work, weights.vector, gradient.gradient)
            if self.direct:
                finish(self.device)  # MPI may write to the weights at once
        else:
            staged = self._stage.gradient
            outcome = self.source.compute(action.step, action.work, self._stage.weights(weights), staged)
            gradient.vector.copy_(staged)  # returns when all of it is here: MPI may send it at once
        yield self.computed(action, outcome)

    def assess(self, action: Assess) -> Iterator[Assessed | None]:
        assert self.examined is not None
        weights, found = self.weights_to_test(action.weights), []
        size = self.examined.batch_size
        for name, split in self.examined.splits.items():
            batches = -(-len(split) // size)
            mine = range(batches * action.part // action.parts, batches * (action.part + 1) // action.parts)
            sums: Sums = defaultdict(float)
            for batch in mine:
                add_batch(sums, self.source.model, weights, split, size, batch)
                yield None
            count = min(mine.stop * size, len(split)) - mine.start * size
            found += [(name.encode(), metric.encode()[:64], count, total) for metric, total in sums.items()]
        yield Assessed(action.part, np.array(found, records.SUM))

    def weights_to_test(self, name: str) -> torch.Tensor:
        """Those in a buffer, where the model computes."""
        buffer = self.buffer(name)
        return buffer.vector if self._stage is None else self._stage.weights(buffer)

    def computed(self, action: Compute | Backward, outcome: BatchResult) -> Computed:
        """What a computation came to; its weights are still in their buffer."""
        found = Computed(action.step, outcome.loss, outcome.errors, outcome.samples)
        if self.hooks is not None:
            buffer = self.buffer(action.weights)
            self.hooks.computed(action, found, lambda: buffer.array)
        return found

    def close(self) -> None:
        self.source.close()
        super().close()


class ReplicaExecutor(LearnerExecutor, OwnerExecutor):
    """What a learner works with that updates weights of its own."""


class StatisticsExecutor(Executor):
    """Tests weights, one batch at a time."""

    def test(self, job: Job, flat: FlatModel, splits: Mapping[str, Samples]) -> None:
        """What to test, on which samples."""
        self._flat, self._splits, self._batch_size = flat, splits, job.training.evaluation_batch_size

    def try_out(self, buffer: str) -> tuple[str, ...]:
        """Tests one batch; what it measures beside loss and error."""
        split = next(iter(self._splits.values()))
        self._flat.bind(self.buffer(buffer).vector)
        batch = split.batch(np.arange(min(self._batch_size, len(split))))
        return (*self._flat.evaluate_batch(*batch)[2], *self._flat.task.derived(0.0))

    def evaluate(self, action: Evaluate) -> Iterator[Evaluated | None]:
        began = time.perf_counter()
        scores = []
        tested = self.buffer(action.buffer)
        weights = tested.vector if self._stage is None else self._stage.weights(tested)
        for name, split in self._splits.items():
            for score in evaluate(self._flat, weights, split, self._batch_size, name):
                if score is None:
                    yield None
                else:
                    scores.append(score)
        yield Evaluated(action.buffer, tuple(scores), time.perf_counter() - began)

    def sum(self, action: Sum) -> Evaluated:
        sums: dict[str, Sums] = {}
        counts: Counter[str] = Counter()
        for split, name, samples, value in action.rows.tolist():
            of_split = sums.setdefault(split.decode(), defaultdict(float))
            of_split[name.decode()] += value
            counts[split.decode()] += samples if name == LOSS.encode() else 0
        scores = [score_of(name, found, counts[name], self._flat.task) for name, found in sums.items()]
        for place, score in enumerate(scores):
            if score.split == TRAIN:  # the columns are of the gradients
                more = ((LOSS, score.loss), (ERROR, score.error))
                scores[place] = structs.replace(score, metrics=(*more, *score.metrics))
        return Evaluated(action.buffer, tuple(scores), 0.0)
