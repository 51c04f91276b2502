"""Guided by prices and by the momentum that asynchrony adds: the default.

1. Cold start and reference run.
2. One epoch of the fastest point of every kind: protocol, and number of groups or gradients per
   update. Each has the rate of the reference, and as much less momentum as its staleness adds.
3. Neighbours of the best: other rates, momenta, mini-batch sizes and periods, until none is better.
4. The best three are prolonged, each by as much as it has, until one has reached the target and no other can be sooner.
5. Winner, runner-up and the job as given are trained from the initial weights to the target, with fresh seeds.

A point is dropped if it would be later than the best prediction even with samples that are worth 1.25 times the best
known worth, or if a probe diverged that was no harder in any respect.

Source of the momentum rule: omnivore.txt §IV-C, theorem 1: g groups act like a momentum of 1 - 1/g.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    FINALISTS,
    KEPT,
    LATER,
    MARGIN,
    MOMENTA,
    MOMENTUM,
    RATE,
    Bound,
    around,
    diverges,
    from_common,
    in_order,
    kind,
    prolonged,
    promising,
    rates,
    started,
)
from rudra.tuning.space import Settings
from rudra.tuning.state import SearchState, key_of


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, (_kinds, 1.5 * KEPT), (_neighbours, 1.5 * KEPT), (prolonged, KEPT))


def _kinds(state: SearchState) -> Iterator[Probe]:
    """One epoch of the most promising point of each kind that has none."""
    known = {kind(estimate.settings) for estimate in state.estimates()}
    bound = Bound.of(state)
    for price in promising(state):
        if kind(price.point.settings) not in known and not bound.excludes(price):
            yield from_common(state, started(state, price), 1)


def _neighbours(state: SearchState) -> Iterator[Probe]:
    """Points that differ from one of the best in one setting, as far as they have not been tried."""
    tried = {probe.settings for probe in state.probes.values() if probe.origin}
    bound = Bound.of(state)
    for estimate in state.estimates()[:FINALISTS]:
        if estimate.certain or estimate.time_s > MARGIN * LATER * bound.soonest_s:
            continue
        for settings in _around(state, estimate.settings):
            late = bound.excludes(state.price(settings))
            if key_of(settings) not in tried and not late and not diverges(state, settings):
                tried.add(key_of(settings))
                yield from_common(state, settings, 1)


def _around(state: SearchState, settings: Settings) -> Iterator[Settings]:
    """Settings that differ from some settings by one step of one key."""
    series: dict[str, Sequence[Any]] = {RATE: rates(state), MOMENTUM: MOMENTA}
    for key in ("training.minibatch_size", "averaging.period"):
        series[key] = sorted(
            {
                price.point.settings[key]
                for price in state.prices
                if price.dominated is None
                and all(settings.get(k) == v for k, v in price.point.settings.items() if k != key)
                and key in price.point.settings
            }
        )
    for key, values in series.items():
        if settings.get(key) in values:
            for other in around(values, settings[key]):
                if other != settings[key]:
                    yield {**settings, key: other}
