"""Budgets, the steadiness of the machine, and measured rates: parts of `rudra tune` that a clock decides."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from rudra.errors import ConfigError, ResultsError, TopologyError
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.mpi.launch import LaunchOutcome
from rudra.prepare import cost_files
from rudra.prepare.start import StartRequest
from rudra.simulation.predict import outline
from rudra.tuning import ranks as real
from rudra.tuning import steady
from rudra.tuning.budgets import Budget, check_reference, metered
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.prices import Price
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.room import Room, least_bytes, within
from rudra.tuning.ruler import Mark
from rudra.tuning.space import Candidate, Refused, Settings, with_settings
from rudra.tuning.state import SearchState

EPOCH = 100
JOB = Job(name="job", model={"name": "mlp"}, training={"epochs": 8}, cluster={"learners": 2, "threads_per_rank": 1})
HARD = {"protocol.name": "hardsync", "topology.name": "base"}
ASYNC = {"protocol.name": "async", "topology.name": "base"}


def state_of(budget: Budget, *, is_real: bool = True) -> SearchState:
    prices = [Price(Candidate(each, with_settings(JOB, each)), 50.0, 0.0, "compute") for each in ({}, HARD, ASYNC)]
    about: dict[str, Any] = {
        "untimed": {"optimizer.learning_rate"},
        "training_samples": EPOCH,
        "longest": 8,
        "real": is_real,
    }
    return SearchState(JOB, Target("validation", "accuracy", True, 0.9), prices, budget=budget.runs, **about)


def trained(*times_s: float, metric: float = 0.5) -> Outcome:
    return Outcome(tuple(Mark((i + 1) * EPOCH, 1.0 / (i + 1), metric, time_s) for i, time_s in enumerate(times_s)))


@pytest.mark.parametrize(
    ("text", "runs", "minutes"),
    [("8x", 8, None), (2.5, 2.5, None), ("15m", math.inf, 15), ("0.5h", math.inf, 30), ("1x", 1, None)],
)
def test_a_budget_is_reference_runs_or_a_time(text: str | float, runs: float, minutes: float | None) -> None:
    found = Budget.parse(text)
    assert (found.runs, found.minutes) == (runs, minutes)


@pytest.mark.parametrize("text", ["", "8", "x", "0x", "0m", "-1x", "15min", "1e3x", "8x 15m", "nanx", "٣x ", "15 m"])
def test_anything_else_is_no_budget(text: str) -> None:
    with pytest.raises(ConfigError, match="is no budget; use reference runs such as 8x, or a time") as caught:
        Budget.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["0.5x", 0.99])
def test_a_budget_below_one_reference_run_names_the_least(text: str | float) -> None:
    with pytest.raises(ConfigError, match="x: is less than one reference run; use 1x or more"):
        Budget.parse(text)


def test_minutes_become_samples_once(tmp_path: Path) -> None:
    """By the first probe that trains, and never again: neither with a slower probe, nor after a stop."""
    budget, probe, taken = Budget.parse("2m"), Probe.of(HARD, "", 1), [2.0, 50.0]
    state = state_of(budget)
    journal = Journal(tmp_path / NAME, {})
    outcomes = [Outcome((), "diverged"), trained(1.0), trained(1.0)]
    train = metered(lambda *_: outcomes.pop(0), budget, state, journal, lambda _: taken.pop(0))
    train(probe, None)
    assert state.limit == math.inf
    train(probe, None)
    assert state.limit == 120 * EPOCH / 2
    state.tell(probe, train(probe, None))
    assert state.allowed == 6000
    assert [entry["samples"] for entry in journal.of("budget")] == [6000]
    again = state_of(budget)
    metered(lambda *_: trained(1.0), budget, again, Journal(tmp_path / NAME, {}), lambda _: 50.0)
    assert again.limit == 6000
    assert again.allowed == math.inf, "the first round is asked for before the limit is known"


def test_too_few_minutes_end_the_search_before_it_trains_more(tmp_path: Path) -> None:
    budget, trains = Budget.parse("0.1m"), 0

    def train(probe: Probe, before: Outcome | None) -> Outcome:
        nonlocal trains
        trains += 1
        return trained(1.0)

    text = "--budget 0.1m: is less than one reference run, which needs 200 samples or more; use 0.4m or more"
    journal = Journal(tmp_path / NAME, {})
    with pytest.raises(ConfigError, match=text) as caught:
        metered(train, budget, state_of(budget), journal, lambda _: 10.0)(Probe.of(HARD, "", 1), None)
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=text):
        metered(train, budget, state_of(budget), Journal(tmp_path / NAME, {}), lambda _: 10.0)
    assert trains == 1


def test_a_reference_that_the_minutes_cut_short_is_no_answer(tmp_path: Path) -> None:
    budget = Budget.parse("0.1m")
    state, journal = state_of(budget), Journal(tmp_path / NAME, {})
    cold = Probe.of({**HARD, "optimizer.learning_rate": 0.1}, "", 1)
    outcomes = [trained(1.0), trained(1.0, 2.0)]
    train = metered(lambda *_: outcomes.pop(0), budget, state, journal, lambda _: 2.0)
    reference = Probe(cold.settings, cold.end, 2)
    state.tell(cold, train(cold, None))
    state.tell(reference, train(reference, None))
    assert state.limit == 300
    with pytest.raises(ConfigError, match=r"which needs 400 samples or more; use 0\.2m or more"):
        check_reference(budget, state, journal)
    state.outcomes[reference.name] = trained(1.0, 2.0, metric=0.95)
    check_reference(budget, state, journal)


def test_measured_rates_replace_predictions_and_set_the_pace_of_others() -> None:
    state = state_of(Budget.parse("8x"))
    assert (state.rate(HARD), state.rate(ASYNC)) == (50, 50)
    state.tell(Probe.of({**HARD, "optimizer.learning_rate": 0.1}, "", 3), trained(9.0, 10.0, 11.0))
    assert state.rate({**HARD, "optimizer.learning_rate": 0.5}) == 100, "the slow first epoch is not typical"
    assert state.rate(ASYNC) == 100
    state.tell(Probe.of({**HARD, "optimizer.learning_rate": 9.0}, "", 1), Outcome((), "the loss is nan"))
    state.tell(Probe.of({**HARD, "optimizer.learning_rate": 0.2}, "", 1), trained(1.0))
    assert state.rate(HARD) == 100
    virtual = state_of(Budget.parse("8x"), is_real=False)
    virtual.tell(Probe.of(HARD, "", 1), trained(1.0))
    assert virtual.rate(HARD) == 50


def steadily(journal: Journal, times_s: list[float], probes: int) -> None:
    train = steady.watched(lambda *_: Outcome(()), lambda: times_s.pop(0), journal, "job")
    for _ in range(probes):
        train(Probe.of(HARD, "", 1), None)
        journal.add({"kind": "probe"})


@pytest.mark.parametrize(
    ("times_s", "entries", "note"),
    [
        ([1.3, 1.0, 1.09, 0.95], [[1.3, 1.0], [1.09], [0.95]], None),
        ([1.0, 1.1, 1.5, 1.02, 1.0], [[1.0, 1.1], [1.5, 1.02], [1.0]], None),  # repeated, and then as before
        ([1.0, 1.0, 1.5, 1.4, 0.8, 0.9], [[1.0, 1.0], [1.5, 1.4], [0.8, 0.9]], "up to 40% slower than when the search"),
        ([1.0, 1.0, 0.7, 0.8, 1.0], [[1.0, 1.0], [0.7, 0.8], [1.0]], "up to 30% faster than when the search"),
    ],
    ids=["steady", "a moment", "busy", "idle"],
)
def test_the_machine_is_timed_every_eighth_probe(
    tmp_path: Path, times_s: list[float], entries: list[list[float]], note: str | None
) -> None:
    """Also if the search is stopped in between."""
    steadily(Journal(tmp_path / NAME, {}), times_s, 9)
    journal = Journal(tmp_path / NAME, {})
    steadily(journal, times_s, 8)
    found = [(entry["at"], entry["seconds"]) for entry in journal.of("drift")]
    assert found == [*zip((0, 8, 16), entries, strict=True)]
    assert (note is None) == (steady.notes(journal) == ())
    assert note is None or note in steady.notes(journal)[0]


class Ranks(real.Launches):
    """Starts nothing: runs end as the test says."""

    def __init__(self, *ends: LaunchOutcome) -> None:
        self.ends, self.asked, self.calibrations = [*ends], list[tuple[Job, StartRequest]](), 0

    def train(self, job: Job, asked: StartRequest) -> LaunchOutcome:
        self.asked.append((job, asked))
        return self.ends.pop(0)

    def calibrated(self, job: Job) -> str:
        self.calibrations += 1
        return "compute_s = 0.002\n"


LOST, FINE = LaunchOutcome(1, lost=True), LaunchOutcome(0)


@pytest.mark.parametrize(
    ("ends", "error", "code", "left"),
    [
        ([LOST, LOST], real.RankDied, 3, 0),
        ([LOST, FINE], ResultsError, 2, 0),  # it ends well, but leaves no file here
        ([FINE], ResultsError, 2, 0),
        ([LaunchOutcome(1), FINE], real.ProbeFailed, 1, 1),
        ([LaunchOutcome(3), FINE], KeyboardInterrupt, None, 1),
        ([LaunchOutcome(1, stopped=True), FINE], KeyboardInterrupt, None, 1),
    ],
)
def test_only_a_run_whose_rank_died_is_repeated_and_only_once(
    tmp_path: Path, ends: list[LaunchOutcome], error: type[BaseException], code: int | None, left: int
) -> None:
    ranks = Ranks(*ends)
    with pytest.raises(error) as caught:
        ranks.execute(JOB, tmp_path / "out.h5", tmp_path / "begin.ckpt")
    assert len(ranks.ends) == left
    assert getattr(caught.value, "exit_code", None) == code
    job, asked = ranks.asked[0]
    assert (job.fault_tolerance.on_learner_loss, job.fault_tolerance.non_finite_loss) == ("stop", "warn")
    assert (asked.origin, asked.rows) == (tmp_path / "begin.ckpt", False)


def test_costs_are_measured_once_and_only_if_there_are_none(tmp_path: Path) -> None:
    ranks = Ranks()
    for _ in range(2):
        job, measured, room = ranks.prepared(JOB, tmp_path)
        assert (job, room.ranks) == (JOB, None)
        assert 0 < room.node_bytes < math.inf
        assert cost_files.load(measured).simulation.compute_s == 0.002
    assert ranks.calibrations == 1
    known = JOB.with_(simulation={"compute_s": 0.5})
    assert ranks.prepared(known, tmp_path)[1] == known


def test_points_with_more_ranks_than_there_are_say_so() -> None:
    points = [Candidate(each, with_settings(JOB, each)) for each in (HARD, {**HARD, "topology.name": "groups"})]
    few = min(points, key=lambda point: point.job.plan().ranks)
    refused: list[Refused] = []
    assert within(points, Room(ranks=3), refused) == [few]
    assert [each.reason for each in refused] == ["needs 4 ranks, but the launcher started 3"]


@pytest.mark.parametrize(
    ("settings", "vectors"),
    [
        (HARD, 3 + 2 * 2 + 1),  # see docs/memory.md
        ({"protocol.name": "hardsync", "topology.name": "groups"}, 2 * 2 + 1),
        ({"protocol.name": "average", "topology.name": "replicas"}, 2 * 4 + 1),
    ],
)
def test_points_that_need_more_memory_than_the_node_has_say_so(settings: Settings, vectors: int) -> None:
    point = Candidate(settings, with_settings(JOB, settings))
    size = outline(point.job).size_bytes
    assert least_bytes(point.job, size) == vectors * size
    refused: list[Refused] = []
    assert within([point], Room(node_bytes=vectors * size), refused) == [point]
    assert refused == []
    assert within([point], Room(node_bytes=vectors * size - 1), refused) == []
    assert re.match(r"needs \S+ GB for vectors of weights alone, but the node has \S+ GB$", refused[0].reason)


@pytest.mark.parametrize(("size", "given", "learners"), [(4, None, 2), (4, 2, 2), (6, 2, 2)])
def test_under_a_launcher_the_ranks_without_a_server_are_learners(size: int, given: int | None, learners: int) -> None:
    job = Job(name="job", model={"name": "mlp"}, cluster={"learners": given}, simulation={"compute_s": 1.0})
    ranks = real.OneLaunch(lambda task: 0, size)
    assert ranks.fitted(job)[0].learners == learners


@pytest.mark.parametrize(
    ("size", "given", "said"),
    [
        (3, 2, "job: 2 learners with topology base need 4 ranks, but the launcher started 3; start 4"),
        (2, None, "ranks are too few for topology base"),
    ],
)
def test_a_launcher_with_too_few_ranks_is_refused(size: int, given: int | None, said: str) -> None:
    job = Job(name="job", model={"name": "mlp"}, cluster={"learners": given})
    with pytest.raises(TopologyError, match=said):
        real.OneLaunch(lambda task: 0, size).fitted(job)


def test_too_few_ranks_cannot_measure_costs() -> None:
    with pytest.raises(ConfigError, match="2 ranks cannot measure them; run rudra calibrate first, or start 3 ranks"):
        real.OneLaunch(lambda task: 0, 2).calibrated(JOB)
