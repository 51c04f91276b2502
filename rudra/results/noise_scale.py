"""Gradient noise scale B, from squared norms of gradients and of their averages.

A gradient g over b samples is G + noise. G is the gradient over all samples, and the noise has the covariance Σ / b. So
E|g|² = |G|² + tr(Σ) / b. The noise scale B = tr(Σ) / |G|² is the size of a batch whose noise is as large as its
gradient. Smaller batches cost few additional samples, larger ones save few updates.

An update averages c gradients g_i of b_i samples with weights v_i, whose sum is 1. Their average g has
E|g|² = |G|² + tr(Σ) Σ v_i² / b_i. The expected difference Σ v_i |g_i|² - |g|² contains no |G|². So these estimates are
unbiased, for any b_i and v_i:

    tr(Σ) ≈ (Σ v_i |g_i|² - |g|²) / (Σ v_i / b_i - Σ v_i² / b_i)
    |G|²  ≈ |g|² - tr(Σ) Σ v_i² / b_i

With v_i = b_i / Σ b_i the first one is Σ b_i |g_i - g|² / (c - 1), the mean square between groups of an analysis of
variance. With equal b_i both are the estimates of the source for batches of b and cb samples.

The quotient of two estimates is biased and varies a lot. So both are averaged over many updates before the division.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team 2018, "An Empirical Model of Large-Batch Training", eq. 2.8
and appendix A.1. It has equal batches, and a moving average instead of the mean over updates.

Samples of a batch are drawn without replacement from n. This reduces tr(Σ) by the factor 1 - b/n, which is ignored.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FEWEST = 10
"""Smallest number of updates that a standard error is estimated from."""

_BLOCKS = 32
_CLEAR = 3.0
"""Smallest ratio of the mean |G|² to its standard error. With a smaller one, a quotient with this mean says nothing."""

Numbers = NDArray[np.float64]


class Moments(NamedTuple):
    """Estimates of the two moments from each of several updates. All arrays have the shape (updates,).

    Attributes:
        signal: Estimates of |G|².
        noise: Estimates of tr(Σ).
        weight: Weight of each update in a mean over updates.
    """

    signal: Numbers
    noise: Numbers
    weight: Numbers

    def of(self, chosen: NDArray[np.bool_]) -> "Moments":
        """Returns the estimates from some of the updates."""
        return Moments(*(column[chosen] for column in self))


class NoiseScale(NamedTuple):
    """Gradient noise scale of several updates.

    Attributes:
        samples: B, in samples. NaN: the updates are too few.
        error: Standard error of B. It contains the change of B over the updates. NaN: as above.
        updates: Number of updates that the estimate is made from.
        needed: Number of updates that would be enough, at least. 0: these are enough.
    """

    samples: float
    error: float
    updates: int
    needed: int = 0


def of_averages(
    update: NDArray[np.int64], samples: NDArray[np.int64], weights: Numbers, squares: Numbers, averages: Numbers
) -> Moments:
    """Estimates the moments from gradients and their averages. Updates of one gradient get the weight 0.

    Args:
        update: Place of each gradient's update in `averages`, shape (gradients,).
        samples: b_i: samples of each gradient, shape (gradients,).
        weights: Weight of each gradient in its average, shape (gradients,). Their sum may differ from 1.
        squares: |g_i|²: squared norm of each gradient, shape (gradients,).
        averages: Squared norm of each average, shape (updates,).
    """

    def total(values: Numbers) -> Numbers:
        found: Numbers = np.bincount(update, values, len(averages)).astype(np.float64, copy=False)
        return found

    whole = total(weights)
    v = weights / whole[update]
    averages = averages / whole**2
    own = total(v**2 / samples)  # the share of tr(Σ) in |g|²
    apart = total(v / samples) - own
    several = total(np.ones(len(v))) > 1
    noise = np.divide(total(v * squares) - averages, apart, out=np.zeros(len(averages)), where=several)
    # With v = b / Σb this is c - 1, the degrees of freedom.
    weight = np.divide(apart, own, out=np.zeros(len(averages)), where=several)
    return Moments(averages - noise * own, noise, weight)


def of_neighbours(samples: NDArray[np.int64], squares: Numbers, products: Numbers) -> Moments:
    """Estimates the moments from gradients of successive updates, whose noise is independent: E(g_t · g_s) = G_t · G_s.

    The estimate is biased, because the weights of both gradients differ by an update. A step along g_s reduces
    g_t · g_s by its learning rate times g_s · H g_s, where H is the Hessian. So |G|² is too small, and B too large.

    Args:
        samples: Samples of each gradient, shape (updates,).
        squares: Squared norm of each gradient, shape (updates,).
        products: Inner product of each gradient and the previous one, shape (updates,).
    """
    return Moments(products, samples * (squares - products), np.ones(len(samples)))


def of_replicas(differences: Moments, squares: Numbers, shares: Numbers, elasticity: Numbers, way: Numbers) -> Moments:
    """Estimates the moments from the differences of replicas from the weights z, just before each average.

    Each replica takes τ steps x ← x - α g between two averages. An average moves it towards z by the part e of its
    difference (`elasticity`). The noise of its steps makes the variance V of its place. In balance
    V = (1 - e)² V + α² τ tr(Σ) / b. A period of a replica has τb samples, so `differences.noise`, which is V τ b, is
    tr(Σ) (ατ)² / (1 - (1 - e)²).

    If e = 1, replicas begin at z, so `differences.signal` is |G|² (ατ)². Otherwise |G|² is what the norms of gradients
    leave: |g|² - tr(Σ) / b. A small b then makes |G|² uncertain.

    This assumes steps without momentum, and averages that pull more strongly than the curvature of the loss. Curvature
    makes distances, and so B, too small. A training set of few mini-batches has the same effect, because a replica
    draws them without replacement.

    Args:
        differences: Moments of the differences, with the samples of a period.
        squares: Mean |g|² of gradients of all replicas, weighted by samples, shape (updates,).
        shares: Mean 1/b of these gradients, weighted by samples.
        elasticity: e of each update, more than 0.
        way: ατ of each update.
    """
    noise = differences.noise * (1 - (1 - elasticity) ** 2) / way**2
    signal = np.where(elasticity == 1, differences.signal / way**2, squares - noise * shares)
    return Moments(signal, noise, differences.weight)


def noise_scale(moments: Moments) -> NoiseScale:
    """Returns B as the quotient of the means of both moments over all updates.

    Its standard error is a delete-one jackknife over blocks of successive updates, because moments of successive
    updates are correlated.
    """
    moments = moments.of(moments.weight > 0)
    count = len(moments.weight)
    if count < FEWEST:
        return NoiseScale(math.nan, math.nan, count, FEWEST)
    blocks = min(_BLOCKS, count)
    starts = np.arange(blocks) * count // blocks
    weight, signal, noise = (
        np.add.reduceat(column, starts)
        for column in (moments.weight, moments.weight * moments.signal, moments.weight * moments.noise)
    )
    weights, signals, noises = (column.sum() - column for column in (weight, signal, noise))  # without each block
    mean, error = signal.sum() / weight.sum(), _jackknife(signals / weights)
    clear = mean / error if error > 0 else math.inf if mean > 0 else 0.0
    if clear < _CLEAR:
        return NoiseScale(math.nan, math.nan, count, math.ceil(count * (_CLEAR / max(1.0, clear)) ** 2))
    return NoiseScale(float(noise.sum() / signal.sum()), _jackknife(noises / signals), count)


def _jackknife(without: Numbers) -> float:
    """Returns the standard error of an estimate, from the estimates without each block."""
    return float(np.sqrt((len(without) - 1) * without.var()))
