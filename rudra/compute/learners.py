"""Executors that compute gradients and evaluate weights."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs

from rudra.compute.devices import finish
from rudra.compute.evaluation import add_batch, evaluate, score_of
from rudra.compute.executor import Executor, performs
from rudra.compute.final_gradients import Ready
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import ERROR, LOSS, BatchResult, GradientSource, Sums
from rudra.compute.owners import OwnerExecutor
from rudra.core import records
from rudra.core.events import (
    BackpropFirstStage,
    Compute,
    Computed,
    ComputeEvaluationPart,
    Evaluate,
    Evaluated,
    EvaluationPartComputed,
    MergeEvaluation,
)
from rudra.data.samples import Samples
from rudra.job.job import Job

TRAIN = "train"
"""Name of the training set as a split for evaluation."""


class Examined(NamedTuple):
    """Data for the evaluation of weights.

    Attributes:
        splits: Splits by name.
        batch_size: Number of samples that are computed at once.
    """

    splits: Mapping[str, Samples]
    batch_size: int


class LearnerExecutor(Executor):
    """Executor of a learner, which computes gradients.

    Attributes:
        pushes_at_once: Whether the learner pushes each gradient once it is ready, and then requests newer weights.
        examined: Data for evaluation, if learners evaluate weights.
        ready: Called while a gradient is computed, whenever more of it is final. None: it is not called.
    """

    source: GradientSource
    pushes_at_once = True
    examined: Examined | None = None
    ready: Ready | None = None

    def learn(self, source: GradientSource, *, pushes_at_once: bool) -> None:
        """Sets the source of gradients, and whether its learner pushes at once."""
        self.source, self.pushes_at_once = source, pushes_at_once

    def prepare(self) -> None:
        super().prepare()
        self.source.prepare()

    @performs(Compute)
    def compute(self, action: Compute) -> Iterator[Computed]:
        weights, gradient = self.buffer(action.weights), self.buffer(action.gradient)
        if self._stage is None:
            outcome = self.source.compute(action.step, action.work, weights.vector, gradient.gradient, self.ready)
            if self.direct:
                finish(self.device)  # MPI may overwrite the weights at once
        else:
            staged = self._stage.gradient
            outcome = self.source.compute(action.step, action.work, self._stage.weights(weights), staged)
            gradient.vector.copy_(staged)  # returns when the copy is complete: MPI may send it at once
        yield self.computed(action, outcome)

    @performs(ComputeEvaluationPart)
    def assess(self, action: ComputeEvaluationPart) -> Iterator[EvaluationPartComputed | None]:
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
        yield EvaluationPartComputed(action.part, np.array(found, records.SUM))

    def weights_to_test(self, name: str) -> torch.Tensor:
        """Returns the weights in a buffer, on the device of the model."""
        buffer = self.buffer(name)
        return buffer.vector if self._stage is None else self._stage.weights(buffer)

    def computed(self, action: Compute | BackpropFirstStage, outcome: BatchResult) -> Computed:
        """Returns the result of a computation whose weights are still in their buffer."""
        found = Computed(action.step, outcome.loss, outcome.errors, outcome.samples)
        if self.hooks is not None:
            buffer = self.buffer(action.weights)
            self.hooks.computed(action, found, lambda: buffer.array)
        return found

    def close(self) -> None:
        self.source.close()
        super().close()


class ReplicaExecutor(LearnerExecutor, OwnerExecutor):
    """Executor of a learner that updates its own weights."""


class StatisticsExecutor(Executor):
    """Executor that evaluates weights, one batch at a time."""

    def test(self, job: Job, flat: FlatModel, splits: Mapping[str, Samples]) -> None:
        """Sets the splits to evaluate."""
        self._flat, self._splits, self._batch_size = flat, splits, job.training.evaluation_batch_size

    def try_out(self, buffer: str) -> tuple[str, ...]:
        """Evaluates one batch. Returns the names of metrics other than loss and error."""
        split = next(iter(self._splits.values()))
        self._flat.bind(self.buffer(buffer).vector)
        batch = split.batch(np.arange(min(self._batch_size, len(split))))
        return (*self._flat.evaluate_batch(*batch)[2], *self._flat.task.derived(0.0))

    @performs(Evaluate)
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

    @performs(MergeEvaluation)
    def sum(self, action: MergeEvaluation) -> Evaluated:
        sums: dict[str, Sums] = {}
        counts: Counter[str] = Counter()
        for split, name, samples, value in action.rows.tolist():
            of_split = sums.setdefault(split.decode(), defaultdict(float))
            of_split[name.decode()] += value
            counts[split.decode()] += samples if name == LOSS.encode() else 0
        scores = [score_of(name, found, counts[name], self._flat.task) for name, found in sums.items()]
        for place, score in enumerate(scores):
            if score.split == TRAIN:  # the columns contain sums over gradients
                more = ((LOSS, score.loss), (ERROR, score.error))
                scores[place] = structs.replace(score, metrics=(*more, *score.metrics))
        return Evaluated(action.buffer, tuple(scores), 0.0)
