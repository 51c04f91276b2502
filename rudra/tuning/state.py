"""State of a search for its strategy: prices, outcomes of probes, and estimates from them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rudra.job.job import Job
from rudra.job.target import Target
from rudra.tuning.batches import UpdateBatch, batch_of
from rudra.tuning.prices import Price
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.ruler import Mark, Ruler, crossed, reached
from rudra.tuning.space import Settings, with_settings

SURE, UNSURE = 2, 1.15
"""Epochs of a probe that decides, and the factor on the time of a shorter one in the ranking. A lower learning rate
gains at once and never again. So an epoch shows which points may be better, and two show which are."""


class Estimate(NamedTuple):
    """Time to the target of a candidate.

    Attributes:
        settings: Settings of the candidate.
        time_s: From the common checkpoint to the target.
        certain: Whether its probe has reached the target. Otherwise the time is predicted.
        worth: Reference samples that a sample of the candidate is worth. NaN: unknown.
        epochs: Number of epochs of its probe.
        low_s, high_s: Range of the time.
    """

    settings: Settings
    time_s: float
    certain: bool
    worth: float
    epochs: int
    low_s: float
    high_s: float

    @property
    def sure(self) -> bool:
        """Whether its probe is long enough to decide."""
        return self.certain or self.epochs >= SURE


class SearchState:
    """State of a search.

    Args:
        job: Job that probes vary.
        target: Target on the validation split.
        prices: Prices of the points. The first one has no settings: it is the job as given.
        untimed: Keys that do not change the time of a sample.
        training_samples: Samples in an epoch.
        budget: Number of reference runs whose samples all probes may train together.
        longest: Number of epochs of the longest probe.
        given: Key -> values, in place of the values that a strategy would try.
        real: Whether probes are trained on real ranks, so that their times are measured.

    Attributes:
        limit: Most samples that all probes may train together, as soon as it is known: a budget in minutes.
        prices: Prices of the points, without the job as given.
        priced: The same prices, by the key of their point.
        given: Key -> values, in place of the values that a strategy would try.
        probes: Probes at their present length, by name, in the order of asking.
        outcomes: Their outcomes, by name.
    """

    def __init__(
        self,
        job: Job,
        target: Target,
        prices: Sequence[Price],
        *,
        untimed: Collection[str],
        training_samples: int,
        budget: float,
        longest: int,
        given: Mapping[str, Sequence[Any]] | None = None,
        real: bool = False,
    ) -> None:
        self.job, self.target, self.given = job, target, given or {}
        self._priced, self._untimed = {key_of(p.point.settings): p for p in prices}, frozenset(untimed)
        self.priced = {key: price for key, price in self._priced.items() if price.point.settings}
        self.prices = [*self.priced.values()]
        self.training_samples, self.budget, self.longest, self.real = training_samples, budget, longest, real
        self.limit = math.inf
        self._measured: dict[tuple[tuple[str, str], ...], float] = {}
        self._batches: dict[tuple[tuple[str, str], ...], UpdateBatch] = {}
        self._jobs: dict[tuple[tuple[str, str], ...], Job] = {}
        self.probes: dict[str, Probe] = {}
        self.outcomes: dict[str, Outcome] = {}

    def tell(self, probe: Probe, outcome: Outcome) -> None:
        """Adds the outcome of a probe."""
        self.probes[probe.name] = probe
        self.outcomes[probe.name] = outcome
        for name in ("reference", "ruler", "_ranked"):
            self.__dict__.pop(name, None)
        if self.real and outcome.marks:
            point = self.point_of(probe.by_key)
            self._measured[point] = median(self._rates(point))

    def _rates(self, point: tuple[tuple[str, str], ...]) -> Iterator[float]:
        """Yields the measured samples per second of every epoch of a point's probes."""
        for probe in self.probes.values():
            if self.point_of(probe.by_key) == point:
                for before, mark in pairwise((Mark(0, 0.0, 0.0, 0.0), *self.outcomes[probe.name].marks)):
                    yield (mark.samples - before.samples) / max(mark.time_s - before.time_s, 1e-9)

    @property
    def one_run(self) -> float:
        """Samples of a reference run from the initial weights. As long as it has not ended, the most it may have."""
        epoch = self.training_samples
        end = None if self.reference is None else self.first_at_target(self.reference)
        return self.longest * epoch if end is None else end.samples + epoch

    @property
    def spent(self) -> int:
        """Samples that probes have trained."""
        return sum(outcome.marks[-1].samples for outcome in self.outcomes.values() if outcome.marks)

    @property
    def trained_s(self) -> float:
        """Training time of all probes in seconds, as measured or predicted."""
        return sum(outcome.marks[-1].time_s for outcome in self.outcomes.values() if outcome.marks)

    @property
    def allowed(self) -> float:
        """Samples that probes may train."""
        limit = self.limit if self.outcomes else math.inf  # as in a search whose first probe has yet to be timed
        return min(self.budget * self.one_run, limit)

    def left(self, keep: float = 0.0) -> float:
        """Returns the number of epochs that are left of the budget, without the reference runs to keep."""
        return (self.allowed - keep * self.one_run - self.spent) / self.training_samples

    def affordable(self, probes: Iterable[Probe], keep: float = 0.0) -> list[Probe]:
        """Returns the first of the probes that fit into what is left of the budget.

        Args:
            probes: Probes that a strategy wants.
            keep: Number of reference runs that are kept for later.
        """
        left, found = self.left(keep), []
        for probe in probes:
            done = self.outcomes.get(probe.name)
            left -= probe.epochs - (len(done.marks) if done else 0)
            if left < 0:
                break
            found.append(probe)
        return found

    def marks(self, probe: Probe) -> tuple[Mark, ...]:
        """Returns the evaluations of a probe, the first one at its beginning."""
        own = self.outcomes[probe.name].marks
        if not probe.origin:
            return own
        before = self.outcomes[probe.origin.rpartition("-")[0]].marks[-1]
        return (before._replace(samples=0, time_s=0.0), *own)

    # The common beginning and the reference.

    @property
    def cold(self) -> Probe | None:
        """Run whose end is the common checkpoint: the best of those from the initial weights."""
        tried = [p for p in self.probes.values() if not (p.origin or p.seed or self.outcomes[p.name].failed)]
        return min(tried, key=lambda p: _last_loss(self.outcomes[p.name]), default=None)

    @property
    def common_loss(self) -> float:
        """Loss at the common checkpoint."""
        assert self.cold is not None
        return _last_loss(self.outcomes[self.cold.name])

    @cached_property
    def reference(self) -> Probe | None:
        """The reference run: the first probe from the common checkpoint, or if it misses the target, the first that
        reaches it."""
        mine = [probe for probe in self.probes.values() if probe.origin]
        return next((probe for probe in mine if self.first_at_target(probe) is not None), mine[0] if mine else None)

    @cached_property
    def ruler(self) -> Ruler:
        """Ruler of the reference."""
        assert self.reference is not None
        return Ruler(self.marks(self.reference))

    @property
    def reference_samples(self) -> float:
        """Samples of the reference from the common checkpoint to the target. Infinity: it did not reach it."""
        return math.inf if self.reference is None else self._to_target(self.reference)

    def first_at_target(self, probe: Probe) -> Mark | None:
        """Returns the first evaluation of a probe that reaches the target, or None."""
        return reached(self.outcomes[probe.name].marks, self.target.value, at_least=self.target.at_least)

    def _to_target(self, probe: Probe) -> float:
        """Returns the samples from the beginning of a probe to the target. Infinity: it did not reach it."""
        return crossed(self.marks(probe), self.target.value, at_least=self.target.at_least)

    # Candidates.

    def rate(self, settings: Settings) -> float:
        """Returns the samples per second with settings: measured by probes on real ranks, or else predicted."""
        return self._measured.get(self.point_of(settings)) or self.pace * self.price(settings).samples_per_s

    @property
    def pace(self) -> float:
        """Measured samples per second over predicted ones, the median of all measured points. 1: none is measured."""
        ratios = [rate / self._priced[point].samples_per_s for point, rate in self._measured.items()]
        return median(ratios) if ratios else 1.0

    def price(self, settings: Settings) -> Price:
        """Returns the price of a candidate."""
        return self._priced[self.point_of(settings)]

    def point_of(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        """Returns the key of a candidate's point: its settings that change the time of a sample."""
        return key_of({key: value for key, value in settings.items() if key not in self._untimed})

    @property
    def tried_points(self) -> set[tuple[tuple[str, str], ...]]:
        """Keys of the points that have a probe from the common checkpoint."""
        return {self.point_of(probe.by_key) for probe in self.probes.values() if probe.origin}

    def has(self, settings: Settings) -> bool:
        """Whether the space has a point with these settings."""
        return self.point_of(settings) in self._priced

    def batch(self, settings: Settings) -> UpdateBatch:
        """Returns the batch of an update of a candidate."""
        key = self.point_of(settings)
        if key not in self._batches:
            self._batches[key] = batch_of(self._priced[key].point.job)
        return self._batches[key]

    def job_with(self, settings: Settings) -> Job:
        """Returns the job with settings. Strategies ask for the same jobs in every round."""
        key = key_of(settings)
        if key not in self._jobs:
            self._jobs[key] = with_settings(self.job, settings)
        return self._jobs[key]

    @property
    def noise(self) -> ProbeNoise | None:
        """Gradient noise scale in the cold start. None: unknown."""
        return None if self.cold is None else self.outcomes[self.cold.name].noise

    def estimates(self) -> list[Estimate]:
        """Returns the estimates of all candidates with a probe from the common checkpoint, the best one first.

        One that is not sure is better only if it is clearly sooner.
        """
        return self._ranked

    @cached_property
    def _ranked(self) -> list[Estimate]:
        made = [self._estimate(p) for p in self.probes.values() if p.origin and self.outcomes[p.name].marks]
        return sorted(made, key=lambda e: (e.time_s * (1.0 if e.sure else UNSURE), -e.epochs))

    def _estimate(self, probe: Probe) -> Estimate:
        """Returns the estimate of a candidate from its probe."""
        settings, rate, epochs = probe.by_key, self.rate(probe.by_key), len(self.outcomes[probe.name].marks)
        if math.isfinite(samples := self._to_target(probe)):
            time_s = samples / rate
            return Estimate(settings, time_s, True, math.nan, epochs, time_s, time_s)
        worth, spread = self.worth(probe), self._spread(probe)
        time_s = self.reference_samples / (worth * rate) if worth > 0 else math.inf
        return Estimate(settings, time_s, False, worth, epochs, time_s / spread, time_s * spread)

    def worth(self, probe: Probe) -> float:
        """Returns the worth of a probe's samples."""
        outcome = self.outcomes[probe.name]
        return 0.0 if outcome.failed or not outcome.marks else self._worth(self.marks(probe))

    def _worth(self, marks: Sequence[Mark]) -> float:
        return self.ruler.worth(marks, self.reference_samples)

    def _spread(self, probe: Probe) -> float:
        """Returns the factor between the worth of a probe now and one epoch earlier, at least 1.15."""
        marks = self.marks(probe)
        if len(marks) < 3:
            return 2.0
        before, now = self._worth(marks[:-1]), self._worth(marks)
        return max(1.15, before / now, now / before) if before > 0 and now > 0 else 2.0


Strategy = Callable[[SearchState], list[Probe]]
"""Returns the next round of probes. Empty: the search is over. Only the state decides."""


def _last_loss(outcome: Outcome) -> float:
    loss = outcome.marks[-1].loss if outcome.marks else math.inf
    return math.inf if math.isnan(loss) else loss


def key_of(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns settings as probes have them."""
    return Probe.of(settings, "", 0).settings
