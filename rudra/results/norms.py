"""Norms of gradients in a result file: columns for the rows of gradients and updates, and norms that a replay adds."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from rudra.core.actions import TableName
from rudra.core.messages import Rows
from rudra.errors import ResultsError
from rudra.results.checkpoint import sync_directory
from rudra.results.writer import GROWING, NORMS, NORMS_EVERY, create_table, reason_of

Places = NDArray[np.int64]


def with_gradient_norms(rows: Rows, norms: Rows) -> Rows:
    """Returns the rows of gradients with a column `norm`: NaN where the norm of the mini-batch is not recorded.

    The norm is also NaN in the row of a replica that made several mini-batches between two averages.

    Args:
        rows: Rows of `/gradients`.
        norms: Rows of `/gradient_norms`.
    """
    return _joined(rows, norms, places_of_gradients(norms, rows), ["norm"])


def with_update_norms(rows: Rows, norms: Rows) -> Rows:
    """Returns the rows of updates with columns `norm`, `clipped_norm` and `product`: NaN where they are not recorded.

    Args:
        rows: Rows of `/updates`.
        norms: Rows of `/update_norms`.
    """
    return _joined(rows, norms, places_of_updates(norms, rows), ["norm", "clipped_norm", "product"])


def places_of_gradients(norms: Rows, rows: Rows) -> Places:
    """Returns the place of the norm of the mini-batch in each row, among rows of `/gradient_norms`. -1: there is none.

    Args:
        norms: Rows of `/gradient_norms`.
        rows: Rows with the columns `learner`, `step` and `samples`.
    """
    learners = 1 + np.int64(max(rows["learner"].max(initial=0), norms["learner"].max(initial=0)))
    places = _last_places(*(table["step"] * learners + table["learner"] for table in (norms, rows)))
    places[np.append(norms["samples"], 0)[places] != rows["samples"]] = -1
    return places


def places_of_updates(norms: Rows, rows: Rows) -> Places:
    """Returns the place of the norm of each update, among rows of `/update_norms`. -1: there is none.

    Args:
        norms: Rows of `/update_norms`.
        rows: Rows with the column `timestamp`.
    """
    return _last_places(norms["timestamp"], rows["timestamp"])


def _last_places(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> Places:
    """Returns the last place of each wanted key among the known keys. -1: it is not among them."""
    order = np.append(np.argsort(known, kind="stable"), -1)
    places = order[np.searchsorted(known[order[:-1]], wanted, "right") - 1]
    return np.where(np.append(known, -1)[places] == wanted, places, -1)


def _joined(rows: Rows, norms: Rows, places: Places, columns: list[str]) -> Rows:
    """Returns rows with more columns, from the rows of norms at these places. -1: NaN."""
    made = np.empty(len(rows), [*rows.dtype.descr, *((column, "<f8") for column in columns)])
    for name in rows.dtype.names or ():
        made[name] = rows[name]
    for column in columns:
        made[column] = np.append(norms[column], np.nan)[places]
    return made


def add_norms(path: Path, every: int, rows: Mapping[TableName, Iterable[Rows]]) -> None:
    """Adds norms to a closed result file without norms. Readers of the old file keep it.

    Args:
        path: Path of the file.
        every: Number N: the norms are of every Nth update.
        rows: Rows of the tables in `NORMS`.

    Raises:
        ResultsError: The file cannot be written.
    """
    made = path.with_name(f".{path.stem}.new.h5")
    try:
        shutil.copy2(path, made)
        with h5py.File(made, "r+", libver="latest", locking="best-effort") as file:
            file.attrs[NORMS_EVERY] = every
            for name in NORMS:
                found = np.concatenate([np.zeros(0, GROWING[name]), *rows[name]])
                table = create_table(file, name)
                table.resize(len(found), axis=0)
                table[...] = found
            file.flush()
            os.fsync(file.id.get_vfd_handle())
        os.replace(made, path)
        sync_directory(path.absolute().parent)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResultsError(f"{path}: cannot write: {reason_of(error)}") from None
    finally:
        made.unlink(missing_ok=True)
