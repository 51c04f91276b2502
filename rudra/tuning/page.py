"""Report page of a search: the answer, its reasons, and everything that was tried."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rudra.errors import ConfigError
from rudra.files import written
from rudra.log import log
from rudra.report import check_libraries
from rudra.report.chapters import Chapter
from rudra.report.page import render_chapters
from rudra.report.tables import ReportTable
from rudra.tuning.answer import Verdict, named, tried
from rudra.tuning.curves import curves
from rudra.tuning.space import Refused
from rudra.tuning.state import SearchState
from rudra.tuning.surface import Surface
from rudra.tuning.untried import untried

NAME = "report.html"


def write_page(directory: Path, state: SearchState, verdict: Verdict, refused: Sequence[Refused]) -> None:
    """Writes the report page of a search that has ended. Without matplotlib or Jinja there is none, and a line says so.

    Args:
        directory: Directory of the answer.
        state: The search.
        verdict: Its answer.
        refused: Combinations that the job or its cluster does not allow.

    Raises:
        ResultsError: The page cannot be written.
    """
    path = directory / NAME
    try:
        check_libraries()
    except ConfigError as error:
        log.warning(f"{path}: not written: {error}; the same command then writes it")
        return
    title = f"{verdict.job.name}: the soonest to {verdict.target.text}"
    with written(path) as file:
        file.write(render_chapters(title, [*_chapters(state, verdict, refused)]).encode())


def _chapters(state: SearchState, verdict: Verdict, refused: Sequence[Refused]) -> Iterator[Chapter]:
    left = [*untried(state, refused)]
    yield Chapter("The answer", [line.strip() for line in verdict.lines()])
    if verdict.winner is None:
        yield Chapter("Why no point won", [*_failure(state)])
    else:
        begin = "the common checkpoint" if verdict.winner.predicted else "the initial weights"
        lines = [_REASON, f"Samples count from {begin}."]
        yield Chapter("Why the winner won", lines, tables=[_reasons(state, verdict)])
    if math.isfinite(state.reference_samples):
        yield Chapter("The surface", figures=[Surface.of(state, left).figure()])
    yield Chapter("The curves", figures=curves(state, verdict))
    lost = ReportTable("not-tried", ("point", "why"), [(named(each.settings), each.reason) for each in left], {})
    about = [_TRIED, _LEFT] if left else [_TRIED]
    yield Chapter("Everything", about, tables=[_everything(state), lost], collapsed=True)
    yield Chapter("The test set", [*_about_test(verdict)], tables=[_tested(verdict)])


_REASON = (
    "A candidate is sooner if it trains more samples per second, or if its samples are worth more, so that it needs "
    "fewer. The last three columns compare the winner with each candidate: speed × worth = gain."
)

_TRIED = "The first table has all probes, as in tried.csv."

_LEFT = "The second table has the points without a probe, each with the reason."


def _reasons(state: SearchState, verdict: Verdict) -> ReportTable:
    """Returns speed, worth and gain of the winner against the others."""
    winner = verdict.winner
    assert winner is not None
    assert state.reference is not None
    samples = state.reference_samples if winner.predicted else state.one_run
    rate = state.rate(state.reference.by_key)
    candidates = [(role, f.settings, f.time_s, state.rate(f.settings)) for role, f in verdict.roles.items()]
    candidates.insert(1, ("reference", state.reference.by_key, samples / rate, rate))
    if verdict.given is None and not math.isnan(verdict.saving):  # the budget ended before its run
        candidates.append(("job as given, at least", {}, verdict.given_least_s, state.rate({})))
    won_rate = state.rate(winner.settings)
    rows = [
        (
            role,
            named(settings),
            its_rate,
            _known(time_s * its_rate),
            won_rate / its_rate,
            _known(time_s * its_rate / (winner.time_s * won_rate)),
            _known(time_s / winner.time_s),
        )
        for role, settings, time_s, its_rate in candidates
    ]
    heads = ("candidate", "settings", "samples/s", "samples to the target")
    factors = ("speed", "× worth", "= gain")
    shown = {**dict.fromkeys(heads[2:], "{:,.0f}".format), **dict.fromkeys(factors, "{:.2f}".format)}
    return ReportTable("reasons", (*heads, *factors), rows, shown)


def _failure(state: SearchState) -> Iterator[str]:
    """Yields what kept a search from a winner."""
    if state.cold is None:
        yield "The loss diverged with every learning rate of the cold start."
    elif state.reference is None:
        yield "The budget ended with the cold start."
    elif not math.isfinite(state.reference_samples):
        metric, epochs = state.target.metric, len(state.outcomes[state.reference.name].marks)
        values = [mark.metric for mark in state.marks(state.reference) if not math.isnan(mark.metric)]
        best = (max if state.target.at_least else min)(values, default=math.nan)
        yield f"The reference reached {metric} {best:.4g} in {epochs} epochs after the cold start."
        yield "Without a reference that reaches the target, nothing else is tried."
    else:
        yield "The reference reached the target, but no finalist did from the initial weights."


def _everything(state: SearchState) -> ReportTable:
    """Returns the rows of `tried.csv`."""
    head, *rows = csv.reader(io.StringIO(tried(state)))
    return ReportTable("tried", tuple(head), [tuple(map(_value, head, row)) for row in rows], {})


def _value(head: str, text: str) -> Any:
    """Returns a number as such, except in a digest. None: unknown."""
    try:
        number = math.nan if head in ("probe", "begins with") else float(text)
    except ValueError:
        number = math.nan
    if math.isfinite(number):
        return int(number) if text.isdecimal() else number
    return None if text in ("", "nan") else text


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _about_test(verdict: Verdict) -> Iterator[str]:
    """Yields what the figures of the test set are."""
    if not verdict.scores:
        yield "No finalist was evaluated on the test set."
        return
    yield "The finalists were evaluated on the test set once, after the last decision. It decided nothing."
    if not all(score.seed for score in verdict.scores):
        yield "Seed 0 is the probe from the common checkpoint: the budget had no room for runs with fresh seeds."


def _tested(verdict: Verdict) -> ReportTable:
    """Returns the scores of the finalists on the test set, seed by seed."""
    metric = verdict.target.metric
    heads = ("candidate", "settings", "seed", "epochs", "target reached", f"validation {metric}", f"test {metric}")
    rows = [
        (role, named(s.settings), s.seed, s.epochs, "yes" if s.reached else "no", _known(s.held_out), _known(s.value))
        for role, finalist in verdict.roles.items()
        for s in verdict.tested(finalist)
    ]
    return ReportTable("test-set", heads, rows, dict.fromkeys(heads[-2:], "{:.4f}".format))
