"""Which samples a gradient is made of, and who decides that: the plan, μ and the shares of the learners."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from msgspec import Struct

from topologies import Plan


class Work(Struct, frozen=True, gc=False):
    """The samples of one gradient: `count` of them from the `first` on, in a stream of samples.

    Attributes:
        stream: number of the walk through the training set that they are drawn from.
        first: position of the first one in that walk.
        count: how many.
        stride: how much further on the learner's next work begins, unless something changes by then.
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


def portion(plan: Plan, role: int, minibatch_size: int, shares: Sequence[float] = ()) -> Portion:
    """What a learner computes.

    Without shares it draws μ samples from a stream of its own. With shares, the learners of a compute group, or all
    where there are no groups, draw from one stream and take adjacent parts of each batch.

    Args:
        plan: who is who.
        role: the learner's.
        minibatch_size: μ; a batch of k learners has kμ samples.
        shares: for each learner of the job by its number, how much it takes compared with the others.
    """
    about = plan.roles[role]
    if not shares:
        return Portion(about.index, 0, minibatch_size, minibatch_size)
    members = plan.learners if about.group is None else plan.group_of(role)
    batch = minibatch_size * len(members)
    counts = apportion([shares[plan.roles[member].index] for member in members], batch)
    place = members.index(role)
    return Portion(about.group or 0, sum(counts[:place]), counts[place], batch)


def apportion(shares: Sequence[float], batch: int) -> list[int]:
    """Whole samples of a batch in proportion to shares: at least one each, and `batch` in all."""
    total = sum(shares)
    ends = [round(batch * end / total) for end in accumulate(shares, initial=0.0)]
    counts = [end - begin for begin, end in pairwise(ends)]
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
