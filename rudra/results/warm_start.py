"""The weights that a run begins with, if they are another run's last."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rudra.core.layout import Entry
from rudra.errors import ConfigError
from rudra.results.reader import open_results


def final_weights(path: Path, layout: Sequence[Entry]) -> npt.NDArray[np.float32]:
    """The last weights of a run, (size,).

    Args:
        path: its result file.
        layout: of the model that they are for.

    Raises:
        ConfigError: they are another model's, or there are none.
        ResultsError: the file is none, or damaged.
    """
    with open_results(path) as results:
        theirs, ours = [(e.name, tuple(e.shape)) for e in results.layout], [(e.name, tuple(e.shape)) for e in layout]
        weights, size = results.weights, sum(entry.size for entry in layout)
        if weights is None:
            raise ConfigError(f"[training] warm_start: {path} holds no final weights (its run is {results.status})")
        if len(weights) != size:
            raise ConfigError(f"[training] warm_start: {path} holds another model, of {len(weights):,} numbers")
        if theirs != ours:
            differing = next((f"{a} against {b}" for a, b in zip(theirs, ours, strict=False) if a != b), "their number")
            raise ConfigError(f"[training] warm_start: {path} holds another model: {differing}")
        return weights
