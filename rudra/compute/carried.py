"""State of a checkpoint in a form that every family of roles can take over.

A checkpoint holds the state of the roles that step: of one owner of the weights, of the owners on both sides of a cut
(`rudra.compute.stages`), or of each learner with a replica (`rudra.compute.replicas`). Here it is the state of one
optimiser over the whole model. Each role takes the part that it needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rudra.compute.optim import numbered_parts
from rudra.core.buffer_names import AVERAGE, REPLICA, WEIGHTS
from rudra.core.layout import Entry, NamedVectors
from rudra.core.state_names import BACK, OPTIMIZER, STEP
from rudra.job.tables import OptimizerTable


class CarriedState(NamedTuple):
    """State that a role of any family can begin with.

    Attributes:
        weights: (size,) float32.
        average: (size,) float32, average of the weights over time. None: the checkpoint has none.
        steps: State of the optimiser that steps by gradients: key -> (P,) float32, or one value.
        outer: State of the optimiser of `[averaging.outer]`, by its names in the checkpoint. Empty: there is none.
    """

    weights: NDArray[np.float32]
    average: NDArray[np.float32] | None
    steps: Mapping[str, torch.Tensor]
    outer: Mapping[str, NDArray[np.float32]]


def carried_state(
    tensors: NamedVectors, table: OptimizerTable, layout: Sequence[Entry], *, averages: bool
) -> CarriedState:
    """Returns the state of a checkpoint. The states of several replicas are averaged.

    Args:
        tensors: Tensors of the checkpoint.
        table: Table of the optimiser, of the checkpoint's job and of the present one.
        layout: Layout of the whole model.
        averages: Whether the checkpoint belongs to a run that averages replicas.
    """
    parameters = [entry for entry in layout if entry.kind == "parameter"]
    size = parameters[-1].offset + parameters[-1].size
    owner = _named(tensors, OPTIMIZER)
    if averages:
        replicas = [_whole(_named(tensors, f"{prefix}."), table, parameters) for prefix in _replicas(tensors)]
        return CarriedState(tensors[WEIGHTS], tensors.get(AVERAGE), _mean(replicas), owner)
    back = _named(tensors, BACK + OPTIMIZER)
    if not back:
        return CarriedState(tensors[WEIGHTS], tensors.get(AVERAGE), _whole(owner, table, parameters), {})
    last = max(_length(back, key) for key in _keys(back))
    cut = size - last if last > 1 else _length(owner, next(iter(_keys(owner)), ""))
    first = [entry for entry in parameters if entry.offset < cut]
    sides = [_whole(state, table, side) for state, side in ((owner, first), (back, parameters[len(first) :]))]
    return CarriedState(tensors[WEIGHTS], tensors.get(AVERAGE), _beside(*sides, cut=cut, size=size), {})


def _named(tensors: NamedVectors, prefix: str) -> dict[str, NDArray[np.float32]]:
    """Returns the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _replicas(tensors: NamedVectors) -> list[str]:
    """Returns the prefixes of the replicas in a checkpoint."""
    return sorted({name.partition(".")[0] for name in tensors if name.startswith(REPLICA)})


def _keys(state: Iterable[str]) -> list[str]:
    """Returns the keys of an optimiser's state: names without the number of a part."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in state if name.rpartition(".")[2].isdigit()))


def _length(state: NamedVectors, key: str) -> int:
    """Returns the number of elements of a key's values."""
    return sum(len(value) for name, value in state.items() if name.rpartition(".")[0] == key)


def _whole(state: NamedVectors, table: OptimizerTable, parameters: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """Returns the state of an optimiser over these parameters: key -> a value for each element, or one value."""
    if not state or not parameters:
        return {}
    first = parameters[0].offset
    mine = [Entry(e.name, e.shape, e.offset - first, e.size, e.kind) for e in parameters]
    groups = table.groups_of([entry.name for entry in mine])
    parts = numbered_parts(table.model_copy(update={"groups": groups}), mine)
    found: dict[str, torch.Tensor] = {}
    for key in _keys(state):
        values = {number: state[f"{key}.{number}"] for number in range(len(parts)) if f"{key}.{number}" in state}
        if key == STEP or any(len(values[number]) != parts[number].stop - parts[number].start for number in values):
            found[key] = torch.tensor(max(float(value[0]) for value in values.values()))
            continue
        found[key] = torch.zeros(mine[-1].offset + mine[-1].size)
        for number, value in values.items():
            found[key][parts[number]] = torch.from_numpy(value)
    return found


def _mean(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the mean of the replicas' states, for the keys that all have."""
    keys = [key for key in states[0] if all(key in state for state in states)] if states else []
    return {key: torch.stack([state[key] for state in states]).mean(0) for key in keys}


def _beside(
    front: Mapping[str, torch.Tensor], back: Mapping[str, torch.Tensor], *, cut: int, size: int
) -> dict[str, torch.Tensor]:
    """Returns the state of the whole model from the states of both sides of a cut. A missing side is zero."""
    found = {}
    for key in dict.fromkeys((*front, *back)):
        one = front.get(key, back.get(key))
        if one is not None and not one.dim():
            found[key] = one
            continue
        sides = (front.get(key, torch.zeros(cut)), back.get(key, torch.zeros(size - cut)))
        found[key] = torch.cat(sides)
    return found
