"""What a learner and the statistics server compute: gradients of drawn mini-batches, and tests of weights."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from rudra.config import Job
from rudra.data import Batch, Samples
from rudra.flat import FlatModel
from rudra.sampling import Sampler, mix

_DEPTH = 2  # mini-batches that the input thread prepares ahead


@dataclass(frozen=True, slots=True)
class Outcome:
    """Training error of one mini-batch."""

    loss: float  # mean over the samples
    errors: int  # samples whose most probable class is wrong
    samples: int


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Outcome of one test; errors are fractions in 0…1."""

    loss: float  # mean over the samples
    error: float
    error_top5: float  # NaN where there are five classes or fewer
    samples: int


class GradientSource:
    """One learner's gradients: step s draws the samples s·μ … (s+1)·μ − 1 of its walk, whoever asks and when.

    Args:
        job: gives μ and the seed.
        learner: the learner's number; names its walk.
        model: computes; may be shared by several sources in one thread.
        split: the training samples.
        prefetch: an input thread prepares the next mini-batches meanwhile; the bits are the same without it.

    Source: Rudra §3.2, the I/O thread of the data server.
    """

    def __init__(self, job: Job, learner: int, model: FlatModel, split: Samples, *, prefetch: bool) -> None:
        self._seed = job.training.seed
        self._learner = learner
        self._model = model
        self._inputs = _Inputs(Sampler(self._seed, learner, len(split)), split, job.training.minibatch_size)
        self._prefetched = _Prefetched(self._inputs) if prefetch else None

    def compute(self, step: int, weights: torch.Tensor, out: torch.Tensor) -> Outcome:
        """Computes the gradient of one step.

        Args:
            step: any; consecutive steps are prefetched.
            weights: (size,) float32, only read.
            out: (size,) float32, as `FlatModel.gradient` fills it.

        Raises:
            DataError: a label is out of range. Whatever else the user's dataset raises comes through.
        """
        inputs, labels = self._inputs.minibatch(step) if self._prefetched is None else self._prefetched.minibatch(step)
        self._model.bind(weights)
        loss, errors = self._model.gradient(inputs, labels, out, mix(self._seed, self._learner, step))
        return Outcome(loss, errors, len(labels))

    def close(self) -> None:
        """Ends the input thread, if there is one; `compute` may not be called again."""
        if self._prefetched is not None:
            self._prefetched.close()


@dataclass(frozen=True, slots=True)
class _Inputs:
    sampler: Sampler
    split: Samples
    minibatch_size: int

    def minibatch(self, step: int) -> Batch:
        return self.split.batch(self.sampler.indices(step * self.minibatch_size, self.minibatch_size))


class _Prefetched:
    """The input thread and its two queues: steps go in, mini-batches or exceptions come out in the same order."""

    def __init__(self, inputs: _Inputs) -> None:
        self._steps: SimpleQueue[int | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._asked: deque[int] = deque()
        self._thread = threading.Thread(
            target=_prepare, args=(inputs, self._steps, self._ready), name="rudra-input", daemon=True
        )
        self._thread.start()

    def minibatch(self, step: int) -> Batch:
        if self._asked and self._asked[0] != step:  # not the order that was foreseen: forget what is on its way
            while self._asked:
                self._asked.popleft()
                self._ready.get()
        self._ask(step)
        self._asked.popleft()
        result = self._ready.get()
        if isinstance(result, BaseException):
            raise result
        self._ask(step + 1)
        return result

    def _ask(self, first: int) -> None:
        while len(self._asked) < _DEPTH:
            step = self._asked[-1] + 1 if self._asked else first
            self._asked.append(step)
            self._steps.put(step)

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()


def _prepare(inputs: _Inputs, steps: SimpleQueue[int | None], ready: SimpleQueue[Batch | BaseException]) -> None:
    while (step := steps.get()) is not None:
        try:
            ready.put(inputs.minibatch(step))
        except BaseException as error:  # the learner raises it, in its own thread
            ready.put(error)


def evaluate(
    model: FlatModel, weights: torch.Tensor, split: Samples, batch_size: int
) -> Iterator[EvaluationResult | None]:
    """Tests weights, one batch at a time, so that the caller can do other work in between.

    Args:
        model: computes; may do other work between two batches.
        weights: (size,) float32, only read, and unchanged until the end.
        split: the test samples.
        batch_size: samples in a batch.

    Yields:
        None after each batch but the last, and the result after that.
    """
    samples = len(split)
    totals = np.zeros(3)
    for first in range(0, samples, batch_size):
        inputs, labels = split.batch(np.arange(first, min(first + batch_size, samples)))
        model.bind(weights)
        totals += model.evaluate_batch(inputs, labels)
        if first + batch_size < samples:
            yield None
    loss, error, error_top5 = (totals / samples).tolist()
    yield EvaluationResult(loss, error, error_top5, samples)
