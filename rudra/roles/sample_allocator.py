"""Assignment of an epoch's samples to workers by the coordinator.

Source: Hogbatch (Ma and Rusu 2020), §5.1 and Algorithms 1 and 2. Here each sample is applied once per epoch. The last
batch of an epoch takes the remaining samples. Samples that a worker had when it died, or when a run was stopped, are
assigned again.
"""

from collections import deque
from itertools import pairwise

from protocols import Hogbatch
from protocols.hogbatch import WorkerProgress, parts
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import DEALT, Work
from rudra.errors import ProtocolError
from topologies import Plan

Range = tuple[int, int]
"""Position of the first sample in the epoch, and number of samples."""
Dealt = tuple[tuple[Range, ...], tuple[int, ...], tuple[float, ...]]
"""Ranges to assign again, batch sizes, and update counts."""


class SampleAllocator:
    """Remaining samples of an epoch, and the samples assigned to each worker.

    Args:
        protocol: rule for batch sizes.
        plan: roles of the run and their connections.
        training_samples: number of samples in an epoch.
        position: state of training at the start. Nothing is under way.

    Attributes:
        sizes: size of each worker's last batch, in samples per thread.
        counts: number of updates of each worker, as the protocol counts them.
        samples: number of applied samples of each worker.
    """

    def __init__(self, protocol: Hogbatch, plan: Plan, training_samples: int, position: TrainingState) -> None:
        self._protocol, self._samples, self._epoch = protocol, training_samples, position.epoch
        self._left = {plan.roles[learner].index for learner in plan.learners}
        self._given: list[deque[Range]] = [deque() for _ in protocol.workers]  # parts of each worker, not applied yet
        self._counted: list[tuple[int, Range]] = []  # worker and part of each gradient in the next update
        self._before: Dealt | None = None  # state at the last update, if samples were assigned since
        self._again: list[Range] = sorted(position.again)  # were assigned to workers that have died or stopped
        self._cursor = position.samples - position.epoch * training_samples + sum(count for _, count in self._again)
        self.sizes = list(position.sizes or protocol.first_sizes)
        self.counts = list(position.counts or (0.0,) * len(protocol.workers))
        self.samples = [position.learned_by(worker) for worker in range(len(protocol.workers))]

    def validate(self, applied: int) -> None:
        """Raises AssertionError unless each sample of the epoch that is not applied is left exactly once."""
        ranges = [*self._about()[0], (self._cursor, self._samples - self._cursor)]
        assert all(first + count <= other for (first, count), (other, _) in pairwise(ranges))
        assert sum(count for _, count in ranges) == self._samples - applied
        for about, size in zip(self._protocol.workers, self.sizes, strict=True):
            assert about.least <= size <= about.most

    def deal(self, worker: int) -> Work | None:
        """Returns the next batch of a worker, or None if nothing is left for it now.

        Args:
            worker: number of the worker.
        """
        available = self._again[0] if self._again else (self._cursor, self._samples - self._cursor)
        if not available[1]:
            return None
        self._before = self._before or self._about()
        rule = self._protocol
        remaining = self._samples - self._cursor + sum(count for _, count in self._again)
        team = WorkerProgress(self.sizes, self.counts, self.samples, self._left, remaining, self._samples)
        size = rule.next_size(worker, team)
        if not size:
            return None
        self.sizes[worker] = size
        threads = rule.workers[worker].threads
        first, count = available[0], min(available[1], self.sizes[worker] * threads)
        if self._again:
            rest = (first + count, available[1] - count)
            self._again[:1] = [rest] if rest[1] else []
        else:
            self._cursor += count
        place = first
        for part in parts(count, threads):
            self._given[worker].append((place, part))
            place += part
        return Work(DEALT, self._base + first, count, 0)

    def count(self, gradient: Gradient) -> None:
        """Counts a gradient for the next update. Threads that compute in parallel may finish in any order.

        Raises:
            ProtocolError: The gradient's samples were not assigned to its worker.
        """
        worker, part = gradient.learner, (gradient.first - self._base, gradient.samples)
        given = self._given[worker]
        if part not in given:
            was = f"samples {given[0][0]} and {given[0][1] - 1} more" if given else "nothing"
            raise ProtocolError(f"learner {worker} pushed a gradient of {part[1]} from {part[0]} on, but had {was}")
        given.remove(part)
        self._counted.append((worker, part))

    def applied(self) -> None:
        """Notes that the next update is made."""
        for worker, (_, samples) in self._counted:
            self.counts[worker] += self._protocol.counted(worker)
            self.samples[worker] += samples
        self._counted.clear()
        self._before = None

    def take(self, gradient: Gradient) -> None:
        """Counts a gradient as an update of its own that is made. Combines `count` and `applied`."""
        self.count(gradient)
        self.applied()

    @property
    def idle(self) -> bool:
        """Whether no worker has samples whose gradients are not in an update yet."""
        return not any(self._given)

    def held(self, worker: int) -> int:
        """Returns the number of parts assigned to a worker whose gradients are not in an update yet."""
        return len(self._given[worker])

    def recall(self, worker: int, *, dead: bool = False) -> None:
        """Takes back the samples of a worker, to assign them again. A dead worker gets no more samples."""
        self._again = _joined([*self._again, *self._given[worker]])
        self._given[worker].clear()
        if dead:
            self._left.discard(worker)

    def end_epoch(self) -> None:
        """Begins the next epoch. All samples of the present one are applied."""
        self._epoch += 1
        self._cursor = 0
        if self._protocol.counts_each_epoch:
            self.counts = [0.0] * len(self.counts)

    def about(self) -> Dealt:
        """Returns the part of `TrainingState` about assignments, as of the last update, so that a replay has it."""
        return self._before or self._about()

    def _about(self) -> Dealt:
        given = [part for of_worker in self._given for part in of_worker]
        given += (part for _, part in self._counted)
        return tuple(_joined([*self._again, *given])), tuple(self.sizes), tuple(self.counts)

    @property
    def _base(self) -> int:
        """Position in the stream of the epoch's first sample."""
        return self._epoch * self._samples if self._protocol.shuffles_each_epoch else 0


def _joined(ranges: list[Range]) -> list[Range]:
    """Returns the ranges in order, with adjacent ranges joined."""
    found: list[Range] = []
    for first, count in sorted(ranges):
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
    return found
