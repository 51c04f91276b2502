"""Halving: many points for one epoch, then the better half twice as long, until a few are left.

Probes are prolonged, not repeated. Source of the idea: Jamieson and Talwalkar 2016, arXiv 1502.07943.
"""

import itertools

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import FINALISTS, from_common, in_order, kept, prolonged, spread
from rudra.tuning.state import SearchState, key_of

FIRST = 0.5
"""Part of the budget that the first round takes. Each later round costs half as much as the first one."""


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, _round, prolonged)


def _round(state: SearchState) -> list[Probe]:
    """Returns the first round, or the better half of the latest one, twice as long."""
    mine = {probe.settings: probe for probe in state.probes.values() if probe.origin and probe != state.reference}
    if not mine:
        count = max(0, int(FIRST * state.left(kept(state, 2))))
        first = (from_common(state, settings, 1) for settings in spread(state))
        return [*itertools.islice((probe for probe in first if probe.name not in state.probes), count)]
    longest = max(probe.epochs for probe in mine.values())
    ranked = [mine[key] for e in state.estimates() if (key := key_of(e.settings)) in mine]
    latest = [probe for probe in ranked if probe.epochs == longest]
    left = latest[: len(latest) // 2]
    if len(left) < FINALISTS or 2 * longest > state.longest:
        return []
    return [probe._replace(epochs=2 * longest) for probe in left]
