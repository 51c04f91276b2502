"""Points of a search that have no probe, each with the reason."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rudra.tuning.rounds import dropped
from rudra.tuning.space import Refused, Settings
from rudra.tuning.state import SearchState, key_of

LEFT = "not tried: the strategy did not ask for it within the budget"


class Untried(NamedTuple):
    """A point without a probe from the common checkpoint.

    Attributes:
        settings: Settings of the point.
        reason: Why it has no probe.
    """

    settings: Settings
    reason: str


def untried(state: SearchState, refused: Sequence[Refused]) -> Iterator[Untried]:
    """Yields all points of a space that were not tried: dropped, left, with the weights of a faster one, or refused.

    Args:
        state: The search.
        refused: Combinations that the job or its cluster does not allow.
    """
    tried = state.tried_points
    drops = {key_of(price.point.settings): f"dropped: {reason}" for price, reason in dropped(state)}
    open_points = [price for price in state.prices if price.dominated is None]
    for price in open_points:
        if (key := key_of(price.point.settings)) not in tried:
            yield Untried(price.point.settings, drops.get(key, LEFT))
    for price in state.prices:
        if price.dominated is not None and key_of(price.point.settings) not in tried:
            yield Untried(price.point.settings, f"same weights as {price.dominated.name}, which is faster")
    for each in refused:
        yield Untried(each.settings, f"refused: {each.reason}")
