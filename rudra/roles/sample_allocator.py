"""The samples of an epoch as the coordinator deals them out: which are left, and who has which.

Source: Hogbatch (Ma and Rusu 2020), §5.1 and Algorithms 1 and 2. Here every sample of an epoch is served once: the last
batch takes what is left, and what a worker had when it died, or when a run was stopped, is served again.
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
"""The first sample, as its place in the epoch, and how many."""
Dealt = tuple[tuple[Range, ...], tuple[int, ...], tuple[float, ...]]
"""What is to be served again, sizes and counts."""


class SampleAllocator:
    """What is left of an epoch, and who is to compute what.

    Args:
        protocol: the rule.
        plan: who is who.
        training_samples: of an epoch.
        position: where training begins; nothing is under way.

    Attributes:
        sizes: of the last batch of each worker, in samples for each of its threads.
        counts: of updates of each worker, as the protocol counts them.
        samples: applied, of each worker.
    """

    def __init__(self, protocol: Hogbatch, plan: Plan, training_samples: int, position: TrainingState) -> None:
        self._protocol, self._samples, self._epoch = protocol, training_samples, position.epoch
        self._left = {plan.roles[learner].index for learner in plan.learners}
        self._given: list[deque[Range]] = [deque() for _ in protocol.workers]  # parts whose gradients are not applied
        self._counted: list[tuple[int, Range]] = []  # those of the next update, and whose they are
        self._before: Dealt | None = None  # what was dealt up to the last update, if more was since
        self._again: list[Range] = sorted(position.again)  # were given to somebody who will not bring them
        self._cursor = position.samples - position.epoch * training_samples + sum(count for _, count in self._again)
        self.sizes = list(position.sizes or protocol.first_sizes)
        self.counts = list(position.counts or (0.0,) * len(protocol.workers))
        self.samples = [position.learned_by(worker) for worker in range(len(protocol.workers))]

    def validate(self, applied: int) -> None:
        """Raises AssertionError unless all samples of the epoch but those that were applied are left, each once."""
        ranges = [*self._about()[0], (self._cursor, self._samples - self._cursor)]
        assert all(first + count <= other for (first, count), (other, _) in pairwise(ranges))
        assert sum(count for _, count in ranges) == self._samples - applied
        for about, size in zip(self._protocol.workers, self.sizes, strict=True):
            assert about.least <= size <= about.most

    def deal(self, worker: int) -> Work | None:
        """The next batch of a worker; None: nothing is left for it now.

        Args:
            worker: its number.
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
        """A gradient is in the next update; threads that compute at the same time may be done in any order.

        Raises:
            ProtocolError: it is of other samples than its worker was given.
        """
        worker, part = gradient.learner, (gradient.first - self._base, gradient.samples)
        given = self._given[worker]
        if part not in given:
            was = f"samples {given[0][0]} and {given[0][1] - 1} more" if given else "nothing"
            raise ProtocolError(f"learner {worker} pushed a gradient of {part[1]} from {part[0]} on, but had {was}")
        given.remove(part)
        self._counted.append((worker, part))

    def applied(self) -> None:
        """That update is made."""
        for worker, (_, samples) in self._counted:
            self.counts[worker] += self._protocol.counted(worker)
            self.samples[worker] += samples
        self._counted.clear()
        self._before = None

    def take(self, gradient: Gradient) -> None:
        """A gradient is an update by itself, which is made: `count` and `applied` at once."""
        self.count(gradient)
        self.applied()

    def held(self, worker: int) -> int:
        """How many parts a worker has whose gradients are not in an update yet."""
        return len(self._given[worker])

    def recall(self, worker: int, *, dead: bool = False) -> None:
        """What a worker has is served again, to others if it is dead."""
        self._again = _joined([*self._again, *self._given[worker]])
        self._given[worker].clear()
        if dead:
            self._left.discard(worker)

    def end_epoch(self) -> None:
        """All samples are applied; the next epoch has them all again."""
        self._epoch += 1
        self._cursor = 0
        if self._protocol.counts_each_epoch:
            self.counts = [0.0] * len(self.counts)

    def about(self) -> Dealt:
        """What `TrainingState` has of it, as of the last update, so that a replay knows it, too."""
        return self._before or self._about()

    def _about(self) -> Dealt:
        given = [part for of_worker in self._given for part in of_worker]
        given += (part for _, part in self._counted)
        return tuple(_joined([*self._again, *given])), tuple(self.sizes), tuple(self.counts)

    @property
    def _base(self) -> int:
        """Where the epoch begins in the stream."""
        return self._epoch * self._samples if self._protocol.shuffles_each_epoch else 0


def _joined(ranges: list[Range]) -> list[Range]:
    """In order, and those that touch as one."""
    found: list[Range] = []
    for first, count in sorted(ranges):
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
    return found
