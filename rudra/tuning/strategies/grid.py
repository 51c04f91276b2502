"""Every point with every rate and momentum, trained to the target: what other strategies are measured against.

A point ends when it has taken three times as long as the best one.
"""

import itertools
import math

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import MOMENTA, MOMENTUM, RATE, cold_start, fresh, from_common, rates, reference, until_target
from rudra.tuning.state import SearchState

LATEST = 3.0


def ask(state: SearchState) -> list[Probe]:
    if probes := cold_start(state):
        return state.affordable(probes)
    if state.cold is None:
        return []
    if probes := reference(state):
        return state.affordable(probes)
    if not math.isfinite(state.reference_samples):
        return []
    most_s = LATEST * min(estimate.time_s for estimate in state.estimates())
    series = rates(state)
    place = series.index(state.cold.by_key[RATE])
    around = series[max(0, place - 1) : place + 2]
    momenta = MOMENTA if state.job.optimizer.name == "sgd" else (None,)
    asked: list[Probe] = []
    for price, rate, momentum in itertools.product(state.prices, around, momenta):
        if price.dominated is None:
            own = {} if momentum is None else {MOMENTUM: momentum}
            asked += until_target(state, from_common(state, {**price.point.settings, RATE: rate, **own}, 1), most_s)
    return state.affordable(asked) or state.affordable([*fresh(state)])
