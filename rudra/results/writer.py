"""Writer of a result file, and the file's data sets: `OBJECTS`, which `docs/results.md` shows."""

import fcntl
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from rudra.compute import statedict
from rudra.compute.statedict import StateEntry
from rudra.core.actions import TableName
from rudra.core.layout import Entry
from rudra.core.messages import Rows
from rudra.core.records import (
    AVERAGE,
    EPOCH,
    EVENT,
    GRADIENT,
    GRADIENT_NORM,
    LEARNER,
    METRIC,
    MINIBATCH,
    ROLE,
    STAGE,
    TOTALS,
    UPDATE,
    UPDATE_NORM,
    joined_rows,
    table,
)
from rudra.errors import ConfigError, ResultsError
from rudra.files import check_output
from rudra.results.checkpoint import sync_directory

FORMAT_VERSION = 9

Status = Literal["finished", "failed", "interrupted"]

GROWING: dict[TableName, np.dtype[np.void]] = {
    "gradients": GRADIENT,
    "updates": UPDATE,
    "minibatches": MINIBATCH,
    "epochs": EPOCH,
    "metrics": METRIC,
    "events": EVENT,
    "averages": AVERAGE,
    "stages": STAGE,
    "gradient_norms": GRADIENT_NORM,
    "update_norms": UPDATE_NORM,
}
NORMS: tuple[TableName, ...] = ("gradient_norms", "update_norms")
"""Data sets that only files with norms have."""

NORMS_EVERY = "norms_every"
"""Attribute of a file with norms: number N of `results.gradient_norms = "every N"`."""

STATE = table(
    ("status", "S16", "`running`, `finished`, `failed` or `interrupted`; a killed writer leaves `running`"),
    ("reason", "S1024", "why the run ended early; else empty"),
    ("weights_sha256", "S64", "SHA-256 of the final weights; empty until they are in the file"),
    ("flushed_s", "<f8", "wall clock of the last flush, in seconds since 1970"),
)
OBJECTS = {  # data set -> meaning of a row, content
    "gradients": ("gradient that was applied", "which gradients made which update, in order of application"),
    "updates": ("update", "learning rate, staleness and time of each update"),
    "minibatches": ("mini-batch", "training loss and times of each learner; empty without `results.minibatches`"),
    "epochs": ("epoch that has ended", "losses, errors, staleness and time of each epoch"),
    "metrics": ("metric, split and epoch", "metrics of the evaluations other than loss and error"),
    "events": ("event", "checkpoints, restarts, lost ranks, stragglers, targets that were reached"),
    "averages": ("learner and average", "how far replicas were from the weights; empty unless learners average"),
    "stages": ("mini-batch of a stage server", "its updates and their staleness; empty unless layers are placed"),
    "gradient_norms": ("mini-batch", "norms of gradients; missing without `results.gradient_norms`"),
    "update_norms": ("update", "norms of the gradients of updates; missing without `results.gradient_norms`"),
    "roles": ("role", "roles: kind, rank, node and compute group"),
    "learners": ("learner", "where each learner's time went; empty until the run ends"),
    "totals": ("run", "how many gradients were pushed, applied and dropped; empty until the run ends"),
    "state": ("run", "whether the run has ended, and how"),
    "weights/final": ("element", "float32: the final weights as one vector; NaN until `/state` has `weights_sha256`"),
    "weights/epochs": ("epoch that is kept", "float32 (epochs, elements): the weights at the ends of these epochs"),
    "weights/kept": ("epoch that is kept", "int32: the epoch of the same row of `/weights/epochs`; 0: none, ignore it"),
    "weights/layout": ("tensor", "place of each parameter and buffer in such a vector"),
    "weights/names": ("name in the model's `state_dict`", "tensor of each name"),
    "weights/fixed": (
        "",
        "a group with a data set for each tensor that is not trained, as it was at the start, under its name (`%2F` "
        "for a slash); float32 where HDF5 lacks the type, such as bfloat16",
    ),
}
DATASETS = tuple(name for name in OBJECTS if name != "weights/fixed")
_SILENT_S = 30.0
"""A writer that has not written for this time has ended, though a file server may keep the locks of a lost node."""

_STEP_S = 5.0
"""Minimum time between two flushes of a file that must be opened for each flush."""

_MOST_BYTES = 16 << 20
"""Bytes of rows that wait for a flush at most."""

_CHUNK_ROWS = 1024
_CHUNK_WEIGHTS = 1 << 20


def default_output(job_name: str, directory: Path = Path(), now: datetime | None = None) -> Path:
    """Reserves a file name made of job and time. It creates an empty file, so that no other run gets this name.

    Raises:
        ResultsError: The file cannot be created.
    """
    safe_name = re.sub(r"[^\w.-]+", "-", job_name)
    stem = f"{safe_name}-{now or datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        path = directory / f"{stem}{f'-{number}' if number > 1 else ''}.h5"
        try:
            path.open("xb").close()
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise ResultsError(f"{path}: cannot create: {error.strerror or error}") from None
    return path


@contextmanager
def default_outputs(job_name: str) -> Iterator[Callable[[], Path]]:
    """Yields `default_output` for a job, and at the end removes files that it created and no run has written to."""
    reserved: list[Path] = []

    def reserve() -> Path:
        reserved.append(default_output(job_name))
        return reserved[-1]

    try:
        yield reserve
    finally:
        for path in reserved:
            remove_if_empty(path)


def remove_if_empty(path: Path) -> None:
    """Removes the file of `default_output` if no run has written to it."""
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()


def checked_name(path: Path) -> Path:
    """Returns a valid name for a result file.

    Raises:
        ConfigError: The suffix is not `.h5`. Names of checkpoints and images derive from the stem.
    """
    if path.suffix != ".h5":
        raise ConfigError(f"{path}: is not a name for a result file; valid: {path.stem or 'FILE'}.h5")
    return path


class ResultsWriter:
    """Only writer of a result file.

    Rows are collected in memory and passed to the operating system every `flush_s`. After `finish`, `fail` or
    `close` the file is closed. All methods must be called from one thread.

    HDF5's single-writer, multiple-reader mode needs a file system that shows writes to readers in their original order.
    Without it the file is opened, extended and closed for each flush, less often, and is complete in between.

    Args:
        path: Path of the file to create.
        attributes: Root attributes: texts, numbers, or lists of either. None is left out.
        layout: Tensors of the flat weights.
        size: Number of elements of the flat weights.
        learners: λ.
        flush_s: Seconds that rows stay in memory before the next `append` or `flush` writes them.
        roles: Roles of the run, `records.ROLE`.
        overwrite: Whether to replace an existing file as soon as the new one is complete. Readers of the old file keep
            it.
        swmr: Whether the file system supports that mode.
        carried: Rows that start the file, from an earlier part of the same run. The file of that part is replaced as
            with `overwrite`.
        carried_weights: Stored epochs of the earlier part, and their weights.
        state_dict: Entries of the model's state dict, by default the tensors of the layout.
        norms: Whether the file has the data sets in `NORMS`, even if no earlier rows are theirs.

    Raises:
        ResultsError: The file exists or cannot be created, or (in any method) cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        attributes: Mapping[str, Any],
        layout: Sequence[Entry],
        size: int,
        learners: int,
        flush_s: float,
        roles: Rows | None = None,
        overwrite: bool = False,
        swmr: bool = True,
        carried: Mapping[TableName, Iterable[Rows]] | None = None,
        carried_weights: Iterable[tuple[int, NDArray[np.float32]]] = (),
        state_dict: Sequence[StateEntry] = (),
        norms: bool = False,
    ) -> None:
        replaces = overwrite or carried is not None
        check_output(path, replaces)
        with _alone(path):  # no other process writes it
            self._held = ExitStack()
        self.path = path
        made = path.with_name(f".{path.stem}.new.h5") if replaces else path
        self._swmr, self._ended = swmr, False
        self._flush_s = flush_s if swmr else max(flush_s, _STEP_S)
        self._flushed_at = -np.inf
        self._pending: dict[TableName, list[Rows]] = {kind: [] for kind in GROWING}
        self._pending_bytes = 0
        self._kept: list[int] = []  # epochs in the order of their places, with 0 for a free place
        self._written = dict.fromkeys(DATASETS, 0)
        self._state = np.zeros(1, STATE)
        self._state["status"] = b"running"
        try:
            if replaces:
                made.unlink(missing_ok=True)
            self._file = h5py.File(made, "x", libver="latest", locking="best-effort", rdcc_nbytes=0)
        except OSError as error:
            raise ResultsError(f"{path}: cannot create: {reason_of(error)}") from None
        try:
            with self._guarded():
                # All data sets stay open: HDF5 crashes if the last writes to a data set fail while it is being closed.
                tables = [name for name in GROWING if norms or name not in NORMS or name in (carried or {})]
                self._datasets = _create(self._file, attributes, layout, size, learners, roles, state_dict, tables)
                if swmr:
                    self._file.swmr_mode = True
                    self._held.enter_context(_alone(made))
                for kind, pieces in (carried or {}).items():
                    for rows in pieces:
                        self._extend(kind, rows)
                for epoch, weights in carried_weights:
                    self._keep(epoch, weights)
                self._flush(time.monotonic())
                if replaces:
                    self._to_disk()
                    os.replace(made, path)
                    sync_directory(path.absolute().parent)
                if not swmr:
                    self._file.close()
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def append(self, kind: TableName, rows: Rows) -> None:
        """Takes rows of `GROWING[kind]`, shape (rows,), and flushes if due. It copies rows that may still change."""
        if rows.dtype != GROWING[kind]:
            raise TypeError(f"rows of {kind} have another dtype: {rows.dtype}")
        self._pending[kind].append(rows if isinstance(rows.base, bytes) else rows.copy())
        self._pending_bytes += rows.nbytes
        self.flush()

    def flush(self, now: float | None = None, *, force: bool = False) -> None:
        """Passes appended rows to the operating system, if `flush_s` has passed since the last flush.

        Call it now and then even without new rows: the file also records the time of the last flush.

        Args:
            now: Value of `time.monotonic()`, if the caller already has it.
            force: Whether to flush at once.
        """
        now = time.monotonic() if now is None else now
        due = now - self._flushed_at >= self._flush_s and (self._swmr or self._pending_bytes)
        if force or due or self._pending_bytes >= _MOST_BYTES:
            with self._writing():
                self._flush(now)

    def keep(self, epoch: int, weights: NDArray[np.float32], instead_of: Sequence[int] = ()) -> None:
        """Writes the weights at an epoch's end, shape (size,), float32. They are only read.

        The places of the epochs in `instead_of` become free for later epochs.
        """
        with self._writing():
            self._keep(epoch, weights, instead_of)

    def sync(self) -> None:
        """Flushes everything appended to disk."""
        with self._writing():
            self._flush(time.monotonic())
            self._to_disk()

    def note(self, status: Status, reason: str) -> None:
        """Flushes everything to disk, with the end of the run in case nothing else is written after it."""
        if not self._ended:
            self._state["status"], self._state["reason"] = status.encode(), reason.encode()
            self.sync()

    def _to_disk(self) -> None:
        os.fsync(self._file.id.get_vfd_handle())

    def finish(self, totals: Rows, learners: Rows, weights: NDArray[np.float32] | None, sha256: str = "") -> None:
        """Writes the totals of a complete run and closes the file.

        Args:
            totals: Totals of the run, `records.TOTALS`, shape () or (1,).
            learners: Totals of the learners, `records.LEARNER`, shape (λ,).
            weights: Final flat weights, shape (size,), float32, which are only read. None if the run had no tensors.
            sha256: Hexadecimal digest of the little-endian bytes of `weights`.
        """
        if weights is not None:
            with self._writing():
                self._flush(time.monotonic())
                self._datasets["weights/final"][...] = weights
                self._flush(time.monotonic())  # before the digest, which declares the weights valid
            self._state["weights_sha256"] = sha256.encode()
        self._end("finished", "", totals, learners)

    def fail(self, status: Status, reason: str, totals: Rows | None = None, learners: Rows | None = None) -> None:
        """Writes all rows and the reason why the run ended early, and closes the file.

        It does nothing if the file is already closed, for example because it could not be written.
        """
        if not self._ended:
            self._end(status, reason, totals, learners)

    def close(self) -> None:
        """Closes the file. If the run neither finished nor failed, it is marked as failed."""
        self.fail("failed", "the run ended without a result")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(ResultsError):  # the first error is the one to report
            if issubclass(kind, KeyboardInterrupt):
                self.fail("interrupted", "stopped on request")
            else:
                self.fail("failed", str(error) or kind.__name__)

    def _end(self, status: Status, reason: str, totals: Rows | None, learners: Rows | None) -> None:
        self._state["status"], self._state["reason"] = status.encode(), reason.encode()
        with self._writing():
            if learners is not None:
                self._extend("learners", learners)
            if totals is not None:
                self._extend("totals", np.atleast_1d(totals))
            self._flush(time.monotonic())
            self._ended = True
            self._file.close()
        self._held.close()

    def _keep(self, epoch: int, weights: NDArray[np.float32], instead_of: Sequence[int] = ()) -> None:
        place = self._kept.index(0) if 0 in self._kept else len(self._kept)
        if place < len(self._kept):
            self._datasets["weights/epochs"][place] = weights
        else:
            self._extend("weights/epochs", weights[None])
        self._flush(time.monotonic())  # before the number, which declares the weights valid
        if place < len(self._kept):
            self._datasets["weights/kept"][place] = epoch
        else:
            self._extend("weights/kept", np.array([epoch], "<i4"))
        freed = [place for place, number in enumerate(self._kept) if number in instead_of]
        if freed:
            self._flush(time.monotonic())
            for free in freed:
                self._datasets["weights/kept"][free] = 0
            self._flush(time.monotonic())
        self._kept[place:] = [epoch, *self._kept[place + 1 :]]
        self._kept = [0 if n in freed else number for n, number in enumerate(self._kept)]

    def _flush(self, now: float) -> None:
        for kind, pending in self._pending.items():
            if pending:
                self._extend(kind, joined_rows(pending))
                self._pending[kind] = []
        self._pending_bytes = 0
        self._state["flushed_s"] = time.time()
        state = self._datasets["state"]
        state[...] = self._state
        state.file.flush()
        self._flushed_at = now

    def _extend(self, name: str, rows: NDArray[Any]) -> None:
        """Appends rows to a data set. They have its dtype, so that HDF5 converts nothing."""
        # Counted here, not taken from the file: an interrupted attempt is repeated at the same place.
        start, end = self._written[name], self._written[name] + len(rows)
        dataset = self._datasets[name].id  # a quarter of the time of h5py's own assignment, which looks at each column
        dataset.set_extent((end, *rows.shape[1:]))
        place = dataset.get_space()
        place.select_hyperslab((start, *(0 for _ in rows.shape[1:])), rows.shape)
        dataset.write(h5py.h5s.create_simple(rows.shape), place, rows, dataset.get_type())
        self._written[name] = end

    def _abandon(self) -> None:
        """Leaves the file on disk as it is, like the file of a killed writer.

        HDF5 would try to write its pending data at any later access, and crash. So its writes go to `/dev/null`.
        """
        self._ended = True
        if self._file:
            void = os.open(os.devnull, os.O_RDWR)
            os.dup2(void, self._file.id.get_vfd_handle())
            os.close(void)
            with suppress(Exception):
                self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Opens the file if necessary, and reports errors in one line."""
        with self._guarded():
            if self._swmr or self._ended:
                yield
                return
            self._file = h5py.File(self.path, "r+", libver="latest", locking=False)  # readers must not prevent writing
            self._datasets = {name: self._file[name] for name in self._datasets}
            yield
            self._file.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._abandon()
            failure = ResultsError(f"{self.path}: cannot write: {reason_of(error)}")
            failure.exit_code = 1  # the run failed, but not by a user's mistake
            raise failure from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Locks a file against other runs. It does not use `flock`, because readers do.

    Raises:
        ResultsError: Another run is writing the file.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # the file may be read-only, or the file system has no locks
            file = stack.enter_context(path.open("r+b"))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.time() - path.stat().st_mtime < _SILENT_S:
                    raise ResultsError(f"{path}: another run is writing it") from None
        yield


def create_table(file: h5py.File, name: TableName) -> h5py.Dataset:
    """Creates the empty data set of a table."""
    return file.create_dataset(name, (0,), GROWING[name], chunks=(_CHUNK_ROWS,), maxshape=(None,))


def _create(
    file: h5py.File,
    attributes: Mapping[str, Any],
    layout: Sequence[Entry],
    size: int,
    learners: int,
    roles: Rows | None,
    state_dict: Sequence[StateEntry],
    growing: Sequence[TableName],
) -> dict[str, h5py.Dataset]:
    """Creates everything that the file will ever contain, and returns the open data sets."""
    for name, value in {"format_version": FORMAT_VERSION, **attributes}.items():
        if value is not None:
            file.attrs.create(name, _encoded(value))
    made: dict[str, h5py.Dataset] = {name: create_table(file, name) for name in growing}
    for account, row, rows_at_once in (("learners", LEARNER, learners), ("totals", TOTALS, 1)):
        made[account] = file.create_dataset(account, (0,), row, chunks=(rows_at_once,), maxshape=(None,))
    made["state"] = file.create_dataset("state", (1,), STATE, chunks=(1,), maxshape=(None,))
    # Only chunked, resizable data sets may be written in SWMR mode. Their chunks take no space until written.
    chunk = max(1, min(size, _CHUNK_WEIGHTS))
    for name, shape, dtype, chunks, most in (
        ("final", (size,), "<f4", (chunk,), (None,)),
        ("epochs", (0, size), "<f4", (1, chunk), (None, size)),
        ("kept", (0,), "<i4", (_CHUNK_ROWS,), (None,)),
    ):
        fill = np.nan if dtype == "<f4" else 0
        made[f"weights/{name}"] = file.create_dataset(
            f"weights/{name}", shape, dtype, chunks=chunks, maxshape=most, fillvalue=fill
        )
    listed = state_dict or [StateEntry(entry.name, entry.name, "float32", None) for entry in layout]
    fixed = file.create_group("weights/fixed")
    for tensor, value in {named.tensor: named.value for named in listed if named.value is not None}.items():
        fixed.create_dataset(statedict.key(tensor), data=value)
    for name, rows in (
        ("roles", np.zeros(0, ROLE) if roles is None else roles),
        ("weights/layout", _layout_rows(layout)),
        ("weights/names", statedict.rows_of(listed)),
    ):
        made[name] = file.create_dataset(name, data=rows)
    return made


NAMES = {  # column of /weights/names -> its meaning
    "name": "name in the `state_dict`",
    "tensor": "name of the tensor in `/weights/layout` or `/weights/fixed`; tied names have the same one",
    "dtype": "torch's name of the tensor's type, such as `float32`",
}
LAYOUT = {  # column of /weights/layout -> its meaning
    "name": "name of the tensor in the model",
    "kind": "`parameter`, `buffer` or `counter` (a whole number, such as BatchNorm's count of mini-batches)",
    "dimensions": "number of dimensions of the tensor",
    "shape": "shape of the tensor: the first `dimensions` numbers",
    "offset": "first element of the tensor in the vector",
    "size": "number of elements of the tensor",
}


def _layout_rows(layout: Sequence[Entry]) -> Rows:
    length = max([1, *(len(entry.name.encode()) for entry in layout)])
    dimensions = max([8, *(len(entry.shape) for entry in layout)])
    columns = [("name", f"S{length}"), ("kind", "S16"), ("dimensions", "<i4"), ("shape", "<i8", (dimensions,))]
    rows = np.zeros(len(layout), [*columns, ("offset", "<i8"), ("size", "<i8")])
    for row, entry in zip(rows, layout, strict=True):
        row["name"], row["kind"], row["dimensions"] = entry.name.encode(), entry.kind.encode(), len(entry.shape)
        row["shape"][: len(entry.shape)] = entry.shape
        row["offset"], row["size"] = entry.offset, entry.size
    return rows


def _encoded(value: Any) -> NDArray[Any]:
    """Returns texts as strings of fixed length. Strings of variable length do not survive a killed writer."""
    array = np.asarray(value)
    if array.dtype.kind != "U":
        return array
    texts: NDArray[Any] = np.char.encode(array, "utf-8")
    return texts.astype(h5py.string_dtype("utf-8", max(1, texts.dtype.itemsize)))


def reason_of(error: Exception) -> str:
    """Returns the cause in HDF5's error text, on one line."""
    text = " ".join(str(error).split())
    found = re.search(r"error message = '([^']*)'", text) or re.search(r"\((.*)\)$", text)
    return found[1] if found else text or type(error).__name__
