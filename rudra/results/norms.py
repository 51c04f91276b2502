"""Norms of gradients in a result file: columns for the rows of gradients and updates, and norms that a replay adds."""

import numpy as np
from numpy.typing import NDArray

from rudra.core.messages import Rows

NORMS_EVERY = "norms_every"
"""Attribute of a result file with norms: number N of `results.gradient_norms = "every N"`."""


def with_gradient_norms(rows: Rows, norms: Rows) -> Rows:
    """Returns the rows of gradients with a column `norm`: NaN where the norm of the mini-batch is not recorded.

    It is also NaN for a row that stands for several mini-batches, those of a replica between two averages.

    Args:
        rows: Rows of `/gradients`.
        norms: Rows of `/gradient_norms`.
    """
    learners = 1 + max(rows["learner"].max(initial=0), norms["learner"].max(initial=0)).astype(np.int64)
    places = _last_places(*(table["step"] * learners + table["learner"] for table in (norms, rows)))
    places[np.append(norms["samples"], 0)[places] != rows["samples"]] = -1
    return _joined(rows, norms, places, ["norm"])


def with_update_norms(rows: Rows, norms: Rows) -> Rows:
    """Returns the rows of updates with columns `norm` and `clipped_norm`: NaN where they are not recorded.

    Args:
        rows: Rows of `/updates`.
        norms: Rows of `/update_norms`.
    """
    return _joined(rows, norms, _last_places(norms["timestamp"], rows["timestamp"]), ["norm", "clipped_norm"])


def _last_places(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the last place of each wanted key among the known keys. -1: it is not among them."""
    order = np.append(np.argsort(known, kind="stable"), -1)
    after = np.searchsorted(known[order[:-1]], wanted, "right")
    places = order[after - 1]
    return np.where(np.append(known, -1)[places] == wanted, places, -1)


def _joined(rows: Rows, norms: Rows, places: NDArray[np.int64], columns: list[str]) -> Rows:
    """Returns rows with more columns, from the rows of norms at these places. -1: NaN."""
    made = np.empty(len(rows), [*rows.dtype.descr, *((column, "<f8") for column in columns)])
    for name in rows.dtype.names or ():
        made[name] = rows[name]
    for column in columns:
        made[column] = np.append(norms[column], np.nan)[places]
    return made
