"""Halving: all kinds with three rates for one epoch, then the better half twice as long, until a few are left.

Probes are prolonged, not repeated. Source of the idea: Jamieson and Talwalkar 2016, arXiv 1502.07943.
"""

import itertools

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    FINALISTS,
    KEPT,
    RATE,
    around,
    from_common,
    in_order,
    prolonged,
    promising,
    rates,
    started,
)
from rudra.tuning.state import SearchState


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, (_round, KEPT), (prolonged, KEPT))


def _round(state: SearchState) -> list[Probe]:
    """Returns the first round, or the better half of the latest one, twice as long."""
    assert state.cold is not None
    near = around(rates(state), state.cold.by_key[RATE])
    firsts = [started(state, price) | {RATE: rate} for price, rate in itertools.product(promising(state), near)]
    first = [probe for settings in firsts if (probe := from_common(state, settings, 1)).name not in state.probes]
    if first:
        return first
    mine = {from_common(state, settings, 1).name for settings in firsts}
    longest = max(state.probes[name].epochs for name in mine)
    latest = {probe.settings for name in mine if (probe := state.probes[name]).epochs == longest}
    ranked = [e.settings for e in state.estimates() if from_common(state, e.settings, 1).settings in latest]
    left = ranked[: len(ranked) // 2]
    if len(left) < FINALISTS or 2 * longest > state.longest:
        return []
    return [from_common(state, settings, 2 * longest) for settings in left]
