"""Every point with every rate and momentum, trained to the target: what other strategies are measured against.

A point ends when it has taken three times as long as the best one.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import MOMENTUM, RATE, around, from_common, in_order, momenta, rates, until_target
from rudra.tuning.state import SearchState

LATEST = 3.0


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, _unfinished)


def _unfinished(state: SearchState) -> Iterator[Probe]:
    """All points that have neither reached the target nor taken too long."""
    assert state.cold is not None
    most_s = LATEST * state.estimates()[0].time_s
    own_momenta: list[Any] = momenta(state) or [None]
    for price, rate, momentum in itertools.product(
        state.prices, around(rates(state), state.cold.by_key[RATE]), own_momenta
    ):
        if price.dominated is None:
            own = {} if momentum is None else {MOMENTUM: momentum}
            yield from until_target(state, from_common(state, {**price.point.settings, RATE: rate, **own}, 1), most_s)
