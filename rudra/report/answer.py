"""First section of a report: which run is best, what else differs between the runs, and why the best took its time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rudra.errors import RudraError
from rudra.explain import explain
from rudra.explain.explanation import COLUMNS
from rudra.report.runs import Run, Study, text, varying
from rudra.report.tables import ReportTable, clock_of

_MOST_KEYS = 6


class Answer(NamedTuple):
    """Answer of a report on one study.

    Attributes:
        best: Sentences about the best runs, and about their differences. Empty for a single run.
        explained: Label of the run that is explained. Empty: no run is.
        lines: Explanation of that run.
        changes: Changes of that run that are worth it, or None.
    """

    best: Sequence[str]
    explained: str = ""
    lines: Sequence[str] = ()
    changes: ReportTable | None = None


def answer_of(study: Study) -> Answer:
    """Returns the answer of a study. It explains the run with the best test error, or else the fastest run."""
    runs = [run for run in study.known if run.finished]
    if not runs:
        return Answer(())
    best = _best(runs) if len(runs) > 1 else []
    explained = _least(runs, _error) or _least(runs, _epoch_s) or runs[0]
    try:
        found = explain(explained.file, trust=None)
    except RudraError:  # a file that is damaged where only explanations look
        return Answer(best)
    rows = found.rows()
    changes = ReportTable("changes", COLUMNS, rows, {}) if rows else None
    return Answer(best, explained.label, found.lines, changes)


def _best(runs: Sequence[Run]) -> list[str]:
    by_error, by_target, by_epoch = (_least(runs, key) for key in (_error, _to_target, _epoch_s))
    found = []
    if by_error is not None:
        value = f"{by_error.error:.2f} %" if by_error.error is not None else f"test loss {by_error.loss:.4g}"
        found.append(f"Best test error: {by_error.label}, {value}.")
    if by_target is not None:
        goal, seconds = by_target.summary["target"], _to_target(by_target)
        found.append(f"First at the target ({goal}): {by_target.label}, {clock_of([by_target])} {seconds:.4g} s.")
    if by_epoch is not None:
        found.append(f"Fastest epoch: {by_epoch.label}, {_epoch_s(by_epoch):.4g} s.")
    keys = varying(runs)
    shown = [f"{key} ({', '.join(dict.fromkeys(text(run.job.get(key)) for run in runs))})" for key in keys[:_MOST_KEYS]]
    more = f", and {len(keys) - _MOST_KEYS} other keys" if len(keys) > _MOST_KEYS else ""
    found.append(f"The runs differ in {', '.join(shown)}{more}." if keys else "The runs have the same job.")
    return found


def _least(runs: Sequence[Run], key: Callable[[Run], float | None]) -> Run | None:
    known = [(value, place) for place, run in enumerate(runs) if (value := key(run)) is not None]
    return runs[min(known)[1]] if known else None


def _error(run: Run) -> float | None:
    return run.loss if run.error is None else run.error


def _to_target(run: Run) -> float | None:
    seconds = run.summary["time_to_target_s"]
    return None if seconds is None else float(seconds)


def _epoch_s(run: Run) -> float | None:
    return float(run.epoch_end_s[-1]) / len(run.epoch_end_s) if len(run.epoch_end_s) else None
