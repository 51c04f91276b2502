"""Omnivore's Theorem 1 and its staleness S = g - 1, among compute groups in virtual time."""

import numpy as np
import pytest
from clusters import SAMPLES, job, timing

from tests.selection import CAMPAIGN, covering
from tests.sim.implicit_momentum import fit, measure

pytestmark = pytest.mark.slow

GRADIENTS = 2500


def staleness(groups: int, learners: int, **simulation: object) -> np.ndarray:
    options = {"name": "groups", "options": {"groups": groups}}
    costs = {"compute_s": 1.0, "bandwidth_bytes_per_s": 1e12, **simulation}
    run = job("async", learners, epochs=1, topology=options, simulation=costs)
    return timing(run, GRADIENTS * SAMPLES)["gradients"]["staleness"][GRADIENTS // 10 :]


@pytest.mark.parametrize(("groups", "learners"), [(1, 4), (2, 4), (4, 4), (4, 8), (8, 8)])
def test_group_staleness_is_g_less_one(groups: int, learners: int) -> None:
    sigma = staleness(groups, learners, jitter=0.06)
    assert sigma.mean() == pytest.approx(groups - 1, abs=0.05)
    assert sigma.std() < max(0.01, 0.5 * groups), "nearly in turns"


def test_groups_that_take_turns_are_all_as_stale() -> None:
    assert set(staleness(4, 4, jitter=0.0)) == {3}


def test_staleness_is_geometric_where_step_times_are_memoryless() -> None:
    sigma = staleness(4, 4, distribution="memoryless")
    found = np.bincount(sigma, minlength=5)[:5] / len(sigma)
    assert found == pytest.approx(0.25 * 0.75 ** np.arange(5), abs=0.03)


@pytest.mark.parametrize("groups", covering([2], [1, 2, 8]))
def test_groups_act_like_momentum_of_one_less_their_share(groups: int) -> None:
    found = measure(groups, seeds=40)
    assert found.momentum == pytest.approx(1 - 1 / groups, abs=0.05)
    assert found.error < 0.03
    assert found.rate == pytest.approx(1.0, abs=0.3), "the gradient enters at η/g"


@pytest.mark.parametrize(("learners", "n"), [(4, 1), pytest.param(5, 3, marks=CAMPAIGN)])
def test_under_softsync_it_is_the_staleness_that_acts_like_momentum(learners: int, n: int) -> None:
    """Also where all learners together make an update: ⟨σ⟩ is nearly 1 then, and so acts like a half."""
    run = job("softsync", learners, n=n, optimizer={"momentum": 0.95, "momentum_correction": "implicit"})
    taken = 0.95 - run.explicit_momentum()
    found = measure(learners, seeds=24, n=n)
    assert found.momentum == pytest.approx(taken, abs=0.05)
    assert found.momentum == pytest.approx(found.staleness / (1 + found.staleness), abs=0.05)
    assert found.error < 0.02


def test_the_fit_finds_the_momentum_of_momentum() -> None:
    """Steps made by the recursion itself, with noise that means over few seeds do not remove."""
    source = np.random.default_rng(1)
    steps, gradients = np.zeros((60, 40, 3)), np.zeros((60, 40, 3))
    weights, step = np.full((60, 3), 3.0), np.zeros((60, 3))
    for t in range(40):
        gradients[:, t] = weights * [0.2, 0.5, 1.0]
        step = 0.6 * step - 0.3 * (gradients[:, t] + source.normal(0.0, 0.3, (60, 3)))
        steps[:, t] = step
        weights = weights + step
    m, coefficient, error = fit(steps, gradients)
    assert m == pytest.approx(0.6, abs=4 * error)
    assert coefficient == pytest.approx(0.3, abs=0.03)
    assert error < 0.02


@pytest.mark.parametrize(("momentum", "groups", "warnings"), [(0.9, 4, 0), (0.75, 4, 1), (0.5, 4, 1), (0.5, 1, 0)])
def test_a_momentum_of_which_nothing_is_left_is_told_once(momentum: float, groups: int, warnings: int) -> None:
    run = job(
        "async",
        4,
        topology={"name": "groups", "options": {"groups": groups}},
        optimizer={"momentum": momentum, "momentum_correction": "implicit"},
    )
    said = timing(run, 80).warnings
    assert len(said) == warnings
    assert all(f"leaves no explicit momentum of {momentum:g}" in text for text in said)


def test_without_correction_nothing_is_told() -> None:
    assert timing(job("async", 4, optimizer={"momentum": 0.5}), 80).warnings == []
