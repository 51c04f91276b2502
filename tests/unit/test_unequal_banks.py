"""Numbers of learners for banks on unequal devices, on curves of time: what each has, and what all make together."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rudra.core import records
from rudra.core.decisions import MeasuredBanks, in_events, measurements
from rudra.core.schedule import Schedule
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.roles.bank_tuner import BankTuner
from rudra.roles.machine import Setup
from rudra.roles.unequal_banks import are_unequal, bank_seconds, fastest_together

MOST = 16

FAST = {1: 0.010, 4: 0.010, 16: 0.040}
SLOW = {1: 0.040, 2: 0.041, 4: 0.080, 16: 0.320}
STEEP = {1: 0.020, 16: 0.320}
"""Seconds of a bank of m learners: it holds four, or two, or one without taking longer."""


def speed(tables: Sequence[Mapping[int, float]], sizes: Sequence[int]) -> float:
    """Learners in a second, if all make updates together."""
    return sum(sizes) / max(bank_seconds(table, m) for table, m in zip(tables, sizes, strict=True))


@pytest.mark.parametrize("tables", [*itertools.combinations_with_replacement([FAST, SLOW, STEEP], 2)])
def test_together_they_are_near_the_fastest_of_all_numbers(tables: Sequence[Mapping[int, float]]) -> None:
    best = max(speed(tables, sizes) for sizes in itertools.product(range(1, MOST + 1), repeat=2))
    sizes = fastest_together(tables, [MOST, MOST])
    assert speed(tables, sizes) >= 0.9 * best
    assert fastest_together(tables, [3, MOST])[0] <= 3
    assert sum(fastest_together(tables, [MOST, MOST], stable=6)) <= 6


def test_a_fast_device_gets_as_many_learners_as_compute_while_a_slow_one_computes() -> None:
    fast, slow = fastest_together([FAST, SLOW], [MOST, MOST])
    assert slow <= 2, "its next one would take twice the time"
    assert 13 <= fast <= 16


def test_times_between_and_beyond_measurements_are_estimated() -> None:
    assert bank_seconds({1: 0.01, 4: 0.04}, 2) == pytest.approx(0.02)
    assert bank_seconds({1: 0.01, 4: 0.02}, 8) == pytest.approx(0.04)


def make_job(**cluster: Any) -> Job:
    about = {"learners_per_device": "auto", "learners": 32, "most_learners_per_device": MOST, **cluster}
    return Job(model={"name": "mlp"}, data={"name": "digits"}, protocol={"name": "sma"}, cluster=about).resolved()


class Trial:
    """Updates of two banks whose times are known, as the statistics server hears of them."""

    def __init__(self, tables: Sequence[Mapping[int, float]], **cluster: Any) -> None:
        job = make_job(**cluster)
        self.setup = Setup(job, job.plan(), 1000, Schedule.stepped(job.optimizer, ()))
        self.tuner, self.tables, self.measured = BankTuner(self.setup), tables, list[MeasuredBanks]()
        self.timestamp, self.now = 0, 0.0

    def update(self, sizes: tuple[int, ...]) -> None:
        took = [bank_seconds(table, m) for table, m in zip(self.tables, sizes, strict=True)]
        learners = [(16 * bank + i, bank) for bank, m in enumerate(sizes) for i in range(m)]
        minibatches = np.zeros(len(learners), records.MINIBATCH)
        minibatches["learner"], minibatches["timestamp"] = [i for i, _ in learners], self.timestamp
        minibatches["compute_s"] = [took[bank] * (i % 16 + 1) / sizes[bank] for i, bank in learners]  # in turn
        self.tuner.time(minibatches)
        self.timestamp, self.now = self.timestamp + 1, self.now + max(took)
        row = np.zeros(1, records.UPDATE)
        row["timestamp"], row["gradients"], row["samples"] = self.timestamp, sum(sizes), 4 * sum(sizes)
        row["time_s"] = self.now
        if (found := self.tuner.enter(row)) is not None:
            self.measured.append(found)

    def run(self, updates: int = 1000) -> tuple[int, ...]:
        for _ in range(updates):
            if not self.tuner.ended:
                self.update(self.tuner.sizes)
        return self.tuner.sizes


@pytest.mark.parametrize("growth", ["double", "one"])
def test_each_device_grows_by_its_own_times_and_all_end_together(growth: str) -> None:
    trial = Trial([FAST, SLOW], growth=growth)
    sizes = trial.run()
    assert trial.tuner.ended
    assert sizes[1] <= 2
    assert 13 <= sizes[0] <= 16
    assert [found.sizes for found in trial.measured][:2] == [(1, 1), (2, 2)]
    assert trial.measured[0].update_s == pytest.approx((0.010, 0.040))
    assert trial.measured[-1].images_per_s == pytest.approx(4 * speed([FAST, SLOW], sizes), rel=0.01)
    assert trial.measured[-1].images_per_s >= max(found.images_per_s for found in trial.measured)
    assert json.loads(trial.tuner.change) == {"cluster": {"active_learners": list(sizes)}}
    again, texts = BankTuner(trial.setup), "".join(found.text for found in trial.measured)
    again.recall(measurements(in_events(b"measured", texts, 0, 0, 0.0)))
    assert (again.sizes, again.ended) == (sizes, True)


def test_devices_that_differ_little_have_the_same_number() -> None:
    trial = Trial([FAST, {m: 1.4 * seconds for m, seconds in FAST.items()}])
    sizes = trial.run()
    assert sizes[0] == sizes[1] == 4
    assert all(len(found.sizes) == 1 for found in trial.measured)
    assert are_unequal([0.01, 0.015])
    assert not are_unequal([0.01])


def test_memory_limits_one_device_of_unequal_ones() -> None:
    trial = Trial([FAST, SLOW])
    while trial.tuner.sizes != (4, 4):
        trial.update(trial.tuner.sizes)
    fast, slow = trial.setup.plan.learners
    assert not trial.tuner.lacks_memory(fast, 8)
    assert trial.tuner.give_back(fast, 8) == MeasuredBanks((4, 4), 0.0, lacking=0)
    assert trial.tuner.lacks_memory(fast, 8)
    assert not trial.tuner.lacks_memory(slow, 8)
    assert trial.tuner.sizes == (2, 4), "the other one is still measured"
    assert trial.run() == (2, 2)
    assert trial.tuner.ended


def test_learners_of_each_rank_take_part_by_number() -> None:
    plan = make_job().plan().whole
    first = plan.learners[0]
    some = plan.with_active([3, 1], evenly=True)
    assert [learner - first for learner in some.learners] == [0, 1, 2, 16]
    assert some.whole.learners == plan.learners
    assert plan.with_active([16, 16], evenly=True).dormant == frozenset()
    dead = some.without([first + 1])
    assert [learner - first for learner in dead.learners] == [0, 2, 3, 16]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no banks": (
        {"learners": 4, "active_learners": [1, 2]},
        "[cluster] active_learners = [1, 2] is not supported with learners that have no banks; use learners_per_device",
    ),
    "more than a bank has": (
        {"learners": 4, "learners_per_device": 2, "active_learners": [1, 3]},
        "[cluster] active_learners = [1, 3] is not supported with banks of 2 learners; use 1 to 2 for each",
    ),
    "none": ({"active_learners": [1, 0]}, "[cluster] active_learners must be >= 1, not [1, 0]"),
    "words": (
        {"active_learners": "all"},
        "[cluster] active_learners must be a number, or a list of numbers, not 'all'",
    ),
    "too few": (
        {"learners": 4, "learners_per_device": 2, "active_learners": [1]},
        "[cluster] active_learners = [1] is not supported with 2 ranks with learners; use 2 numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_do_not_fit_the_ranks_are_refused(name: str) -> None:
    cluster, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        Job(model={"name": "mlp"}, data={"name": "digits"}, protocol={"name": "sma"}, cluster=cluster).plan()
    assert said in str(error.value)
