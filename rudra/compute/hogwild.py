"""What roles work with whose weights lie in a window (`rudra.compute.window`): workers, and the owner of the weights.

Source: Hogbatch §5.1: a CPU worker has a reference to the global model, a GPU worker a deep copy, made for each batch.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rudra.compute.executor import Executor, arithmetic_of_thread, performs
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.compute.learners import LearnerExecutor
from rudra.compute.owners import ServerExecutor
from rudra.compute.staging import Staging
from rudra.compute.window import LOGGED, Contribution, Shape, Update, Window, WindowEntry
from rudra.core.events import (
    AppliedGradient,
    FindUpdates,
    ReadShared,
    SharedRead,
    TrainedInPlace,
    TrainInPlace,
    UpdatesFound,
    WriteShared,
)
from rudra.core.records import Gradient
from rudra.core.work import DEALT, Work
from rudra.data.samples import Batch
from rudra.data.trees import mapped
from rudra.job.job import Job
from topologies import Plan


class _Thread:
    """One thread of a worker: what computes its gradients, at which weights.

    Args:
        source: of the gradients, on a model of its own.
        size: of the weights.
        copies: it computes at a copy of them; always where it computes on a GPU.
    """

    def __init__(self, source: GradientSource, size: int, *, copies: bool) -> None:
        self.source = source
        on_gpu = source.model.device.type == "cuda"
        self.gradient = torch.zeros(size, pin_memory=on_gpu)
        self.own = torch.zeros(size, pin_memory=on_gpu) if copies else None
        self._stage = Staging(size, source.model.device) if on_gpu else None

    def compute(self, step: int, work: Work, batch: Batch, weights: torch.Tensor) -> BatchResult:
        """Computes a gradient at weights in main memory, to where it comes back."""
        if self._stage is None:
            return self.source.of_batch(step, work, batch, weights, self.gradient)
        result = self.source.of_batch(step, work, batch, self.there(weights), self._stage.gradient)
        self.gradient.copy_(self._stage.gradient)
        return result

    def there(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights in main memory, where it computes."""
        return weights if self._stage is None else self._stage.copied(weights)


class Sharing(Executor):
    """What a role works with that fills the window of its node, or reads it while nobody computes.

    Attributes:
        window: is given before training begins.
    """

    window: Window

    def enter(self, window: Window) -> None:
        """Shares this window from now on."""
        self.window = window

    @performs(WriteShared)
    def publish(self, action: WriteShared) -> None:
        self.window.fill(self.buffer(action.weights).vector, action.timestamp)

    @performs(ReadShared)
    def fetch(self, action: ReadShared) -> SharedRead:
        buffer = self.renew(action.weights)
        buffer.vector.copy_(self.window.latest)
        buffer.version += 1
        return SharedRead(self.window.surviving)


class HogwildExecutor(Sharing, LearnerExecutor):
    """What a worker works with that brings its gradients into a window itself.

    Attributes:
        copies: gradients are computed at a copy of the weights; else where they are, while others write.
        overwrites: the weights become the copy, updated: what others have done meanwhile is lost.
    """

    worker = 0
    copies = overwrites = False

    def share(self, job: Job, plan: Plan, role: int, sources: Sequence[GradientSource]) -> None:
        """How it goes about it, with sources of gradients, one for each thread, each on a model of its own."""
        self.worker = plan.roles[role].index
        self.copies, self.overwrites = manner(job, plan, role)
        for source in sources:
            source.model.guard.racing = not self.copies
        self._threads = [_Thread(source, self.size, copies=self.copies) for source in sources]
        self._pool: ThreadPoolExecutor | None = None

    @performs(TrainInPlace)
    def train(self, action: TrainInPlace) -> Iterator[TrainedInPlace]:
        batches = self.batches(action.step, action.works)
        tasks = list(
            zip(range(action.step, action.step + len(batches)), action.works, batches, action.rates, strict=True)
        )
        threads = self._threads[: len(tasks)]
        if len(threads) == 1:
            yield TrainedInPlace(tuple(self._made(threads[0], *task) for task in tasks))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._threads), "rudra-hogwild", arithmetic_of_thread())
        found = list(self._pool.map(self._share_of, threads, (tasks[i :: len(threads)] for i in range(len(threads)))))
        made = {each.gradient.step: each for of_thread in found for each in of_thread}
        yield TrainedInPlace(tuple(made[step] for step, *_ in tasks))

    def _share_of(self, thread: _Thread, tasks: Sequence[tuple[int, Work, Batch, float]]) -> list[AppliedGradient]:
        return [self._made(thread, *task) for task in tasks]

    def batches(self, step: int, works: Sequence[Work]) -> list[Batch]:
        """The samples of gradients that are computed together, drawn at once: adjacent works of one stream."""
        source = self._threads[0].source
        if len(works) == 1:
            return [source.minibatch(step, works[0])]
        sizes = [work.count for work in works]
        inputs, target = source.minibatch(step, Work(works[0].stream, works[0].first, sum(sizes), 0))
        return list(zip(_split(inputs, sizes), _split(target, sizes), strict=True))

    def _made(self, thread: _Thread, step: int, work: Work, batch: Batch, rate: float) -> AppliedGradient:
        window, own = self.window, thread.own
        reading = window.begin_reading(self.worker) if own is None else window.copy(self.worker, own)
        result = thread.compute(step, work, batch, window.vector if own is None else own)
        if own is None:
            reading = window.end_reading(self.worker, reading)
        began = time.perf_counter()
        entry = window.add(
            self.contribution(step, work, result, rate), reading, thread.gradient, own if self.overwrites else None
        )
        return made_of(entry, window.update, time.perf_counter() - began)

    def contribution(self, step: int, work: Work, result: BatchResult, rate: float) -> Contribution:
        """What is known of a gradient when it is computed."""
        return Contribution(self.worker, step, work.first, result.samples, result.loss, result.errors, rate)

    def weights_to_test(self, name: str) -> torch.Tensor:
        return self._threads[0].there(self.window.latest)

    def gradient_at(self, step: int, work: Work, batch: Batch, weights: torch.Tensor, out: torch.Tensor) -> BatchResult:
        """A gradient, for who takes care of the window himself."""
        return self._threads[0].source.of_batch(step, work, batch, weights, out)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        super().close()


class HogwildServerExecutor(Sharing, ServerExecutor):
    """What the owner of the weights works with that lie in a window.

    Its own vector is what was published, or fetched last.

    Attributes:
        workers: role -> its number among those who write to the window.
    """

    workers: Mapping[int, int] = {}

    @performs(FindUpdates)
    def look(self, action: FindUpdates) -> UpdatesFound:
        entries = self.window.entries(self.workers[action.role], action.after)
        return UpdatesFound(action.role, tuple(made_of(entry, self.window.update) for entry in entries))


def manner(job: Job, plan: Plan, role: int) -> tuple[bool, bool]:
    """Whether a worker computes at a copy of the weights, and whether it overwrites them.

    Source: Hogbatch §5.1, shallow and deep copies.
    """
    large = job.hogbatch.team(plan.learner_numbers)[plan.roles[role].index].kind == "large"
    overwrites = large and job.hogbatch.gpu_write == "overwrite"
    return large or job.hogbatch.locking, overwrites


def threads_of(job: Job, plan: Plan, role: int) -> int:
    """How many gradients a worker computes at the same time: as many as batches have parts and its rank has threads."""
    if job.hogbatch.locking:
        return 1
    parts = job.hogbatch.team(plan.learner_numbers)[plan.roles[role].index].threads
    return min(parts, job.cluster.threads_per_rank or 1)


def made_of(entry: WindowEntry, update: Update, seconds: float = 0.0) -> AppliedGradient:
    """An update as roles speak of it."""
    worker, step, first, samples, loss, errors, rate = entry.of
    number = entry.update if update == "locked" else -1
    gradient = Gradient(number, worker, samples, step, first, entry.timestamp, entry.fewest, 1.0, loss, errors, DEALT)
    return AppliedGradient(gradient, rate, entry.digest, seconds, entry.most)


def shape_of(job: Job, plan: Plan, size: int) -> Shape:
    """The window for weights of so many floats."""
    most = max(table.threads for table in job.hogbatch.team(plan.learner_numbers))
    return Shape(size, plan.learner_numbers, "locked" if job.hogbatch.locking else "racing", max(LOGGED, 3 * most))


def window_here(shape: Shape) -> Window:
    """A window for roles that share a process."""
    return Window(np.zeros(shape.bytes, np.uint8), shape)


def give_window(executors: Mapping[int, Executor], window: Window) -> None:
    """Has the roles of a process share a window."""
    for executor in executors.values():
        if isinstance(executor, Sharing):
            executor.enter(window)


def _split(tree: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Adjacent pieces of a batch."""
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        yield mapped(lambda tensor, end=end, size=size: tensor[end - size : end], tree)
