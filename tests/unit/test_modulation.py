"""What staleness and the number of learners do to the rate (rudra.txt §3.2, eq. 6, footnote 3)."""

import math
from typing import Any

import pytest

import protocols
from protocols import MODULATIONS, Modulation
from rudra.errors import ConfigError
from rudra.job.job import Job


@pytest.mark.parametrize(
    ("key", "rate", "weight"),
    [  # λ = 30, μ = 64, n = 4, B = 128; ⟨σ⟩ = 2.5, σ = 5
        ("none", 1.0, 1.0),
        ("sqrt", math.sqrt(15), 1.0),
        ("n", 1 / 4, 1.0),
        ("mean_staleness", 1 / 2.5, 1.0),
        ("gradient_staleness", 1.0, 1 / 5),
    ],
)
def test_factors(key: str, rate: float, weight: float) -> None:
    modulation = MODULATIONS[key](30, 64, 4, 128)
    assert modulation.rate_factor(2.5) == pytest.approx(rate, rel=1e-15)
    assert modulation.gradient_weight(5) == weight


def test_every_modulation_stands_in_the_table_above() -> None:
    assert set(MODULATIONS) == {"none", "sqrt", "n", "mean_staleness", "gradient_staleness"}


@pytest.mark.parametrize("staleness", [0, 1])
def test_fresh_gradients_never_raise_the_rate(staleness: int) -> None:
    for modulation in (kind(30, 64, 4, 128) for kind in MODULATIONS.values()):
        assert modulation.gradient_weight(staleness) == 1.0
        assert modulation.rate_factor(staleness) == modulation.rate_factor(0.5) == modulation.rate_factor(1.0)


@pytest.mark.parametrize(
    ("protocol", "learners", "n", "minibatch_size", "factor"),
    [
        ("hardsync", 1, None, 128, 1.0),
        ("hardsync", 30, None, 128, math.sqrt(30)),
        ("hardsync", 4, None, 8, 0.5),
        ("softsync", 30, 1, 128, 1.0),  # no term for the batch size
        ("softsync", 30, 1, 4, 1.0),
        ("softsync", 30, 4, 128, 1 / 4),
        ("softsync", 30, 30, 128, 1 / 30),
        ("softsync", 5, 3, 16, 1 / 3),  # n, although c = 1 and all five push between two updates
        ("softsync", 30, 11, 16, 1 / 11),
        ("async", 30, None, 128, 1 / 30),
        ("async", 1, None, 4, 1.0),
    ],
)
def test_what_auto_means(protocol: str, learners: int, n: int | None, minibatch_size: int, factor: float) -> None:
    made = protocols.make(protocol, learners=learners, minibatch_size=minibatch_size, n=n)
    assert made.modulation.rate_factor(17.0) == pytest.approx(factor, rel=1e-15)
    assert made.modulation.gradient_weight(17) == 1.0


class Halved(Modulation):
    """A user's own."""

    def rate_factor(self, mean_staleness: float) -> float:
        return 0.5 / (1 + mean_staleness)


class Endless(Modulation):
    def rate_factor(self, mean_staleness: float) -> float:
        return math.inf


class Broken(Modulation):
    def gradient_weight(self, staleness: int) -> float:
        return 1 / (7 - staleness)


def test_a_modulation_of_the_user() -> None:
    made = Job(protocol={"name": "async", "modulation": f"{__name__}:Halved"}, cluster={"learners": 3}).make_protocol()
    assert (made.modulation.name, made.modulation.rate_factor(1.0)) == ("Halved", 0.25)
    assert not made.modulation.weighs


@pytest.mark.parametrize(
    ("protocol", "name", "text"),
    [
        ("async", "Endless", r"rate_factor\(0\) is inf, then inf; return the same number >= 0"),
        ("async", "Broken", r"gradient_weight\(7\) fails \(ZeroDivisionError: .*test_modulation.py"),
        ("async", "Any", "modulation: Any: Type Any cannot be instantiated|modulation: .*Any"),
        ("async", "Nobody", "has no attribute 'Nobody'"),
        ("easgd", "Halved", "modulation = 'Halved' is not supported with protocol easgd; use none"),
    ],
)
def test_a_modulation_of_the_user_that_cannot_be_is_one_line(protocol: str, name: str, text: str) -> None:
    tables: Any = {"topology": {"name": "replicas"}} if protocol == "easgd" else {}
    rule = {"name": protocol, "modulation": f"{__name__}:{name}"}
    with pytest.raises(ConfigError, match=text) as raised:
        Job(protocol=rule, cluster={"learners": 3}, **tables)
    assert "\n" not in str(raised.value)
