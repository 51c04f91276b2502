"""Distribution of recorded times of mini-batches: jitter, distribution and stragglers of virtual time."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

STRAGGLING = 4.0
"""Factor on the median from which a mini-batch counts as a straggler."""

_MOST_STRAGGLERS = 0.05  # if more are late, they belong to the distribution
_QUANTILES = 400  # compared between recorded times and each distribution
_CLEARLY = 0.8  # fraction of the misfit of a uniform distribution that another one must stay below
_NEARLY_NONE = 0.05
_WIDER = 1.5  # a learner's jitter must differ by this factor from the others'

Times = npt.NDArray[np.float64]


class TimeSpread(NamedTuple):
    """Random variation of the times of mini-batches.

    Attributes:
        distribution: Name in `[simulation] distribution`.
        jitter: Its width.
        of_median: `compute_s` of this distribution, as a multiple of the median of the times.
        own: Learner -> its width, if it differs from `jitter`.
        straggler_probability: Fraction of mini-batches that are late.
        straggler_factor: Factor on their time.
    """

    distribution: str
    jitter: float
    of_median: float
    own: dict[int, float]
    straggler_probability: float = 0.0
    straggler_factor: float = 10.0

    def keys(self) -> dict[str, Any]:
        """Returns the keys of `[simulation]`, except for single learners."""
        names = ("distribution", "jitter", "straggler_probability", "straggler_factor")
        return {name: getattr(self, name) for name in names}


def spread_of(times: Mapping[int, Times]) -> TimeSpread:
    """Fits the distribution of times.

    Args:
        times: Learner -> its times in the order of its steps, as multiples of their median.
    """
    late = np.concatenate([own[own > STRAGGLING] for own in times.values()])
    count = sum(map(len, times.values()))
    probability, factor = 0.0, 10.0
    if 0 < len(late) <= _MOST_STRAGGLERS * count:
        probability, factor = len(late) / count, float(np.median(late))
        times = {number: own[own <= STRAGGLING] for number, own in times.items()}
    pooled = np.concatenate([*times.values()])
    deviation = math.sqrt(_mean_square([*times.values()]))
    sigma = math.sqrt(_mean_square([np.log(own) for own in times.values()]))
    mean, least = float(pooled.mean()), float(pooled.min())
    least = max(least - (mean - least) / len(pooled), 1e-12)
    width = min(0.99, math.sqrt(3) * deviation)
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = np.array([NormalDist().inv_cdf(each) for each in at.tolist()])
    quantiles = {
        "uniform": (mean * (1 + width * (2 * at - 1)), width, mean),
        "lognormal": (np.exp(sigma * normal), sigma, 1.0),
        "exponential": (least - (mean - least) * np.log(1 - at), mean / least - 1, least),
        "memoryless": (-mean * np.log(1 - at), 0.1, mean),
    }
    found = np.quantile(pooled, at)
    misfit = {name: float(np.abs(found - values).mean()) for name, (values, *_) in quantiles.items()}
    best = min(misfit, key=lambda name: misfit[name])
    if misfit[best] > _CLEARLY * misfit["uniform"]:
        best = "uniform"
    elif least < _NEARLY_NONE * mean:  # an exponential distribution from about 0 is memoryless
        best = "memoryless"
    _, jitter, of_median = quantiles[best]
    own = _own(times, deviation) if best == "uniform" else {}
    return TimeSpread(best, jitter, of_median, own, probability, factor)


def _own(times: Mapping[int, Times], deviation: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for number, taken in times.items():
        alone = math.sqrt(_mean_square([taken]))
        if deviation and not 1 / _WIDER < alone / deviation < _WIDER:
            found[number] = min(0.99, math.sqrt(3) * alone)
    return found


def _mean_square(series: list[Times]) -> float:
    """Returns the variance from one step to the next, so that a slow drift of a machine does not count."""
    squares = np.concatenate([np.diff(values) ** 2 / 2 for values in series])
    return float(squares.mean()) if len(squares) else 0.0
