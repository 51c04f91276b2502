"""The gradient noise scale, against gradients whose moments are known."""

import math

import numpy as np
import pytest

from rudra.results.noise_scale import FEWEST, Moments, noise_scale, of_averages, of_neighbours, of_replicas

SIGNAL, SIGMA = 2.0, np.linspace(0.1, 2.0, 30)  # |G|², and the variances of Σ
NOISE = float(SIGMA.sum())
REPEATS = 400


def gradients(random: np.random.Generator, samples: list[int], updates: int, repeats: int = REPEATS) -> np.ndarray:
    """Gradients of shape (repeats, updates, c, parameters)."""
    noise = random.standard_normal((repeats, updates, len(samples), len(SIGMA)))
    noise *= np.sqrt(SIGMA) / np.sqrt(samples)[:, None]
    noise[..., 0] += np.sqrt(SIGNAL)
    return noise


def moments_of(one: np.ndarray, samples: list[int], weights: np.ndarray) -> Moments:
    """Moments of the updates of one repeat."""
    count = len(samples)
    update = np.arange(len(one)).repeat(count)
    averages = (weights[:, None] * one).sum(1)
    squares, means = (one**2).sum(-1).ravel(), (averages**2).sum(-1)
    return of_averages(update, np.tile(samples, len(one)), np.tile(weights, len(one)), squares, means)


@pytest.mark.parametrize(
    ("samples", "scale"),
    [([8, 8], [1.0, 1.0]), ([2, 5, 20], [1.0, 1.0, 1.0]), ([2, 5, 20], [0.2, 1.0, 0.4])],
    ids=["equal", "unequal", "scaled"],
)
def test_moments_of_unequal_batches_have_no_bias_and_b_lies_within_its_error(samples: list[int], scale: list) -> None:
    random = np.random.default_rng(7)
    weights = np.array(scale) * samples / np.sum(samples)
    each = [moments_of(one, samples, weights) for one in gradients(random, samples, 60)]
    for found, wanted in ((np.stack([m.signal for m in each]), SIGNAL), (np.stack([m.noise for m in each]), NOISE)):
        assert abs(found.mean() - wanted) < 4 * found.std() / math.sqrt(found.size)
    scales = [noise_scale(m) for m in each]
    assert all(s.updates == 60 and s.needed == 0 for s in scales)
    covered = np.mean([abs(s.samples - NOISE / SIGNAL) < 1.96 * s.error for s in scales])
    assert 0.91 < covered < 0.98  # a standard deviation of this share is 0.011


def test_noise_of_weighted_averages_is_the_mean_square_between_batches() -> None:
    samples = np.array([3, 4, 9])
    one = np.random.default_rng(1).standard_normal((5, 3, 4))
    weights = samples / samples.sum()
    found = moments_of(one, samples.tolist(), weights)
    apart = one - (weights[:, None] * one).sum(1, keepdims=True)
    assert found.noise == pytest.approx((samples * (apart**2).sum(-1)).sum(1) / 2)
    assert found.weight == pytest.approx(np.full(5, 2.0))


def test_error_covers_a_gradient_that_changes_slowly() -> None:
    """Its squared norm is correlated over updates, so an error from single updates would be too small."""
    random = np.random.default_rng(3)
    steps, sizes = random.standard_normal((REPEATS, 600)), np.zeros((REPEATS, 600))
    for i in range(1, 600):
        sizes[:, i] = 0.8 * sizes[:, i - 1] + 0.6 * steps[:, i]
    squares = SIGNAL * (1 + 0.5 * sizes) ** 2  # the mean is 1.25 SIGNAL
    found = [noise_scale(Moments(one, np.full(600, NOISE), np.ones(600))) for one in squares]
    spread = np.std([s.samples for s in found])
    assert 0.8 * spread < np.mean([s.error for s in found]) < 1.2 * spread
    alone = np.std(squares, 1).mean() / math.sqrt(600) / squares.mean() * NOISE / squares.mean()
    assert alone < 0.5 * spread


def test_neighbours_of_equal_weights_have_no_bias() -> None:
    random = np.random.default_rng(5)
    one = gradients(random, [4], 30)[:, :, 0]
    products = (one[:, 1:] * one[:, :-1]).sum(-1)
    found = of_neighbours(np.full(29, 4), (one[:, 1:] ** 2).sum(-1), products)
    assert found.signal.mean() == pytest.approx(SIGNAL, rel=0.05)
    assert found.noise.mean() == pytest.approx(NOISE, rel=0.05)


@pytest.mark.parametrize(("elasticity", "period"), [(1.0, 1), (1.0, 4), (0.25, 3)])
def test_replicas_on_a_slope_have_no_bias(elasticity: float, period: int) -> None:
    """Of unequal batches. The gradient is the same everywhere, so only noise drives replicas apart."""
    random, rate, samples = np.random.default_rng(11), 0.1, np.array([2, 6, 10])
    shares = samples / samples.sum()
    steps = gradients(random, samples.tolist(), 120 * period, 4).reshape(4, 120, period, 3, -1)
    place, z = np.zeros((4, 3, len(SIGMA))), np.zeros((4, 1, len(SIGMA)))
    distances, lengths, means = [], [], []
    for i in range(120):
        place -= rate * steps[:, i].sum(1)
        difference = z - place
        mean = (shares[:, None] * difference).sum(1, keepdims=True)
        distances.append((difference**2).sum(-1))
        means.append((mean**2).sum(-1)[:, 0])
        lengths.append((steps[:, i, -1] ** 2).sum(-1))
        z = z - mean
        place += elasticity * (z - place)
    late = slice(30, None)  # in balance
    squares, norms = (np.concatenate(each[late]) for each in (distances, lengths))
    count = len(squares)
    about = (np.arange(count).repeat(3), np.tile(samples * period, count), np.tile(shares, count), squares.ravel())
    differences = of_averages(*about, np.concatenate(means[late]))
    inverse, pull, way = (np.full(count, x) for x in ((shares / samples).sum(), elasticity, rate * period))
    found = of_replicas(differences, norms @ shares, inverse, pull, way)
    assert found.noise.mean() == pytest.approx(NOISE, rel=0.06)
    assert found.signal.mean() == pytest.approx(SIGNAL, rel=0.1)


def test_too_few_updates_say_how_many_are_needed() -> None:
    few = Moments(*(np.ones(FEWEST - 1) for _ in range(3)))
    found = noise_scale(few)
    assert math.isnan(found.samples)
    assert (found.updates, found.needed) == (FEWEST - 1, FEWEST)
    # One gradient per update says nothing, however many updates there are.
    single = np.arange(50)
    alone = of_averages(single, np.full(50, 4), np.ones(50), np.ones(50), np.ones(50))
    assert noise_scale(alone).needed == FEWEST
    # A mean |G|² as large as its standard error is three times too unclear, which takes nine times as many updates.
    signal = np.tile([1.0, -1.0], 16) + 1 / math.sqrt(31)
    found = noise_scale(Moments(signal, np.ones(32), np.ones(32)))
    assert math.isnan(found.samples)
    assert found.needed == pytest.approx(9 * 32, abs=1)
