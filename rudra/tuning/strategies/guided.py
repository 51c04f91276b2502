"""Guided by prices and by the momentum that asynchrony adds: the default.

1. Cold start and reference run.
2. One epoch of the fastest point of every kind: protocol, and number of groups or gradients per
   update. Each has the rate of the reference, and as much less momentum as its staleness adds.
3. Neighbours of the best: other rates, momenta, mini-batch sizes and periods, until none is better.
4. The best three are prolonged, each by as much as it has, until one has reached the target and no other can be sooner.
5. Winner, runner-up and the job as given are trained from the initial weights to the target, with fresh seeds.

A point is dropped if it would be later than the best prediction even with samples that are worth 1.25 times the best
known worth.

Source of the momentum rule: omnivore.txt §IV-C, theorem 1: g groups act like a momentum of 1 - 1/g.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rudra.tuning.prices import Price
from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    FINALISTS,
    KEPT,
    LATER,
    MOMENTA,
    MOMENTUM,
    RATE,
    around,
    from_common,
    in_order,
    kind,
    prolonged,
    promising,
    rates,
    started,
)
from rudra.tuning.space import Settings
from rudra.tuning.state import Estimate, SearchState, key_of

MARGIN = 1.25


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, (_kinds, 1.5 * KEPT), (_neighbours, 1.5 * KEPT), (prolonged, KEPT))


def _kinds(state: SearchState) -> Iterator[Probe]:
    """One epoch of the most promising point of each kind that has none."""
    estimates = state.estimates()
    known = {kind(estimate.settings) for estimate in estimates}
    for price in promising(state):
        if kind(price.point.settings) not in known and _may_win(state, price, estimates):
            yield from_common(state, started(state, price), 1)


def _may_win(state: SearchState, price: Price, estimates: Sequence[Estimate]) -> bool:
    """Whether a point could be the soonest if its samples were worth more than the samples of any other."""
    most = MARGIN * max([1.0, *(e.worth for e in estimates if math.isfinite(e.worth))])
    return state.reference_samples / (most * price.samples_per_s) <= LATER * estimates[0].time_s


def _neighbours(state: SearchState) -> Iterator[Probe]:
    """Points that differ from one of the best in one setting, as far as they have not been tried."""
    tried = {probe.settings for probe in state.probes.values() if probe.origin}
    estimates = state.estimates()
    for estimate in estimates[:FINALISTS]:
        if estimate.certain or estimate.time_s > MARGIN * LATER * estimates[0].time_s:
            continue
        for settings in _around(state, estimate.settings):
            if key_of(settings) not in tried and _may_win(state, state.price(settings), estimates):
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
