"""Reader of result files: one HDF5 file for each run, readable during the run.

`rudra.results.writer` (`OBJECTS`) lists the content of a file, `rudra.core.records` its columns, and the page
`docs/results.md` describes both. All numbers are little-endian. All strings are UTF-8 of fixed length.

`rudra.results.checked_file` opens and checks a file.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rudra.compute.statedict import StateEntry
from rudra.core.actions import TableName
from rudra.core.messages import Rows
from rudra.errors import ResultsError
from rudra.files import check_output
from rudra.results import plan_rows, validation
from rudra.results.checked_file import CheckedFile, decoded
from rudra.results.norms import with_gradient_norms, with_update_norms
from rudra.results.summary import best_epoch, summarise
from rudra.results.writer import FORMAT_VERSION, STATE, ResultsWriter, default_output
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
        attributes: Values that were fixed when the run started, such as `"protocol"` or `"learners"`: name -> value.
        has_norms: Whether the file has norms of gradients.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = CheckedFile(self.path)
        self.attributes = self._file.attributes
        self.has_norms = self._file.has_norms

    def close(self) -> None:
        """Closes the file. Nothing can be read afterwards."""
        self._file.close()

    def refresh(self) -> None:
        """Opens the file again, unless it is `live`.

        Call it to follow a run on a network file system. The file is complete between any two flushes, and a reader
        sees new rows only after opening the file again.
        """
        self._file.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def live(self) -> bool:
        """Whether the file was open for writing when this object opened it: its run continues, or was killed."""
        return self._file.live

    @property
    def job(self) -> dict[str, Any]:
        """The job as it was run, with every default: table -> key -> value."""
        return self._file.job

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
        return self._file.read("roles")

    @property
    def learners(self) -> Rows:
        """Table `/learners`: one row for each learner, shape (λ,). Empty until the run has ended."""
        return self._file.read("learners")

    @property
    def totals(self) -> Rows:
        """Table `/totals`: one row for the run, shape (1,). Empty until the run has ended."""
        return self._file.read("totals")

    @property
    def state(self) -> dict[str, Any]:
        """The row of `/state`: `"status"`, `"reason"`, `"weights_sha256"` and `"flushed_s"`."""
        row = self._file.read("state")[0]
        return {name: decoded(row[name]) for name in STATE.names or ()}

    @property
    def status(self) -> str:
        """Status of the run: `"running"`, `"finished"`, `"failed"` or `"interrupted"`. A killed run stays
        `"running"`."""
        return str(self.state["status"])

    @property
    def layout(self) -> tuple[LayoutEntry, ...]:
        """Layout of `weights`: the elements of each tensor of the model."""
        rows = self._file.read("weights/layout")
        with self._file.reading():
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
        with self._file.reading():
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
        weights: NDArray[np.float32] = self._file.read("weights/final")
        if hashlib.sha256(weights.data).hexdigest() != digest:
            raise ResultsError(f"{self.path}: damaged: the final weights do not match their checksum")
        return weights

    @property
    def kept_epochs(self) -> tuple[int, ...]:
        """Numbers of epochs whose weights are in the file, ascending. They include the last epoch of a finished run."""
        rows = self.epochs
        hashed = set(rows["epoch"][rows["weights_sha256"] != b""].tolist())
        kept = tuple(sorted(epoch for epoch in self._file.read("weights/kept").tolist() if epoch in hashed))
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
        place = self._file.read("weights/kept").tolist().index(epoch)
        weights: NDArray[np.float32] = self._file.row("weights/epochs", place)
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
        rows = self._file.read("weights/names")
        with self._file.reading():
            values: dict[str, NDArray[Any]]
            values = {e.name: weights[e.offset : e.offset + e.size].reshape(e.shape) for e in layout}
            values |= {e.name: values[e.name].astype(np.int64) for e in layout if e.kind == "counter"}
            named = [StateEntry(*(row[column].decode() for column in ("name", "tensor", "dtype"))) for row in rows]
            for tensor in {each.tensor for each in named} - values.keys():
                values[tensor] = self._file.fixed(tensor)
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
        with self._file.reading():
            count, last = self._file.last("updates")
            return count * int(last["samples"]) if count else 0

    def pieces(self, name: TableName, rows: int = 1 << 15, start: int = 0) -> Iterator[Rows]:
        """Yields the rows of a table in pieces, for runs whose tables do not fit into memory.

        Args:
            name: One of `"gradients"`, `"updates"`, `"minibatches"`, `"epochs"`, `"metrics"`, `"events"`,
                `"averages"`, `"stages"`, `"gradient_norms"` or `"update_norms"`.
            rows: Maximum number of rows of a piece.
            start: Index of the first row.
        """
        return self._file.pieces(name, rows, start)

    def recorded(self, name: TableName) -> Rows:
        """Returns the rows of a table as they are in the file, without columns from other tables.

        They are without empty rows at the end, which a truncated file may have. All valid rows have samples.
        """
        return self._file.recorded(name)


def _listed(epochs: Sequence[int]) -> str:
    """Formats epochs for users. If there are many, only the first and the last ones are named."""
    shown = [str(epoch) for epoch in epochs]
    return ", ".join(shown if len(shown) < 20 else [*shown[:10], "…", *shown[-5:]]) or "none"
