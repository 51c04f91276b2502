"""The staleness law of n-softsync (rudra.txt §5.1, figure 4) among 30 learners in virtual time."""

import numpy as np
import pytest
from clusters import SAMPLES, job, timing

LEARNERS = 30
GRADIENTS = 20_010
EPOCHS = 3


def staleness(protocol: str, n: int | None = None, **simulation: object) -> np.ndarray:
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 1e9, **simulation}
    run = job(protocol, LEARNERS, n=n, epochs=EPOCHS, simulation=costs)
    return timing(run, GRADIENTS * SAMPLES // EPOCHS)["gradients"]["staleness"]


@pytest.mark.parametrize("n", [1, 2, 30])
def test_mean_staleness_is_n_and_hardly_any_exceeds_2n(n: int) -> None:
    sigma = staleness("softsync", n)
    assert len(sigma) >= 20_000
    assert sigma.mean() == pytest.approx(n, rel=0.1)
    assert (sigma > 2 * n).mean() < 1e-4


def test_async_is_softsync_with_n_of_all_learners() -> None:
    assert np.array_equal(staleness("async"), staleness("softsync", 30))


@pytest.mark.parametrize("n", [1, 2])
def test_a_slow_learner_breaks_the_bound(n: int) -> None:
    assert staleness("softsync", n, slowdown={0: 3.0}).max() > 2 * n


def test_hardsync_is_never_stale() -> None:
    assert staleness("hardsync", slowdown={3: 2.0}).max() == 0
