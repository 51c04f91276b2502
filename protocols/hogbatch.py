"""Hogbatch: a coordinator deals out the samples; unlike workers take batches of unlike sizes, and nobody waits.

Source: Ma and Rusu 2020 (hogbatch.txt), §6.1-6.3, Algorithms 1 and 2. Every gradient is an update, at a rate that goes
with its batch (§7). A rule is asked at each request of a worker how large its next batch is:

    fixed      small workers take their smallest batch, large ones their largest (§6.2, CPU+GPU Hogbatch)
    adaptive   begins there; who has made fewer updates than all others takes a smaller batch, who has made more a
               larger one, by a factor, within its bounds (§6.3, Algorithm 2)
    balanced   ours: the same, but a large worker gives up its batch, with which it computes best, only when no small
               one can change its own any more

Where the paper is unclear: the smallest and the largest count of updates are those of the others, and equal counts
change nothing; a batch is a whole number of samples for each thread; the samples that are left at the end of an epoch
are a short batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from protocols.base import Protocol

Kind = Literal["small", "large"]
Rule = Literal["fixed", "adaptive", "balanced"]
Scaling = Literal["linear", "none"]
RULES: tuple[Rule, ...] = ("fixed", "adaptive", "balanced")


@dataclass(frozen=True, slots=True)
class Worker:
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


def parts(count: int, threads: int) -> list[int]:
    """The samples of each part of a batch: one part for each thread, as equal as can be, none of them empty."""
    number = min(count, threads)
    each, over = divmod(count, number)
    return [each + (place < over) for place in range(number)]


class Hogbatch(Protocol):
    """Hogbatch.

    Args:
        learners: λ, the number of workers.
        workers: what each can take, by the number of the learner.
        rule: how many samples a worker gets next.
        lr_scaling: `"linear"`: the rate is multiplied by the samples of the gradient, divided by the reference batch
            size (Goyal et al. 2017); `"none"`: it is not.
        alpha: α, the factor by which a batch changes.
        beta: β, what each part of a small worker's batch counts as, compared with an update.
        shuffle: `"once"`: each epoch has the samples in the same random order; `"epoch"`: in another one.
        counts: whether updates are counted over the `"run"`, or over each `"epoch"`.
    """

    grants_on_push = False
    default_modulation: ClassVar[str] = "none"
    modulations = ("none", "mean_staleness", "gradient_staleness")

    def __init__(
        self,
        learners: int,
        workers: Sequence[Worker] = (),
        rule: Rule = "fixed",
        lr_scaling: Scaling = "linear",
        alpha: float = 2.0,
        beta: float = 1.0,
        shuffle: str = "once",
        counts: str = "run",
    ) -> None:
        super().__init__(learners)
        for name, number in (("alpha", alpha), ("beta", beta)):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"options.{name} must be a number, not {number!r}")
        if not 1 < alpha < 2**31:
            raise ValueError(f"options.alpha = {alpha}; valid: > 1")
        if not 0 <= beta <= 1:
            raise ValueError(f"options.beta = {beta}; valid: 0 to 1")
        for name, text, valid in (("shuffle", shuffle, ("once", "epoch")), ("counts", counts, ("run", "epoch"))):
            if text not in valid:
                raise ValueError(f"options.{name} = {text!r}; valid: {' or '.join(valid)}")
        self.workers = tuple(workers)
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

    def counted(self, worker: int) -> float:
        """What a gradient of a worker adds to its count of updates."""
        return self.beta if self.workers[worker].kind == "small" else 1.0

    def next_size(self, worker: int, sizes: Sequence[int], counts: Sequence[float], left: Collection[int]) -> int:
        """The batch of a worker that asks for work, in samples for each thread.

        Args:
            worker: its number.
            sizes: of the last batch of each worker, in samples for each thread.
            counts: of updates of each worker, as `counted` has it.
            left: numbers of the workers that live.
        """
        about, size, count = self.workers[worker], sizes[worker], counts[worker]
        others = [other for other in left if other != worker]
        if self.rule == "fixed" or not others:
            return size
        if self.rule == "balanced" and about.kind == "large" and self._small_can_change(count, sizes, counts, others):
            return size
        if count < min(counts[other] for other in others):
            return max(about.least, int(size / self.alpha))
        if count > max(counts[other] for other in others):
            return min(about.most, max(size + 1, int(size * self.alpha)))
        return size

    def _small_can_change(
        self, count: float, sizes: Sequence[int], counts: Sequence[float], others: Sequence[int]
    ) -> bool:
        """Whether a small worker that is ahead can take more, or one that is behind less."""
        return any(
            (counts[other] > count and sizes[other] < self.workers[other].most)
            or (counts[other] < count and sizes[other] > self.workers[other].least)
            for other in others
            if self.workers[other].kind == "small"
        )

    def rate_scale(self, samples: int) -> float:
        return samples / self.modulation.reference_batch_size if self.lr_scaling == "linear" else 1.0


PROTOCOL = Hogbatch
