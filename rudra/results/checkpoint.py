"""Checkpoint files: weights, optimiser state and training state, stored next to the results and written atomically.

`run.h5` has the checkpoint `run.ckpt` and its predecessor `run.previous.ckpt`. Checkpoints that outlast the run are
`run-3.ckpt`, from the end of epoch 3, or `run-update120.ckpt`. The format is safetensors (a length, a header in JSON,
the tensors), so other programs can read the tensors. Rudra's own data is in `__metadata__`:

=========  ====================================================================================
format     "rudra 1"
state      JSON: position (`rudra.core.training_state.TrainingState`), job as resolved, attributes of the result
           file that outlive a restart, and for each tensor its CRC-32
crc32      of the text of `state`
=========  ====================================================================================

No content of such a file is executed. All of it is checked before anything is used.
"""

import errno
import glob
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rudra.core.decisions import is_possible
from rudra.core.layout import NamedVectors
from rudra.core.training_state import TrainingState
from rudra.errors import CheckpointError
from rudra.job.jobfiles import possible
from rudra.job.renamed import translated
from rudra.results.safetensors import LENGTH, Tensor, entry, write

FORMAT = "rudra 1"
SUFFIX, PREVIOUS = ".ckpt", ".previous.ckpt"
SPARE = 4 << 20
"""Bytes that a checkpoint must leave free in addition to the final weights. A run continues without a checkpoint, but
fails without space for its results."""

_KEPT = re.compile(r"(.+)-(?:update)?[0-9]+")
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors


class SavedState(NamedTuple):
    """Content of a checkpoint, except its tensors.

    Attributes:
        path: Path of the file.
        position: Training state of the checkpoint.
        job: Resolved job: table -> key -> value.
        attributes: Attributes of the result file.
        signed_job: Job exactly as stored in the file, for its signature.
        names: Names of the tensors.
    """

    path: Path
    position: TrainingState
    job: dict[str, Any]
    attributes: dict[str, Any]
    signed_job: Mapping[str, Any] = MappingProxyType({})
    names: tuple[str, ...] = ()


def path_of(results: Path) -> Path:
    """Returns the path of a result file's checkpoint."""
    return results.with_suffix(SUFFIX)


def results_of(path: Path) -> Path:
    """Returns the path of a checkpoint's result file. The checkpoint may be the latest, its predecessor, or a kept
    one."""
    plain = path.with_name(path.name.removesuffix(SUFFIX).removesuffix(".previous") + ".h5")
    kept = _KEPT.fullmatch(plain.stem)
    if kept is None or plain.is_file():
        return plain
    of = plain.with_name(f"{kept[1]}.h5")
    return of if of.is_file() else plain


def is_kept(path: Path) -> bool:
    """Returns whether a checkpoint is kept in addition to the latest one and its predecessor."""
    return path.name not in {path_of(of := results_of(path)).name, previous_of(path_of(of)).name}


def previous_of(path: Path) -> Path:
    """Returns the path of a checkpoint's predecessor."""
    return path.with_name(path.name.removesuffix(SUFFIX) + PREVIOUS)


def _saved_of(path: Path) -> Path:
    """Returns the path of a new checkpoint before its commit."""
    return path.with_name(f".{path.name}.saved")


def discard(path: Path, *, kept: bool = False) -> None:
    """Removes a checkpoint and its accompanying files. Kept checkpoints are removed only if `kept` is set."""
    beside = path.parent.glob(f"{glob.escape(path.stem)}-*{SUFFIX}") if kept else ()
    mine = [each for each in beside if results_of(each) == results_of(path)]
    for each in (_saved_of(path), previous_of(path), path, *mine):
        with suppress(OSError):
            each.unlink(missing_ok=True)


def discard_piece(path: Path) -> None:
    """Removes the incomplete checkpoint of a writer that has ended."""
    with suppress(OSError):
        _saved_of(path).unlink(missing_ok=True)


def step_back(path: Path) -> None:
    """Makes a kept checkpoint the one to resume from. Later training will be repeated."""
    last = path_of(results_of(path))
    discard(last)
    _link(path, last)


def _link(path: Path, to: Path) -> None:
    """Gives a file a second name, or copies it if the file system has no links."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def how_to_resume(output: Path) -> str:
    """Describes for users how to resume a run that ended."""
    path = path_of(output)
    if not path.is_file():
        return f"it had no checkpoint yet; results so far: {output}" if output.is_file() else "it had no results yet"
    return f"to resume from its last checkpoint: rudra resume {output}"


class CheckpointWriter:
    """Writer of one run's checkpoints. A background thread may call its methods.

    Args:
        path: Path of the checkpoint.
        job: Resolved job: table -> key -> value.
        attributes: Attributes of the result file that outlive a restart.
    """

    def __init__(self, path: Path, job: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        self.path = path
        self._about = {"job": job, "attributes": attributes}
        self._saved = _saved_of(path)
        self._held: int | None = None  # file that is saved but not yet committed

    def save(self, position: TrainingState, tensors: NamedVectors) -> None:
        """Writes a checkpoint next to the current one.

        Args:
            position: Training state of the checkpoint.
            tensors: One-dimensional, contiguous float32 tensors, which must not change during the call.

        Raises:
            OSError: The file cannot be written.
        """
        crcs = {name: zlib.crc32(tensor.data) for name, tensor in tensors.items()}
        state = json.dumps({"position": msgspec.to_builtins(position), "crc32": crcs, **self._about})
        metadata = {"format": FORMAT, "state": state, "crc32": f"{zlib.crc32(state.encode()):08x}"}
        sizes, free = [tensor.nbytes for tensor in tensors.values()], shutil.disk_usage(self.path.parent).free
        results = max(sizes, default=0) + SPARE
        if sum(sizes) + results > free:
            needed, kept, left = (size / 2**20 for size in (sum(sizes), results, free))
            text = f"it needs {needed:.1f} MiB, the results may need {kept:.1f}, and the disk has {left:.1f} left"
            raise OSError(errno.ENOSPC, text)
        self.release()
        try:
            with self._saved.open("wb") as file:
                self._held = os.dup(file.fileno())  # an open file is not a leftover of a killed run
                write(file, {name: Tensor("F32", tensor.shape, tensor) for name, tensor in tensors.items()}, metadata)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # an incomplete file takes space that the results need
            self._saved.unlink(missing_ok=True)
            self.release()
            raise

    def release(self) -> None:
        """Closes the file that was saved last."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def commit(self, keep: str = "") -> None:
        """Makes the saved file the current checkpoint. The checkpoint before it becomes its predecessor.

        Args:
            keep: Name under which the checkpoint is also kept, or an empty string.

        Raises:
            OSError: The directory cannot be written, or the name belongs to another run.
        """
        if keep:
            kept = self.path.with_name(f"{self.path.name.removesuffix(SUFFIX)}-{keep}{SUFFIX}")
            if (of := kept.with_suffix(".h5")).exists():
                raise FileExistsError(f"{kept} would be the checkpoint of {of}, which is another run")
            _link(self._saved, kept)
        if self.path.exists():
            previous = previous_of(self.path)
            try:  # the first name refers to a checkpoint at every moment
                previous.unlink(missing_ok=True)
                os.link(self.path, previous)
            except OSError:  # a file system without links
                os.replace(self.path, previous)
        os.replace(self._saved, self.path)
        self.release()
        sync_directory(self.path.parent)

    def finish(self, position: TrainingState, tensors: NamedVectors, keep: str, *, leaves: bool) -> None:
        """Writes the final checkpoint of a run. The previous one counts until the final one is complete.

        Args:
            position: Training state at the end.
            tensors: Tensors as for `save`.
            keep: Name under which it is also kept, or an empty string.
            leaves: Whether the run leaves its last checkpoint. Otherwise it leaves only kept ones.

        Raises:
            OSError: The file cannot be written.
        """
        try:
            self.save(position, tensors)
        except OSError:  # it may fit after the earlier ones are deleted
            self.discard()
            self.save(position, tensors)
        self.commit(keep)
        self.discard_previous()
        if not leaves:
            self.discard()

    def discard(self) -> None:
        """Removes the checkpoint and its accompanying files."""
        discard(self.path)

    def discard_previous(self) -> None:
        """Removes the predecessor of the checkpoint."""
        previous_of(self.path).unlink(missing_ok=True)


def _possible(position: TrainingState, job: Mapping[str, Any]) -> bool:
    """Returns whether a run of this job can be at this training state."""
    counts = [position.timestamp, position.epoch, position.samples, position.applied, position.epoch_gradients]
    counts += [position.epoch_samples, position.averaged, *position.steps, *position.lowered]
    tables = all(possible(name, keys) for name, keys in job.items())
    # Larger numbers could not be written to the result file.
    fits = all(0 <= count < 2**53 for count in counts) and 0 <= position.time_s < 1e12
    cluster = job["cluster"]
    fits = fits and all(map(is_possible, position.decided))
    return tables and fits and len(position.steps) == cluster["learners"] and "threads_per_rank" in cluster


def sync_directory(path: Path) -> None:
    """Flushes a directory's names to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[SavedState, dict[str, NDArray[np.float32]]]:
    """Reads and completely checks a checkpoint.

    Raises:
        CheckpointError: The file is missing, truncated, damaged or of another format. The text offers the
            predecessor if it is complete.
    """
    try:
        return _read(path)
    except CheckpointError as error:
        before = previous_of(path)
        if path.name.endswith(PREVIOUS) or not before.is_file():
            raise
        try:
            update = _read(before)[0].position.timestamp
        except CheckpointError:
            raise error from None
        text = f"{error}; the one before it, of update {update}, is intact: rudra resume {before}"
        raise CheckpointError(text) from None


def _read(path: Path) -> tuple[SavedState, dict[str, NDArray[np.float32]]]:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would block
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{path}: is not a file; valid: a checkpoint, FILE.ckpt")
            size = about.st_size
            header, first = _header(path, file.read(LENGTH.size), file.read, size)
            state, places = _understood(path, header, size - first)
            tensors = {}
            for name, (start, end, crc) in places.items():
                file.seek(first + start)
                tensor = np.fromfile(file, np.float32, (end - start) // 4)
                if zlib.crc32(tensor.data) != crc:
                    raise CheckpointError(f"{path}: damaged: {name} does not match its checksum")
                tensors[name] = tensor
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror or error}") from None
    return state, tensors


def _header(path: Path, length: bytes, read_bytes: Any, size: int) -> tuple[dict[str, Any], int]:
    """Returns the header, and the offset of the tensors."""
    count = LENGTH.unpack(length)[0] if len(length) == LENGTH.size else size
    first = LENGTH.size + count
    if count <= _LONGEST_HEADER and first <= size:
        with suppress(ValueError, RecursionError):
            header = json.loads(read_bytes(count))
            if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
                return header, first
    raise CheckpointError(f"{path}: not a checkpoint of Rudra, or cut off in its header")


def _understood(path: Path, header: dict[str, Any], size: int) -> tuple[SavedState, dict[str, tuple[int, int, int]]]:
    """Returns the state from a header, and start, end and checksum of each tensor."""
    metadata = header["__metadata__"]
    entries = {name: found for name, found in header.items() if name != "__metadata__"}
    if (version := metadata.get("format")) != FORMAT:
        raise CheckpointError(f"{path}: has format '{version}'; this Rudra reads '{FORMAT}'")
    text = metadata.get("state")
    if not isinstance(text, str) or metadata.get("crc32") != f"{zlib.crc32(text.encode(errors='replace')):08x}":
        raise CheckpointError(f"{path}: damaged: its header does not match its checksum")
    try:
        state = json.loads(text)
        signed_job = dict(state["job"])
        state["job"] = translated(signed_job)
        position = msgspec.convert(state["position"], TrainingState)
        places = {name: (*entries[name]["data_offsets"], crc) for name, crc in state["crc32"].items()}
        ends = [0, *(end for _, end, _ in places.values())]
        sound = all(type(number) is int for place in places.values() for number in place)
        expected = {name: entry("F32", [(end - start) // 4], start, end) for name, (start, end, _) in places.items()}
        sound = sound and entries == expected
        sound = sound and all(s == e for (s, _, _), e in zip(places.values(), ends, strict=False))
        sound = sound and all((end - start) % 4 == 0 <= end - start for start, end, _ in places.values())
        sound = sound and _possible(position, state["job"])
        found = SavedState(path, position, state["job"], dict(state["attributes"]), signed_job, tuple(places))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgspec.ValidationError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: damaged: its header contradicts itself")
    if ends[-1] != size:
        raise CheckpointError(f"{path}: truncated: {size} of {ends[-1]} bytes of tensors")
    return found, places
