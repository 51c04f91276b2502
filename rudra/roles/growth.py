"""Growth of a bank: the number of learners on a device, m, that the run measures next or keeps.

Source: crossbow.txt §3.4 and §4.4, Algorithm 2, and two deviations. The paper compares absolute throughputs with a
threshold that it does not give. The threshold here is relative, as in the authors' code, and so the rule `one` stops at
m = 10 even if m learners are m times as fast as one. The rule `double` has no such bound.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ONE_GAIN = 1.1
"""Ratio of two throughputs above which the rule `one` adds another learner."""

DOUBLE_GAIN = 1.2
"""Ratio of two throughputs from which the rule `double` doubles the number of learners again."""

NEAR = 0.9
"""Fraction of the highest throughput that the rule `double` accepts from a smaller number of learners."""

BETWEEN = 2
"""Number of measurements between powers of two."""


class Measurement(NamedTuple):
    """Throughput of a run with a number of learners on each device.

    Attributes:
        learners: m.
        images_per_s: Samples of all learners in a second. 0: their memory does not suffice.
    """

    learners: int
    images_per_s: float


class NextSize(NamedTuple):
    """Number of learners on each device from now on.

    Attributes:
        learners: m.
        ends: Whether the run keeps it. Otherwise it is measured next.
    """

    learners: int
    ends: bool


def next_size(growth: str, measured: Sequence[Measurement], most: int) -> NextSize:
    """Returns the size of a bank that follows from all measurements. It has no other memory.

    A size that does not fit into memory ends the growth at the largest smaller one.

    Args:
        growth: Rule, a value of `cluster.growth`: `"double"` or `"one"`.
        measured: Measurements in their order, at least one. The first one is the size at the start.
        most: Largest size.
    """
    *before, last = measured
    if not last.images_per_s:
        return NextSize(max((m for m, _ in before if m < last.learners), default=1), ends=True)
    return RULES[growth](measured, most)


def by_one(measured: Sequence[Measurement], most: int) -> NextSize:
    """Adds a learner while this brings more than 1.1 times the throughput, else removes the last one and ends.

    As in the authors' code, the first addition without this gain is the last one.
    """
    *before, last = measured
    if before and last.images_per_s <= ONE_GAIN * before[-1].images_per_s:
        return NextSize(before[-1].learners, ends=True)
    return NextSize(min(last.learners + 1, most), ends=last.learners >= most)


def by_doubling(measured: Sequence[Measurement], most: int) -> NextSize:
    """Doubles the learners while this brings 1.2 times the throughput, then looks for a smaller number between them.

    The first measurement between is in the middle of the last doubling, where the highest throughput may be. The next
    ones halve the gap below the smallest number whose throughput is within 10 % of the highest.
    """
    found = dict(measured)
    doubled = _doublings(measured)
    last = doubled[-1]
    gains = len(doubled) == 1 or found[last] >= DOUBLE_GAIN * found[doubled[-2]]
    if len(doubled) == len(measured) and gains and last < most:
        return NextSize(min(2 * last, most), ends=False)
    keeps = smallest_near_best(found)
    if len(measured) - len(doubled) == BETWEEN:
        return NextSize(keeps, ends=True)
    if len(doubled) == len(measured) and not gains:
        above, below = last, doubled[-2]
    else:
        above, below = keeps, max((m for m in found if m < keeps), default=keeps)
    if above - below < 2:
        return NextSize(keeps, ends=True)
    return NextSize((above + below) // 2, ends=False)


def _doublings(measured: Sequence[Measurement]) -> list[int]:
    """Returns the sizes up to the first measurement between."""
    sizes = [m for m, _ in measured]
    return [m for place, m in enumerate(sizes) if m > max(sizes[:place], default=0)]


def smallest_near_best(found: Mapping[int, float]) -> int:
    """Returns the smallest size whose throughput is within 10 % of the highest.

    Args:
        found: Size -> samples in a second.
    """
    least = NEAR * max(found.values())
    return min(m for m, images_per_s in found.items() if images_per_s >= least)


RULES = {"double": by_doubling, "one": by_one}
"""Rules of growth by name."""
