"""Executors that compute gradients and evaluate weights."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs

from rudra.compute.arrivals import Arrivals
from rudra.compute.averaging import slices
from rudra.compute.bank.gathering import Bank, ReadyLearner
from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number, Pending, Stream, known, until_done
from rudra.compute.early_pass import EarlyPass
from rudra.compute.evaluation import evaluate, score_of, summed
from rudra.compute.executor import Executor, performs
from rudra.compute.feed import Given
from rudra.compute.final_gradients import Ready
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import ERROR, LOSS, BatchFigures, BatchResult, GradientSource
from rudra.compute.norms import NormMeter
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import OwnerExecutor, UpdateResult
from rudra.compute.speculation import SpeculativeSteps
from rudra.compute.vectors import Buffer
from rudra.compute.waiting import NotInTime
from rudra.core import records
from rudra.core.actions import (
    BackpropFirstStage,
    Compute,
    ComputeEvaluationPart,
    Evaluate,
    ExecutorAction,
    MergeEvaluation,
    Reduce,
    Update,
)
from rudra.core.buckets import copied
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import Computed, Evaluated, EvaluationPartComputed, SplitMetrics
from rudra.data.samples import Batch, Samples
from rudra.job.job import Job

STAGED = 1 << 22
"""Number of elements of a gradient that are copied from a device at once, if its parts leave one after the other."""

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


class _Attempt(NamedTuple):
    """Gradient that was computed with a loss of one scale.

    Attributes:
        figures: Loss and errors of the mini-batch.
        batch: Returns the mini-batch.
        norm: Norm of the gradient. NaN: it is not recorded.
        overflows: Whether the gradient has elements that are not finite, so that a smaller scale is tried.
        copies: Copies of its parts from the device, in the order of arrival.
    """

    figures: tuple[float, float]
    batch: Callable[[], Batch]
    norm: float
    overflows: bool
    copies: list[tuple[slice, Pending]]


class LearnerExecutor(Executor):
    """Executor of a learner, which computes gradients.

    Attributes:
        pushes_at_once: Whether the learner pushes each gradient once it is ready, and then requests newer weights.
        examined: Data for evaluation, if learners evaluate weights.
        ready: Called while a gradient is computed, whenever more of it is final. None: it is not called.
        norms: Norms of gradients. None: they are not recorded.
        speculation: Steps that the device does before the role asks. None: it does none.
        bank: Learners of this rank that compute together with this one. None: it computes by itself.
        own_stream: Whether other learners of this rank compute at the same time, on other streams.
    """

    source: GradientSource
    _stream: Stream
    _copying: Stream  # copies between the device and main memory
    _arriving: list[Pending]  # copies of the next weights to the device
    pushes_at_once = True
    examined: Examined | None = None
    ready: Ready | None = None
    norms: NormMeter | None = None
    speculation: SpeculativeSteps | None = None
    bank: Bank | None = None
    own_stream = False

    def learn(self, source: GradientSource, *, pushes_at_once: bool) -> None:
        """Sets the source of gradients, and whether its learner pushes at once."""
        self.source, self.pushes_at_once = source, pushes_at_once
        device = source.model.device
        self._stream, self._arriving = kind_of(device).stream(device), []
        if self._stage is not None:
            self._copying = kind_of(device).stream(device, own=True)

    def use_stream(self, stream: Stream) -> None:
        """Computes on a stream while other learners compute on others. The source has a model of its own."""
        self._stream, self.own_stream = stream, True

    @property
    def computes_alone(self) -> bool:
        """Whether the rank waits for each gradient of this learner, and computes no other at the same time."""
        return self.bank is None and not self.own_stream

    def prepare(self) -> None:
        super().prepare()
        self.source.prepare()

    def make_room(self, action: ExecutorAction) -> None:
        if self.speculation is None or not isinstance(action, Compute) or not self.speculation.expects(action):
            super().make_room(action)

    @performs(Compute)
    def compute(self, action: Compute) -> Iterator[Computed | Pending]:
        noted = None if self.speculation is None else self.speculation.compute(action)
        if noted is not None:
            yield from until_done(noted.pending)
            batch = partial(self.source.minibatch, action.step, action.work)
            yield self.computed(action, self.source.confirmed(noted.figures.tolist(), action.work, batch))
            return
        weights, gradient = self.buffer(action.weights), self.buffer(action.gradient)
        self._watch(action, gradient)
        given = self.source.take(action.step, action.work)
        if self.bank is not None:
            about = self.source, action, partial(self._vectors, weights, gradient), given
            yield from self.bank.gather(self, ReadyLearner(*about))
        model = self.source.model
        for scale in model.scales if model.scaled and kind_of(model.device).apart else (None,):
            attempt = yield from self._attempt(action, weights, gradient, given, scale)
            if not attempt.overflows:
                break
        for part, there in attempt.copies:
            while not there.done():
                yield attempt.copies[-1][1]
            if self.ready is not None:
                self.ready(part)
        yield self.computed(action, self.source.confirmed(attempt.figures, action.work, attempt.batch), attempt.norm)

    def _watch(self, action: Compute, gradient: Buffer) -> None:
        """Lets `ready` also measure a gradient whose norm is recorded, or drops it if another thread computes."""
        if self.own_stream and self._stage is None:
            self.ready = None  # only the thread of the roles may call it
        norms = self.norms if self.norms is not None and self.norms.covers_gradient(action.timestamp) else None
        if norms is not None and self.ready is not None and self._stage is None:
            self.ready = norms.watching(gradient.vector, self.ready)

    def _attempt(
        self, action: Compute, weights: Buffer, gradient: Buffer, given: Given | None, scale: float | None
    ) -> Generator[Pending, None, _Attempt]:
        """Computes a gradient with a loss of this scale. When it returns, copies may still be on their way."""
        batches: list[Batch] = []

        def work() -> tuple[Number, ...]:
            self.source.given = given
            loss, errors, _, batch = self._gradient(action, weights, gradient, scale)
            self.source.given = None
            batches.append(batch)
            checks = scale not in (None, self.source.model.scales[-1])
            overflows = self.source.model.overflows(self._vectors(weights, gradient)[1]) if checks else 0.0
            return loss, errors, self._norm(action), overflows

        inputs = [] if given is None else [given.copied]
        if self.bank is not None:
            inputs = self.bank.copies
        pending = self._stream.submit(work, after=(*inputs, *self._arriving))
        self._arriving.clear()
        if given is not None:
            given.half.used = pending
        copies = self._copies_back(gradient, pending)
        last = copies[-1][1] if copies else pending
        while not pending.done():
            self.source.send_ahead(action.step, action.work)
            yield last
        loss, errors, norm, overflows = pending.numbers()
        return _Attempt((loss, errors), batches.pop, norm, overflows > 0, copies)

    def _gradient(self, action: Compute, weights: Buffer, gradient: Buffer, scale: float | None) -> BatchFigures:
        """Computes a gradient in its buffer."""
        if self.bank is not None:
            return self.bank.gradient(self)
        if self._stage is None:
            about = weights.vector, gradient.gradient, self.ready
        else:
            about = self._stage.weights(weights), self._stage.gradient, None
        return self.source.compute(action.step, action.work, *about, scale)

    def _vectors(self, weights: Buffer, gradient: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights and the place of their gradient on the device."""
        if self._stage is None:
            return weights.vector, gradient.vector
        return self._stage.weights(weights), self._stage.gradient

    def _copies_back(self, gradient: Buffer, computed: Pending) -> list[tuple[slice, Pending]]:
        """Begins to copy a gradient from the device, and returns the copies of its parts, the last parts first.

        Each part may leave while the next one is copied.
        """
        if self._stage is None:
            return []
        parts = [slice(0, self.size)] if self.ready is None else [*slices(0, self.size, STAGED)][::-1]
        return [(part, self._copying.submit(partial(self._copy_back, gradient, part), (computed,))) for part in parts]

    def _copy_back(self, gradient: Buffer, part: slice) -> tuple[Number, ...]:
        assert self._stage is not None
        gradient.vector[part].copy_(self._stage.gradient[part], non_blocking=True)
        return ()

    @performs(ComputeEvaluationPart)
    def assess(self, action: ComputeEvaluationPart) -> Iterator[EvaluationPartComputed | Pending | None]:
        assert self.examined is not None
        weights, found = self.weights_to_test(action.weights), []
        size = self.examined.batch_size
        for name, split in self.examined.splits.items():
            batches = -(-len(split) // size)
            mine = range(batches * action.part // action.parts, batches * (action.part + 1) // action.parts)
            sums = yield from summed(self.source.model, weights, split, size, mine, self._stream)
            count = min(mine.stop * size, len(split)) - mine.start * size
            found += [(name.encode(), metric.encode()[:64], count, total) for metric, total in sums.items()]
        yield EvaluationPartComputed(action.part, np.array(found, records.SUM))

    def weights_to_test(self, name: str) -> torch.Tensor:
        """Returns the weights in a buffer, on the device of the model."""
        buffer = self.buffer(name)
        while self._arriving:
            self._arriving.pop().numbers()
        return buffer.vector if self._stage is None else self._stage.weights(buffer)

    def _norm(self, action: Compute | BackpropFirstStage) -> Number:
        """Returns the norm of a gradient that has been computed. NaN: it is not recorded."""
        if self.norms is None or not self.norms.covers_gradient(action.timestamp):
            return math.nan
        return self.norms.norm(self.buffer(action.gradient).gradient if self._stage is None else self._stage.gradient)

    def computed(
        self, action: Compute | BackpropFirstStage, outcome: BatchResult, norm: float | None = None
    ) -> Computed:
        """Returns the result of a computation whose weights are still in their buffer.

        Args:
            action: The computation.
            outcome: Its loss and errors.
            norm: Norm of the gradient, as `_norm` returns it. None: the gradient is measured now.
        """
        if norm is None:
            (norm,) = known([self._norm(action)])
        norm = norm if self.norms is None else self.norms.rounded(norm)
        found = Computed(action.step, outcome.loss, outcome.errors, outcome.samples, norm)
        if self.hooks is not None:
            buffer = self.buffer(action.weights)
            self.hooks.computed(action, found, lambda: buffer.array)
        return found

    def close(self) -> None:
        self._stream.close()
        self.source.close()
        super().close()


class OwningLearnerExecutor(LearnerExecutor, OwnerExecutor):
    """Executor of a learner that updates its own copy of the weights."""

    @property
    def steps_unwatched(self) -> bool:
        """Whether neither hooks, norms, corrections nor averages over time see single steps or updates."""
        watched = self.hooks, self.norms, self.update_norms, self.corrector
        return not any(each is not None for each in watched) and not (self._averages or self.source.model.scaled)

    @property
    def rules(self) -> dict[str, UpdateRule]:
        """Rule that steps each vector of the learner, by the vector's buffer. The weights are the last one."""
        return {WEIGHTS: self._rule}

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of these rules."""
        return tuple(rule.settings for rule in self.rules.values())

    @property
    def steps_repeat(self) -> bool:
        """Whether a device may repeat recorded steps of these vectors."""
        return all(rule.repeats for rule in self.rules.values()) and self.computes_in_place


class ReplicaExecutor(OwningLearnerExecutor):
    """Executor of a learner that updates its own weights by the average of gradients.

    While the average of a gradient arrives, it may begin the update and the next forward pass (`EarlyPass`). It then
    has another buffer for the weights, and another momentum.
    """

    _computed: Compute | None = None  # the last computation
    _early: EarlyPass | None = None

    @property
    def can_pass_early(self) -> bool:
        """Whether forward passes may begin early, if the optimiser allows it at that time.

        The role must compute on its buffers in main memory, with whole vectors, without hooks and without a correction
        of gradients.
        """
        whole = self._stage is None and self._owned_part is None
        plain = self.row_format is None and self.device.type == "cpu" and not self.direct
        alone = self.hooks is None and self.corrector is None and self.computes_alone
        return whole and plain and alone and type(self) is ReplicaExecutor and self.source.can_pass_early

    @property
    def ahead_bytes(self) -> int:
        """Memory that updates which begin early take: other weights, and another state of the optimiser."""
        return 4 * self.size + self._rule.state_bytes() if self.can_pass_early else 0

    def prepare_early(self, reduction: Reduce, arrivals: Arrivals) -> None:
        """Prepares the update and the forward pass that follow a reduction, if they can begin early.

        Args:
            reduction: the reduction.
            arrivals: parts of its result that have arrived.
        """
        self._drop_early()
        rate, last = reduction.rate, self._computed
        sliced = self._rule.sliced if self.can_pass_early and self.source.can_pass_early_now else None
        if sliced is not None and rate is not None and last is not None and last.work.stride:
            about = sliced, self.buffer(WEIGHTS), self.spare(), self._counters, reduction.buffer, rate
            self._early = EarlyPass(*about, arrivals, (last.step + 1, last.work.after(1)))

    def pass_early(self) -> None:
        """Begins the prepared forward pass, if the first parameters have arrived and it is worthwhile.

        It returns after the pass.
        """
        early = self._early
        if early is None or early.batch is not None or not early.arrivals.begun:
            return
        if not early.arrivals.worthwhile(copied(self._rule.state_bytes() / (4 * self.size)), len(self.layout)):
            self._drop_early()
            return
        step, work = early.minibatch
        try:
            early.batch = self.source.minibatch(step, work)
            early.passed = self.source.forward_early(step, work, early.batch, early.weights.vector, early.need)
        except Exception:  # the usual computation waits for all weights, and raises any other exception again
            self._drop_early()

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None and not early.adopted:
            self._use_again(early.weights)

    def _stepped(self, action: Update) -> Buffer:
        early = self._early
        if early is not None and early.fits_update(action, self.buffer(action.weights)):
            with suppress(NotInTime):
                early.adopt()
                self._replace(action.weights, early.weights)
                self._void(action.gradient)
                return early.weights
        self._drop_early()
        return super()._stepped(action)

    def update(self, action: Update) -> UpdateResult:
        done = super().update(action)
        if self._early is not None:
            self._early.keep()
        return done

    def _gradient(self, action: Compute, weights: Buffer, gradient: Buffer, scale: float | None) -> BatchFigures:
        early, self._computed = self._early, action
        if early is None or not early.fits_gradient(action, weights):
            self._drop_early()
            return super()._gradient(action, weights, gradient, scale)
        self._early = None
        assert early.passed is not None
        assert early.batch is not None
        return self.source.gradient_of(
            early.passed, action.work, early.batch, weights.vector, gradient.vector, self.ready
        )


class StatisticsExecutor(Executor):
    """Executor that evaluates weights, one batch at a time.

    A device does so on a stream of its own, in parallel with the gradients of its learners.
    """

    def test(self, job: Job, flat: FlatModel, splits: Mapping[str, Samples]) -> None:
        """Sets the splits to evaluate."""
        self._flat, self._splits, self._batch_size = flat, splits, job.training.evaluation_batch_size
        kind = kind_of(flat.device)
        self._training, self._testing = kind.stream(flat.device), kind.stream(flat.device, own=True)

    def try_out(self, buffer: str) -> tuple[str, ...]:
        """Evaluates one batch. Returns the names of metrics other than loss and error."""
        split = next(iter(self._splits.values()))
        self._flat.bind(self.buffer(buffer).vector)
        batch = split.batch(np.arange(min(self._batch_size, len(split))))
        return (*self._flat.evaluate_batch(*batch)[2], *self._flat.task.derived(0.0))

    @property
    def batches(self) -> int:
        """Number of batches of one evaluation."""
        return sum(math.ceil(len(split) / self._batch_size) for split in self._splits.values())

    @performs(Evaluate)
    def evaluate(self, action: Evaluate) -> Iterator[Evaluated | Pending | None]:
        began = time.perf_counter()
        scores = []
        tested = self.buffer(action.buffer)
        weights = tested.vector if self._stage is None else self._stage.weights(tested)
        come = self._training.submit(lambda: ())  # the copy of these weights
        for name, split in self._splits.items():
            about = self._flat, weights, split, self._batch_size, name, self._testing, (come,)
            for found in evaluate(*about):
                if isinstance(found, SplitMetrics):
                    scores.append(found)
                else:
                    yield found
        yield Evaluated(action.buffer, tuple(scores), time.perf_counter() - began)

    @performs(MergeEvaluation)
    def sum(self, action: MergeEvaluation) -> Evaluated:
        sums: dict[str, defaultdict[str, float]] = {}
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
