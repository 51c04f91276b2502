"""Remarks about an answer: what makes it less certain than its numbers look."""

import math
from collections.abc import Iterator

from rudra.tuning.batches import APART
from rudra.tuning.rounds import RATE
from rudra.tuning.space import Settings
from rudra.tuning.state import SearchState

LUCK = 2.0
"""Number of standard errors that chance often causes."""


def remarks(state: SearchState, winner: Settings | None) -> Iterator[str]:
    """Yields remarks about the answer of a search.

    Args:
        state: The search.
        winner: Settings of the winner. None: there is none.
    """
    if state.cold is None:
        yield f"the loss diverged with every learning rate: {_rates(state)}"
    if winner is not None:
        yield from _far_from_noise(state, winner)
        yield from _within_luck(state)


def _far_from_noise(state: SearchState, winner: Settings) -> Iterator[str]:
    """Yields a remark if the batch of an update and the noise scale differ much."""
    if (noise := state.noise) is not None:
        samples = state.batch(winner).samples
        if not 1 / APART <= samples / noise.samples <= APART:
            yield (
                f"an update of the winner has {samples} samples; the gradient noise of the cold start suggests "
                f"{noise.samples:.0f} ± {noise.error:.0f}"
            )


def _within_luck(state: SearchState) -> Iterator[str]:
    """Yields a remark if chance moves the target's metric by more than an epoch of the reference at its end does."""
    target, split = state.target, state.job.data.validation_split
    if state.reference is None or not split or not target.is_fraction:
        return
    last = [mark.metric for mark in state.marks(state.reference)][-2:]
    held_out = state.training_samples * split / (1 - split)
    luck = LUCK * math.sqrt(target.value * (1 - target.value) / held_out)
    if len(last) == 2 and abs(last[1] - last[0]) < luck:
        yield (
            f"chance may decide: with {held_out:.0f} validation samples the {target.metric} is known to ±{luck:.2g}, "
            f"but an epoch of the reference changed it by {abs(last[1] - last[0]):.2g}; a larger "
            "data.validation_split or a target on the loss is safer"
        )


def _rates(state: SearchState) -> str:
    """Returns the learning rates of the cold start."""
    tried = sorted({float(probe.by_key[RATE]) for probe in state.probes.values()})
    return ", ".join(f"{rate:g}" for rate in tried) or "none was tried"
