"""What servers work with: averages of gradients, and weights that they own and update."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.averaging import CACHE_LINE, CHUNK, slices
from rudra.compute.executor import Executor, performs
from rudra.compute.flat import FlatModel, sha256
from rudra.compute.optim import UpdateRule
from rudra.compute.parts import stretch_names
from rudra.compute.rows import RowForm, RowGradient, alike
from rudra.compute.sparse import SparseRows
from rudra.compute.vectors import Buffer
from rudra.core.digest import sample
from rudra.core.events import (
    DOWNCAST,
    WEIGHTS,
    Accumulate,
    ComputeNorms,
    Copy,
    NormsComputed,
    Update,
    Updated,
)
from rudra.core.layout import Entry, Part
from rudra.core.messages import Message, MessageKind
from rudra.errors import CheckpointError
from rudra.job.job import Job
from topologies import Plan

FirstWeights = Callable[[Path, Sequence[Entry]], npt.NDArray[np.float32]]
"""Gives the weights of a warm start: what a result file holds for a model of that layout, (size,) float32."""


class AveragingExecutor(Executor):
    """Adds gradients, for a server."""

    @performs(Accumulate)
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
            out.put(SparseRows(indices, mine))

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

    @performs(Update)
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

    @performs(ComputeNorms)
    def measure(self, action: ComputeNorms) -> NormsComputed:
        gradient = self.buffer(action.gradient).vector[: self.parameters]
        return NormsComputed(self._rule.norms(gradient).numpy().tobytes())

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
        if message.kind is MessageKind.SNAPSHOT and not near and self._is_lent():  # a message goes behind the weights
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
