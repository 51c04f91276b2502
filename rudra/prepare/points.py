"""Times between measured ones: mini-batches of other sizes, and banks of other sizes."""

import math
from collections.abc import Mapping

BankSeconds = Mapping[int, float | Mapping[int, float]]
"""Number of learners of a bank -> seconds until each has computed a mini-batch, as `at` accepts them."""


def at(compute_s: float | Mapping[int, float], minibatch_size: int) -> float:
    """Returns the seconds for one mini-batch, given a constant or points (μ, seconds) on straight lines in log-log
    scale.

    The outermost lines are extended. A single point means that the time is proportional to μ.
    """
    if not isinstance(compute_s, Mapping):
        return compute_s
    points = sorted((math.log(size), math.log(seconds)) for size, seconds in compute_s.items())
    if len(points) == 1:
        return math.exp(points[0][1]) * minibatch_size / math.exp(points[0][0])
    x = math.log(minibatch_size)
    place = min(max(1, sum(size < x for size, _ in points)), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def bank_at(bank_s: BankSeconds, learners: int, minibatch_size: int) -> float:
    """Returns the seconds until each learner of a bank has computed a mini-batch.

    Args:
        bank_s: Known times. Other numbers of learners are on straight lines in log-log scale, as μ is.
        learners: m.
        minibatch_size: μ.
    """
    return at({m: at(seconds, minibatch_size) for m, seconds in bank_s.items()}, learners)
