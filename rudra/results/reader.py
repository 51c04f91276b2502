"""Reader of result files: one HDF5 file for each run, readable during the run.

`rudra.results.writer` (`OBJECTS`) lists the content of a file, `rudra.core.records` its columns, and the page
`docs/results.md` describes both. All numbers are little-endian. All strings are UTF-8 of fixed length.

The writer uses HDF5's single-writer, multiple-reader (SWMR) mode from the start. In this mode neither data sets nor
attributes can be added, so all of them exist from the start, and variable data is in data sets. Flushed data survives
a killed writer. The file of a killed or running writer opens only in SWMR mode: `open_results` does so, or by hand
`h5py.File(path, "r", swmr=True, locking=False)`.
"""

import ctypes
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from rudra.compute.statedict import StateEntry
from rudra.core.actions import TableName
from rudra.core.messages import Rows
from rudra.core.records import AVERAGE, EVENT, METRIC, STAGE, UPDATE_NORM
from rudra.errors import ResultsError, printable
from rudra.files import check_output
from rudra.results import plan_rows, validation
from rudra.results.norms import with_gradient_norms, with_update_norms
from rudra.results.summary import best_epoch, summarise
from rudra.results.writer import (
    DATASETS,
    FORMAT_VERSION,
    NORMS,
    OBJECTS,
    STATE,
    ResultsWriter,
    default_output,
    reason_of,
)
from topologies import Plan

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT_VERSION",
    "LayoutEntry",
    "Results",
    "ResultsWriter",
    "check_output",
    "default_output",
    "open_results",
]

# HDF5 doubles its pause after each of (by default) 100 attempts to read damaged metadata in SWMR mode, so practically
# never ends.
_READ_ATTEMPTS = 28


class LayoutEntry(NamedTuple):
    """One tensor in a vector of weights: the elements from `offset` up to `offset + size`.

    Attributes:
        name: Name of the tensor in the model.
        kind: `"parameter"`, `"buffer"`, or `"counter"`: a whole number such as BatchNorm's count of mini-batches.
        shape: Shape of the tensor.
        offset: Index of the tensor's first element in the vector.
        size: Number of the tensor's elements.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


READABLE = tuple(range(5, FORMAT_VERSION + 1))
"""Versions of the format that can be read."""


def open_results(path: str | Path) -> "Results":
    """Opens a result file: a complete one, one that a run is writing, or one whose run was killed.

    Args:
        path: Path of the result file.

    Returns:
        Results of the run. Close them, or use `with`.

    Raises:
        ResultsError: The file does not exist, is damaged, or is not a result file.
    """
    return Results(Path(path))


class Results:
    """Contents of a result file. `rudra.open_results`, `rudra.run` and `rudra.simulate` return it.

    Tables are structured NumPy arrays: `results.epochs["test_error"]` is a column. `docs/results.md` lists the columns
    of each table, with units. While a run writes the file, each access reads all rows in the file at that time.

    Attributes:
        path: Path of the file.
        live: Whether the file was open for writing when this object opened it: its run continues, or was killed.
        attributes: Values that were fixed when the run started, such as `"protocol"` or `"learners"`: name -> value.
        has_norms: Whether the file has norms of gradients.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self._file, self.live = _open(path)
        try:
            with self._reading():
                values = validation.plain_attributes(self._file.attrs)
                self.attributes: dict[str, Any] = {name: _decoded(value) for name, value in values.items()}
                missing = [name for name in OBJECTS if name not in self._file]
            version = self.attributes.get("format_version")
            if version is None:
                raise ResultsError(f"{path}: not a result file of Rudra")
            if version not in READABLE:
                known = f"{READABLE[0]} to {READABLE[-1]}"
                raise ResultsError(f"{path}: has format version {version}; this Rudra reads {known}")
            absent = validation.lacking(version)
            self.has_norms = not set(NORMS) <= {*missing}
            absent |= frozenset() if self.has_norms else frozenset(NORMS)
            if missing := [name for name in missing if name not in absent]:
                raise ResultsError(f"{path}: damaged: {', '.join(missing)} missing")
            self.attributes = validation.attributes(self.attributes, path)
            self._job = validation.job(self.attributes.get("job", "{}"), path)
            with self._reading():
                self._absent = absent
                for name in (name for name in DATASETS if name not in absent):
                    if self._file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
                        raise ValueError(f"/{name} is a link")
                    validation.dataset(self._file[name], name)
        except ResultsError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file. Nothing can be read afterwards."""
        self._file.close()

    def refresh(self) -> None:
        """Opens the file again, unless it is `live`.

        Call it to follow a run on a network file system. The file is complete between any two flushes, and a reader
        sees new rows only after opening the file again.
        """
        if not self.live:
            self._file.close()
            self._file, self.live = _open(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def job(self) -> dict[str, Any]:
        """The job as it was run, with every default: table -> key -> value."""
        return self._job

    @property
    def gradients(self) -> Rows:
        """Table `/gradients`: one row for each applied gradient, in order of application.

        If the file `has_norms`, it has a column `norm` from `gradient_norms`, which is NaN where none is recorded.
        """
        rows = self.recorded("gradients")
        return with_gradient_norms(rows, self.gradient_norms) if self.has_norms else rows

    @property
    def updates(self) -> Rows:
        """Table `/updates`: one row for each update of the weights, in order.

        If the file `has_norms`, it has the columns `norm`, `clipped_norm` and `product` from `update_norms`. They are
        NaN where none is recorded.
        """
        rows = self.recorded("updates")
        return with_update_norms(rows, self.update_norms) if self.has_norms else rows

    @property
    def minibatches(self) -> Rows:
        """Table `/minibatches`: one row for each mini-batch of a learner, in order of its report."""
        return self.recorded("minibatches")

    @property
    def epochs(self) -> Rows:
        """Table `/epochs`: one row for each finished epoch, in order."""
        return self.recorded("epochs")

    @property
    def metrics(self) -> Rows:
        """Table `/metrics`: one row for each metric of each evaluation, except loss and error, in order of epochs."""
        return self.recorded("metrics")

    @property
    def events(self) -> Rows:
        """Table `/events`: one row for each checkpoint, restart, lost rank, …, in order of time."""
        return self.recorded("events")

    @property
    def averages(self) -> Rows:
        """Table `/averages`: one row for each learner and average of replicas. Empty unless learners average."""
        return self.recorded("averages")

    @property
    def stages(self) -> Rows:
        """Table `/stages`: one row for each mini-batch of a stage server. Empty unless layers are placed."""
        return self.recorded("stages")

    @property
    def gradient_norms(self) -> Rows:
        """Table `/gradient_norms`: the norm of the gradient of each measured mini-batch. Empty unless `has_norms`."""
        return self.recorded("gradient_norms")

    @property
    def update_norms(self) -> Rows:
        """Table `/update_norms`: the norm of the gradient of each measured update. Empty unless `has_norms`."""
        return self.recorded("update_norms")

    @property
    def roles(self) -> Rows:
        """Table `/roles`: one row for each role. The row's index is the role's id."""
        return self._read("roles")

    @property
    def learners(self) -> Rows:
        """Table `/learners`: one row for each learner, shape (λ,). Empty until the run has ended."""
        return self._read("learners")

    @property
    def totals(self) -> Rows:
        """Table `/totals`: one row for the run, shape (1,). Empty until the run has ended."""
        return self._read("totals")

    @property
    def state(self) -> dict[str, Any]:
        """The row of `/state`: `"status"`, `"reason"`, `"weights_sha256"` and `"flushed_s"`."""
        row = self._read("state")[0]
        return {name: _decoded(row[name]) for name in STATE.names or ()}

    @property
    def status(self) -> str:
        """Status of the run: `"running"`, `"finished"`, `"failed"` or `"interrupted"`. A killed run stays
        `"running"`."""
        return str(self.state["status"])

    @property
    def layout(self) -> tuple[LayoutEntry, ...]:
        """Layout of `weights`: the elements of each tensor of the model."""
        rows = self._read("weights/layout")
        with self._reading():
            return tuple(
                LayoutEntry(
                    row["name"].decode(),
                    row["kind"].decode(),
                    tuple(int(n) for n in row["shape"][: row["dimensions"]]),
                    int(row["offset"]),
                    int(row["size"]),
                )
                for row in rows
            )

    def plan(self) -> Plan:
        """Returns the roles of the run, and their exchanges of gradients and weights.

        Raises:
            ResultsError: The file is damaged.
        """
        rows = self.roles
        with self._reading():
            return validation.plan(plan_rows.plan_of(rows, self.attributes), self.attributes["learners"])

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """Final weights as one vector, shape (elements,), float32, or None if the run did not finish.

        Raises:
            ResultsError: The weights do not match the checksum in the file.
        """
        digest = self.state["weights_sha256"]
        if not digest:
            return None
        weights: NDArray[np.float32] = self._read("weights/final")
        if hashlib.sha256(weights.data).hexdigest() != digest:
            raise ResultsError(f"{self.path}: damaged: the final weights do not match their checksum")
        return weights

    @property
    def kept_epochs(self) -> tuple[int, ...]:
        """Numbers of epochs whose weights are in the file, ascending. They include the last epoch of a finished run."""
        rows = self.epochs
        hashed = set(rows["epoch"][rows["weights_sha256"] != b""].tolist())
        kept = tuple(sorted(epoch for epoch in self._read("weights/kept").tolist() if epoch in hashed))
        return (*kept, int(rows["epoch"][-1])) if self.state["weights_sha256"] and len(rows) else kept

    @property
    def best_epoch(self) -> int | None:
        """Number of the epoch with the best evaluation, or None if no epoch was evaluated.

        The best evaluation has the best value of the metric in `training.target`. Without a target, it has the smallest
        test error, or the smallest test loss if the task has no error. Among equal evaluations the first one counts.
        With `results.keep_best` only epochs whose weights are in the file count.
        """
        return best_epoch(self, self.kept_epochs if self.job.get("results", {}).get("keep_best") else None)

    def weights_of(self, epoch: int | Literal["best"] | None = None) -> NDArray[np.float32]:
        """Returns the weights at the end of an epoch as one vector, shape (elements,), float32.

        Args:
            epoch: One of `kept_epochs`, or `"best"` for `best_epoch`. None: the final weights.

        Raises:
            ResultsError: The file does not have these weights, or their checksum is wrong.
        """
        kept = self.kept_epochs
        if epoch == "best":
            epoch = self.best_epoch
            if epoch is None:
                raise ResultsError(f"{self.path}: has no best epoch: none was evaluated")
            if epoch not in kept:
                what = f"the best one; epochs that are kept: {_listed(kept)}"
                raise ResultsError(f"{self.path}: has no weights of epoch {epoch}, {what}; results.keep_best keeps it")
        if epoch in {None, *kept[-1:]} and (final := self.weights) is not None:
            return final
        if epoch not in kept:
            what = f"final weights: the run is {self.status}" if epoch is None else f"weights of epoch {epoch}"
            raise ResultsError(f"{self.path}: has no {what}; epochs that are kept: {_listed(kept)}")
        place = self._read("weights/kept").tolist().index(epoch)
        with self._reading():
            dataset = self._dataset("weights/epochs")
            validation.fits(dataset.shape[1] * dataset.dtype.itemsize, "weights/epochs", self.path.stat().st_size)
            weights: NDArray[np.float32] = dataset[place]
        rows = self.epochs
        if hashlib.sha256(weights.data).hexdigest().encode() != rows["weights_sha256"][rows["epoch"] == epoch][0]:
            raise ResultsError(f"{self.path}: damaged: the weights of epoch {epoch} do not match their checksum")
        return weights

    def state_dict(self, epoch: int | Literal["best"] | None = None) -> "dict[str, torch.Tensor]":
        """Returns the argument for the model's `load_state_dict`: name -> tensor, in the model's own shapes and types.

        Tensors that are not trained (frozen parameters, integer buffers except counters) have their initial values.
        Tied names share one tensor. `tensors` gives NumPy arrays.

        Args:
            epoch: One of `kept_epochs`, or `"best"` for `best_epoch`. None: the final weights.

        Raises:
            ResultsError: The file does not have these weights, or their checksum is wrong.
        """
        from rudra.results.tensors import tensors_of  # imports torch, which other readers do not need

        return tensors_of(self.tensors(epoch), self.path)

    def tensors(self, epoch: int | Literal["best"] | None = None) -> tuple[StateEntry, ...]:
        """Returns the entries of `state_dict(epoch)` with NumPy arrays instead of tensors.

        Arrays of trained tensors are views of `weights_of(epoch)`. Counters such as BatchNorm's are int64. Types that
        NumPy lacks, such as bfloat16, are float32.

        Args:
            epoch: One of `kept_epochs`, or `"best"` for `best_epoch`. None: the final weights.

        Returns:
            One entry for each name in the model's `state_dict`, in torch's order: `name`, `tensor` (the first name of
            the tensor), `dtype` (torch's name of the type) and `value` (the array).

        Raises:
            ResultsError: The file does not have these weights, or their checksum is wrong.
        """
        weights, layout = self.weights_of(epoch), self.layout
        rows, file_bytes = self._read("weights/names"), self.path.stat().st_size
        with self._reading():
            values: dict[str, NDArray[Any]]
            values = {e.name: weights[e.offset : e.offset + e.size].reshape(e.shape) for e in layout}
            values |= {e.name: values[e.name].astype(np.int64) for e in layout if e.kind == "counter"}
            named = [StateEntry(*(row[column].decode() for column in ("name", "tensor", "dtype"))) for row in rows]
            for tensor in {each.tensor for each in named} - values.keys():
                values[tensor] = validation.fixed(self._file, tensor, file_bytes)
            return tuple(each._replace(value=values[each.tensor]) for each in named)

    def frame(self, table: str) -> Any:
        """Returns a table as a `pandas.DataFrame`, with bytes decoded to texts.

        Args:
            table: One of `"gradients"`, `"updates"`, `"minibatches"`, `"epochs"`, `"metrics"`, `"events"`,
                `"averages"`, `"stages"`, `"gradient_norms"`, `"update_norms"`, `"roles"` or `"learners"`.

        Raises:
            ConfigError: The table does not exist, or pandas is not installed.
        """
        from rudra.results.frame import frame

        return frame(self, table)

    def summary(self, target: str | None = None, window: int | None = None) -> dict[str, Any]:
        """Returns the figures of the run, as `rudra show --json` prints them. None means not known (yet).

        They include:

        - `status`, `updates`, `samples`, `wall_time_s` (seconds of training) and `samples_per_s`
        - `test_error`, `test_loss`, `train_error`, `train_loss` and `epoch_end_s`: lists with one entry for each epoch
        - `final_test_error`: test error of the last evaluated epoch
        - `metrics`: split -> name -> list with one entry for each epoch
        - `noise_scale` and `epoch_noise_scale`: gradient noise scale of the run and of each epoch, with `samples` (B),
          `error` (its standard error), `updates`, `update_samples` and `note`. None without `results.gradient_norms`
        - `mean_staleness`, `max_staleness` and `staleness_histogram` (number of applied gradients with σ = 0, 1, …)
        - `time_to_target_s` and `target_epoch`: time and epoch when the target was reached

        Args:
            target: Target such as `"accuracy >= 0.98"`. None: the job's `training.target`.
            window: Number of evaluations whose median must reach the target. None: the job's `training.target_window`.

        Returns:
            Name -> number, text, or list or table of numbers and texts. All values fit into JSON.

        Raises:
            ConfigError: The target is not valid, or the evaluations of the run do not measure it.
        """
        return summarise(self, target, window)

    def applied_samples(self) -> int:
        """Estimates the current number of applied samples, as if all updates had as many as the last one.

        It reads one row, so it is cheap enough to call often during a run.
        """
        with self._reading():
            dataset = self._dataset("updates")
            count = len(dataset)
            return count * int(dataset[count - 1]["samples"]) if count else 0

    def pieces(self, name: TableName, rows: int = 1 << 15, start: int = 0) -> Iterator[Rows]:
        """Yields the rows of a table in pieces, for runs whose tables do not fit into memory.

        Args:
            name: One of `"gradients"`, `"updates"`, `"minibatches"`, `"epochs"`, `"metrics"`, `"events"`,
                `"averages"`, `"stages"`, `"gradient_norms"` or `"update_norms"`.
            rows: Maximum number of rows of a piece.
            start: Index of the first row.
        """
        for first in range(start, self._length(name), rows):
            with self._reading():
                piece = self._checked(name, self._file[name][first : first + rows])
            yield piece[_filled(piece)]

    def _length(self, name: TableName) -> int:
        if name in self._absent:
            return 0
        with self._reading():
            dataset = self._dataset(name)
            validation.fits(dataset.nbytes, name, self.path.stat().st_size)
            return len(dataset)

    def recorded(self, name: TableName) -> Rows:
        """Returns the rows of a table as they are in the file, without columns from other tables.

        They are without empty rows at the end, which a truncated file may have. All valid rows have
        samples."""
        rows = self._read(name)
        filled = np.flatnonzero(_filled(rows))
        return rows[: filled[-1] + 1 if filled.size else 0]

    def _read(self, name: str) -> NDArray[Any]:
        if name in self._absent:
            return np.zeros(0, validation.DTYPES[name])
        with self._reading():
            dataset = self._dataset(name)
            dtype, shape = dataset.dtype, dataset.shape
            validation.fits(math.prod(shape) * dtype.itemsize, name, self.path.stat().st_size)
            values = np.zeros(shape, dtype)
            if values.size:
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
            return self._checked(name, values)

    def _dataset(self, name: str) -> h5py.Dataset:
        """Returns a data set with the rows that its file has now."""
        dataset = self._file[name]
        if self.live:
            dataset.id.refresh()
        return dataset

    def _checked(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        wanted = validation.DTYPES.get(name)
        if wanted is not None and values.dtype != wanted:
            values = self._completed(name, values, wanted)
        found = validation.rows(name, values, self.attributes.get("learners"))
        if name == "updates" and self.attributes["format_version"] == 5:  # format 5 counts epochs from 0
            found["epoch"] += 1
        return found

    def _completed(self, name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns rows of an older format (`validation.older`) with all columns. Times that it did not separate are
        0."""
        found = np.zeros(values.shape, dtype)
        for column in {*(values.dtype.names or ())} & {*(dtype.names or ())}:
            found[column] = values[column]
        if name == "gradients":
            found["stream"] = values["learner"]
            found["first"] = values["step"] * self.attributes["minibatch_size"]
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ResultsError:
            raise
        except Exception as error:  # HDF5 and NumPy raise almost any error if a file is damaged
            raise ResultsError(f"{self.path}: damaged or closed: {reason_of(error)}") from None


def _filled(rows: Rows) -> NDArray[np.bool_]:
    """Returns which rows have content."""
    told = {EVENT: "kind", METRIC: "name", AVERAGE: "timestamp", STAGE: "timestamp", UPDATE_NORM: "timestamp"}.get(
        rows.dtype, "samples"
    )
    filled: NDArray[np.bool_] = rows[told] != np.zeros((), rows.dtype[told])
    return filled


def _listed(epochs: Sequence[int]) -> str:
    """Formats epochs for users. If there are many, only the first and the last ones are named."""
    shown = [str(epoch) for epoch in epochs]
    return ", ".join(shown if len(shown) < 20 else [*shown[:10], "…", *shown[-5:]]) or "none"


def _open(path: Path) -> tuple[h5py.File, bool]:
    """Opens a file for reading. The second value says whether no writer has closed the file."""
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # opening a pipe would block
            raise ResultsError(f"{path}: not a result file of Rudra")
        with path.open("rb") as file:
            head = file.read(12)
        if not head:
            raise ResultsError(f"{path}: is empty: its run has not created it yet, or ended before it could")
        if len(head) < 12 or not head.startswith(b"\x89HDF\r\n\x1a\n"):
            raise ResultsError(f"{path}: not a result file of Rudra")
        if head[8] >= 3 and head[11] & 1:  # HDF5's own mark, set from a file's creation until it is closed
            return _open_swmr(path), True
        return h5py.File(path, "r", locking="best-effort"), False
    except FileNotFoundError:
        raise ResultsError(f"{path}: no such result file") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise ResultsError(f"{path}: cannot read: {reason_of(error)}") from None


def _open_swmr(path: Path) -> h5py.File:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    set_attempts = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts  # h5py does not offer this function
    set_attempts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    set_attempts(access.id, _READ_ATTEMPTS)
    flags = h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ
    return h5py.File(h5py.h5f.open(os.fsencode(path), flags, access))


def _decoded(value: Any) -> Any:
    """Returns a plain Python value for a value from HDF5."""
    if isinstance(value, bytes):
        return printable(value.decode("utf-8", "replace"))
    array = np.asarray(value)
    if array.dtype.kind != "S":
        return array.tolist()
    texts = np.char.decode(array, "utf-8", "replace").tolist()
    return [printable(text) for text in texts] if isinstance(texts, list) else printable(texts)
