"""Omnivore's optimizer: fewer compute groups as long as the best momentum is 0.

It searches only hardsync and asynchronous compute groups. It starts with as many groups as the space has, and with each
number it tries two rates with four momenta. If momentum 0 is the best, even against 0.1 and 0.2, there is too much
asynchrony, and half as many groups are tried.

Source: omnivore.txt §V-B, algorithm 1, and appendix E-C.
"""

import math
from collections.abc import Sequence

from rudra.job.table import named
from rudra.tuning.prices import Price
from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    MOMENTUM,
    RATE,
    from_common,
    in_order,
    momenta,
    prolonged,
    rates,
)
from rudra.tuning.space import Settings
from rudra.tuning.state import SearchState, key_of

FINE = (0.1, 0.2)


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, _steady, prolonged)


def _steady(state: SearchState) -> list[Probe]:
    """Returns the next grid. Empty: the number of groups is found."""
    assert state.cold is not None
    rate, momentum = state.cold.by_key[RATE], 1.0
    for price in _groups(state):
        grid = [
            {**price.point.settings, RATE: each, MOMENTUM: m}
            for each in _lower(state, rate)
            for m in momenta(state)
            if each != rate or m <= momentum
        ]
        if missing := _missing(state, grid):
            return missing
        best = _best(state, grid)
        if best[MOMENTUM] != 0:
            return []
        fine = [] if MOMENTUM in state.given else [{**best, MOMENTUM: m} for m in FINE]
        if missing := _missing(state, fine):
            return missing
        best = _best(state, [*grid, *fine])
        if best[MOMENTUM] != 0:
            return []
        rate = best[RATE]
    return []


def _lower(state: SearchState, rate: float) -> list[float]:
    """Returns a rate and a tenth of it."""
    series = rates(state)
    place = series.index(rate)
    return series[max(0, place - 2) : place + 1 : 2][::-1] if place > 1 else [rate]


def _groups(state: SearchState) -> list[Price]:
    """Returns asynchronous groups by falling number, at the job's mini-batch size. A single group is hardsync."""
    size = state.job.training.minibatch_size
    found: dict[int, Price] = {}
    for price in sorted(state.prices, key=lambda p: -p.samples_per_s):
        job = price.point.job
        name = named(job.protocol.name)
        if job.training.minibatch_size == size and price.dominated is None and name in ("async", "hardsync"):
            groups = 1 if name == "hardsync" else price.point.settings.get("topology.options.groups", job.learners)
            found.setdefault(groups, price)
    return [found[groups] for groups in sorted(found, reverse=True)]


def _missing(state: SearchState, grid: Sequence[Settings]) -> list[Probe]:
    probes = (from_common(state, settings, 1) for settings in grid)
    return [probe for probe in probes if probe.name not in state.probes]


def _best(state: SearchState, grid: Sequence[Settings]) -> Settings:
    """Returns the settings with the lowest loss after the first epoch."""

    def loss(settings: Settings) -> float:
        marks = state.outcomes[from_common(state, settings, 1).name].marks
        return marks[0].loss if marks and not math.isnan(marks[0].loss) else math.inf

    return min(grid, key=lambda settings: (loss(settings), key_of(settings)))
