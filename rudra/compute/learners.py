"""What computes gradients, and what tests weights."""

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
"""The training set, as a split that is tested."""


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

    @performs(Compute)
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
        """Those in a buffer, where the model computes."""
        buffer = self.buffer(name)
        return buffer.vector if self._stage is None else self._stage.weights(buffer)

    def computed(self, action: Compute | BackpropFirstStage, outcome: BatchResult) -> Computed:
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
            if score.split == TRAIN:  # the columns are of the gradients
                more = ((LOSS, score.loss), (ERROR, score.error))
                scores[place] = structs.replace(score, metrics=(*more, *score.metrics))
        return Evaluated(action.buffer, tuple(scores), 0.0)
