"""Measurements of banks that grow, and the largest size that stability and memory allow."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rudra.compute.memory_plan import planned
from rudra.core import records
from rudra.core.decisions import MeasuredBanks, in_events, measurements
from rudra.core.messages import Rows
from rudra.core.schedule import Schedule
from rudra.data.load import load
from rudra.job.job import Job
from rudra.prepare import bank_size
from rudra.prepare.resolve import RankFacts
from rudra.roles.bank_tuner import LEAST_UPDATES, SETTLING, BankTuner, largest_stable, throughput
from rudra.roles.machine import Setup
from topologies import Plan, replicas
from topologies.fitting import sharing_ranks


def make_job(**tables: Any) -> Job:
    cluster = {"learners_per_device": "auto", "learners": 16, **tables.pop("cluster", {})}
    return Job(
        **{
            "model": {"name": "mlp"},
            "data": {"name": "digits"},
            "protocol": {"name": "sma"},
            "cluster": cluster,
            **tables,
        }
    ).resolved()


def setup_of(job: Job) -> Setup:
    return Setup(job, job.plan(), 1000, Schedule.stepped(job.optimizer, ()))


def rows(gradients: int, times: Sequence[float]) -> Rows:
    found = np.zeros(len(times), records.UPDATE)
    found["gradients"], found["samples"], found["time_s"] = gradients, 4 * gradients, times
    return found


def steps(count: int, seconds: float, begin: float = 0.0) -> list[float]:
    return [begin + seconds * step for step in range(count)]


WHOLE = SETTLING + LEAST_UPDATES + 1
"""Updates of a measurement, if they take long enough."""


def test_a_measurement_begins_when_the_new_learners_have_settled() -> None:
    tuner = BankTuner(setup_of(make_job()))
    assert not tuner.enter(rows(1, [0.0, 5.0, 6.0, *steps(WHOLE - 4, 0.1, 7.0)]))
    assert tuner.enter(rows(1, [7.0 + 0.1 * (WHOLE - 4)])) == ((1,), pytest.approx(40), (), -1)
    assert (tuner.sizes, tuner.ended) == ((2,), False)
    assert json.loads(tuner.change) == {"cluster": {"active_learners": 2}}
    assert not tuner.enter(rows(1, steps(100, 0.1))), "the change has not taken effect"
    assert tuner.enter(rows(2, steps(WHOLE, 0.1))) == ((2,), pytest.approx(80), (), -1)


def test_a_measurement_takes_half_a_second_at_least() -> None:
    tuner = BankTuner(setup_of(make_job()))
    assert not tuner.enter(rows(1, steps(400, 0.001)))
    assert tuner.enter(rows(1, steps(200, 0.001, 0.4)))


def test_a_pause_within_a_measurement_does_not_count() -> None:
    usual = [(0.1 * step, 8) for step in range(41)]
    paused = [(time_s + 3.0 * (time_s > 2.0), samples) for time_s, samples in usual]
    assert throughput(usual) == throughput(paused) == pytest.approx(80)


def test_measurements_before_a_checkpoint_are_known_after_it() -> None:
    tuner = BankTuner(setup_of(make_job()))
    text = "".join(MeasuredBanks((m,), 100.0 * m).text for m in (1, 2, 4))
    events = in_events(b"measured", f'{text}{{"learners_per_device": "damaged"}}[1]', 0, 0, 0.0)
    found = measurements(events)
    assert found == [MeasuredBanks((m,), 100.0 * m) for m in (1, 2, 4)]
    tuner.recall(found)
    assert (tuner.sizes, tuner.ended) == ((8,), False)
    tuner = BankTuner(setup_of(make_job()))
    tuner.recall([MeasuredBanks((1,), 100.0), MeasuredBanks((2,), 105.0)])
    assert (tuner.sizes, tuner.ended) == ((1,), True)
    assert not tuner.enter(rows(1, steps(400, 0.1)))


def test_memory_limits_a_bank_to_what_was_measured_before() -> None:
    setup = setup_of(make_job())
    learner, statistics = setup.plan.learners[0], setup.plan.statistics
    tuner = BankTuner(setup)
    assert tuner.give_back(learner, 1) is None, "nothing smaller was measured"
    tuner.enter(rows(1, steps(WHOLE, 0.1)))
    assert tuner.give_back(learner, 7) is None, "the growth did not choose seven"
    assert tuner.give_back(statistics, 2) is None, "fewer learners do not help"
    assert not tuner.lacks_memory(learner, 2)
    found = tuner.give_back(learner, 2)
    assert found == MeasuredBanks((2,), 0.0)
    assert (tuner.sizes, tuner.ended, tuner.lacks_memory(learner, 2)) == ((1,), True, True)
    assert json.loads(tuner.change) == {"cluster": {"active_learners": 1}}
    again = BankTuner(setup)
    again.recall([MeasuredBanks((1,), 40.0), *measurements(in_events(b"measured", found.text, 0, 0, 0.0))])
    assert (again.sizes, again.ended) == ((1,), True)


def test_memory_that_is_short_later_ends_at_a_size_before() -> None:
    setup = setup_of(make_job(cluster={"growth": "one", "learners": 2}))
    tuner = BankTuner(setup)
    for m in (1, 2):
        tuner.enter(rows(m, steps(WHOLE, 0.1)))
    assert (tuner.sizes, tuner.ended) == ((2,), True)
    assert tuner.give_back(setup.plan.learners[0], 2) == MeasuredBanks((2,), 0.0)
    assert tuner.sizes == (1,)


def test_growth_ends_when_something_else_changes_the_learners() -> None:
    tuner = BankTuner(setup_of(make_job()))
    tuner.enter(rows(1, steps(WHOLE, 0.1)))
    tuner.enter(rows(3, [4.0]))
    assert tuner.ended


@pytest.mark.parametrize(
    ("averaging", "most"),
    [({}, 16), ({"elasticity": 0.4}, 7), ({"elasticity": 0.4, "outer": {"momentum": 0.0}}, 3)],
)
def test_averages_of_the_largest_bank_do_not_diverge(averaging: dict[str, Any], most: int) -> None:
    setup = setup_of(make_job(averaging=averaging))
    assert largest_stable(setup.all_phases, 16, 1) == most


def test_learners_of_all_ranks_take_part_evenly() -> None:
    plan: Plan = sharing_ranks(replicas.plan([0] * 8), 4)
    first = plan.learners[0]

    def numbers(plan: Plan) -> list[int]:
        return [learner - first for learner in plan.learners]

    assert numbers(plan.with_active(2, evenly=True)) == [0, 4]
    assert numbers(plan.with_active(4, evenly=True)) == [0, 1, 4, 5]
    assert numbers(plan.with_active(4)) == [0, 1, 2, 3]
    assert numbers(plan.with_active(2, evenly=True).without([first + 4])) == [0, 5]
    assert plan.with_active(8, evenly=True).whole.learners == plan.learners


@pytest.mark.parametrize(("free", "bank", "most"), [(10**12, "auto", 16), (2_600_000, "loop", 3), (0, "auto", 1)])
def test_a_bank_has_as_many_learners_as_fit_into_memory(
    free: int, bank: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_size, "free_memory", lambda: free)
    job = make_job(cluster={"bank": bank})
    ranks = [RankFacts(0, "here", 2)] * 2
    decided = bank_size.with_bank_size(job, {"cluster": {"device": "cpu"}}, ranks)
    if most == 16:
        assert decided == {"cluster": {"device": "cpu"}}
    else:
        assert decided == {"cluster": {"device": "cpu", "learners": most, "most_learners_per_device": most}}
    given = job.with_(cluster={"most_learners_per_device": 16})
    assert bank_size.with_bank_size(given, {}, ranks) == {}, "the user's number stays"


@pytest.mark.parametrize(("protocol", "vectors"), [("average", 4), ("sma", 5)])
def test_memory_of_a_learner_that_averages_counts_its_replica_and_its_optimisers(protocol: str, vectors: int) -> None:
    """Weights, gradient, replica, difference, and the outer momentum of sma."""
    job = make_job(protocol={"name": protocol}, cluster={"bank": "loop"})
    found = planned(job, job.plan(), load(job.data), torch.device("cpu"))
    assert found is not None
    assert found.bank is not None
    one, two = (found.bank._replace(learners=m).plan().total(4) for m in (1, 2))
    assert two - one == vectors * 4 * (64 * 128 + 128 + 128 * 10 + 10)
