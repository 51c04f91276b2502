"""The staleness law of n-softsync (rudra.txt §5.1, figure 4) among 30 learners, and what topologies make of it."""

import re
from typing import Any

import numpy as np
import pytest
from clusters import SAMPLES, SIZE_BYTES, job, timing

pytestmark = pytest.mark.slow

LEARNERS = 30
GRADIENTS, FEW = 20_010, 3_000
EPOCHS = 3


def staleness(protocol: str, n: int | None = None, gradients: int = FEW, **simulation: object) -> np.ndarray:
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 1e9, **simulation}
    run = job(protocol, LEARNERS, n=n, epochs=EPOCHS, simulation=costs)
    return timing(run, gradients * SAMPLES // EPOCHS)["gradients"]["staleness"]


@pytest.mark.parametrize("n", [1, 2, 30])
def test_mean_staleness_is_n_and_hardly_any_exceeds_2n(n: int) -> None:
    sigma = staleness("softsync", n, GRADIENTS)
    assert len(sigma) >= 20_000
    assert sigma.mean() == pytest.approx(n, rel=0.1)
    assert (sigma > 2 * n).mean() < 1e-4


@pytest.mark.parametrize(("learners", "n"), [(30, 11), (30, 16), (5, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("simulation", [{}, {"jitter": 0.9, "slowdown": {0: 4.0}}], ids=["alike", "one slow"])
def test_mean_staleness_is_what_a_protocol_expects(learners: int, n: int, simulation: dict[str, Any]) -> None:
    """Not n where λ/n was rounded down: with n > λ/2 all learners but one are under way at each update."""
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 1e9, **simulation}
    run = job("softsync", learners, n=n, epochs=1, simulation=costs)
    expected = run.make_protocol().expected_staleness
    assert expected == (learners - 1) / (learners // n)
    assert timing(run, 2000 * SAMPLES)["gradients"]["staleness"].mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.each_value
@pytest.mark.parametrize("per_rank", [2, 3, 30])
@pytest.mark.parametrize(("n", "protocol"), [(1, "softsync"), (2, "softsync"), (None, "async")])
def test_the_law_holds_for_learners_that_share_ranks(per_rank: int, n: int | None, protocol: str) -> None:
    """They compute one after another, which takes longer, and a gradient is as stale as it would be otherwise."""
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 1e9}
    run = job(protocol, LEARNERS, n=n, epochs=1, simulation=costs).with_(cluster={"learners_per_rank": per_rank})
    expected = run.make_protocol().expected_staleness
    rows = timing(run, 4_000 * SAMPLES)
    assert rows["gradients"]["staleness"].mean() == pytest.approx(expected, rel=0.02)
    assert expected == pytest.approx(n or LEARNERS, rel=0.05)
    assert rows["gradients"]["staleness"].max() <= 2 * (n or LEARNERS)
    assert rows.time_s == pytest.approx(0.1 * 4_000 * per_rank / LEARNERS, rel=0.1)


@pytest.mark.parametrize(("protocol", "topology"), [("async", "base"), ("hardsync", "groups"), ("async", "adv*")])
def test_a_rank_computes_one_mini_batch_at_a_time(protocol: str, topology: str) -> None:
    run = job(protocol, 6, simulation={"compute_s": 0.1, "jitter": 0.0, "nodes": 1, "slowdown": {1: 2.0}})
    run = run.with_(topology={"name": topology}, cluster={"learners_per_rank": 3})
    minibatches = timing(run, 60 * SAMPLES)["minibatches"]
    for first in (0, 3):
        mine = minibatches[np.isin(minibatches["learner"], range(first, first + 3))]
        mine = mine[np.argsort(mine["time_s"])]
        takes_s = np.where(mine["learner"] == 1, 0.2, 0.1)
        assert (np.diff(mine["time_s"]) >= takes_s[1:] - 1e-9).all()
        turns = np.bincount(mine["learner"], minlength=first + 3)[first:]
        assert np.ptp(turns) <= 1, "and all have their turn"


def test_softsync_with_n_of_all_learners_is_async() -> None:
    assert np.array_equal(staleness("async"), staleness("softsync", 30))


@pytest.mark.parametrize("n", [1, 2])
def test_staleness_with_a_slow_learner_exceeds_the_bound(n: int) -> None:
    assert staleness("softsync", n, slowdown={0: 3.0}).max() > 2 * n


def test_hardsync_with_a_slow_learner_is_never_stale() -> None:
    assert staleness("hardsync", slowdown={3: 2.0}).max() == 0


KNOWN: dict[str, np.ndarray] = {}
"""Gradients of a job that `on` has run: several tests compare other jobs with the same one."""


def on(topology: str, protocol: str, n: int | None = None, learners: int = 12, **tables: Any) -> np.ndarray:
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 1e9, "nodes": 3, **tables}
    about = {"name": topology, "options": costs.pop("options", {})}
    plain = job(protocol, learners, n=n, epochs=2, simulation=costs, topology=about).with_(cluster={"buckets": "off"})
    if (key := plain.to_json()) not in KNOWN:
        KNOWN[key] = timing(plain, 1000 * SAMPLES)["gradients"]
    return KNOWN[key]


@pytest.mark.parametrize("simulation", [{}, {"jitter": 0.9}, {"bandwidth_bytes_per_s": 2e7, "slowdown": {3: 4.0}}])
def test_as_many_groups_as_learners_are_async(simulation: dict[str, Any]) -> None:
    """A group of one is a learner: the very same events, so the same staleness, gradient by gradient.

    Only on base do weights come in buckets, with which a forward pass begins early.
    """
    groups = on("groups", "async", options={"groups": 12}, **simulation)
    assert np.array_equal(groups, on("base", "async", **simulation))


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_the_staleness_of_groups_is_their_number_less_one(groups: int) -> None:
    """Omnivore §IV-A: S = g - 1."""
    sigma = on("groups", "async", options={"groups": groups})["staleness"]
    assert sigma.mean() == pytest.approx(groups - 1, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"fan_out": 4}])
def test_async_through_a_tree_is_as_stale_as_through_one_server(options: dict[str, Any]) -> None:
    base, adv = on("base", "async")["staleness"], on("adv", "async", options=options)["staleness"]
    assert adv.mean() == pytest.approx(base.mean(), rel=0.02)
    size = 1 + max(base.max(), adv.max())
    shares = [np.bincount(sigma, minlength=size) / len(sigma) for sigma in (base, adv)]
    assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.1, "the part of all gradients whose staleness is another one"


@pytest.mark.parametrize("options", [{}, {"fan_out": 2}, {"fan_out": [1, 3]}])
def test_hardsync_through_a_tree_is_never_stale(options: dict[str, Any]) -> None:
    assert on("adv", "hardsync", options=options)["staleness"].max() == 0


@pytest.mark.parametrize("free", [{"jitter": 0.0}, {"jitter": 0.1}, {"jitter": 0.3}])
def test_one_softsync_through_a_tree_is_as_stale_as_through_one_server(free: dict[str, Any]) -> None:
    """Rudra §5.5 has a staleness close to 1 for both. Learners of one of L leaf servers go together: 1 - 1/L."""
    alike = {"learners": 54, "nodes": 14, "bandwidth_bytes_per_s": 1e13, "latency_s": 0.0, **free}
    base, adv = (on(name, "softsync", 1, **alike) for name in ("base", "adv"))
    assert abs(adv["staleness"].mean() - base["staleness"].mean()) < 0.15
    assert adv["staleness"].mean() == pytest.approx(1 - 1 / 14, abs=0.05)
    _, times = np.unique(adv[["update", "learner"]], return_counts=True)
    assert times[times > 1].sum() / len(adv) < 0.15, "hardly anybody is twice in an update"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_softsync_through_a_tree_is_no_staler(n: int) -> None:
    """A server passes on whole averages, so updates may be larger than c, and staleness smaller than n."""
    base, adv = on("base", "softsync", n), on("adv", "softsync", n)
    assert base["staleness"].mean() / 2 < adv["staleness"].mean() < base["staleness"].mean() + 0.15
    assert (adv["staleness"] > 2 * n + 1).mean() < 1e-3


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_staleness_rises_from_base_to_adv_star_at_the_papers_bandwidth(jitter: float) -> None:
    """At Table 4's sizes: 289 MB, μ = 4, 4.8 GB/s. What adv hides least, it pays with waiting, not with staleness."""
    paper = {"bandwidth_bytes_per_s": 4.8e9 * SIZE_BYTES / 289e6, "compute_s": 1.042, "jitter": jitter, "nodes": 14}
    sigma = {name: on(name, "softsync", 1, 54, **paper)["staleness"].mean() for name in ("base", "adv", "adv*")}
    assert sigma["base"] == pytest.approx(1, abs=0.05)
    assert sigma["adv"] == pytest.approx(1, abs=0.15)
    assert sigma["adv*"] > 1.3


@pytest.mark.parametrize("outstanding", [1, 2])
def test_a_bound_of_outstanding_gradients_bounds_staleness_where_weights_take_long(outstanding: int) -> None:
    slow = {"bandwidth_bytes_per_s": 2e7}
    free, bound = (on("adv*", "async", **slow, options=o)["staleness"] for o in ({}, {"outstanding": outstanding}))
    assert free.mean() > 2.5 * 12
    assert bound.mean() <= outstanding * 12


def test_with_one_outstanding_gradient_a_learner_alone_is_never_stale() -> None:
    """Then there is no overlap: plain SGD."""
    assert on("adv*", "async", learners=1, options={"outstanding": 1})["staleness"].max() == 0
    assert on("adv*", "async", learners=1)["staleness"].max() > 0


@pytest.mark.parametrize(("protocol", "n"), [("softsync", 1), ("softsync", 2), ("async", None)])
def test_who_never_waits_is_staler_where_weights_take_long(protocol: str, n: int | None) -> None:
    """Rudra-adv* hides what it takes to push and pull, and pays with staleness (rudra.txt §5.5)."""
    slow = {"bandwidth_bytes_per_s": 2e7}
    adv, hidden = (on(name, protocol, n, **slow)["staleness"].mean() for name in ("adv", "adv*"))
    assert hidden > 1.5 * adv


@pytest.mark.parametrize(
    ("topology", "options", "modulation", "told"),
    [
        ("adv*", {}, "n", "[topology] options.outstanding bounds that"),
        ("adv*", {"outstanding": 2}, "n", None),
        ("adv*", {}, "mean_staleness", None),
        ("adv*", {}, "none", None),
        ("base", {}, "n", None),
    ],
)
def test_gradients_that_are_too_stale_for_the_rate_are_told_once(
    topology: str, options: dict[str, Any], modulation: str, told: str | None
) -> None:
    """Every epoch of three is staler than 2n where nobody waits; α0/n is the rate for n."""
    costs = {"compute_s": 0.1, "jitter": 0.1, "bandwidth_bytes_per_s": 2e7, "nodes": 3}
    run = job("async", 12, simulation=costs, topology={"name": topology, "options": options})
    warnings = timing(run.with_(protocol={"modulation": modulation}), 1000 * SAMPLES).warnings
    assert len(warnings) == bool(told)
    for text in warnings:
        assert re.search(r"gradients of epoch 1 were stale by \d+\.\d updates on average, more than 2n = 24, ", text)
        assert text.endswith(f"'mean_staleness' divides it by what is measured, {told}")
