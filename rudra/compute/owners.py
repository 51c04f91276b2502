"""Executors of roles that own and update weights."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.averaging import CACHE_LINE, CHUNK, slices
from rudra.compute.averaging_executor import AveragingExecutor
from rudra.compute.carried import CarriedState
from rudra.compute.correcting import Corrector
from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number, Pending, known, until_done
from rudra.compute.executor import Executor, performs
from rudra.compute.flat import FlatModel
from rudra.compute.norms import NormMeter
from rudra.compute.optim import UpdateRule
from rudra.compute.parts import elements_of, stretch_names
from rudra.compute.rows import RowGradient
from rudra.compute.sliced_steps import SlicedSteps
from rudra.compute.speculation import SpeculativeSteps, Step
from rudra.compute.vectors import Buffer
from rudra.compute.weight_samples import WeightSamples
from rudra.core.actions import ComputeNorms, Copy, Correct, SetOptimizer, Update
from rudra.core.buffer_names import AVERAGE, DOWNCAST, WEIGHTS
from rudra.core.digest import digest_of, sha256
from rudra.core.events import NormsComputed, Updated
from rudra.core.layout import Entry, Part
from rudra.core.messages import Message, MessageKind
from rudra.core.norms import single
from rudra.core.state_names import CORRECTION, OPTIMIZER
from rudra.errors import CheckpointError
from rudra.job.job import Job
from topologies import Plan

FirstWeights = Callable[[Path, Sequence[Entry]], npt.NDArray[np.float32]]
"""Returns the weights of a warm start: the weights in a result file for a model of that layout, (size,) float32."""


UpdateResult = Updated | Iterator[Updated | Pending]
"""End of an update, or what yields it after a device has done its work."""


class OwnerExecutor(Executor):
    """Executor of a role that updates its own weights, or a part of the weights, with the optimiser.

    Attributes:
        corrector: Correction of gradients. None: the job has none.
        update_norms: Norms of the gradients of updates. None: they are not recorded.
        speculation: Updates that the device does before the role asks. None: it does none.
    """

    corrector: Corrector | None = None
    update_norms: NormMeter | None = None
    speculation: SpeculativeSteps | None = None
    _owned_part: Part | None = None
    _averages = False

    def own(
        self,
        job: Job,
        plan: Plan,
        flat: FlatModel,
        first_weights: FirstWeights | None = None,
        part: Part | None = None,
        *,
        averages: bool = False,
    ) -> None:
        """Takes over the initial weights of the model or of a warm start, or a part of them.

        Args:
            job: Resolved job.
            plan: Role assignment.
            flat: Model.
            first_weights: Returns the weights of a warm start.
            part: Part of the flat vector that the role owns. None: it owns all of it.
            averages: Whether the role keeps an average of its weights over time.
        """
        own = self.buffer(WEIGHTS).vector
        weights = own if part is None else torch.empty(flat.size)
        flat.read_into(weights)
        if flat.device == weights.device and part is None:
            flat.bind(weights)  # frees the model's own weights: a server has no room for both
        if job.training.warm_start is not None:
            assert first_weights is not None
            weights.copy_(torch.from_numpy(first_weights(job.training.warm_start, flat.layout)))
        self._owned_part, self._of = part, flat.size
        if part is not None:
            self._take_part(weights)
        self._rule = self._rule_of(job, plan, own[: self.parameters])
        self._averages = averages
        if averages:
            self.buffer(AVERAGE).vector.copy_(own)
        here = [entry for entry in self.layout if part is None or entry in part]
        self._counters = sum(entry.kind == "counter" for entry in here)  # they are the last entries

    def _rule_of(self, job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
        """Returns the rule that updates the weights."""
        table = job.optimizer.model_copy(update={"momentum": job.explicit_momentum(plan)})
        part = None if self._owned_part is None else self._owned_part.stretches[0]
        return UpdateRule(table, weights, self.layout, part, self.row_format)

    def _take_part(self, weights: torch.Tensor) -> None:
        """Starts with a part of these weights, and records the digest of all of them, which is not available later."""
        assert self._owned_part is not None
        self.buffer(WEIGHTS).vector.copy_(elements_of(weights, self._owned_part))
        self._first_sha256 = sha256(weights.numpy())

    def sha256(self, name: str) -> str:
        """Returns the SHA-256 of a buffer's floats, in hexadecimal. For a part, hashes all initial weights."""
        return super().sha256(name) if self._owned_part is None or name != WEIGHTS else self._first_sha256

    def put(self, name: str, buffer: Buffer) -> None:
        super().put(name, buffer)
        if name == WEIGHTS:
            self._rule.move(buffer.vector[: self.parameters])

    def prepare(self) -> None:
        self._rule.prepare()

    def state_bytes(self) -> int:
        """Memory that the optimiser's state occupies now."""
        return self._rule.state_bytes()

    @cached_property
    def _samples(self) -> WeightSamples:
        return WeightSamples(self._of, self._owned_part, self.device)

    @cached_property
    def _copies(self) -> dict[str, npt.NDArray[np.float32]]:
        return {}

    def _tensors(self, *, alone: bool = False) -> dict[str, torch.Tensor]:
        """Returns all tensors for a checkpoint, without tensors of other roles if `alone`."""
        self.roll_back()
        state = {OPTIMIZER + name: value for name, value in self._rule.state().items()}
        if self.corrector is not None:
            state |= self.corrector.state()
        kept = (WEIGHTS, AVERAGE) if self._averages else (WEIGHTS,)
        vectors = {name: self.stretches(name) for name in kept}
        pieces = [zip(stretch_names(name, len(found)), found, strict=True) for name, found in vectors.items()]
        return {**dict(chain.from_iterable(pieces)), **state}

    def stretches(self, name: str = WEIGHTS) -> tuple[torch.Tensor, ...]:
        """Returns a vector that the role owns, as pieces of the whole vector."""
        own = self.buffer(name).vector
        return (own,) if self._owned_part is None else tuple(own[part] for part in self._owned_part.within)

    @property
    def evaluated(self) -> str:
        """Name of the buffer with the weights that are evaluated and exported."""
        return AVERAGE if self._averages else WEIGHTS

    def last_state(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns all tensors for a checkpoint after the last change, without copying tensors in main memory."""
        return {name: tensor.reshape(-1).to("cpu", torch.float32).numpy() for name, tensor in self._tensors().items()}

    def state(self, *, alone: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        tensors = self._tensors(alone=alone)
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = np.full(tensor.numel(), 0, np.float32)  # touched, as all large buffers
            torch.from_numpy(self._copies[name]).copy_(tensor.reshape(-1))
        return {name: self._copies[name] for name in tensors}

    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Takes over tensors that `state` returned. Call it after `prepare`.

        Raises:
            CheckpointError: The tensors do not match this model and optimiser.
        """
        self._take_back()
        found = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        weights = found.pop(WEIGHTS, None)
        average = found.pop(AVERAGE, None)
        try:
            if weights is None or len(weights) != self._of:
                raise ValueError(f"the model has {self._of} numbers, not {0 if weights is None else len(weights)}")
            corrections = {name: found.pop(name) for name in [*found] if name.startswith(CORRECTION)}
            if self.corrector is not None:
                self.corrector.restore(corrections)
            self._rule.restore({name.removeprefix(OPTIMIZER): tensor for name, tensor in found.items()})
        except ValueError as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from None
        buffer = self.renew(WEIGHTS)
        if self._owned_part is None:
            buffer.vector.copy_(weights)
        else:
            self._take_part(weights)
        buffer.version += 1
        if self._averages:
            self._restore_average(weights if average is None else average)

    def _restore_average(self, average: torch.Tensor) -> None:
        """Takes over an average of all weights over time.

        Raises:
            CheckpointError: It does not match this model.
        """
        if len(average) != self._of:
            raise CheckpointError(f"the checkpoint does not fit: the average of the weights has {len(average)} numbers")
        buffer = self.renew(AVERAGE)
        buffer.vector.copy_(average if self._owned_part is None else elements_of(average, self._owned_part))
        buffer.version += 1

    @performs(Correct)
    def correct(self, action: Correct) -> None:
        buffer = self.buffer(action.gradient)
        if buffer.borrowed or buffer.readers:
            own = self.spare(action.gradient)
            own.vector.copy_(buffer.vector)
            self._replace(action.gradient, own)
            buffer = own
        self._correct(buffer.vector, action)
        buffer.version += 1

    def _correct(self, vector: torch.Tensor, action: Correct) -> None:
        """Corrects the parameters of a gradient's vector."""
        assert self.corrector is not None
        whole = slice(0, self.parameters)
        pulled = self.buffer(action.pulled).vector[whole] if action.pulled else None
        self.corrector.correct(vector[whole], self.buffer(action.weights).vector[whole], pulled, action)

    def begin_with(self, state: CarriedState) -> None:
        """Takes over the state of a checkpoint of another family. Call it after `prepare`.

        Raises:
            CheckpointError: The weights do not match this model.
        """
        average = {} if state.average is None else {AVERAGE: state.average}
        OwnerExecutor.restore(self, {WEIGHTS: state.weights, **average})
        self._adopt(state)

    def follow(self, other: "OwnerExecutor") -> None:
        """Takes over the weights of another owner in this process, and the state of their optimiser."""
        self.copy_from(other, WEIGHTS)
        self._rule.restore(other._rule.state())

    def copy_from(self, other: "OwnerExecutor", name: str) -> None:
        """Copies the content of a buffer of another owner in this process."""
        buffer = self.renew(name)
        buffer.vector.copy_(other.buffer(name).vector)
        buffer.version += 1

    def _take_back(self) -> None:
        """Lets the device drop what it does before the role asks, because the optimiser changes."""
        if self.speculation is not None:
            self.speculation.forget()

    def _adopt(self, state: CarriedState) -> None:
        """Takes over the optimiser's state."""
        self._rule.take_over(state.steps)

    @performs(SetOptimizer)
    def set_optimizer(self, action: SetOptimizer) -> None:
        self._take_back()
        self._rule.change(action.momentum, action.options)

    @performs(Update)
    def update(self, action: Update) -> UpdateResult:
        began = time.perf_counter()
        if self.speculation is not None and (sampled := self.speculation.update(action)) is not None:
            return Updated(action.timestamp, digest_of(sampled), time.perf_counter() - began)
        if self.corrector is not None:
            self.corrector.updated()
        measured: tuple[Number, Number] = (math.nan, math.nan)
        if self.update_norms is not None:
            measured = self.update_norms.of_update(action.timestamp, lambda: self.buffer(action.gradient).gradient)
        buffer = self._stepped(action)
        self._give_back(action.gradient)
        self._round_counters(buffer.vector)
        buffer.version += 1
        if action.average:
            self._average_over_time(action, buffer.vector)
        if self.hooks is not None:
            self.hooks.updated(action, lambda: buffer.array, self._replica())
        numbers = *measured, self._rule.clip_factor
        if not kind_of(self.device).apart:
            return self._updated(action, self._samples.now(buffer, action.timestamp), known(numbers), began)
        coming = self._samples.later(buffer.vector, action.timestamp, numbers)

        def rest() -> Iterator[Updated | Pending]:
            yield from until_done(coming.pending)
            yield self._updated(action, coming.taken(), coming.pending.numbers(), began)

        return rest()

    def _updated(self, action: Update, sampled: list[bytes], numbers: Sequence[float], began: float) -> Updated:
        """Returns the end of an update.

        Args:
            action: The update.
            sampled: Sample of each stretch of the weights.
            numbers: Norm and product of the gradient, not rounded, and the factor of clipping.
            began: When the update began.
        """
        norm, product, clip_factor = numbers
        if self.update_norms is not None:
            norm = self.update_norms.rounded(norm)
        whole = self._owned_part is None
        digest, pieces = (digest_of(*sampled), ()) if whole else (0, tuple(sampled))
        seconds = time.perf_counter() - began
        return Updated(action.timestamp, digest, seconds, pieces, norm, norm * clip_factor, single(product))

    def _average_over_time(self, action: Update, weights: torch.Tensor) -> None:
        """Adds new weights to their average over time. Counters of the model are not averaged."""
        average = self.buffer(action.average)
        if action.average_weight == 1:
            average.vector.copy_(weights)
        else:
            average.vector.lerp_(weights, action.average_weight)
            floats = self.size - self._counters
            average.vector[floats:] = weights[floats:]
        average.version += 1

    def _stepped(self, action: Update) -> Buffer:
        """Steps the weights, in other memory if they have readers. Returns their buffer."""
        before = self.buffer(action.weights)
        if self.is_read:
            self._replace(action.weights, self.spare())
        buffer = self.buffer(action.weights)
        copy_on_write, waits = buffer is not before, action.gradient in self._deferred
        cached = (copy_on_write or waits) and self.row_format is None and buffer.vector.is_cpu
        sliced = self._rule.sliced if cached else None
        if sliced is not None:
            self._update_in_slices(sliced, action, before.vector, buffer.vector)
        else:
            if copy_on_write:
                buffer.vector.copy_(before.vector)
            gradient = self.buffer(action.gradient).gradient
            others = gradient.rest if isinstance(gradient, RowGradient) else gradient
            self._take_behind(others, buffer.vector)
            if isinstance(gradient, RowGradient):
                self._rule.step_rows(gradient, action.learning_rate)
            else:
                norms = _floats(action.norms, gradient.device)
                self._rule.step(gradient[: self.parameters], action.learning_rate, norms)
        return buffer

    def _take_behind(self, gradient: torch.Tensor, weights: torch.Tensor) -> None:
        """Takes over the averaged model buffers at the end of a gradient."""
        if behind := self.size - self.parameters:
            weights[self.parameters :] = gradient[len(gradient) - behind :]

    def _round_counters(self, weights: torch.Tensor) -> None:
        """Rounds the counters at the end of averaged model buffers."""
        if self.size > self.parameters:
            weights[self.size - self._counters :].round_()

    def in_place(self) -> Step:
        """Returns the update of weights that have no readers, for a device that does it before the role asks."""

        def apply(gradient: torch.Tensor, learning_rate: float, rates: Sequence[torch.Tensor]) -> None:
            weights = self.buffer(WEIGHTS).vector
            self._take_behind(gradient, weights)
            self._rule.step(gradient[: self.parameters], learning_rate, rates=rates)
            self._round_counters(weights)

        def rates(learning_rate: float) -> list[float]:
            return self._rule.rates(learning_rate) if self._rule.takes_rates else []

        return Step(apply, lambda: [*self._rule.state().values()], rates)

    @performs(ComputeNorms)
    def measure(self, action: ComputeNorms) -> NormsComputed:
        gradient = self.buffer(action.gradient).vector[: self.parameters]
        return NormsComputed(self._rule.norms(gradient).numpy(force=True).tobytes())

    def _update_in_slices(
        self, sliced: SlicedSteps, action: Update, before: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Averages each slice, copies it if the weights have readers, and steps it while it is in the cache.

        The deferred average is not stored and is invalid afterwards: an applied gradient is not read again.
        """
        take = self.taking(action.gradient)

        def gradient(part: slice) -> torch.Tensor:
            if weights is not before:
                weights[part] = before[part]
            over = part.start % CACHE_LINE
            return take(slice(part.start - over, part.stop))[over:]

        sources = self._deferred[action.gradient].of if action.gradient in self._deferred else ()
        sliced.step(gradient, action.learning_rate, CHUNK - CACHE_LINE)
        for part in slices(self.parameters, self.size, CHUNK - CACHE_LINE):
            weights[part] = gradient(part)
        self._void(action.gradient)
        self._give_back(*sources)

    def copy_on_write(self, name: str) -> bool:
        return name == WEIGHTS

    def _replica(self) -> Callable[[], npt.NDArray[np.float32]] | None:
        """Returns a function that gives the floats of the replica, if the role has one in addition to the weights."""
        return None

    @property
    def is_read(self) -> bool:
        """Whether others read the weights that are about to change."""
        return self.buffer(WEIGHTS).readers > 0


def _floats(norms: tuple[bytes, bytes], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Converts norms from bytes to tensors, if there are any."""
    before, behind = (torch.from_numpy(np.frombuffer(each, np.float32).copy()).to(device) for each in norms)
    return (before, behind) if any(norms) else None


class ServerExecutor(AveragingExecutor, OwnerExecutor):
    """Executor of the parameter server.

    Copies for the broadcast tree of the weights are deferred: until the next update, the weights themselves are sent.
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
        if message.kind is MessageKind.SNAPSHOT and not near and self._is_lent():  # the message follows the weights
            before = self.buffer(WEIGHTS)
            self._replace(WEIGHTS, self.spare())
            self.buffer(WEIGHTS).vector.copy_(before.vector)
        return super().send(name, message, to, halves=halves, near=near)

    @property
    def is_read(self) -> bool:
        return self._is_lent() or super().is_read

    def _is_lent(self) -> bool:
        """Whether weights are being sent instead of their copies. Forgets transfers that have ended."""
        weights = self.buffer(WEIGHTS)
        sharing = [name for name, buffer in self._buffers.items() if buffer is weights and name.startswith(DOWNCAST)]
        if any(self.lent[name] for name in sharing):
            return True
        for name in sharing:
            self.release(name)
        return False
