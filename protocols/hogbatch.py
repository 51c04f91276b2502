"""Hogbatch: a coordinator deals out the samples; unlike workers take batches of unlike sizes, and nobody waits.

Source: Ma and Rusu 2020 (hogbatch.txt), §6.1-6.3, Algorithms 1 and 2. Every gradient is an update, at a rate that goes
with its batch (§7). A rule is asked at each request of a worker how large its next batch is:

    fixed      small workers take their smallest batch, large ones their largest (§6.2, CPU+GPU Hogbatch)
    adaptive   begins there; who has made fewer updates than all others takes a smaller batch, who has made more a
               larger one, by a factor, within its bounds (§6.3, Algorithm 2)
    balanced   ours: batches in proportion to the speeds so far, so that all make equally many updates, and as large as
               the bounds allow; who would take longer than the others need for what is left of the epoch gets none

Where the paper is unclear: the smallest and the largest count of updates are those of the others, and equal counts
change nothing; a batch is a whole number of samples for each thread; the samples that are left at the end of an epoch
are a short batch. Speeds are told by what was applied, not by clocks, so that a replay decides alike.
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
    """What a worker can take at a time.

    Attributes:
        kind: `"small"`: a batch is computed in as many parts as there are threads, each an update of its own (Hogwild);
            `"large"`: a batch is one gradient.
        threads: of a small worker; 1 of a large one.
        least: smallest batch, in samples for each thread.
        most: largest batch, likewise.
    """

    kind: Kind
    threads: int
    least: int
    most: int

    @property
    def text(self) -> str:
        """For people; sizes are those of whole batches."""
        threads = f" with {self.threads} threads" if self.threads > 1 else ""
        return f"{self.kind}{threads}, batches of {self.least * self.threads} to {self.most * self.threads}"


def parts(count: int, threads: int) -> list[int]:
    """The samples of each part of a batch: one part for each thread, as equal as can be, none of them empty."""
    number = min(count, threads)
    each, over = divmod(count, number)
    return [each + (place < over) for place in range(number)]


class WorkerProgress(NamedTuple):
    """How far the workers are; all but `left` by the number of the worker.

    Attributes:
        sizes: of the last batch, in samples for each thread.
        counts: of updates, as `Hogbatch.counted` has it.
        samples: that were applied.
        left: numbers of the workers that live.
        remaining: samples of the epoch that nobody was given yet.
        epoch: samples of an epoch.
    """

    sizes: Sequence[int]
    counts: Sequence[float]
    samples: Sequence[int]
    left: Collection[int]
    remaining: int
    epoch: int


class Hogbatch(Protocol):
    """Hogbatch.

    Args:
        learners: λ, the number of workers.
        workers: what each can take, by the number of the learner.
        rule: how many samples a worker gets next.
        lr_scaling: `"linear"`: the rate is multiplied by the samples of the gradient, divided by the reference batch
            size (Goyal et al. 2017); `"sqrt"`: by the square root of that (Krizhevsky 2014); `"none"`: it is not.
        alpha: α, the factor by which a batch changes.
        beta: β, what each part of a small worker's batch counts as, compared with an update.
        shuffle: `"once"`: each epoch has the samples in the same random order; `"epoch"`: in another one.
        counts: whether updates are counted over the `"run"`, or over each `"epoch"`.
        window: how workers update weights in a window, `"locked"` or `"racing"`; empty: the weights are at a server.
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
        """The batch of each worker at the beginning, in samples for each thread: the smallest of small ones, the
        largest of large ones.
        """
        return tuple(worker.least if worker.kind == "small" else worker.most for worker in self.workers)

    @property
    def expected_staleness(self) -> float:
        """⟨σ⟩, as in `Protocol`: the parts of a batch are as stale as there are parts before them, besides.

        A worker with t threads brings (t + 1) / 2 gradients for the mean one of another, and (t - 1) / 2 for its own.

        In a window it is the most that the mean can be, and less while workers wait for work: an update makes the
        gradients staler that other workers compute. A worker computes one gradient at a time in a locked window, each
        of weights that it reads for it, and one in each thread in a racing one.
        """
        if self._window:
            under_way = [1 if self._window == "locked" else worker.threads for worker in self.workers]
            return sum(under_way) - min(under_way)
        return sum((worker.threads + 1) / 2 for worker in self.workers) - 1

    @property
    def text(self) -> str:
        """The rule, and what batches the workers take, for people."""
        alike: dict[BatchBounds, list[int]] = {}
        for number, worker in enumerate(self.workers):
            alike.setdefault(worker, []).append(number)
        told = [f"{worker.text}: {_numbers(which)}" for worker, which in alike.items()]
        return f"rule {self.rule}; {'; '.join(told)}"

    def counted(self, worker: int) -> float:
        """What a gradient of a worker adds to its count of updates."""
        return self.beta if self.workers[worker].kind == "small" else 1.0

    def next_size(self, worker: int, team: WorkerProgress) -> int:
        """The batch of a worker that asks for work, in samples for each thread; 0: none for now, others will see to it.

        Args:
            worker: its number.
            team: how far all workers are.
        """
        others = [other for other in team.left if other != worker]
        if self.rule == "fixed" or not others:
            return team.sizes[worker]
        return self._adapted(worker, team, others) if self.rule == "adaptive" else self._balanced(worker, team)

    def _adapted(self, worker: int, team: WorkerProgress, others: Sequence[int]) -> int:
        """Algorithm 2."""
        about, size, count = self.workers[worker], team.sizes[worker], team.counts[worker]
        if count < min(team.counts[other] for other in others):
            return max(about.least, int(size / self.alpha))
        if count > max(team.counts[other] for other in others):
            return min(about.most, max(size + 1, int(size * self.alpha)))
        return size

    def _outlasts(self, worker: int, team: WorkerProgress) -> bool:
        """Whether the smallest batch of a worker takes longer than all others need for what is left of the epoch.

        It is never so for the fastest, so that there is somebody who computes, nor before the last part of an epoch:
        who idles looks slower than it is, and would be given ever less.
        """
        about, samples = self.workers[worker], team.samples
        if team.remaining > team.epoch * _TAIL or worker == max(team.left, key=lambda other: (samples[other], -other)):
            return False
        others = sum(samples[other] for other in team.left) - samples[worker]
        return min(about.least * about.threads, team.remaining) * others > team.remaining * samples[worker]

    def _balanced(self, worker: int, team: WorkerProgress) -> int:
        """As large a batch as all can have that make equally many updates, at the speeds so far."""
        about, samples, total = self.workers[worker], team.samples, sum(team.samples[i] for i in team.left)
        if not all(samples[other] for other in team.left):
            return team.sizes[worker]

        def share(of: int, among: int) -> int:
            """Of so many samples, what a worker computes while all are computed, for each of its threads."""
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
    """Numbers of learners; of many the first and the last."""
    few = [str(learner) for learner in learners]
    if len(few) > 4:
        few[2:-1] = ["…"]
    return f"learner{'s' if len(few) > 1 else ''} {', '.join(few)}"


PROTOCOL = Hogbatch
