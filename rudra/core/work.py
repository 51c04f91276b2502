"""Which samples a gradient is made of, and who decides that: the plan, μ and the shares of the learners."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from msgspec import Struct

from topologies import Plan

DEALT = 0
"""Number of the stream from which the samples come that a coordinator deals out."""


class Work(Struct, frozen=True, gc=False):
    """The samples of one gradient: `count` of them from the `first` on, in a stream of samples.

    Attributes:
        stream: number of the walk through the training set that they are drawn from.
        first: position of the first one in that walk.
        count: how many.
        stride: how much further on the learner's next work begins, unless something changes by then; 0: nobody knows.
    """

    stream: int
    first: int
    count: int
    stride: int

    def after(self, steps: int) -> "Work":
        """That of so many gradients later, or earlier if negative."""
        return Work(self.stream, self.first + steps * self.stride, self.count, self.stride)


class Portion(Struct, frozen=True, gc=False):
    """What part of each batch of a stream one learner takes: `count` samples behind `offset`, of `batch` in all."""

    stream: int
    offset: int
    count: int
    batch: int

    def work(self, drawn: int) -> Work:
        """The learner's samples of the batch that begins at this position of the stream."""
        return Work(self.stream, drawn + self.offset, self.count, self.batch)


def portion(plan: Plan, role: int, minibatch_size: int, shares: tuple[float, ...] = ()) -> Portion:
    """What a learner computes.

    Without shares it draws μ samples from a stream of its own. With shares, the learners of a compute group, or all
    where there are no groups, draw from one stream and take adjacent parts of each batch.

    Args:
        plan: who is who.
        role: the learner's.
        minibatch_size: μ; a batch of k learners has kμ samples.
        shares: for each learner of the job by its number, how much it takes compared with the others.
    """
    if not shares:
        return Portion(plan.roles[role].index, 0, minibatch_size, minibatch_size)
    return _portions(plan, minibatch_size, shares)[role]


@lru_cache(maxsize=4)  # every learner asks
def _portions(plan: Plan, minibatch_size: int, shares: tuple[float, ...]) -> dict[int, Portion]:
    """Those of all learners that share batches."""
    found = {}
    for members in plan.groups or (plan.learners,):
        batch = minibatch_size * len(members)
        counts = apportion([shares[plan.roles[member].index] for member in members], batch)
        for member, count, end in zip(members, counts, accumulate(counts), strict=True):
            found[member] = Portion(plan.roles[member].group or 0, end - count, count, batch)
    return found


def apportion(shares: Sequence[float], batch: int) -> list[int]:
    """Whole samples of a batch in proportion to shares: at least one each, and `batch` in all."""
    total = sum(shares)
    ends = [round(batch * end / total) for end in accumulate(shares, initial=0.0)]
    counts = [end - begin for begin, end in pairwise(ends)]
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def by_speed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Shares in proportion to speed, of three digits; the slowest learner has 1.

    Args:
        seconds: that each learner takes for the same number of samples.

    Source: Omnivore, App. C-D, where speeds are known; here they are measured.
    """
    slowest = max(seconds)
    return tuple(float(f"{slowest / own_s:.3g}") for own_s in seconds)


def speeds_text(seconds: Sequence[float], minibatch_size: int, shares: Sequence[float]) -> str:
    """What was measured, and what follows from it; of many learners only the extremes."""
    taken, chosen = (
        ", ".join(f"{value:.3g}" for value in values)
        if len(values) <= _SHOWN
        else f"{min(values):.3g} to {max(values):.3g}"
        for values in ([1e3 * own_s for own_s in seconds], shares)
    )
    samples = f"{minibatch_size} sample{'s' if minibatch_size > 1 else ''}"
    return f"learners take {taken} ms for {samples}, so their shares are {chosen}"


_SHOWN = 8  # learners that are told one by one
