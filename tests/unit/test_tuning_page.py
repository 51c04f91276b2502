"""The report page and the test set of `rudra tune`, after searches on invented surfaces."""

import csv
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
from surfaces import JOB, SURFACES, TARGET, Search, Surface

from rudra.tuning import space
from rudra.tuning.answer import Verdict, answer_of
from rudra.tuning.final_scores import Score, ends_of, final_scores
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.page import write_page
from rudra.tuning.probes import Probe
from rudra.tuning.state import SearchState
from tests.unit.html_pages import HtmlPage

needs_plots = pytest.mark.skipif(
    not all(map(find_spec, ("matplotlib", "jinja2"))), reason="no pages: pip install 'rudra[plot]'"
)


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
    surface = SURFACES["monotone"]._replace(only=("hardsync", "softsync", "async"))
    return Search(tmp_path_factory.mktemp("finished"), "guided", surface, 30).run()


def even(worth: float) -> Surface:
    """A surface on which all points are worth the same. Zero: all diverge."""
    cliff = math.inf if worth else 0.0
    return Surface(lambda point, sigma: 100.0, lambda point, sigma: worth, size=0, width=math.inf, cliff=cliff)


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
        (0.0, "The loss diverged with every learning rate of the cold start."),
        (0.001, "The reference reached accuracy 0.75"),
        (0.05, "The reference reached accuracy 0.8"),
    ],
    ids=["all diverge", "no progress", "too slow"],
)
def test_a_search_without_a_winner_has_a_page_too(tmp_path: Path, worth: float, said: str) -> None:
    state = Search(tmp_path, "guided", even(worth), noise=0.01).run()
    page, verdict = page_of(tmp_path, state)
    assert verdict.winner is None
    assert said in page.section("why-no-point-won")
    assert "no point reached validation accuracy >= 0.9" in page.section("the-answer")
    assert "No finalist was evaluated" in page.section("the-test-set")
    assert "surface" not in page.ids()


def test_a_search_without_matplotlib_has_no_page_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Search(tmp_path, "guided", even(0.0)).run()
    monkeypatch.setattr("rudra.report.find_spec", lambda name: None)
    write_page(tmp_path, state, answer_of(state, JOB), [])
    assert not (tmp_path / "report.html").exists()
    assert "report.html: not written: reports need matplotlib: pip install 'rudra[plot]'" in capsys.readouterr().err


def test_the_finalists_are_evaluated_once_at_the_target(finished: SearchState, tmp_path: Path) -> None:
    verdict = answer_of(finished, JOB)
    finalists = [f.settings for f in verdict.roles.values() if not f.predicted]
    *there, gone = [end for settings in finalists for end in ends_of(finished, settings, fresh=True)]
    asked: list[str] = []

    def evaluate(paths: Sequence[Path]) -> list[float]:
        asked.extend(path.name for path in paths)
        return [0.5 + place / 100 for place in range(len(paths))]

    def find(probe: Probe, epochs: int) -> tuple[int, Path] | None:
        return None if probe == gone else (epochs, tmp_path / f"{probe.name} {epochs}")

    def read() -> tuple[Score, ...]:
        return final_scores(finished, [*there, gone], Journal(tmp_path / NAME, {}), find, evaluate)

    scores = read()
    assert [(score.seed, score.value) for score in scores] == [(end.seed, 0.5 + n / 100) for n, end in enumerate(there)]
    ends = [f"{end.name} {score.epochs}" for end, score in zip(there, scores, strict=True)]
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


@needs_plots
def test_a_job_that_wins_as_given_is_compared_once(finished: SearchState, tmp_path: Path) -> None:
    verdict = answer_of(finished, JOB)
    assert verdict.given is not None
    won = verdict._replace(finalists=(verdict.given, *verdict.finalists))
    assert [*won.roles] == ["winner", "runner-up"]
    write_page(tmp_path, finished, won, [])
    page = HtmlPage((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert columns_of(page, "reasons")["candidate"] == ["winner", "reference", "runner-up"]
    assert "the red one the winner" not in page.section("the-curves"), "the job as given has no probe"


@needs_plots
def test_a_job_as_given_that_outlasts_the_budget_bounds_the_gain(finished: SearchState, tmp_path: Path) -> None:
    verdict = answer_of(finished, JOB)
    assert verdict.winner is not None
    late = verdict._replace(given=None, given_least_s=3 * verdict.winner.time_s)
    write_page(tmp_path, finished, late, [])
    reasons = columns_of(HtmlPage((tmp_path / "report.html").read_text(encoding="utf-8")), "reasons")
    assert (reasons["candidate"][-1], float(reasons["= gain"][-1])) == ("job as given, at least", pytest.approx(3))
