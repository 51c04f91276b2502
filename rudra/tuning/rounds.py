"""Rounds of probes that several strategies ask for: first the cold start and the reference run, last the finalists."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from rudra.job.table import named
from rudra.results.progress import duration
from rudra.tuning.batches import nearest, rescaled
from rudra.tuning.prices import Price
from rudra.tuning.probes import Probe
from rudra.tuning.space import Settings, by_steps, spelled_out
from rudra.tuning.state import SearchState, key_of

T = TypeVar("T")

Stage = Callable[[SearchState], Iterable[Probe]]
"""Returns probes that a search wants now. Empty: the stage is over."""

STEPS = 6
"""Number of learning rates below and above the job's that the cold start may try, each √10 from the next."""

LATER = 1.15
"""Largest ratio of two predicted times at which the later one is also trained further."""

MARGIN = 1.25
"""Largest assumed ratio of the worth of an untried point to the best known worth."""

REFERENCES = 3
"""Number of learning rates that a reference run may have, each √10 below the next."""

PATIENCE = 8
"""Least number of epochs of a reference run that stalls."""

FINALISTS, SEEDS = 3, (1, 2, 3)

MOMENTA = (0.0, 0.3, 0.6, 0.9)
"""Values of momentum, in steps that make a difference (omnivore.txt, appendix E-C)."""

RATE, MOMENTUM, SIZE = "optimizer.learning_rate", "optimizer.momentum", "training.minibatch_size"


def in_order(state: SearchState, *stages: Stage) -> list[Probe]:
    """Returns the next round of a strategy: of the cold start, the reference, the given stages, or the finalists.

    Each stage keeps samples for the later ones, see `kept`.
    """
    if probes := cold_start(state):
        return state.affordable(probes)
    if state.cold is None:  # all learning rates diverge
        return []
    if probes := reference(state):
        return state.affordable(probes)
    if not math.isfinite(state.reference_samples):
        return []
    for later, stage in zip(range(len(stages), 0, -1), stages, strict=True):
        if probes := state.affordable(stage(state), kept(state, later)):
            return probes
    return state.affordable(fresh(state))


def kept(state: SearchState, later: int) -> float:
    """Returns the number of reference runs that are kept for the job as given, and for a run of each later stage.

    A run of the best point counts at most as a reference run. It has an epoch before the common checkpoint, and may end
    an epoch late. The job as given is allowed two reference runs. It needs them only if its learning rate is worse.
    """
    assert state.cold is not None
    best = state.estimates()[0]
    samples = min(state.reference_samples, best.time_s * state.rate(best.settings))
    given = 1 if state.cold.by_key[RATE] == state.job.optimizer.learning_rate else 2
    return given + later * (samples + 2 * state.training_samples) / state.one_run


def safest(state: SearchState) -> Price:
    """Returns the price of the reference: the fastest hardsync with the job's mini-batch size.

    Without hardsync in the space it is the least stale point, and of those the fastest.
    """
    size = state.job.training.minibatch_size

    def order(price: Price) -> tuple[bool, bool, float, float]:
        job = price.point.job
        other = named(job.protocol.name) != "hardsync"
        return other, job.training.minibatch_size != size, price.staleness, -price.samples_per_s

    return min(state.prices, key=order)


def rates(state: SearchState) -> list[float]:
    """Returns the learning rates that a search may try: the user's, or a series around the job's with steps of √10."""
    own = state.given.get(RATE)
    return sorted(map(float, own)) if own else by_steps(state.job.optimizer.learning_rate, math.sqrt(10), STEPS)


def lower(state: SearchState, rate: float, steps: int) -> float:
    """Returns a learning rate some steps below another one."""
    series = rates(state)
    return series[max(0, series.index(rate) - steps)]


def momenta(state: SearchState) -> list[float]:
    """Returns the values of momentum that a search may try: the user's, or `MOMENTA` and the job's own. Empty: none."""
    own = state.job.optimizer
    if own.name != "sgd":
        return []
    return sorted(map(float, state.given.get(MOMENTUM, {*MOMENTA, own.momentum})))


def at_most(series: Sequence[float], value: float) -> float:
    """Returns the largest value of a series that is not above a value, or else the smallest one."""
    return max((each for each in series if each <= value + 1e-9), default=series[0])


def around(series: Sequence[T], value: T) -> list[T]:
    """Returns a value of a series with its neighbours."""
    place = series.index(value)
    return [*series[max(0, place - 1) : place + 2]]


def cold_start(state: SearchState) -> list[Probe]:
    """Returns one pass with each of several learning rates from the initial weights. Empty: the best one is known.

    The first round has the job's rate, and a lower and a higher one by √10. While the lowest or the highest rate is the
    best one, the next beyond it follows.
    """
    tried = {probe.by_key[RATE]: probe for probe in state.probes.values() if not (probe.origin or probe.seed)}
    series = rates(state)
    if not tried:
        wanted = around(series, nearest(series, state.job.optimizer.learning_rate))
    elif state.cold is None:  # all of them diverged
        wanted = [series[i - 1] for i in [series.index(min(tried))] if i]
    else:
        failed = [rate for rate, probe in tried.items() if state.outcomes[probe.name].failed]
        near = around(series, state.cold.by_key[RATE])
        wanted = [rate for rate in near if rate not in tried and not any(rate > bad for bad in failed)]
    settings = with_momentum(state, safest(state).point.settings, state.job.optimizer.momentum)
    return [Probe.of({**settings, RATE: rate}, "", 1) for rate in wanted]


def with_momentum(state: SearchState, settings: Settings, momentum: float) -> Settings:
    """Returns settings with the largest momentum of the search that is not above a value."""
    series = momenta(state)
    return {MOMENTUM: at_most(series, momentum), **settings} if series else settings


def reference(state: SearchState) -> list[Probe]:
    """Returns the reference run, longer each time until it reaches the target. Empty: it has, or cannot.

    If the cold start's learning rate cannot reach it, lower ones follow.
    """
    assert state.cold is not None
    cold = state.cold.by_key
    for steps in range(REFERENCES):
        probe = from_common(state, {**cold, RATE: lower(state, cold[RATE], steps)}, 1)
        probe = state.probes.get(probe.name, probe)
        if (probes := until_target(state, probe, math.inf)) and not _stalls(state, probe):
            return probes
        if state.first_at_target(probe) is not None:
            return []
    return []


def _stalls(state: SearchState, probe: Probe) -> bool:
    """Returns whether a long run has got no better in its second half."""
    if (outcome := state.outcomes.get(probe.name)) is None or len(outcome.marks) < PATIENCE:
        return False
    values = [mark.metric if state.target.at_least else -mark.metric for mark in outcome.marks]
    return values.index(max(values)) < len(values) // 2


def until_target(state: SearchState, probe: Probe, most_s: float) -> list[Probe]:
    """Returns a probe, longer each time, until it reaches the target. Empty: it has, or failed, or takes too long.

    Args:
        state: The search.
        probe: Probe of any length.
        most_s: Time after which it is too late.
    """
    outcome = state.outcomes.get(probe.name)
    if outcome is None:
        return [probe._replace(epochs=1)]
    done, longest = len(outcome.marks), state.longest - probe.begins_at
    late = bool(outcome.marks) and outcome.marks[-1].samples / state.rate(probe.by_key) > most_s
    if outcome.failed or done >= longest or late or state.first_at_target(probe) is not None:
        return []
    step = min(done // 3, int(state.left()) // FINALISTS)  # short steps miss the target by little
    return [probe._replace(epochs=min(done + max(1, step), longest))]


class Bound(NamedTuple):
    """Bound that drops points, from what is known now.

    Attributes:
        reference_samples: Samples of the reference from the common checkpoint to the target.
        worth: The most that a sample of a point may be worth: `MARGIN` times the best known worth.
        soonest_s: Best known time to the target, certain or predicted.
        pace: Measured samples per second over predicted ones.
    """

    reference_samples: float
    worth: float
    soonest_s: float
    pace: float = 1.0

    @classmethod
    def of(cls, state: SearchState) -> "Bound":
        """Returns the bound of a search whose reference is known."""
        estimates = state.estimates()
        worth = max([1.0, *(e.worth for e in estimates if math.isfinite(e.worth))])
        soonest_s = estimates[0].time_s if estimates else math.inf
        return cls(state.reference_samples, MARGIN * worth, soonest_s, state.pace)

    def least_s(self, price: Price) -> float:
        """Returns the time to the target that a point takes at least."""
        return self.reference_samples / (self.worth * self.pace * price.samples_per_s)

    def excludes(self, price: Price) -> bool:
        """Returns whether a point cannot be the soonest."""
        return self.least_s(price) > LATER * self.soonest_s


def dropped(state: SearchState) -> Iterator[tuple[Price, str]]:
    """Yields the points that have no probe and cannot be the soonest, each with the reason.

    A point comes back if samples prove to be worth more.
    """
    if not math.isfinite(state.reference_samples):
        return
    bound = Bound.of(state)
    tried = state.tried_points
    for key, price in state.priced.items():
        if price.dominated is None and key not in tried and bound.excludes(price):
            yield (
                price,
                f"takes {duration(bound.least_s(price))} at least, even if its samples are worth {bound.worth:.2f} of "
                f"the reference's; the best takes {duration(bound.soonest_s)}",
            )


def diverges(state: SearchState, settings: Settings) -> bool:
    """Returns whether a probe diverged that had no larger rate, momentum, staleness and mini-batch."""
    staleness, rate, momentum, size = _hardness(state, settings)
    for probe in state.probes.values():
        if state.outcomes[probe.name].failed:
            its = _hardness(state, probe.by_key)
            if its[0] <= staleness and its[1] <= rate and its[2] <= momentum and its[3] == size:
                return True
    return False


def _hardness(state: SearchState, settings: Settings) -> tuple[float, float, float, int]:
    price = state.price(settings)
    own = price.point.job.optimizer
    rate, momentum = settings.get(RATE, own.learning_rate), settings.get(MOMENTUM, own.momentum)
    return price.staleness, rate, momentum, price.point.job.training.minibatch_size


def from_common(state: SearchState, settings: Settings, epochs: int) -> Probe:
    """Returns a probe from the common checkpoint."""
    assert state.cold is not None
    return Probe.of(settings, state.cold.end, epochs)


OF_KIND = ("protocol.name", "topology.options.groups", "protocol.n", "cluster.learners", "placement.cut")


def kind(settings: Settings) -> tuple[object, ...]:
    """Returns protocol, splitting, number of learners, and cut: points of a kind are much alike."""
    return tuple(settings.get(key) for key in OF_KIND)


@lru_cache(maxsize=1)
def promising(state: SearchState) -> tuple[Price, ...]:
    """Returns the fastest point of each family with the job's mini-batch size, the fastest family first."""
    size, periods = state.job.training.minibatch_size, _own_periods(state)
    found: dict[object, Price] = {}
    for price in sorted(state.prices, key=lambda p: -p.samples_per_s):
        its = state.batch(price.point.settings).family
        usual = price.point.settings.get("averaging.period") in periods[its]
        if usual and price.point.job.training.minibatch_size == size and price.dominated is None:
            found.setdefault(its, price)
    return tuple(found.values())


def _own_periods(state: SearchState) -> dict[object, set[Any]]:
    """Returns the period of each family that is in the middle of those in the space."""
    found: dict[object, list[Any]] = {}
    for price in state.prices:
        found.setdefault(state.batch(price.point.settings).family, []).append(
            price.point.settings.get("averaging.period")
        )
    middles = {its: sorted({*periods} - {None}) for its, periods in found.items()}
    return {its: {periods[(len(periods) - 1) // 2]} if periods else {None} for its, periods in middles.items()}


def started(state: SearchState, price: Price) -> dict[str, Any]:
    """Returns the first settings for a point.

    The momentum is the job's, less what the point's staleness adds. The learning rate gives the effective rate of the
    cold start.
    """
    assert state.cold is not None
    settings = price.point.settings
    momentum = max(0.0, state.job.optimizer.momentum - state.batch(settings).momentum)
    found = with_momentum(state, settings, momentum)
    return {**found, RATE: suited(state, state.cold.by_key, found)}


def spread(state: SearchState) -> Iterator[Settings]:
    """Promising points and points near them, the most promising first.

    A step changes the mini-batch size to the next one, or the learning rate by √10. A point that is a step away comes
    as late as one with half the speed.
    """
    sizes, series = sorted({price.point.job.training.minibatch_size for price in state.prices}), rates(state)
    found: list[tuple[float, Settings]] = []
    for price, by_size in itertools.product(promising(state), (0, -1, 1, -2, 2)):
        size = sizes.index(price.point.job.training.minibatch_size) + by_size
        changed = {**price.point.settings, SIZE: sizes[size]} if 0 <= size < len(sizes) and by_size else None
        settings = price.point.settings if by_size == 0 else changed
        if settings is not None and state.has(settings):
            first = started(state, state.price(settings))
            away = abs(by_size) - math.log2(state.rate(settings))
            near = around(series, first[RATE])
            found += [(away + (rate != first[RATE]), {**first, RATE: rate}) for rate in near]
    return (settings for _, settings in sorted(found, key=lambda each: each[0]))


def suited(state: SearchState, settings: Settings, other: Settings) -> float:
    """Returns a learning rate for other settings that suits them as well, as one that a search may try."""
    noise = state.noise.samples if state.noise else math.nan
    rate = rescaled(settings[RATE], noise, state.batch(settings), state.batch(other))
    return nearest(rates(state), rate * (1 - other.get(MOMENTUM, 0.0)) / (1 - settings.get(MOMENTUM, 0.0)))


def prolonged(state: SearchState) -> Iterator[Probe]:
    """The best candidates, twice as long, until one has reached the target and no other can be sooner."""
    assert state.reference is not None
    ranked = state.estimates()
    certain = [e.time_s for e in ranked if e.certain and key_of(e.settings) != key_of(state.reference.by_key)]
    soonest = min(certain, default=math.inf)
    for estimate in ranked[:FINALISTS]:
        probe = from_common(state, estimate.settings, 1)
        done = len(state.outcomes[probe.name].marks) if probe.name in state.outcomes else 0
        if not estimate.certain and estimate.low_s < LATER * soonest and 0 < done < state.longest:
            yield probe._replace(epochs=min(2 * done, state.longest))


_SIMPLER = ("hardsync", "average", "sma", "softsync", "async", "easgd", "diloco")
"""Protocols from the simplest on: of two that are equally soon, the simpler one is the answer."""


def simplicity(settings: Settings) -> tuple[int, int, str]:
    """Returns the place of settings in the order from the simplest on."""
    name = settings.get("protocol.name", "")
    place = _SIMPLER.index(name) if name in _SIMPLER else len(_SIMPLER)
    return place, len(settings), str(key_of(settings))


def is_given(state: SearchState, settings: Settings) -> bool:
    """Whether settings make the job as given."""
    return not settings or spelled_out(state.job_with(settings)) == spelled_out(state.job)


def latest_s(state: SearchState) -> float:
    """Returns the time after which a run from the initial weights is too late: twice the time of the reference."""
    assert state.reference is not None
    return 2 * state.one_run / state.rate(state.reference.by_key)


def fresh(state: SearchState) -> list[Probe]:
    """Returns the next run from the initial weights to the target: of winner, job as given, or runner-up, by seed.

    They train one after the other, so that a small budget ends one of them. The runner-up is the simplest point that is
    hardly later than the winner, because it wins if there is no difference.
    """
    ranked = [estimate for estimate in state.estimates() if math.isfinite(estimate.time_s)]
    near = [estimate for estimate in ranked[1:] if estimate.time_s <= LATER * ranked[0].time_s]
    second = [min(near, key=lambda estimate: simplicity(estimate.settings))] if near else ranked[1:2]
    finalists = [*(e.settings for e in ranked[:1]), {}, *(e.settings for e in second)]
    for seed, settings in itertools.product(SEEDS, [{} if is_given(state, each) else each for each in finalists]):
        if probes := until_target(state, Probe.of(settings, "", 1, seed), latest_s(state)):
            return probes
    return []
