"""Gradients of mini-batches for learners, and sums of metrics for the statistics server."""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from protocols.hogbatch import parts
from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number, known
from rudra.compute.early_forward import EarlyForward, ForwardPass
from rudra.compute.feed import Drawn, Feed, Given, Minibatch
from rudra.compute.final_gradients import Ready
from rudra.compute.flat import FlatModel
from rudra.compute.rows import RowGradient
from rudra.compute.waiting import Needs
from rudra.core.work import Work
from rudra.data import trees
from rudra.data.augmentation import Augmentation
from rudra.data.load import asked_at_once, in_memory
from rudra.data.resident import Resident
from rudra.data.samples import Batch, Samples, indices_of_whole
from rudra.data.sampling import Sampler, mix, seed_all
from rudra.data.sparse import bytes_of, finite_rows, stretch
from rudra.data.sparse import split as rows_split
from rudra.data.trees import mapped
from rudra.errors import ConfigError, DataError
from rudra.job.job import Job

_DRAWING, _CHANGING = 1, 2
"""Purposes of random numbers in a step, in addition to dropout."""


_COMPILED = 1e-3
"""Largest difference of a compiled gradient, relative to its norm, that rounding explains."""

_DEPTH = 2  # mini-batches that the input thread prepares in advance
_TOGETHER_BYTES = 1 << 17  # drawn at once from samples in memory: small relative to a cache, and per learner
_FIRST_TOGETHER = 8  # steps at the beginning of a run
_INDEX_BYTES = 32  # of a sample that a device gathers: its index, and the movement of its image


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Training error of one mini-batch."""

    loss: float  # mean over the samples
    errors: float  # wrong samples, each by its share; NaN if the task defines no error
    samples: int


class BatchFigures(NamedTuple):
    """Training error of one mini-batch that a device may still compute.

    Attributes:
        loss: Mean loss over the samples.
        errors: Wrong samples, each by its share; NaN if the task defines no error.
        work: Samples of the mini-batch.
        batch: These samples.
    """

    loss: Number
    errors: Number
    work: Work
    batch: Batch


class GradientSource:
    """Gradients of one learner as pure functions of weights, step and work, independent of caller and time.

    Args:
        job: Job with the seed.
        learner: Number of the learner.
        work: Work of the first step.
        model: Model that computes. Several sources in one thread may share it.
        split: Training samples.
        prefetch: Whether an input thread prepares the next mini-batches in parallel. The result is bitwise identical.

    Attributes:
        work: Work of the first step.
        given: Mini-batch on the device, which `compute` uses if it is the wanted one.
        resident: Training set on the device, if mini-batches are gathered there.

    Source: Rudra §3.2, the I/O thread of the data server.
    """

    def __init__(self, job: Job, learner: int, work: Work, model: FlatModel, split: Samples, *, prefetch: bool) -> None:
        self._seed = job.training.seed
        self._learner = learner
        self._microbatches = job.training.microbatches
        self._stops = job.fault_tolerance.non_finite_loss == "stop"
        self._needs_graph = job.cluster.graphs == "on"
        self.work, self.model = work, model
        self._early = EarlyForward(model)
        self._inputs = _Inputs(self._seed, split, Augmentation(job.augment), self.seed)
        # A data set that draws random numbers is read in this thread, without concurrent draws.
        self._prefetched = _Prefetched(self._inputs) if prefetch and not asked_at_once(split) else None
        self._feed: Feed | None = None
        self.resident: Resident | None = None
        self._indices = Drawn(torch.empty(0), {})  # the last ones of several steps
        self._tried: Minibatch | None = None  # the last one that was sent ahead, or could not be
        self.given: Given | None = None

    def feed_device(self, resident: Resident | None) -> None:
        """Sends the mini-batches of `take` to the device of the model while it computes others.

        Args:
            resident: Training set on the device. Only indices are sent then. None: samples are sent.
        """
        about = kind_of(self.model.device), self.model.device
        self.resident = resident
        if resident is None:
            self._feed = Feed(self._drawn_alone, lambda batch, rows: batch, *about)
        else:
            self._feed = Feed(self._inputs.draw_indices, partial(self._inputs.gathered, resident), *about)
        self._sends_ahead = resident is not None or self._inputs.in_memory

    def take(self, step: int, work: Work) -> Given | None:
        """Sends a mini-batch to the device, if it is not on its way. None: `compute` draws it in main memory.

        Raises:
            Exception: Exceptions of the user's data set.
        """
        return None if self._feed is None else self._feed.take(step, work)

    def send_ahead(self, step: int, work: Work) -> None:
        """Sends the mini-batch of the step after this one, if it can be drawn at once."""
        if self._feed is None or self._tried == (step, work):
            return
        if work.stride and (self._sends_ahead or (self._prefetched is not None and self._prefetched.is_ready)):
            self._tried = step, work
            with suppress(Exception):  # the step itself raises it again
                self._feed.send_ahead(step + 1, work.after(1))

    def indices_of(self, step: int, work: Work, count: int) -> torch.Tensor:
        """Draws what `gathered` needs for some steps, (count * μ, 1 or 4) int64 in main memory."""
        found: list[torch.Tensor] = []
        for number in range(count):
            wanted = step + number, work.after(number)
            if wanted not in self._indices.rows:
                self._indices = self._inputs.draw_indices(*wanted)
            found.append(self._indices.content[self._indices.rows[wanted]])
        return torch.cat(found)

    def gathered(self, indices: torch.Tensor) -> Batch:
        """Returns the mini-batch of some indices, which are on the device of the training set."""
        assert self.resident is not None
        return self._inputs.gathered(self.resident, indices, slice(None))

    def ends_pass(self, work: Work) -> bool:
        """Whether a mini-batch ends a pass through the training set."""
        return self._inputs.ends_pass(work)

    def compute(
        self,
        step: int,
        work: Work,
        weights: torch.Tensor,
        out: torch.Tensor | RowGradient,
        ready: Ready | None = None,
        scale: float | None = None,
    ) -> BatchFigures:
        """Computes the gradient of one step. A device may still compute it when this returns.

        Args:
            step: Step number. Consecutive steps are prefetched.
            work: Samples of the step.
            weights: (size,) float32, only read.
            out: Receives the gradient, as in `FlatModel.gradient`.
            ready: Called while more of it becomes final, as in `FlatModel.gradient`.
            scale: As in `FlatModel.gradient`.

        Raises:
            DataError: A label is out of range. Other exceptions of the user's data set propagate.
        """
        return self.of_batch(step, work, self.minibatch(step, work), weights, out, ready, scale)

    def of_batch(
        self,
        step: int,
        work: Work,
        batch: Batch,
        weights: torch.Tensor,
        out: torch.Tensor | RowGradient,
        ready: Ready | None = None,
        scale: float | None = None,
    ) -> BatchFigures:
        """Computes the gradient as `compute` does, from samples that the caller has drawn."""
        return BatchFigures(*self._gradient(batch, weights, out, self.seed(step), ready, scale), work, batch)

    @property
    def can_pass_early(self) -> bool:
        """Whether forward passes may begin early."""
        return self._microbatches == 1 and self._early.possible

    @property
    def can_pass_early_now(self) -> bool:
        """Whether the next forward pass may begin early."""
        return self._microbatches == 1 and self._early.possible_now

    def forward_early(self, step: int, work: Work, batch: Batch, weights: torch.Tensor, needs: Needs) -> ForwardPass:
        """Begins to compute the gradient of samples that the caller has drawn, while the weights arrive.

        Args:
            step: As for `compute`.
            work: As for `compute`.
            batch: Samples of the step.
            weights: As for `compute`. They need not be complete yet.
            needs: As for `EarlyForward.forward`.
        """
        return self._early.forward(*batch, weights, self.seed(step), needs)

    def gradient_of(
        self,
        passed: ForwardPass,
        work: Work,
        batch: Batch,
        weights: torch.Tensor,
        out: torch.Tensor,
        ready: Ready | None = None,
    ) -> BatchFigures:
        """Computes what `of_batch` computes, after `forward_early`."""
        return BatchFigures(*self._early.gradient(passed, *batch, weights, out, ready), work, batch)

    def checked(self, figures: BatchFigures) -> BatchResult:
        """Returns the result of a mini-batch. Waits for its device.

        Raises:
            DataError: The loss is not finite because of a sample.
        """
        return self.confirmed(known((figures.loss, figures.errors)), figures.work, lambda: figures.batch)

    def confirmed(self, numbers: Sequence[float], work: Work, batch: Callable[[], Batch]) -> BatchResult:
        """Returns the result of a mini-batch with its loss and errors, which are known. Raises as `checked`."""
        loss, errors = numbers
        if self._stops and not math.isfinite(loss):
            inputs, target = batch()
            if (wrong := not_finite(inputs) | not_finite(target)).any():
                sample = self._inputs.indices([work])[int(wrong.argmax())]
                raise DataError(
                    f"[data] training sample {sample} has a value that is not finite, so the loss is not finite"
                )
        return BatchResult(loss, errors, work.count)

    def _gradient(
        self,
        batch: Batch,
        weights: torch.Tensor,
        out: torch.Tensor | RowGradient,
        seed: int,
        ready: Ready | None = None,
        scale: float | None = None,
    ) -> tuple[Number, Number]:
        """Computes `FlatModel.gradient` in the parts that the job sets: their mean, weighted by samples.

        Each part continues with the generator state and the buffers of the part before.
        """
        model, (inputs, target) = self.model, batch
        count = len(trees.first(target))
        if self._microbatches == 1 or count == 1:
            model.bind(weights)
            return model.gradient(inputs, target, out, seed, ready, scale)
        assert isinstance(out, torch.Tensor), "gradients in rows are of whole mini-batches"
        trained, last = slice(model.parameter_count), 0
        loss: Number = 0.0
        errors: Number = 0.0
        mean, state = torch.zeros_like(out), None
        if buffers := model.size > model.parameter_count:
            weights = weights.clone()
        model.bind(weights)
        for part in parts(count, self._microbatches):
            first, last = last, last + part
            ours, theirs = (mapped(lambda t, a=first, b=last: stretch(t, a, b), each) for each in batch)
            its_loss, wrong = model.gradient(ours, theirs, out, seed if state is None else state, scale=scale)
            state = model.random_state
            mean[trained].add_(out[trained], alpha=part / count)
            loss, errors = loss + its_loss * (part / count), errors + wrong
            if buffers:
                weights[model.parameter_count :] = out[model.parameter_count :]
        out[trained] = mean[trained]
        # Single precision, as a whole batch gives it: records keep it exactly.
        return loss.float() if isinstance(loss, torch.Tensor) else float(np.float32(loss)), errors

    def prepare(self) -> None:
        """Compiles the step with one discarded gradient, so that the first step takes no longer than others.

        Raises:
            ConfigError: torch.compile does not support this model, or its gradient differs from torch's. Or the job
                demands a graph, and the step cannot be recorded.
        """
        if self._needs_graph and (reason := self.not_recorded_because()):
            text = f"the step of this model cannot be recorded: {reason}"
            raise ConfigError(f"[cluster] graphs = 'on': {text}; valid for this model: auto, off")
        if not self.model.compiled:
            return
        weights = torch.zeros(self.model.size, device=self.model.device)
        self.model.read_into(weights)
        try:
            batch = self._inputs.minibatch(0, self.work)
            self._gradient(batch, weights, torch.empty_like(weights), 0)
            count = next(iter(parts(self.work.count, self._microbatches))) if self.work.count > 1 else 1
            difference = self.model.compiled_difference(*(mapped(lambda t: stretch(t, 0, count), b) for b in batch))
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"[training] compile = true: torch.compile cannot compile this model ({what})") from error
        if difference > _COMPILED:
            text = f"the compiled gradient differs from torch's by {difference:.1g} of its norm"
            raise ConfigError(f"[training] compile = true: {text}; valid for this model: false")

    def not_recorded_because(self) -> str:
        """Returns why a device cannot record a step, with the place in its code. Empty: it can.

        It drops the record, because the graphs of the run belong to other vectors.
        """
        model, batch = self.model, self._inputs.minibatch(0, self.work)
        weights = torch.zeros(model.size, device=model.device)
        model.read_into(weights)
        model.record_passes()
        assert model.graphs is not None
        while not model.graphs.tried:
            self._gradient(batch, weights, torch.empty_like(weights), 0, scale=model.scales[0])
        refusal = model.graphs.refusal
        model.record_passes()
        return refusal

    def minibatch(self, step: int, work: Work) -> Batch:
        """Returns the samples of one step."""
        if self._feed is not None and self.given is not None and self.given.minibatch == (step, work):
            return self._feed.finish(self.given)
        return self._drawn(step, work)

    def _drawn(self, step: int, work: Work) -> Batch:
        """Draws the samples of one step in main memory."""
        ahead = self._prefetched if work.stride else None
        return (self._inputs if ahead is None else ahead).minibatch(step, work)

    def _drawn_alone(self, step: int, work: Work) -> Drawn:
        return Drawn(self._drawn(step, work), {(step, work): slice(None)})

    def seed(self, step: int) -> int:
        """Returns the seed of dropout and similar layers in one step."""
        return mix(self._seed, self._learner, step)

    def close(self) -> None:
        """Ends the input thread, if there is one. The source cannot be used afterwards."""
        if self._prefetched is not None:
            self._prefetched.close()


def not_finite(batch: Any) -> npt.NDArray[np.bool_]:
    """Returns which samples contain NaN or infinite numbers, (samples,)."""
    flags = np.zeros(len(trees.first(batch)), np.bool_)

    def look(tensor: torch.Tensor) -> None:
        flags[:] |= ~finite_rows(tensor)

    mapped(look, batch)
    return flags


class _Inputs:
    """A source of mini-batches. From samples in memory it draws several steps at once, at the cost of one draw.

    The step number determines which steps are drawn together, so that a mini-batch has the same memory layout in every
    run.
    """

    def __init__(self, seed: int, split: Samples, augmentation: Augmentation, seed_of: Callable[[int], int]) -> None:
        self._split, self._augmentation = split, augmentation
        self._seed, self._seed_of = seed, seed_of  # of the job, and of a step
        self._sampler: Sampler | None = None
        self._sample_bytes = 0
        self.in_memory = in_memory(split)
        if self.in_memory:
            self._sample_bytes = sum(bytes_of(tensor) for tensor in split.batch(np.zeros(1, np.int64)))
        self._drawn: dict[Minibatch, Batch] = {}

    def indices(self, works: Sequence[Work]) -> npt.NDArray[np.int64]:
        """Returns the sample indices of mini-batches of one stream."""
        first, *more = works
        if self._sampler is None or self._sampler.stream != first.stream:
            self._sampler = Sampler(self._seed, first.stream, len(self._split))
        if not more or first.count == first.stride:
            return self._sampler.indices(first.first, first.count * len(works))
        return np.concatenate([self._sampler.indices(work.first, work.count) for work in works])

    def ends_pass(self, work: Work) -> bool:
        """Whether a mini-batch ends a pass through the samples."""
        return work.first // len(self._split) != (work.first + work.count) // len(self._split)

    def minibatch(self, step: int, work: Work) -> Batch:
        wanted = (step, work)
        if wanted not in self._drawn:
            self._drawn = dict(self._draw(step, work))
        return self._drawn.pop(wanted)  # removed from the cache: the caller may change it

    def draw_indices(self, step: int, work: Work) -> Drawn:
        """Draws what `gathered` needs for the mini-batches of several steps: (steps * count, 1 or 4) int64."""
        step, works = _together(step, work, _INDEX_BYTES)
        rows = indices_of_whole(self._split, self.indices(works))[:, None]
        if self._augmentation.moves:
            keys = [mix(self._seed_of(step + number), _CHANGING) for number in range(len(works))]
            rows = np.concatenate([rows, self._augmentation.shifts(keys, work.count)], axis=1)
        count = work.count
        places = {(step + i, its): slice(i * count, (i + 1) * count) for i, its in enumerate(works)}
        return Drawn(torch.from_numpy(rows), places)

    def gathered(self, resident: Resident, drawn: torch.Tensor, rows: slice) -> Batch:
        """Returns a mini-batch, bitwise the same as `minibatch`, on the device where the set and its indices are."""
        inputs, target = resident.batch(drawn[rows, 0])
        if self._augmentation.moves:
            self._augmentation.check(inputs)
            inputs = self._augmentation.moved(inputs, drawn[rows, 1:])
        return inputs, target

    def _draw(self, step: int, work: Work) -> Iterator[tuple[Minibatch, Batch]]:
        """Yields the mini-batches of several steps."""
        size = work.count
        step, works = _together(step, work, self._sample_bytes)
        if self._split.random:
            seed_all(mix(self._seed_of(step), _DRAWING))
        drawn = self._split.batch(self.indices(works))
        pairs = [drawn] if len(works) == 1 else zip(rows_split(drawn[0], size), drawn[1].split(size), strict=True)
        for number, (inputs, target) in enumerate(pairs):
            if not self._augmentation.idle:
                inputs = self._augmentation(inputs, mix(self._seed_of(step + number), _CHANGING))
            yield (step + number, works[number]), (inputs, target)


def _together(step: int, work: Work, sample_bytes: int) -> tuple[int, list[Work]]:
    """Returns which steps are drawn together: the first, and the work of each.

    The first steps of a run are drawn few at a time, as a short run needs no more.
    """
    if not sample_bytes or not work.stride:
        return step, [work]
    together = max(1, _TOGETHER_BYTES // (sample_bytes * work.count))
    start, end = step - step % together, step - step % together + together
    if not start:
        start = 0 if step < _FIRST_TOGETHER else 1 << (step.bit_length() - 1)
        end = min(together, max(_FIRST_TOGETHER, 2 * start))
    before = min(step - start, work.first // work.stride)
    return step - before, [work.after(i - before) for i in range(end - start)]


class _Prefetched:
    """Input thread with two queues: steps go in, and mini-batches or exceptions come out in the same order."""

    def __init__(self, inputs: _Inputs) -> None:
        self._wanted: SimpleQueue[tuple[int, Work] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._asked: deque[tuple[int, Work]] = deque()
        self._thread = threading.Thread(
            target=_prepare, args=(inputs, self._wanted, self._ready), name="rudra-input", daemon=True
        )
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether the next mini-batch is ready, or has failed."""
        return not self._ready.empty()

    def minibatch(self, step: int, work: Work) -> Batch:
        if self._asked and self._asked[0] != (step, work):  # not the predicted step: discard prefetched ones
            while self._asked:
                self._asked.popleft()
                self._ready.get()
        self._ask(step, work)
        self._asked.popleft()
        result = self._ready.get()
        if isinstance(result, BaseException):
            raise result
        self._ask(step + 1, work.after(1))
        return result

    def _ask(self, step: int, work: Work) -> None:
        while len(self._asked) < _DEPTH:
            ahead = len(self._asked)
            wanted = (step + ahead, work.after(ahead))
            self._asked.append(wanted)
            self._wanted.put(wanted)

    def close(self) -> None:
        self._wanted.put(None)
        self._thread.join()


def _prepare(
    inputs: _Inputs, wanted: SimpleQueue[tuple[int, Work] | None], ready: SimpleQueue[Batch | BaseException]
) -> None:
    while (minibatch := wanted.get()) is not None:
        try:
            ready.put(inputs.minibatch(*minibatch))
        except BaseException as error:  # the learner raises it in its own thread
            ready.put(error)


Sums = defaultdict[str, Number]
"""Metrics summed over samples: loss, error, and metrics by name. A device may still compute them."""

LOSS, ERROR = "loss", "error"
