"""Weights in parts: where they are cut, and how the states of several owners are joined to the state of one.

Cuts keep arithmetic on a part bitwise identical to arithmetic on the whole. They are between runs of parameters that an
optimiser steps together, or a multiple of a cache line after the start of a run. Buffers are in the last part.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rudra.compute.runs import CACHE_LINE, runs_of
from rudra.core.buffer_names import AVERAGE, WEIGHTS
from rudra.core.layout import Entry, NamedVectors, Part
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable


def cut(table: OptimizerTable, layout: Sequence[Entry], count: int) -> tuple[slice, ...]:
    """Divides a flat vector into `count` parts, with numbers of parameters as even as possible.

    Args:
        table: Table of the optimiser, which may have groups of parameters.
        layout: Layout of the vector.
        count: Number of parts.

    Raises:
        ConfigError: The model is too small for this number of parts.
    """
    size = layout[-1].offset + layout[-1].size
    runs = [run for _, run in runs_of(table.groups, layout)]
    ends = [_nearest(runs, runs[-1].stop * i // count) for i in range(1, count)]
    parts = [slice(a, b) for a, b in zip([0, *ends], [*ends, size], strict=True)]
    if any(part.start >= part.stop for part in parts) or parts[-1].start >= runs[-1].stop:
        raise ConfigError(
            f"[topology] options.shards = {count}: the model's {size} numbers cannot be divided among {count} servers; "
            "valid: fewer"
        )
    return tuple(parts)


def pieces_of(job: Job, layout: Sequence[Entry], parameters: int, part: Part | None) -> list[slice]:
    """Returns the slices of an owner's parameters that the job's owners have separately. In a replay one owner has all.

    Args:
        job: Resolved job.
        layout: Layout of the whole vector.
        parameters: Number of parameters that the owner has.
        part: Part of the vector that the owner has. None: it has all.
    """
    count = 1 if part is not None else len(job.make_topology().plan(job.learners).front_owners)
    if count == 1:
        return [slice(0, parameters)]
    return [slice(piece.start, min(piece.stop, parameters)) for piece in cut(job.optimizer, layout, count)]


def elements_of(vector: torch.Tensor, part: Part) -> torch.Tensor:
    """Returns the elements of a whole vector that the owner of a part has, as it stores them."""
    return torch.cat([vector[stretch] for stretch in part.stretches])


def _nearest(runs: Sequence[slice], place: int) -> int:
    """Returns the possible cut nearest to a place."""
    possible: list[int] = []
    for run in runs:
        inside = min(max(place, run.start), run.stop) - run.start
        lines = round(inside / CACHE_LINE) * CACHE_LINE
        possible.append(run.start + min(lines, (run.stop - run.start) // CACHE_LINE * CACHE_LINE))
    return min(possible, key=lambda near: abs(near - place))


def joined(states: Sequence[NamedVectors]) -> dict[str, NDArray[np.float32]]:
    """Joins the checkpoint states of several owners, in the order of their parts, to the state of a single owner.

    Tensors with one number for each weight are concatenated. A value for all weights, such as a count of steps, is the
    same at every owner. Stretches of weights have names from `stretch_names`.
    """
    names = dict.fromkeys(name for state in states for name in state)
    found = {}
    for name in names:
        pieces = [state[name] for state in states if name in state]
        # No part of a cut vector is so short, but a stretch may be.
        single = all(len(piece) == 1 for piece in pieces) and not name.startswith((WEIGHTS, AVERAGE))
        found[name] = pieces[0] if single or len(pieces) == 1 else np.concatenate(pieces)
    whole = {}
    for vector in (WEIGHTS, AVERAGE):
        stretches = [found.pop(name) for name in [*found] if name == vector or name.startswith(f"{vector} ")]
        if stretches:
            whole[vector] = stretches[0] if len(stretches) == 1 else np.concatenate(stretches)
    return {**whole, **found}


def stretch_names(vector: str, count: int) -> list[str]:
    """Returns the names of the stretches of an owner's vector in its checkpoint state."""
    return [vector, *(f"{vector} {number}" for number in range(1, count))]
