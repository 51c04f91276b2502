"""The search of `rudra tune`: the space, prices, the ruler, probes and the journal."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from surfaces import EPOCH, JOB, TARGET, Surface, prices_of

from rudra.errors import ConfigError
from rudra.tuning import space
from rudra.tuning.answer import Finalist, Verdict
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.probes import Probe
from rudra.tuning.ruler import Mark, Ruler, crossed, reached
from rudra.tuning.space import Candidate


def marks(*losses: float) -> Iterator[Mark]:
    return (Mark(i * EPOCH, loss, 1 - loss, float(i)) for i, loss in enumerate(losses))


@pytest.mark.parametrize(
    ("losses", "worth"),
    [
        ((1.0, 0.5), 1.0),
        ((1.0, 0.75), 0.5),
        ((1.0, 0.25), 2.0),
        ((1.0, 0.1), 3.0),  # farther than the reference
        ((1.0, 1.5), 0.0),
        ((1.0, math.nan), 0.0),
        ((1.0, 0.5, 0.25), 1.0),
        ((1.0, 0.4, 0.25), 3 / (2 + 1 / 0.6)),  # the gain of its first epoch does not come again
        ((1.0, 0.75, 0.25), 1.0),  # and one good epoch is no promise
        ((1.0, 0.4, 0.4), 0.0),  # no longer gets better
        ((1.0, 0.5, 0.1), 1.5),  # as far as the reference goes
    ],
)
def test_a_sample_is_worth_as_much_as_it_gains_on_the_reference(losses: tuple[float, ...], worth: float) -> None:
    ruler = Ruler([*marks(1.0, 0.5, 0.25, 0.2)])
    assert ruler.worth([*marks(*losses)]) == pytest.approx(worth)


def test_a_target_may_be_a_lower_or_an_upper_bound() -> None:
    found = [*marks(1.0, 0.5, 0.25)]
    assert reached(found, 0.7, at_least=True) == found[2]
    assert reached([replace_metric(mark) for mark in found], 0.6, at_least=False) == replace_metric(found[1])
    assert reached(found, 0.99, at_least=True) is None


def test_a_target_is_reached_between_two_evaluations() -> None:
    found = [*marks(1.0, 0.5, 0.25)]
    assert crossed(found, 0.625, at_least=True) == 1.5 * EPOCH
    assert crossed([replace_metric(mark) for mark in found], 0.75, at_least=False) == 0.5 * EPOCH
    assert crossed(found, 0.0, at_least=True) == 0
    assert crossed(found, 0.99, at_least=True) == math.inf


def replace_metric(mark: Mark) -> Mark:
    return mark._replace(metric=mark.loss)


def test_a_synchronous_point_is_dominated_by_the_same_one_on_a_faster_topology() -> None:
    prices = prices_of(Surface(lambda point, sigma: 2.0 if point.job.topology.name == "groups" else 1.0))
    for price in prices[1:]:
        settings = price.point.settings
        if settings["protocol.name"] == "hardsync" and settings["topology.name"] != "groups":
            assert price.dominated is not None
            assert price.dominated.settings["topology.name"] == "groups"
            assert price.dominated.job.training.minibatch_size == price.point.job.training.minibatch_size
        else:
            assert price.dominated is None


def test_the_space_has_every_pair_that_the_job_allows_and_says_why_not() -> None:
    refused: list[Any] = []
    points = space.points(JOB, [d for d in space.chosen({}) if d.timed], refused)
    pairs = {(p.settings["protocol.name"], p.settings["topology.name"]) for p in points}
    assert {("hardsync", "groups"), ("async", "adv*"), ("sma", "hierarchical"), ("diloco", "replicas")} <= pairs
    assert len({space.Candidate.name.fget(p) for p in points}) == len(points)  # type: ignore[attr-defined]
    (reason,) = {r.reason for r in refused if r.settings == {"protocol.name": "hardsync", "topology.name": "adv*"}}
    assert "is not supported with protocol hardsync" in reason
    for point in points:
        assert point.job.training.epochs == JOB.training.epochs


@pytest.mark.parametrize(
    ("given", "check"),
    [
        ({"protocol.name": ["hardsync"]}, lambda p: p.job.protocol.name == "hardsync"),
        (
            {"topology.name": ["base"], "training.minibatch_size": [3, 5]},
            lambda p: p.job.training.minibatch_size in {3, 5},
        ),
        ({"protocol.n": [3]}, lambda p: p.job.protocol.n in {3, None}),
        ({"cluster.learners": [2, 4]}, lambda p: p.job.learners in {2, 4}),
    ],
    ids=["protocol", "mini-batch", "n", "learners"],
)
def test_values_of_the_user_replace_those_of_a_search(
    given: dict[str, Any], check: Callable[[Candidate], bool]
) -> None:
    points = space.points(JOB, [d for d in space.chosen(given) if d.timed], [])
    assert points
    assert all(map(check, points))


LAYER = {"name": "0", "parameters_bytes": 8, "output_bytes": 8, "forward_s": {8: 1e-3}, "backward_s": {8: 1e-3}}


@pytest.mark.parametrize(
    ("protocol", "tables", "given", "key", "values"),
    [
        ("sma", {}, {}, "cluster.learners_per_rank", {1, 2}),
        ("sma", {}, {}, "cluster.learners", {JOB.learners, 2 * JOB.learners}),
        ("sma", {}, {"cluster.learners": [3]}, "cluster.learners_per_rank", {None}),
        ("hardsync", {}, {}, "cluster.learners_per_rank", {None}),
        ("hardsync", {}, {}, "placement.cut", {None}),
        ("diloco", {}, {}, "averaging.outer.momentum", {None}),
        ("diloco", {}, {"averaging.outer.momentum": [0.0, 0.5]}, "averaging.outer.momentum", {0.0, 0.5}),
        ("diloco", {}, {"optimizer.momentum": [0.0, 0.5]}, "optimizer.momentum", {None}),
        ("hardsync", {"layers": [LAYER]}, {}, "placement.cut", {None, "2"}),
    ],
    ids=[
        *("m", "its learners", "λ is given", "m of gradients", "cut"),
        *("outer", "given outer", "of strategies", "cut with known layers"),
    ],
)
def test_a_row_of_the_space_applies_under_its_condition(
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    tables: dict[str, Any],
    given: dict[str, Any],
    key: str,
    values: set[Any],
) -> None:
    monkeypatch.setattr(space, "choose_cut", lambda job: "2")
    job = JOB.with_(simulation=tables)
    points = space.points(job, [d for d in space.chosen(given) if d.timed], [])
    assert {p.settings.get(key) for p in points if p.settings["protocol.name"] == protocol} == values


BANKS = {"bank_s": {1: 0.01, 4: {8: 0.02}, 6: 0.03}}
DEVICE = "cluster.learners_per_device"


@pytest.mark.parametrize(
    ("protocol", "cluster", "tables", "given", "found"),
    [
        ("sma", {}, BANKS, {}, {(None, 8), (2, 16), (4, 32)}),  # powers of two up to the largest measured bank
        ("sma", {"learners_per_device": 4}, BANKS, {}, {(1, 2), (2, 4), (4, 8)}),  # two devices
        ("sma", {"learners_per_device": 1}, {}, {}, {(1, 8), (2, 16)}),
        ("sma", {"learners": 6, "learners_per_device": 3}, BANKS, {}, {(1, 2), (2, 4), (3, 6), (4, 8)}),
        ("sma", {"learners_per_rank": 2}, BANKS, {}, {(None, 8), (None, 16)}),  # in turns
        ("sma", {}, BANKS, {DEVICE: [1, 5]}, {(None, 8), (5, 40)}),
        ("hardsync", {}, BANKS, {DEVICE: [5]}, {(5, 40)}),
        ("sma", {}, BANKS, {"cluster.learners": [4]}, {(None, 4)}),
        ("sma", {}, BANKS, {"cluster.learners": [4], DEVICE: [2]}, {(2, 4)}),
        ("hardsync", {}, BANKS, {}, {(None, None)}),  # more learners change the batch of an update
        ("sma", {}, BANKS | {"slowdown": {0: 2.0}}, {}, {(None, None)}),
        ("sma", {"learners": 16, "learners_per_device": "auto"}, BANKS, {}, {(1, 1), (2, 2), (4, 4)}),
        ("sma", {"learners": 16, "learners_per_device": "auto"}, BANKS, {DEVICE: ["auto", 2]}, {("auto", 16), (2, 2)}),
    ],
)
def test_learners_per_device_are_a_row_of_the_space(
    protocol: str, cluster: dict[str, Any], tables: dict[str, Any], given: dict[str, Any], found: set[Any]
) -> None:
    about = {"learners_per_rank": 1, **cluster}
    job = JOB.with_(protocol={"name": protocol}, cluster=about, simulation=tables)
    own = {"protocol.name": [protocol], "topology.name": ["base" if protocol == "hardsync" else "replicas"]}
    refused: list[Any] = []
    points = space.points(job, [d for d in space.chosen({**own, **given}) if d.timed], refused)
    assert {(p.settings.get(DEVICE), p.settings.get("cluster.learners")) for p in points} == found
    assert not refused
    for point in points:
        assert point.settings.get(DEVICE, job.cluster.learners_per_device) == point.job.cluster.learners_per_device


def test_the_weights_of_a_bank_that_grows_depend_on_the_cluster() -> None:
    found = set()
    for m in (2, "auto"):
        for bank_s in ({1: 0.01, 2: 0.02}, {1: 0.01, 2: 0.011}):
            about = {"learners": 2, "learners_per_device": m}
            job = JOB.with_(protocol={"name": "sma"}, cluster=about, simulation={"bank_s": bank_s})
            found.add(space.trajectory(job))
    assert len(found) == 3


WINDOW, OUTER_RATE, OUTER_MOMENTUM = (
    "optimizer.average.window",
    "averaging.outer.learning_rate",
    "averaging.outer.momentum",
)


@pytest.mark.parametrize(
    ("protocol", "tables", "given", "steps"),
    [
        ("hardsync", {}, [], [{WINDOW: "1 epoch"}]),
        ("hardsync", {}, [WINDOW], []),
        ("hardsync", {"average": {"rate": 0.1}}, [], []),  # the user's own average stays
        ("hardsync", {"average": {"window": "1 epoch"}}, [], []),
        ("sma", {}, [], [{OUTER_MOMENTUM: 0.0}, {WINDOW: "1 epoch"}]),
        ("diloco", {}, [], [{OUTER_RATE: 0.3}, {OUTER_RATE: 1.0}, {OUTER_MOMENTUM: 0.0}, {WINDOW: "1 epoch"}]),
        ("diloco", {}, [OUTER_RATE], [{OUTER_MOMENTUM: 0.0}, {WINDOW: "1 epoch"}]),
    ],
)
def test_what_a_search_tries_last(
    protocol: str, tables: dict[str, Any], given: list[str], steps: list[dict[str, Any]]
) -> None:
    own = {"protocol.name": protocol, "topology.name": "replicas" if protocol != "hardsync" else "base"}
    job = JOB.with_(optimizer=tables)
    found = [*space.finest(own, space.with_settings(job, own), given)]
    assert found == [{**own, **step} for step in steps]
    for settings in found:
        assert space.with_settings(job, settings) != space.with_settings(job, own)


def test_another_protocol_leaves_nothing_of_the_first() -> None:
    job = JOB.with_(protocol={"name": "diloco"}, averaging={"period": 7, "outer": {"momentum": 0.5}})
    plain = space.with_settings(job, {"protocol.name": "hardsync", "topology.name": "base"})
    assert plain.averaging.non_defaults == {}
    again = space.with_settings(job, {"averaging.outer.learning_rate": 0.3})
    assert again.averaging.period == 7
    assert again.averaging.outer.non_defaults == {"momentum": 0.5, "learning_rate": 0.3}


def test_unequal_parts_are_a_point_although_gradients_are_computed_together() -> None:
    job = JOB.with_(protocol={"name": "hardsync"}, simulation={"slowdown": {"0": 4.0}, "batching": "big-batch"})
    refused: list[space.Refused] = []
    points = space.points(job, [d for d in space.chosen({"protocol.name": ["hardsync"]}) if d.timed], refused)
    by_shares = {
        point.settings["cluster.shares"]: point.job for point in points if point.settings["topology.name"] == "base"
    }
    assert [*by_shares] == [(), "auto"]
    assert by_shares["auto"].simulation.batching == "none"
    assert by_shares[()].simulation.batching == "big-batch"


def test_a_journal_of_another_search_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    Journal(tmp_path / NAME, {"job": "a", "budget": 8})
    with pytest.raises(ConfigError, match="its budget is 8, not 4; give another --output") as caught:
        Journal(tmp_path / NAME, {"job": "a", "budget": 4})
    assert caught.value.exit_code == 2
    (tmp_path / NAME).write_text('{"format": 2}\nnonsense\n{"kind": "probe"}\n')
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        Journal(tmp_path / NAME, {})


def test_a_probe_keeps_its_name_when_it_is_prolonged() -> None:
    probe = Probe.of({"b.c": 1, "a.b": None}, "x-3", 1)
    longer = probe._replace(epochs=4)
    assert probe.name == longer.name
    assert (probe.end, longer.end) == (f"{probe.name}-4", f"{probe.name}-7")
    assert probe.by_key == json.loads(json.dumps({"a.b": None, "b.c": 1}))
    assert Probe.of({"a.b": None, "b.c": 1}, "x-3", 1) == probe
    assert probe.name not in {probe._replace(seed=1).name, probe._replace(origin="y-3").name}


def test_an_answer_about_numbers_of_learners_has_the_time_of_all_ranks() -> None:
    def finalist(time_s: float, **cluster: int) -> Finalist:
        return Finalist({"protocol.name": "sma", **{f"cluster.{key}": n for key, n in cluster.items()}}, (time_s,))

    eight, two = finalist(60.0, learners=8, learners_per_rank=2), finalist(90.0, learners=2)
    lines = [*Verdict(JOB, TARGET, (eight, two), None, math.nan, 3.0).lines()]
    assert (
        lines[1]
        == "  time to target: 1:00 min (54.5 s to 1:06 min expected, one seed); machine time 4:00 min on 4 ranks"
    )
    assert lines[3].endswith("50 % later; machine time 3:00 min on 2 ranks")
    bank = finalist(60.0, learners=8, learners_per_device=4)
    assert "machine time 2:00 min on 2 ranks" in [*Verdict(JOB, TARGET, (bank,), None, math.nan, 3.0).lines()][1]
    same = [*Verdict(JOB, TARGET, (finalist(60.0), finalist(90.0)), None, math.nan, 3.0).lines()]
    assert not any("machine time" in line for line in same)


@pytest.mark.parametrize(
    ("times_s", "epoch_s", "expected"),
    [
        ((11.0,), 0.0, (10.0, 12.1)),  # 10 % for the predicted speed
        ((11.0, 22.0, 33.0), 0.0, (10.0, 36.3)),
        ((22.0,), 11.0, (10.0, 36.3)),  # and an epoch on either side
        ((11.0,), 11.0, (10.0, 24.2)),  # but not less than an epoch
        ((11.0, math.inf), 0.0, (10.0, math.inf)),
    ],
)
def test_another_run_is_expected_in_a_range(
    times_s: tuple[float, ...], epoch_s: float, expected: tuple[float, float]
) -> None:
    assert Finalist({}, times_s, epoch_s).expected_s == pytest.approx(expected)
    assert Finalist({}, times_s, epoch_s, predicted=True).expected_s == (min(times_s), max(times_s))
