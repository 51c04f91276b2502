"""The answer of a search: what to use, what it saves, and how certain that is."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rudra.job.job import Job
from rudra.job.target import Target
from rudra.job.template import toml
from rudra.results.progress import duration
from rudra.tuning.final_scores import Score
from rudra.tuning.probes import Probe
from rudra.tuning.remarks import remarks
from rudra.tuning.rounds import LATER, latest_s, simplicity, until_target
from rudra.tuning.space import PER_DEVICE, PER_RANK, Settings, in_words
from rudra.tuning.state import Estimate, SearchState

SPEED_ERROR = 1.1
"""Largest expected ratio of a measured and a predicted speed."""

ALIKE = 1.05
"""Ratio of two times that are no difference. If their ranges over seeds overlap, `LATER` is none either."""


class Finalist(NamedTuple):
    """A candidate, with its time to the target.

    Attributes:
        settings: Its settings. Empty: the job as given.
        times_s: Time to the target from the initial weights, with each seed. Infinity: it did not reach the target in
            as many epochs as allowed. If `predicted`, the prediction and its range: an epoch of the cold start, and
            the time from the common checkpoint.
        epoch_s: Time of an epoch.
        predicted: Whether the budget was too small to train it to the target.
    """

    settings: Settings
    times_s: tuple[float, ...]
    epoch_s: float = 0.0
    predicted: bool = False

    @property
    def time_s(self) -> float:
        """Median time to the target."""
        return median(self.times_s)

    @property
    def expected_s(self) -> tuple[float, float]:
        """Range that the time of another run should be in.

        It is the range of all seeds, with one epoch and the error of a predicted speed on either side.
        """
        low, high = min(self.times_s), max(self.times_s)
        if self.predicted:
            return low, high
        return max(low - self.epoch_s, self.epoch_s) / SPEED_ERROR, (high + self.epoch_s) * SPEED_ERROR


class Verdict(NamedTuple):
    """Verdict of a search.

    Attributes:
        job: The user's job.
        target: Target on the validation split.
        finalists: Candidates with fresh seeds, the soonest one first. The job as given is one only if it is the first.
        given: The job as given. None: its run did not end within the budget.
        given_least_s: Time that the run of the job as given had trained at least, without reaching the target.
        nearest: Best value of the target's metric that any probe reached.
        spent: Reference runs whose samples the search has used.
        trained_s: Training time of all probes on real ranks. Zero: they trained in virtual time.
        costs: Origin of the times.
        notes: Remarks about the answer, one line each.
        scores: Scores of the finalists on the test set. Empty: it was not read.
    """

    job: Job
    target: Target
    finalists: tuple[Finalist, ...]
    given: Finalist | None
    nearest: float
    spent: float
    costs: str = ""
    notes: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    given_least_s: float = 0.0
    trained_s: float = 0.0

    @property
    def winner(self) -> Finalist | None:
        """The soonest candidate. None: none reached the target."""
        first = next(iter(self.finalists), None)
        return first if first is not None and math.isfinite(first.time_s) else None

    @property
    def saving(self) -> float:
        """How many times sooner the winner reaches the target than the job as given, at least. NaN: unknown."""
        least_s = self.given_least_s if self.given is None else self.given.time_s
        if self.winner is None or (self.given is None and least_s <= self.winner.time_s):
            return math.nan
        return least_s / self.winner.time_s

    @property
    def roles(self) -> dict[str, Finalist]:
        """The finalists that are compared: "winner", "runner-up" and "job as given", unless that is one of them."""
        if self.winner is None:
            return {}
        found = dict(zip(("winner", "runner-up"), self.finalists, strict=False))
        if self.given is not None and self.given not in found.values():
            found["job as given"] = self.given
        return found

    def tested(self, finalist: Finalist) -> list[Score]:
        """Returns the scores of a finalist on the test set, by seed."""
        return [score for score in self.scores if score.settings == finalist.settings]

    def lines(self) -> Iterator[str]:
        """Yields the answer in words."""
        goal = self.target.text
        if self.winner is None:
            near = "" if math.isnan(self.nearest) else f"; the nearest had {self.nearest:.4g}"
            yield f"{self.job.name}: no point reached {goal}{near}"
            yield from self._remarks()
            return
        first, *others = self.finalists
        yield f"{self.job.name}: the soonest to {goal} is {named(first.settings)}"
        yield f"  time to target: {_times(first)}{self._machine_time(first)}"
        if self.given is not None and first.settings:
            if _alike(first, self.given):
                yield f"  the job as given: {_times(self.given)}: no difference, so it may stay as it is"
            elif math.isfinite(self.given.time_s):
                yield f"  the job as given: {_times(self.given)}: the winner is {self.saving:.2f} times as fast"
            else:
                yield "  the job as given did not reach it in twice the time of a reference run"
        elif first.settings and not math.isnan(self.saving):
            least = f"more than {duration(self.given_least_s)}, when the budget ended"
            yield f"  the job as given: {least}: the winner is at least {self.saving:.2f} times as fast"
        elif first.settings:
            yield "  the job as given: its run did not end within the budget; a larger --budget shows the saving"
        for other in others[:1]:
            later = other.time_s / first.time_s
            if not math.isfinite(later):
                yield f"  runner-up: {named(other.settings)}: did not reach it with every seed"
            elif _alike(first, other):
                yield f"  runner-up: {named(other.settings)}: {_times(other)}: no difference, so the simpler one wins"
            else:
                slower = f"{_times(other)}: {100 * (later - 1):.0f} % later"
                yield f"  runner-up: {named(other.settings)}: {slower}{self._machine_time(other)}"
        yield f"  on the test set: {self._on_test_set()}"
        yield from self._remarks()

    def _machine_time(self, finalist: Finalist) -> str:
        """Returns the time of all ranks with learners together, if the finalists have different numbers of learners."""
        if not any("cluster.learners" in each.settings for each in self.finalists):
            return ""
        table = self.job.cluster
        learners = finalist.settings.get("cluster.learners", table.learners or 1)
        usual = 1 if PER_DEVICE[0] in finalist.settings else table.per_rank
        each = finalist.settings.get(PER_DEVICE[0]) or finalist.settings.get(PER_RANK[0], usual)
        ranks = -(-learners // each)
        return f"; machine time {duration(finalist.time_s * ranks)} on {ranks} ranks"

    def _on_test_set(self) -> str:
        """Returns the scores of the finalists on the test set, or why there are none."""
        found = {role: scores for role, finalist in self.roles.items() if (scores := self.tested(finalist))}
        if not found:
            return "not read, since the checkpoints of the finalists are gone"
        shown = ", ".join(f"{role} {_score(scores)}" for role, scores in found.items())
        several = any(len(scores) > 1 for scores in found.values())
        return f"{shown} ({self.target.metric}{', medians' if several else ''})"

    def _paid_back(self) -> str:
        """Returns the training time of the search, and after how many runs the winner has saved as much."""
        if not self.trained_s:
            return ""
        said = f", {duration(self.trained_s)} of training"
        least_s = self.given_least_s if self.given is None else self.given.time_s
        if self.winner is None or not self.winner.settings or not self.winner.time_s < least_s < math.inf:
            return said
        runs = math.ceil(self.trained_s / (least_s - self.winner.time_s))
        return f"{said}: paid back after {runs} run{'s' if runs > 1 else ''} of the job"

    def _remarks(self) -> Iterator[str]:
        yield f"  searched with the samples of {self.spent:.1f} reference runs{self._paid_back()}"
        if self.costs:
            yield f"  times: {self.costs}"
        yield from (f"  note: {note}" for note in self.notes)

    def best(self) -> str:
        """Returns the winner as the text of a job file."""
        assert self.winner is not None
        lines = [*(f"# {line.strip()}" for line in self.lines()), ""]
        lines += _tables(self.job)
        return "\n".join(lines) + "\n"


def _alike(a: Finalist, b: Finalist) -> bool:
    """Whether there is no difference between two finalists."""
    sooner, later = sorted((a, b), key=lambda finalist: finalist.time_s)
    overlap = len(later.times_s) > 1 and min(later.times_s) <= max(sooner.times_s)
    return later.time_s <= (LATER if overlap else ALIKE) * sooner.time_s < math.inf


def _tables(job: Job) -> Iterator[str]:
    """Yields the lines of a job file: all keys that differ from their defaults."""
    tables = {name: getattr(job, name) for name in type(job).model_fields}
    yield f"name = {toml(job.name)}"
    for name, table in tables.items():
        if hasattr(table, "non_defaults") and name != "study":
            keys = {key: value for key, value in _plain(table.non_defaults).items() if value is not None}
            if keys:
                yield from ("", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in keys.items()))


def _plain(value: Any) -> Any:
    """Returns keys of a table and its inner tables as plain values."""
    if hasattr(value, "non_defaults"):
        value = value.non_defaults
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    from rudra.job.table import name_of

    return value if isinstance(value, str | int | float | bool) or value is None else name_of(value)


def named(settings: Settings) -> str:
    """Returns a candidate in words."""
    return in_words(settings) or "the job as given"


def _score(scores: Sequence[Score]) -> str:
    """Returns the median score of a finalist."""
    short = "" if all(score.reached for score in scores) else " short of the target"
    return f"{median(score.value for score in scores):.4g}{short}"


def _times(finalist: Finalist) -> str:
    """Returns the time of a finalist: the median of its seeds, and the range that is expected."""
    count = len(finalist.times_s)
    seeds = "predicted by a probe" if finalist.predicted else f"{count} seeds" if count > 1 else "one seed"
    low, high = finalist.expected_s
    expected = f"{duration(low)} to {duration(high) if math.isfinite(high) else 'never'}"
    return f"{duration(finalist.time_s)} ({expected} expected, {seeds})"


def answer_of(state: SearchState, job: Job) -> Verdict:
    """Returns the answer of a search that has ended.

    Args:
        state: The search.
        job: The user's job.
    """
    found: dict[tuple[tuple[str, str], ...], list[float]] = {}
    least_s = 0.0
    for probe in state.probes.values():
        if probe.seed and not probe.origin:
            end = state.first_at_target(probe)
            if until_target(state, probe, latest_s(state)):  # the budget was too small to end it
                if not probe.settings and (marks := state.outcomes[probe.name].marks):
                    least_s = max(least_s, marks[-1].samples / state.rate(probe.by_key))
                continue
            found.setdefault(probe.settings, []).append(
                math.inf if end is None else end.samples / state.rate(probe.by_key)
            )
    made = [_finalist(state, Probe(key, "", 0).by_key, times) for key, times in found.items()]
    given = next((finalist for finalist in made if not finalist.settings), None)
    ranked = sorted((f for f in made if f.settings), key=lambda f: (f.time_s, named(f.settings)))
    alike = [f for f in ranked if _alike(f, ranked[0])]
    ranked = sorted(alike, key=lambda finalist: simplicity(finalist.settings)) + [f for f in ranked if f not in alike]
    if given is not None and (not ranked or (given.time_s < ranked[0].time_s and not _alike(given, ranked[0]))):
        ranked.insert(0, given)
    if not any(math.isfinite(finalist.time_s) for finalist in ranked) and math.isfinite(state.reference_samples):
        estimates = [estimate for estimate in state.estimates() if math.isfinite(estimate.time_s)]
        ranked = [_predicted(state, estimate) for estimate in estimates]
        given = None
    values = [
        mark.metric for outcome in state.outcomes.values() for mark in outcome.marks if not math.isnan(mark.metric)
    ]
    nearest = (max if state.target.at_least else min)(values, default=math.nan)
    notes = tuple(remarks(state, ranked[0].settings if ranked else None))
    return Verdict(
        job,
        state.target,
        tuple(ranked),
        given,
        nearest,
        state.spent / state.one_run,
        notes=notes,
        given_least_s=least_s,
        trained_s=state.trained_s if state.real else 0.0,
    )


def _finalist(state: SearchState, settings: Settings, times_s: Sequence[float]) -> Finalist:
    return Finalist(settings, tuple(times_s), state.training_samples / state.rate(settings))


def _predicted(state: SearchState, estimate: Estimate) -> Finalist:
    """Returns a candidate without a run that has ended. It takes at least as long as its runs that have not."""
    found = _finalist(state, estimate.settings, (estimate.low_s, estimate.time_s, estimate.high_s))
    own = [p for p in state.probes.values() if not p.origin and p.seed and p.by_key == estimate.settings]
    marks = [state.outcomes[probe.name].marks for probe in own]
    least_s = max((each[-1].samples / state.rate(estimate.settings) for each in marks if each), default=0.0)
    times_s = tuple(max(time_s + found.epoch_s, least_s) for time_s in found.times_s)
    return found._replace(times_s=times_s, predicted=True)


def tried(state: SearchState) -> str:
    """Returns a table of everything that was tried, as CSV."""
    keys = sorted({key for probe in state.probes.values() for key in probe.by_key})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ("probe", "begins with", "seed", "epochs", "samples", "loss", state.target.metric, "worth", "samples/s")
    writer.writerow([*head, "failed", *keys])
    for probe in state.probes.values():
        outcome = state.outcomes[probe.name]
        last = outcome.marks[-1] if outcome.marks else None
        worth = state.worth(probe) if state.reference is not None and probe.origin else math.nan
        shown: Sequence[Any] = (last.samples, last.loss, last.metric) if last else ("", "", "")
        about = (probe.name, probe.origin, probe.seed, len(outcome.marks), *shown, worth, state.rate(probe.by_key))
        writer.writerow([*about, outcome.failed, *(probe.by_key.get(key, "") for key in keys)])
    return out.getvalue()
