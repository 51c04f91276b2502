"""Growth of a bank on curves of throughput, for both rules."""

import random
from collections.abc import Callable

import pytest

from rudra.roles.growth import Measurement, next_size

Curve = Callable[[int], float]

MOST = 64

CURVES: dict[str, Curve] = {
    "linear to 64": lambda m: 100.0 * m,
    "linear to 8, then flat": lambda m: 100.0 * min(m, 8),
    "saturating": lambda m: 100 * m / (1 + m / 20),
    "peaked at 6": lambda m: 100 * min(m, 36 / m),
    "peaked at 3": lambda m: 100 * min(m, 9 / m),
    "peaked at 4": lambda m: 100 * min(m, 16 / m),
    "peaked at 12": lambda m: 100 * min(m, 144 / m),
    "peaked at 48": lambda m: 100 * min(m, 48**2 / m),
    "flat": lambda m: 100.0,
    "falling": lambda m: 100.0 / m,
}

PAPERS = {  # the m at which Algorithm 2 stops: the last one that brought more than 10 %
    "linear to 64": 10,
    "linear to 8, then flat": 8,
    "saturating": 8,
    "peaked at 6": 6,
    "peaked at 3": 3,
    "peaked at 4": 4,
    "peaked at 12": 10,
    "peaked at 48": 10,
    "flat": 1,
    "falling": 1,
}


def grown(growth: str, measure: Curve, most: int = MOST, first: int = 1) -> tuple[int, list[int]]:
    """Returns the final size, and the sizes measured."""
    measured = [Measurement(first, measure(first))]
    while not (found := next_size(growth, measured, most)).ends:
        assert 1 <= found.learners <= most
        assert found.learners not in [m for m, _ in measured]
        measured.append(Measurement(found.learners, measure(found.learners)))
    return found.learners, [m for m, _ in measured]


def noisy(curve: Curve, seed: int) -> Curve:
    chance = random.Random(seed)
    return lambda m: curve(m) * chance.uniform(0.95, 1.05)


def drifting(curve: Curve, factor: float) -> Curve:
    """Returns a curve that grows by a factor with every measurement."""
    made = [1.0]

    def measure(m: int) -> float:
        made[0] *= factor
        return curve(m) * made[0]

    return measure


@pytest.mark.parametrize("name", CURVES)
def test_one_ends_where_the_algorithm_of_the_paper_does(name: str) -> None:
    size, measured = grown("one", CURVES[name])
    assert size == PAPERS[name]
    assert measured == [*range(1, size + 2)]


@pytest.mark.parametrize("name", CURVES)
def test_double_finds_a_small_bank_near_the_best_in_nine_measurements(name: str) -> None:
    curve = CURVES[name]
    size, measured = grown("double", curve)
    best = max(map(curve, range(1, MOST + 1)))
    assert curve(size) >= 0.8 * best
    assert len(measured) <= 9
    near = min(m for m in measured if curve(m) >= 0.9 * max(map(curve, measured)))
    assert size == near


@pytest.mark.parametrize("name", CURVES)
def test_double_is_near_the_best_with_noise_of_five_percent(name: str) -> None:
    curve = CURVES[name]
    best = max(map(curve, range(1, MOST + 1)))
    for seed in range(200):
        size, measured = grown("double", noisy(curve, seed))
        assert curve(size) >= 0.8 * best, seed
        assert len(measured) <= 9


@pytest.mark.parametrize("name", ["linear to 8, then flat", "peaked at 3", "peaked at 4", "flat", "falling"])
def test_one_ends_beside_the_papers_number_with_noise_of_five_percent(name: str) -> None:
    """Above m = 5 an additional learner brings less than 20 %, so noise of 5 % can hide its gain of 10 %."""
    sizes = {grown("one", noisy(CURVES[name], seed))[0] for seed in range(200)}
    low = min(PAPERS[name], 5)
    assert sizes <= {*range(low - 1, PAPERS[name] + 2)}


@pytest.mark.parametrize("factor", [0.97, 1.03])
@pytest.mark.parametrize("name", CURVES)
def test_both_rules_bear_a_drift_of_three_percent_with_every_measurement(name: str, factor: float) -> None:
    curve = CURVES[name]
    size, measured = grown("double", drifting(curve, factor))
    assert curve(size) >= 0.8 * max(map(curve, range(1, MOST + 1)))
    assert len(measured) <= 9
    gain = [m for m in range(1, MOST) if curve(m + 1) * factor <= 1.1 * curve(m)]
    assert grown("one", drifting(curve, factor))[0] == (gain[0] if gain else MOST)


@pytest.mark.parametrize("growth", ["one", "double"])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 48])
def test_a_bank_grows_to_its_largest_size_at_most(growth: str, most: int) -> None:
    size, measured = grown(growth, CURVES["linear to 64"], most)
    assert max(measured) == (11 if growth == "one" and most > 10 else most)
    assert size >= (10 if growth == "one" and most > 10 else 0.9 * most)


@pytest.mark.parametrize("growth", ["one", "double"])
@pytest.mark.parametrize("fits", [1, 3, 5])
def test_a_bank_that_does_not_fit_ends_the_growth_at_the_largest_size_that_did(growth: str, fits: int) -> None:
    size, measured = grown(growth, lambda m: 100.0 * m if m <= fits else 0.0)
    assert measured[-1] > fits
    assert size == max(m for m in measured if m <= fits)


def test_a_bank_may_begin_with_several_learners() -> None:
    assert grown("double", CURVES["linear to 8, then flat"], first=3) == (9, [3, 6, 12, 24, 18, 9])
