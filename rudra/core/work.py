"""Assignment of samples to gradients. The plan, μ and the shares of the learners decide it."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from msgspec import Struct

from topologies import Plan

DEALT = 0
"""Number of the stream whose samples a coordinator assigns."""


class Work(Struct, frozen=True, gc=False):
    """Samples of one gradient: `count` samples of a stream, beginning with `first`.

    Attributes:
        stream: Number of the random walk through the training set.
        first: Position of the first sample in this walk.
        count: Number of samples.
        stride: Distance to the first sample of the learner's next work, if nothing changes. 0: unknown.
    """

    stream: int
    first: int
    count: int
    stride: int

    def after(self, steps: int) -> "Work":
        """Returns the work of a number of gradients later, or earlier if the number is negative."""
        return Work(self.stream, self.first + steps * self.stride, self.count, self.stride)


class Portion(Struct, frozen=True, gc=False):
    """Part of each batch of a stream that one learner takes.

    Attributes:
        stream: Number of the stream.
        offset: Position of the part in the batch.
        count: Number of samples of the part.
        batch: Number of samples of the whole batch.
    """

    stream: int
    offset: int
    count: int
    batch: int

    def work(self, drawn: int) -> Work:
        """Returns the learner's samples of the batch that begins at a position of the stream."""
        return Work(self.stream, drawn + self.offset, self.count, self.batch)


def portion(plan: Plan, role: int, minibatch_size: int, shares: tuple[float, ...] = ()) -> Portion:
    """Returns the part of each batch that a learner computes.

    Without shares, a learner draws μ samples from a stream of its own. With shares, the learners of a compute group
    (without groups: all learners) draw from one stream and take adjacent parts of each batch. A dormant learner has
    the part that it would have if all learners took part.

    Args:
        plan: Role assignment.
        role: Id of the learner's role.
        minibatch_size: μ. A batch of k learners has kμ samples.
        shares: Share of each learner by its number, relative to all others.
    """
    if not shares:
        return Portion(plan.roles[role].index, 0, minibatch_size, minibatch_size)
    return _portions(plan.whole if role in plan.dormant else plan, minibatch_size, shares)[role]


@lru_cache(maxsize=4)  # every learner asks
def _portions(plan: Plan, minibatch_size: int, shares: tuple[float, ...]) -> dict[int, Portion]:
    """Returns the parts of all learners that share batches."""
    found = {}
    for members in plan.groups or (plan.learners,):
        batch = minibatch_size * len(members)
        counts = apportion([shares[plan.roles[member].index] for member in members], batch)
        for member, count, end in zip(members, counts, accumulate(counts), strict=True):
            found[member] = Portion(plan.roles[member].group or 0, end - count, count, batch)
    return found


def apportion(shares: Sequence[float], batch: int) -> list[int]:
    """Divides a batch into whole samples in proportion to shares. Each part has at least one sample."""
    total = sum(shares)
    ends = [round(batch * end / total) for end in accumulate(shares, initial=0.0)]
    counts = [end - begin for begin, end in pairwise(ends)]
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def by_speed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns shares in proportion to speed, with three digits. The slowest learner has 1.

    Args:
        seconds: Time of each learner for the same number of samples.

    Source: Omnivore, App. C-D, where speeds are known. Here they are measured.
    """
    slowest = max(seconds)
    return tuple(float(f"{slowest / own_s:.3g}") for own_s in seconds)


def speeds_text(seconds: Sequence[float], minibatch_size: int, shares: Sequence[float]) -> str:
    """Returns a line with the measured times and the resulting shares. With many learners it has only the extremes."""
    taken, chosen = (
        ", ".join(f"{value:.3g}" for value in values)
        if len(values) <= _SHOWN
        else f"{min(values):.3g} to {max(values):.3g}"
        for values in ([1e3 * own_s for own_s in seconds], shares)
    )
    samples = f"{minibatch_size} sample{'s' if minibatch_size > 1 else ''}"
    return f"learners take {taken} ms for {samples}, so their shares are {chosen}"


_SHOWN = 8  # learners that are told one by one
