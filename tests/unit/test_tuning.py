"""The search of `rudra tune` on invented surfaces: what strategies ask for, and what the answer says."""

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.tuning import space
from rudra.tuning.answer import Verdict, answer_of
from rudra.tuning.final_scores import Score, ends_of, final_scores
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.page import write_page
from rudra.tuning.prices import Price, dominated
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.ruler import Mark, Ruler, reached
from rudra.tuning.search import lead
from rudra.tuning.space import Candidate, Settings
from rudra.tuning.state import SearchState, key_of
from rudra.tuning.strategies import shipped
from tests.unit.html_pages import HtmlPage

needs_plots = pytest.mark.skipif(
    not all(map(find_spec, ("matplotlib", "jinja2"))), reason="no pages: pip install 'rudra[plot]'"
)

EPOCH = 1000
TARGET = Target("validation", "accuracy", True, 0.9)
JOB = Job(
    name="invented",
    model={"name": "mlp"},
    training={"epochs": 40, "minibatch_size": 8},
    optimizer={"learning_rate": 0.01, "momentum": 0.9},
    cluster={"learners": 8, "threads_per_rank": 1},
)

Worth = Callable[[Settings], float]
"""Settings -> progress per sample. Zero: diverges."""


def priced(rate: Callable[[Job, Settings], float], staleness: Callable[[Job], float]) -> list[Price]:
    points = space.points(JOB, [d for d in space.chosen({}) if d.timed], [])
    found = [Price(p, rate(p.job, p.settings), staleness(p.job), "compute") for p in [Candidate({}, JOB), *points]]
    return dominated(found)


def stale(job: Job) -> float:
    """Updates between reading and writing: as many as there are others that update alone."""
    protocol = job.make_protocol()
    if protocol.averages or protocol.ordered:
        return 0.0
    if job.topology.name == "groups":
        return float(job.topology.options.get("groups", 1)) - 1
    return float(job.learners / protocol.gradients_per_update) - 1


def optimum(settings: Settings) -> float:
    """Worth by learning rate and momentum: a ridge, on which staleness acts as momentum, with a cliff beyond it."""
    return ridge(key_of(settings))


@cache
def ridge(key: tuple[tuple[str, str], ...]) -> float:
    job = space.with_settings(JOB, Probe(key, "", 0).by_key)
    return worth_of(job, job.optimizer.learning_rate, job.optimizer.momentum)


def worth_of(job: Job, rate: float, momentum: float) -> float:
    sigma = stale(job)
    implicit = 1 - 1 / (1 + sigma)
    total = 1 - (1 - momentum) * (1 - implicit)
    effective = rate / (1 - total)
    if effective > 2.0:
        return 0.0
    return math.exp(-(math.log(effective / 0.5) ** 2) / 8) * (job.training.minibatch_size / 8) ** -0.5


class Surface:
    """Trains probes of an invented surface: the loss falls by worth, with noise that settings and seed decide."""

    def __init__(self, state: SearchState, worth: Worth, noise: float = 0.01) -> None:
        self._state, self._worth, self._noise = state, worth, noise
        self.trained = 0

    def begin(self, origin: str) -> float:
        """Progress at the beginning of a probe."""
        name, _, _ = origin.rpartition("-")
        return self._progress(self._state.probes[name], self._state.probes[name].epochs) if name else 0.0

    def _progress(self, probe: Probe, epochs: int) -> float:
        return self.begin(probe.origin) + self._worth(probe.by_key) * epochs

    def __call__(self, probe: Probe, before: Outcome | None) -> Outcome:
        self.trained += 1
        if self._worth(probe.by_key) == 0:
            return Outcome((), "the loss of mini-batch 3 is nan")
        marks = []
        for epoch in range(1, probe.epochs + 1):
            luck = random.Random(f"{probe.name} {epoch}").gauss(0, self._noise)
            progress = max(0.0, self._progress(probe, epoch) + luck)
            loss = math.exp(-progress / 4)
            marks.append(Mark(epoch * EPOCH, loss, 1 - loss / 4, epoch * EPOCH / self._state.rate(probe.by_key)))
        return Outcome(tuple(marks))


def searched(
    path: Path,
    strategy: str,
    prices: list[Price],
    worth: Worth = optimum,
    *,
    budget: float = 8,
    dies_after: int | None = None,
) -> tuple[SearchState, Surface]:
    """A search on a surface, which may be killed after a number of probes."""
    untimed = {key for dimension in space.DIMENSIONS if not dimension.timed for key in dimension.keys}
    state = SearchState(
        JOB, TARGET, prices, untimed=untimed, training_samples=EPOCH, budget=budget, longest=JOB.training.epochs
    )
    surface = Surface(state, worth)

    def train(probe: Probe, before: Outcome | None) -> Outcome:
        if surface.trained == dies_after:
            raise KeyboardInterrupt
        return surface(probe, before)

    lead(state, shipped()[strategy], Journal(path / NAME, {"job": "invented"}), train, lambda probe: None)
    return state, surface


def best_of(prices: list[Price]) -> float:
    """Least time of all points and of many rates and momenta, in passes over the data at the reference's rate."""
    found = math.inf
    rates = [0.01 * 10 ** (i / 4) for i in range(-8, 12)]
    for price, rate, momentum in itertools.product(prices, rates, (0.0, 0.3, 0.6, 0.9)):
        if its := worth_of(price.point.job, rate, momentum):
            found = min(found, 1 / (its * price.samples_per_s))
    return found


SURFACES: dict[str, tuple[Callable[[Job, Settings], float], str]] = {
    "all equally fast": (lambda job, settings: 100.0, "hardsync"),
    "waiting costs": (lambda job, settings: 100.0 * (1 + stale(job)), "async"),
    "a valley in g": (
        lambda job, settings: 100.0 * (6 if settings.get("topology.options.groups") == 4 else 1 + 0.1 * stale(job)),
        "async",
    ),
    "replicas are fast": (lambda job, settings: 400.0 if job.make_protocol().averages else 100.0, "average"),
}


@pytest.mark.parametrize(("rate", "who"), SURFACES.values(), ids=SURFACES)
def test_the_default_finds_a_point_that_is_nearly_as_soon_as_the_best(
    tmp_path: Path, rate: Callable[[Job, Settings], float], who: str
) -> None:
    prices = priced(rate, stale)
    state, _ = searched(tmp_path, "guided", prices, budget=20)
    answer = answer_of(state, JOB)
    winner = answer.winner
    assert winner is not None
    time = 1 / (optimum(winner.settings) * state.rate(winner.settings))
    assert time <= 1.5 * best_of(prices[1:]), (winner, who)
    assert not winner.predicted
    assert state.spent <= 20 * state.one_run


@pytest.mark.parametrize("strategy", [name for name in shipped() if name != "grid"])
def test_a_search_that_is_killed_again_and_again_ends_the_same(tmp_path: Path, strategy: str) -> None:
    prices = priced(SURFACES["waiting costs"][0], stale)
    whole, _ = searched(tmp_path / "whole", strategy, prices) if (tmp_path / "whole").mkdir() is None else (None, None)
    assert whole is not None
    chance, lives = random.Random(5), tmp_path / "killed"
    lives.mkdir()
    for _ in range(20):
        try:
            state, _ = searched(lives, strategy, prices, dies_after=chance.randrange(1, 4))
            break
        except KeyboardInterrupt:
            with (lives / NAME).open("ab") as file:
                file.write(b'{"kind": "probe", "na')  # a line that was being written
    else:
        state, _ = searched(lives, strategy, prices)
    assert [*answer_of(state, JOB).lines()] == [*answer_of(whole, JOB).lines()]
    assert state.outcomes == whole.outcomes


def test_nothing_diverges_forever(tmp_path: Path) -> None:
    state, surface = searched(tmp_path, "guided", priced(lambda job, settings: 1.0, stale), lambda settings: 0.0)
    assert state.cold is None
    assert min(probe.by_key["optimizer.learning_rate"] for probe in state.probes.values()) == 1e-5
    answer = answer_of(state, JOB)
    assert answer.winner is None
    first, *_, last = answer.lines()
    assert first == f"{JOB.name}: no point reached validation accuracy >= 0.9"
    assert last.startswith("  note: the loss diverged with every learning rate: 1e-05, 3.16e-05, ")
    assert surface.trained <= 9


def test_a_target_that_the_first_evaluation_meets_compares_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the first evaluation already meets .*; use a tighter one") as caught:
        searched(tmp_path, "guided", priced(lambda job, settings: 1.0, stale), lambda settings: 40.0)
    assert caught.value.exit_code == 2


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


def replace_metric(mark: Mark) -> Mark:
    return mark._replace(metric=mark.loss)


def test_a_synchronous_point_is_dominated_by_the_same_one_on_a_faster_topology() -> None:
    prices = priced(lambda job, settings: 2.0 if job.topology.name == "groups" else 1.0, stale)
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
        (
            "hardsync",
            {"layers": [LAYER]},
            {},
            "placement.cut",
            {"auto", None},
        ),
    ],
    ids=["m", "its learners", "λ is given", "m of gradients", "cut", "cut with known layers"],
)
def test_a_row_of_the_space_applies_under_its_condition(
    protocol: str, tables: dict[str, Any], given: dict[str, Any], key: str, values: set[Any]
) -> None:
    job = JOB.with_(simulation=tables)
    points = space.points(job, [d for d in space.chosen(given) if d.timed], [])
    assert {p.settings.get(key) for p in points if p.settings["protocol.name"] == protocol} == values


def test_another_protocol_leaves_nothing_of_the_first() -> None:
    job = JOB.with_(protocol={"name": "diloco"}, averaging={"period": 7, "outer": {"momentum": 0.5}})
    plain = space.with_settings(job, {"protocol.name": "hardsync", "topology.name": "base"})
    assert plain.averaging.non_defaults == {}
    again = space.with_settings(job, {"averaging.outer.learning_rate": 0.3})
    assert again.averaging.period == 7
    assert again.averaging.outer.non_defaults == {"momentum": 0.5, "learning_rate": 0.3}


def test_a_journal_of_another_search_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    Journal(tmp_path / NAME, {"job": "a", "budget": 8})
    with pytest.raises(ConfigError, match="its budget is 8, not 4; give another --output") as caught:
        Journal(tmp_path / NAME, {"job": "a", "budget": 4})
    assert caught.value.exit_code == 2
    (tmp_path / NAME).write_text('{"format": 1}\nnonsense\n{"kind": "probe"}\n')
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


def page_of(path: Path, state: SearchState) -> tuple[HtmlPage, Verdict]:
    """The report page of a search that has ended."""
    verdict = answer_of(state, JOB)
    write_page(path, state, verdict, [space.Refused({"protocol.name": "hardsync"}, "a <reason>")])
    return HtmlPage((path / "report.html").read_text(encoding="utf-8")), verdict


def columns_of(page: HtmlPage, table: str) -> dict[str, list[str]]:
    """Head -> cells of a table."""
    head, *rows = csv.reader(page.download(table).splitlines())
    return dict(zip(head, map(list, zip(*rows, strict=True)), strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SearchState:
    """A search that has ended with a winner."""
    prices = [p for p in priced(SURFACES["waiting costs"][0], stale) if not p.point.job.make_protocol().averages]
    return searched(tmp_path_factory.mktemp("finished"), "guided", prices, budget=30)[0]


@pytest.fixture(scope="module")
def winning_page(finished: SearchState, tmp_path_factory: pytest.TempPathFactory) -> tuple[HtmlPage, Verdict]:
    return page_of(tmp_path_factory.mktemp("page"), finished)


@needs_plots
def test_the_page_tells_why_the_winner_won(finished: SearchState, winning_page: tuple[HtmlPage, Verdict]) -> None:
    state, (page, verdict) = finished, winning_page
    assert [part.text for part in page.of("h2")] == [
        *("The answer", "Why the winner won", "The surface", "The curves", "Everything", "The test set")
    ]
    assert len(page.ids()) == len(set(page.ids()))
    answer = page.section("the-answer")
    assert all(line.strip() in answer for line in verdict.lines())
    assert verdict.winner is not None
    reasons = columns_of(page, "reasons")
    assert reasons["candidate"] == ["winner", "reference", "runner-up", "job as given"]
    for speed, worth, gain in zip(*(map(float, reasons[head]) for head in ("speed", "× worth", "= gain")), strict=True):
        assert gain == pytest.approx(speed * worth)
    assert float(reasons["= gain"][3]) == pytest.approx(verdict.saving)
    assert f"{verdict.saving:.2f}" in page.section("why-the-winner-won")
    assert float(reasons["samples/s"][0]) == state.rate(verdict.winner.settings)


@needs_plots
def test_the_surface_of_the_page_shows_what_was_tried_and_why_not(
    finished: SearchState, winning_page: tuple[HtmlPage, Verdict]
) -> None:
    state, (page, _) = finished, winning_page
    cells = columns_of(page, "surface")
    ratios = [float(each) for each in cells["times the best"] if each]
    assert min(ratios) == 1
    titles = [part.text for part in page.of("title") if "svg" in part.parents]
    assert len(titles) == 2 * len(cells["kind"]), "each cell has its text, in the wide and in the narrow picture"
    why = [
        text
        for text, ratio in zip(cells["candidate, or why there is none"], cells["times the best"], strict=True)
        if not ratio
    ]
    assert any("dropped: takes " in text or "not tried: " in text for text in why)
    stales = [float(kind.partition("σ ")[2].rstrip(")")) for kind in dict.fromkeys(cells["kind"])]
    assert stales == sorted(stales)
    shown = {*columns_of(page, "curves")["probe"]}
    assert 2 < len(shown) <= 12
    assert {name.partition(":")[0] for name in shown} >= {"reference", "runner-up"} | {"winner"}
    tried = columns_of(page, "tried")
    assert len(tried["probe"]) == len(state.probes)
    missing = columns_of(page, "not-tried")
    assert "refused: a <reason>" in missing["why"]
    points = {state.point_of(probe.by_key) for probe in state.probes.values() if probe.origin}
    assert len(missing["why"]) == len(state.prices) - len(points) + 1


@needs_plots
@pytest.mark.parametrize(
    ("worth", "said"),
    [
        (lambda settings: 0.0, "The loss diverged with every learning rate of the cold start."),
        (lambda settings: 0.001, "The reference came to accuracy 0.75"),
        (lambda settings: 0.05, "The reference came to accuracy 0.8"),
    ],
    ids=["all diverge", "no progress", "too slow"],
)
def test_a_search_without_a_winner_has_a_page_too(tmp_path: Path, worth: Worth, said: str) -> None:
    state, _ = searched(tmp_path, "guided", priced(SURFACES["waiting costs"][0], stale), worth)
    page, verdict = page_of(tmp_path, state)
    assert verdict.winner is None
    assert said in page.section("why-no-point-won")
    assert "no point reached validation accuracy >= 0.9" in page.section("the-answer")
    assert "No finalist was evaluated" in page.section("the-test-set")
    assert "surface" not in page.ids()


def test_a_search_without_matplotlib_has_no_page_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = searched(tmp_path, "guided", priced(lambda job, settings: 1.0, stale), lambda settings: 0.0)
    monkeypatch.setattr("rudra.report.find_spec", lambda name: None)
    write_page(tmp_path, state, answer_of(state, JOB), [])
    assert not (tmp_path / "report.html").exists()
    assert "report.html: not written: reports need matplotlib: pip install 'rudra[plot]'" in capsys.readouterr().err


def test_the_finalists_are_evaluated_once_at_the_target(finished: SearchState, tmp_path: Path) -> None:
    verdict = answer_of(finished, JOB)
    finalists = [f.settings for f in verdict.roles.values() if not f.predicted]
    *there, gone = [end for settings in finalists for end in ends_of(finished, settings, fresh=True)]
    asked: list[str] = []

    def evaluate(seed: int, paths: Sequence[Path]) -> list[float]:
        asked.extend(f"{seed} {path.name}" for path in paths)
        return [0.5 + seed / 100 for _ in paths]

    def find(probe: Probe, epochs: int) -> tuple[int, Path] | None:
        return None if probe == gone else (epochs, tmp_path / f"{probe.name} {epochs}")

    def read() -> tuple[Score, ...]:
        return final_scores(finished, [*there, gone], Journal(tmp_path / NAME, {}), find, evaluate)

    scores = read()
    assert [(score.seed, score.value) for score in scores] == [(end.seed, 0.5 + end.seed / 100) for end in there]
    ends = [f"{end.seed} {end.name} {score.epochs}" for end, score in zip(there, scores, strict=True)]
    assert sorted(asked) == sorted(ends)
    marks = [finished.outcomes[end.name].marks for end in there]
    for score, its in zip(scores, marks, strict=True):
        assert score.reached == any(mark.metric >= TARGET.value for mark in its)
        assert score.held_out == its[score.epochs - 1].metric
        assert all(mark.metric < TARGET.value for mark in its[: score.epochs - 1])
    assert any(score.epochs < len(its) for score, its in zip(scores, marks, strict=True)), "some ran beyond the target"
    assert read() == scores
    assert len(asked) == len(there), "the journal has the scores"
    assert verdict.winner is not None
    won = [score.value for score in scores if score.settings == verdict.winner.settings]
    said = "\n".join(verdict._replace(scores=scores).lines())
    assert f"  on the test set: winner {median(won):.4g}" in said


def test_a_finalist_that_did_not_reach_the_target_is_said_to_be_short_of_it(finished: SearchState) -> None:
    verdict = answer_of(finished, JOB)
    assert verdict.winner is not None
    assert verdict.given is not None
    scores = (Score(verdict.winner.settings, 1, 3, True, 0.9, 0.91), Score({}, 1, 9, False, 0.7, 0.69))
    said = [*verdict._replace(scores=scores).lines()]
    assert "  on the test set: winner 0.91, job as given 0.69 short of the target (accuracy)" in said
