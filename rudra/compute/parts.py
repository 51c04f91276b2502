"""Weights in parts: where they are cut, and how what several owners keep becomes what one would.

Cuts lie where the arithmetic on a part gives the bits of the arithmetic on the whole: between runs of parameters that
an optimiser steps together, or a multiple of a cache line behind the beginning of one. Buffers are in the last part.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rudra.compute.optim import CACHE_LINE, runs_of
from rudra.core.events import WEIGHTS
from rudra.core.layout import Entry, NamedVectors
from rudra.errors import ConfigError
from rudra.job.tables import OptimizerTable


def cut(table: OptimizerTable, layout: Sequence[Entry], count: int) -> tuple[slice, ...]:
    """Divides a flat vector into so many parts, with parameters as even as can be.

    Args:
        table: the optimiser, which may have groups of parameters.
        layout: of the vector.
        count: of the parts.

    Raises:
        ConfigError: the model is too small for so many.
    """
    size = layout[-1].offset + layout[-1].size
    runs = [run for _, run in runs_of(table.groups, layout)]
    ends = [_nearest(runs, runs[-1].stop * i // count) for i in range(1, count)]
    parts = [slice(a, b) for a, b in zip([0, *ends], [*ends, size], strict=True)]
    if any(part.start >= part.stop for part in parts) or parts[-1].start >= runs[-1].stop:
        raise ConfigError(
            f"[topology] options.shards = {count}: the model's {size} numbers cannot be divided among so many servers; "
            "valid: fewer"
        )
    return tuple(parts)


def _nearest(runs: Sequence[slice], place: int) -> int:
    """The possible cut that is nearest to a place."""
    possible: list[int] = []
    for run in runs:
        inside = min(max(place, run.start), run.stop) - run.start
        lines = round(inside / CACHE_LINE) * CACHE_LINE
        possible.append(run.start + min(lines, (run.stop - run.start) // CACHE_LINE * CACHE_LINE))
    return min(possible, key=lambda near: abs(near - place))


def joined(states: Sequence[NamedVectors]) -> dict[str, NDArray[np.float32]]:
    """What several owners hand over for a checkpoint, in the order of their parts, as one owner would.

    What belongs to a single number of weights each is put together; of what is one number for all of them, such as a
    count of steps, all owners have the same. Weights in several stretches come by `stretch_names`.
    """
    names = dict.fromkeys(name for state in states for name in state)
    found = {}
    for name in names:
        pieces = [state[name] for state in states if name in state]
        # No part of a vector that was cut is that short, but a stretch may be.
        single = all(len(piece) == 1 for piece in pieces) and not name.startswith(WEIGHTS)
        found[name] = pieces[0] if single or len(pieces) == 1 else np.concatenate(pieces)
    stretches = [found.pop(name) for name in [*found] if name == WEIGHTS or name.startswith(f"{WEIGHTS} ")]
    if not stretches:
        return found
    return {WEIGHTS: stretches[0] if len(stretches) == 1 else np.concatenate(stretches), **found}


def stretch_names(count: int) -> list[str]:
    """What the stretches of an owner's weights are called in what it hands over."""
    return [WEIGHTS, *(f"{WEIGHTS} {number}" for number in range(1, count))]
