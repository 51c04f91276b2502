"""Executors for weights in a window (`rudra.compute.window`): of workers, and of the owner of the weights.

Source: Hogbatch §5.1: a CPU worker refers to the global model. A GPU worker has a deep copy, made for each batch.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.executor import Executor, arithmetic_of_thread, performs
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.compute.learners import LearnerExecutor
from rudra.compute.owners import ServerExecutor
from rudra.compute.staging import Staging
from rudra.compute.window import LOGGED, Contribution, Update, Window, WindowEntry, WindowLayout
from rudra.core.actions import FindUpdates, ReadShared, TrainInPlace, WriteShared
from rudra.core.events import AppliedGradient, SharedRead, TrainedInPlace, UpdatesFound
from rudra.core.records import Gradient
from rudra.core.work import DEALT, Work
from rudra.data.samples import Batch
from rudra.data.trees import mapped
from rudra.job.job import Job
from topologies import Plan


class _Thread:
    """One thread of a worker, which computes gradients.

    Args:
        source: Source of the gradients, with its own model.
        size: Number of floats in the weights.
        copies: Whether it computes at a copy of the weights. On a GPU it always does.
    """

    def __init__(self, source: GradientSource, size: int, *, copies: bool) -> None:
        self.source = source
        device = source.model.device
        pins = kind_of(device).page_locks
        self.gradient = torch.zeros(size, pin_memory=pins)
        self.own = torch.zeros(size, pin_memory=pins) if copies else None
        self._stage = None if device.type == "cpu" else Staging(size, device)

    def compute(self, step: int, work: Work, batch: Batch, weights: torch.Tensor) -> BatchResult:
        """Computes a gradient at weights in main memory, and returns it in main memory."""
        if self._stage is None:
            return self.source.checked(self.source.of_batch(step, work, batch, weights, self.gradient))
        figures = self.source.of_batch(step, work, batch, self.there(weights), self._stage.gradient)
        self.gradient.copy_(self._stage.gradient)
        return self.source.checked(figures)

    def there(self, weights: torch.Tensor) -> torch.Tensor:
        """Moves weights from main memory to the device of the thread."""
        return weights if self._stage is None else self._stage.copied(weights)


class Sharing(Executor):
    """Executor of a role that fills the window of its node, or reads it while no worker computes.

    Attributes:
        window: Window of the node, set before training begins.
    """

    window: Window

    def enter(self, window: Window) -> None:
        """Uses this window from now on."""
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
    """Executor of a worker that applies its gradients to a window itself.

    Attributes:
        copies: Whether gradients are computed at a copy of the weights. Otherwise they are computed in
            place, while others write.
        overwrites: Whether the updated copy replaces the weights, so that updates by others in between are lost.
    """

    worker = 0
    copies = overwrites = False

    def share(self, job: Job, plan: Plan, role: int, sources: Sequence[GradientSource]) -> None:
        """Sets the mode of the worker, and one source of gradients for each thread, each with its own model."""
        self.worker = plan.roles[role].index
        self.copies, self.overwrites = manner(job, plan, role)
        for source in sources:
            source.model.autograd.guard.racing = not self.copies
        self._threads = [_Thread(source, self.size, copies=self.copies) for source in sources]
        self._pool: ThreadPoolExecutor | None = None

    @performs(TrainInPlace)
    def train(self, action: TrainInPlace) -> Iterator[TrainedInPlace]:
        batches = self.batches(action.step, action.works)
        steps = range(action.step, action.step + len(batches))
        tasks = list(zip(steps, action.works, batches, action.rates, strict=True))
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
        """Draws the samples of gradients that are computed together, at once: adjacent works of one stream."""
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
        of, instead = self.contribution(step, work, result, rate), own if self.overwrites else None
        entry = window.add(of, reading, thread.gradient, instead)
        return made_of(entry, window.update, time.perf_counter() - began)

    def contribution(self, step: int, work: Work, result: BatchResult, rate: float) -> Contribution:
        """Describes an update for the window's log once its gradient is computed."""
        return Contribution(self.worker, step, work.first, result.samples, result.loss, result.errors, rate)

    def weights_to_test(self, name: str) -> torch.Tensor:
        return self._threads[0].there(self.window.latest)

    def gradient_at(self, step: int, work: Work, batch: Batch, weights: torch.Tensor, out: torch.Tensor) -> BatchResult:
        """Computes a gradient for a caller that accesses the window itself."""
        source = self._threads[0].source
        return source.checked(source.of_batch(step, work, batch, weights, out))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        super().close()


class HogwildServerExecutor(Sharing, ServerExecutor):
    """Executor of the owner of weights in a window.

    Its own vector holds the weights as last published or fetched.

    Attributes:
        workers: Number of each worker role among the writers of the window.
    """

    workers: Mapping[int, int] = {}

    @performs(FindUpdates)
    def look(self, action: FindUpdates) -> UpdatesFound:
        entries = self.window.entries(self.workers[action.role], action.after)
        return UpdatesFound(action.role, tuple(made_of(entry, self.window.update) for entry in entries))


def manner(job: Job, plan: Plan, role: int) -> tuple[bool, bool]:
    """Returns whether a worker computes at a copy of the weights, and whether it overwrites them.

    Source: Hogbatch §5.1, shallow and deep copies.
    """
    large = job.hogbatch.team(plan.learner_numbers)[plan.roles[role].index].kind == "large"
    overwrites = large and job.hogbatch.gpu_write == "overwrite"
    return large or job.hogbatch.locking, overwrites


def threads_of(job: Job, plan: Plan, role: int) -> int:
    """Returns how many gradients a worker computes at once: parts of a batch, but no more than its rank's threads."""
    if job.hogbatch.locking:
        return 1
    parts = job.hogbatch.team(plan.learner_numbers)[plan.roles[role].index].threads
    return min(parts, job.cluster.threads_per_rank or 1)


def made_of(entry: WindowEntry, update: Update, seconds: float = 0.0) -> AppliedGradient:
    """Converts a log entry to the record that roles exchange."""
    worker, step, first, samples, loss, errors, rate = entry.of
    number = entry.update if update == "locked" else -1
    gradient = Gradient(number, worker, samples, step, first, entry.timestamp, entry.fewest, 1.0, loss, errors, DEALT)
    return AppliedGradient(gradient, rate, entry.digest, seconds, entry.most)


def layout_of(job: Job, plan: Plan, size: int) -> WindowLayout:
    """Returns the layout of a window for weights of `size` floats."""
    most = max(table.threads for table in job.hogbatch.team(plan.learner_numbers))
    update: Update = "locked" if job.hogbatch.locking else "racing"
    return WindowLayout(size, plan.learner_numbers, update, max(LOGGED, 3 * most))


def window_here(shape: WindowLayout) -> Window:
    """Creates a window for roles that share a process."""
    return Window(np.zeros(shape.bytes, np.uint8), shape)


def give_window(executors: Mapping[int, Executor], window: Window) -> None:
    """Makes the roles of a process share a window."""
    for executor in executors.values():
        if isinstance(executor, Sharing):
            executor.enter(window)


def _split(tree: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Yields adjacent pieces of a batch."""
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        yield mapped(lambda tensor, end=end, size=size: tensor[end - size : end], tree)
