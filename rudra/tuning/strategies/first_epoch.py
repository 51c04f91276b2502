"""First epoch: as many points as the budget allows for one epoch, and only the best of them longer.

Source of the idea: Egele et al. 2023, "Is One Epoch All You Need For Multi-Fidelity Hyperparameter Optimization?",
arXiv 2307.15422.
"""

from collections.abc import Iterator

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import from_common, in_order, prolonged, spread
from rudra.tuning.state import SearchState


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, _first, prolonged)


def _first(state: SearchState) -> Iterator[Probe]:
    """All points of the spread without a probe."""
    for settings in spread(state):
        probe = from_common(state, settings, 1)
        if probe.name not in state.probes:
            yield probe
