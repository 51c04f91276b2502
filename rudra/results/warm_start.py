"""Initial weights of a run that come from another run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rudra.core.layout import Entry
from rudra.errors import ConfigError
from rudra.results import checkpoint
from rudra.results.reader import LayoutEntry, open_results


def shapes(layout: Sequence[Entry | LayoutEntry]) -> list[list[Any]]:
    """Returns name and shape of each tensor of a model, for the checkpoint."""
    return [[entry.name, list(entry.shape)] for entry in layout]


def final_weights(path: Path, layout: Sequence[Entry]) -> npt.NDArray[np.float32]:
    """Reads the last weights of a run, or a checkpoint's weights, (size,).

    Args:
        path: Result file or checkpoint of the other run.
        layout: Layout of the model for the weights.

    Raises:
        ConfigError: The weights belong to another model, or do not exist.
        ResultsError: The result file does not exist, or is damaged.
        CheckpointError: The checkpoint does not exist, or is damaged.
    """
    theirs: list[list[Any]] | None
    if path.suffix == checkpoint.SUFFIX:
        state, tensors = checkpoint.read(path)
        weights, theirs = tensors["weights"], state.attributes.get("layout")
    else:
        with open_results(path) as results:
            found, theirs = results.weights, shapes(results.layout)
            if found is None:
                raise ConfigError(f"[training] warm_start: {path} holds no final weights (its run is {results.status})")
            weights = found
    size = sum(entry.size for entry in layout)
    differing = first_difference(theirs, layout)
    if differing or len(weights) != size:
        differing = differing or f"it has {len(weights):,} weights, and the job's {size:,}"
        raise ConfigError(f"[training] warm_start: {path} holds another model: {differing}; use a file of this model")
    return weights


def first_difference(theirs: list[list[Any]] | None, layout: Sequence[Entry]) -> str:
    """Returns the first difference between two models as text, or an empty string.

    Args:
        theirs: Result of `shapes` for the other model. None: unknown.
        layout: Layout of the model.
    """
    ours = shapes(layout)
    if theirs is None or theirs == ours:
        return ""
    for (their_name, their_shape), (name, shape) in zip(theirs, ours, strict=False):
        if (their_name, their_shape) != (name, shape):
            return f"it has {their_name} of shape {tuple(their_shape)}, and the job's {name} of shape {tuple(shape)}"
    return f"it has {len(theirs)} tensors, and the job's {len(ours)}"
