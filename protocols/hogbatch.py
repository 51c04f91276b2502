"""Hogbatch: a coordinator assigns the samples. Heterogeneous workers take batches of different sizes, and no worker
waits.

Source: Ma and Rusu 2020 (hogbatch.txt), §6.1-6.3, Algorithms 1 and 2. Every gradient is an update, at a rate that
depends on its batch (§7). A rule decides the size of the next batch at each request of a worker:

    fixed      small workers take their smallest batch, large ones their largest (§6.2, CPU+GPU Hogbatch)
    adaptive   starts in the same way; a worker with fewer updates than all others gets a smaller batch, and one with
               more gets a larger one, by a factor, within its bounds (§6.3, Algorithm 2)
    balanced   our own: batches in proportion to the speeds so far, so that all workers make equally many updates, and
               as large as the bounds allow; a worker gets no batch if the smallest one would take longer than the
               others need to finish the epoch

The paper is unclear in some places. Here the smallest and largest counts of updates are the counts of the other
workers, and equal counts change nothing. A batch has a whole number of samples for each thread. The samples that are
left at the end of an epoch are a short batch. Speeds come from the applied samples, not from clocks, so that a replay
decides in the same way.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from protocols.base import Protocol

Kind = Literal["small", "large"]
Rule = Literal["fixed", "adaptive", "balanced"]
Scaling = Literal["linear", "sqrt", "none"]
_POWER: dict[Scaling, float] = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
_TAIL = 0.25  # of an epoch, in which a slow worker may get nothing
RULES: tuple[Rule, ...] = ("fixed", "adaptive", "balanced")


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Limits on the batches of a worker.

    Attributes:
        kind: `"small"`: a batch is computed in as many parts as there are threads, and each part is an update of its
            own (Hogwild). `"large"`: a batch is one gradient.
        threads: Number of threads of a small worker. A large worker has 1.
        least: Smallest batch, in samples for each thread.
        most: Largest batch, in samples for each thread.
    """

    kind: Kind
    threads: int
    least: int
    most: int

    @property
    def text(self) -> str:
        """Returns the limits for people, as sizes of whole batches."""
        threads = f" with {self.threads} threads" if self.threads > 1 else ""
        return f"{self.kind}{threads}, batches of {self.least * self.threads} to {self.most * self.threads}"


def parts(count: int, threads: int) -> list[int]:
    """Returns the number of samples of each part of a batch: one part for each thread, as equal as possible, without
    empty parts."""
    number = min(count, threads)
    each, over = divmod(count, number)
    return [each + (place < over) for place in range(number)]


class WorkerProgress(NamedTuple):
    """Progress of the workers. All attributes except the last three are by the number of the worker.

    Attributes:
        sizes: Size of the last batch of each worker, in samples for each thread.
        counts: Count of updates of each worker, from `Hogbatch.counted`.
        samples: Number of applied samples of each worker.
        left: Numbers of the living workers.
        remaining: Number of samples of the epoch that are not assigned yet.
        epoch: Number of samples of an epoch.
    """

    sizes: Sequence[int]
    counts: Sequence[float]
    samples: Sequence[int]
    left: Collection[int]
    remaining: int
    epoch: int


class Hogbatch(Protocol):
    """Protocol for heterogeneous workers, whose samples a coordinator assigns.

    Args:
        learners: λ, the number of workers.
        workers: Limits on batches, by the number of the learner.
        rule: Rule for the size of the next batch.
        lr_scaling: `"linear"`: the rate is multiplied by the samples of the gradient, divided by the reference batch
            size (Goyal et al. 2017). `"sqrt"`: by the square root of this factor (Krizhevsky 2014). `"none"`: the rate
            is constant.
        alpha: α, factor of a change of the batch size.
        beta: β, count of each part of a small worker's batch, as a fraction of an update.
        shuffle: `"once"`: each epoch has the samples in the same random order. `"epoch"`: each epoch has another order.
        counts: Whether updates are counted over the `"run"`, or over each `"epoch"`.
        window: Way of updating weights in a window, `"locked"` or `"racing"`. Empty: the weights are at a server.
    """

    schedules = True
    table = "hogbatch"
    grants_on_push = False
    default_modulation: ClassVar[str] = "none"
    modulations = ("none", "mean_staleness", "gradient_staleness")

    def __init__(
        self,
        learners: int,
        workers: Sequence[BatchBounds] = (),
        rule: Rule = "fixed",
        lr_scaling: Scaling = "linear",
        alpha: float = 2.0,
        beta: float = 1.0,
        shuffle: Literal["once", "epoch"] = "once",
        counts: Literal["run", "epoch"] = "run",
        window: str = "",
    ) -> None:
        super().__init__(learners)
        self.workers, self._window = tuple(workers), window
        self.most_samples = max((worker.most for worker in self.workers), default=None)
        self.rule, self.lr_scaling = rule, lr_scaling
        self.alpha, self.beta = float(alpha), float(beta)
        self.shuffles_each_epoch = shuffle == "epoch"
        self.counts_each_epoch = counts == "epoch"

    @classmethod
    def label(cls, name: str, n: int | None) -> str:
        return "Hogbatch"

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """Returns the first batch of each worker, in samples for each thread: the smallest for small workers, the
        largest for large ones."""
        return tuple(worker.least if worker.kind == "small" else worker.most for worker in self.workers)

    @property
    def expected_staleness(self) -> float:
        """Expected ⟨σ⟩, as in `Protocol`. In addition, each part of a batch misses the updates of the parts before it.

        A worker with t threads adds (t + 1) / 2 to the mean staleness of each other worker's gradients, and (t - 1) / 2
        to its own.

        In a window the result is an upper bound, and the mean is lower while workers wait for work: an update makes the
        gradients staler that other workers are computing. In a locked window a worker computes one gradient at a time,
        and reads the weights again for each. In a racing window it computes one in each thread.
        """
        if self._window:
            under_way = [1 if self._window == "locked" else worker.threads for worker in self.workers]
            return sum(under_way) - min(under_way)
        return sum((worker.threads + 1) / 2 for worker in self.workers) - 1

    @property
    def text(self) -> str:
        """Returns the rule and the batches of the workers, for people."""
        alike: dict[BatchBounds, list[int]] = {}
        for number, worker in enumerate(self.workers):
            alike.setdefault(worker, []).append(number)
        told = [f"{worker.text}: {_numbers(which)}" for worker, which in alike.items()]
        return f"rule {self.rule}; {'; '.join(told)}"

    def counted(self, worker: int) -> float:
        """Returns the contribution of a gradient to the count of updates of its worker."""
        return self.beta if self.workers[worker].kind == "small" else 1.0

    def next_size(self, worker: int, team: WorkerProgress) -> int:
        """Returns the size of the batch for a worker that requests work, in samples for each thread. 0: none for now,
        because other workers will compute the rest.

        Args:
            worker: Number of the worker.
            team: Progress of all workers.
        """
        others = [other for other in team.left if other != worker]
        if self.rule == "fixed" or not others:
            return team.sizes[worker]
        return self._adapted(worker, team, others) if self.rule == "adaptive" else self._balanced(worker, team)

    def _adapted(self, worker: int, team: WorkerProgress, others: Sequence[int]) -> int:
        """Returns the batch size of Algorithm 2."""
        about, size, count = self.workers[worker], team.sizes[worker], team.counts[worker]
        if count < min(team.counts[other] for other in others):
            return max(about.least, int(size / self.alpha))
        if count > max(team.counts[other] for other in others):
            return min(about.most, max(size + 1, int(size * self.alpha)))
        return size

    def _outlasts(self, worker: int, team: WorkerProgress) -> bool:
        """Returns whether the smallest batch of a worker takes longer than all others need to finish the epoch.

        This is never true for the fastest worker, so that one worker always computes. It is also never true before the
        last part of an epoch: an idle worker looks slower than it is, and would get ever less work.
        """
        about, samples = self.workers[worker], team.samples
        if team.remaining > team.epoch * _TAIL or worker == max(team.left, key=lambda other: (samples[other], -other)):
            return False
        others = sum(samples[other] for other in team.left) - samples[worker]
        return min(about.least * about.threads, team.remaining) * others > team.remaining * samples[worker]

    def _balanced(self, worker: int, team: WorkerProgress) -> int:
        """Returns the largest batch that lets all workers make equally many updates, at the speeds so far."""
        about, samples, total = self.workers[worker], team.samples, sum(team.samples[i] for i in team.left)
        if not all(samples[other] for other in team.left):
            return team.sizes[worker]

        def share(of: int, among: int) -> int:
            """Returns a worker's part of a number of samples, for each of its threads, if all workers compute at their
            speeds."""
            return among * samples[of] // (total * self.workers[of].threads)

        rate = max(samples[i] / max(1, min(self.workers[i].most, share(i, team.epoch))) for i in team.left)
        if self._outlasts(worker, team):
            return 0
        ahead = (team.counts[worker] + 1) / (sum(team.counts[i] for i in team.left) / len(team.left) + 1)
        size = min(int(samples[worker] / rate * ahead), share(worker, team.remaining))
        return min(about.most, max(about.least, size))

    def rate_scale(self, samples: int) -> float:
        return float((samples / self.modulation.reference_batch_size) ** _POWER[self.lr_scaling])


def _numbers(learners: Sequence[int]) -> str:
    """Returns the numbers of learners as text. Of many it shows the first and the last."""
    few = [str(learner) for learner in learners]
    if len(few) > 4:
        few[2:-1] = ["…"]
    return f"learner{'s' if len(few) > 1 else ''} {', '.join(few)}"


PROTOCOL = Hogbatch
