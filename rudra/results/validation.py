"""Validation of a result file before its content is used.

HDF5 protects its own structures by checksums, but neither rows nor attributes. A file may also come from anyone.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
from numpy.typing import NDArray

from rudra.compute.statedict import key
from rudra.core.messages import Rows
from rudra.core.records import LEARNER, ROLE, TOTALS
from rudra.errors import ResultsError
from rudra.files import DENSEST
from rudra.job.jobfiles import possible
from rudra.job.renamed import translated
from rudra.results.writer import GROWING, NORMS_EVERY, STATE
from topologies import Plan
from topologies.kinds import KINDS, PARAMETER_SERVER, STATISTICS_SERVER, Sharing

DTYPES: dict[str, np.dtype[Any]] = {
    **{str(name): dtype for name, dtype in GROWING.items()},
    "roles": ROLE,
    "learners": LEARNER,
    "totals": TOTALS,
    "state": STATE,
    "weights/final": np.dtype("<f4"),
    "weights/epochs": np.dtype("<f4"),
    "weights/kept": np.dtype("<i4"),
}
_ATTRIBUTES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "job", "driver", "protocol", "topology", "reduction", "started", "device"), str),
    **dict.fromkeys(
        ("device_model", "transport", "not_replayable", "python_objects", "initial_weights_sha256", "processor"), str
    ),
    "cpu_learners": str,
    **dict.fromkeys(("format_version", "learners", "minibatch_size", "n", "epochs", "gradients_per_update"), int),
    **dict.fromkeys(("records", "threads_per_rank", "training_samples", "classes", "step_bytes", "bucket_bytes"), int),
    **dict.fromkeys(("begins_at", "cores_per_node", NORMS_EVERY), int),
    **dict.fromkeys(("network_latency_s", "network_bytes_per_s"), float),
    **dict.fromkeys(("overlapped", "averaging", "scheduled", "flush_denormals", "early_passes"), (bool, int)),
    "hosts": list,
    "data_fingerprints": str,
}
_STATUS = {"running", "finished", "failed", "interrupted"}
_OR_NONE = {"parent", "source", "node", "group", "role", "update", "timestamp"}  # columns that may be -1
_UNBOUNDED = {
    "loss",
    "train_loss",
    "test_loss",
    "validation_loss",
    "value",
    "norm",
    "product",
    "distance",
    "correction",
}  # large in a run that diverged
_OR_NAN = {"mean_staleness", "evaluation_began_s", "evaluation_s", "errors"}
_MOST_STALE = 1 << 20
_DEEPEST = 500  # levels of a tree of roles


class Known(dict[str, Any]):
    """Attributes or tables in a result file. A missing one raises an error that names it."""

    def __init__(self, values: Mapping[str, Any], path: Path, what: str) -> None:
        super().__init__(values)
        self._path, self._what = path, what

    def __missing__(self, name: str) -> Any:
        raise ResultsError(f"{self._path}: damaged: has no {self._what} '{name}'")


def plain_attributes(found: h5py.AttributeManager) -> dict[str, Any]:
    """Returns name -> value of all attributes.

    Raises:
        ValueError: An attribute is neither a text nor a number. HDF5 would read other types' bytes as addresses.
    """
    values = dict[str, Any]()
    for name in found:
        attribute = found.get_id(name)
        dtype, shape = attribute.dtype, attribute.shape
        fixed = dtype.kind in "biufS"
        if not fixed and h5py.check_string_dtype(dtype) is None:
            raise ValueError(f"attribute '{name}' is neither a text nor a number")
        if fixed and shape is not None:
            value = np.zeros(shape, dtype)
            attribute.read(value)
            values[name] = value if value.ndim else value[()]
        else:
            values[name] = found[name]
    return values


def attributes(values: Mapping[str, Any], path: Path) -> Known:
    """Returns the root attributes, if they have the right types."""
    for name, kind in _ATTRIBUTES.items():
        value = values.get(name)
        right = value is None or isinstance(value, kind)
        right &= not (isinstance(value, int) and kind is int) or value >= 0
        right &= not isinstance(value, list) or all(isinstance(inner, str) for inner in value)
        if not right:
            raise ResultsError(f"{path}: damaged: attribute '{name}' is {str(value)[:60]!r}")
    return Known(values, path, "attribute")


def job(text: str, path: Path) -> Known:
    """Returns the job as resolved: table -> key -> value."""
    try:
        tables = json.loads(text)
    except (ValueError, RecursionError):
        raise ResultsError(f"{path}: damaged: attribute 'job' is not JSON") from None
    if not isinstance(tables, dict):
        raise ResultsError(f"{path}: damaged: attribute 'job' holds no tables")
    tables = translated(tables)
    for name, keys in tables.items():
        if isinstance(keys, dict) and isinstance(keys.get("options", {}), dict):
            tables[name] = Known(keys, path, f"key of the job's [{name}]")
        elif isinstance(keys, dict) or not possible(name, keys):
            raise ResultsError(f"{path}: damaged: the job's [{name}] is not a table")
    return Known(tables, path, "table of the job")


def dataset(found: object, name: str) -> None:
    """Raises ValueError unless `found` is the data set of this name."""
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise ValueError(f"/{name} is not a plain data set")
    wanted, dtype = DTYPES.get(name), found.dtype
    dimensions = 2 if name == "weights/epochs" else 1
    plain = dtype.names is not None and not dtype.hasobject  # objects are addresses
    known = plain if wanted is None else dtype == wanted or dtype == older(name, wanted)
    if not known or found.ndim != dimensions:
        raise ValueError(f"/{name} has another layout")


_NEWER = {
    "minibatches": {"reduce_s", "update_s"},  # in format 5 reductions counted as pushes, and updates as pulls
    "learners": {"reduce_s", "update_s"},
    "gradients": {"first", "stream"},  # up to format 6 every learner drew its own stream
}
"""Columns that are missing in older files."""


_ABSENT = {"averages": 8, "stages": 9}
"""Data sets that are missing in older files, and the first format with them."""


def lacking(version: int) -> frozenset[str]:
    """Returns the data sets that files of a format do not have."""
    return frozenset(name for name, since in _ABSENT.items() if version < since)


def older(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the type of a table's rows in files of older formats."""
    columns = [(column, dtype[column]) for column in dtype.names or () if column not in _NEWER.get(name, ())]
    if name == "gradients":
        columns.append(("pad", np.dtype("<i4")))
    return np.dtype(columns) if columns else dtype


def fits(claimed: int, name: str, file_bytes: int) -> None:
    """Raises ValueError if the data to read has more bytes than its file can hold."""
    if claimed > DENSEST * file_bytes:
        raise ValueError(f"/{name} claims {claimed:,} bytes, in a file of {file_bytes:,}")


def fixed(file: h5py.File, tensor: str, file_bytes: int) -> NDArray[Any]:
    """Reads a tensor that is not trained.

    Raises:
        ValueError: The tensor is missing, or is not a plain array of numbers.
    """
    name = f"weights/fixed/{key(tensor)}"
    link = file.get(name, getlink=True)
    found = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external or found.shape is None:
        raise ValueError(f"/{name} is not a plain data set")
    if found.dtype.kind not in "biufc":
        raise ValueError(f"/{name} has another layout")
    fits(found.nbytes, name, file_bytes)
    return np.asarray(found[()])


def rows(name: str, values: Rows, learners: int | None) -> Rows:
    """Returns the rows of a table, if all numbers are in their valid ranges.

    Raises:
        ValueError: A number is out of range.
    """
    for column in values.dtype.names or ():
        found = values[column]
        if found.dtype.kind == "i":
            wrong = (found < (-1 if column in _OR_NONE else 0)) | (found >= 2**53)
            if column == "staleness":
                wrong |= found > max(_MOST_STALE, len(found))
            if column == "learner" and learners is not None and name != "gradients":  # a replay finds it there
                wrong |= found >= learners
        elif found.dtype.kind == "f" and column.removeprefix("clipped_") not in _UNBOUNDED:
            most = 1.0 if "_error" in column else 1e12
            wrong = ~(np.abs(found) <= most)
            if column in _OR_NAN or "_error" in column:
                wrong &= ~np.isnan(found)
        else:
            continue
        if wrong.any():
            place = int(np.argmax(wrong.reshape(len(values), -1).any(axis=1)))
            raise ValueError(f"/{name} has {column} = {np.ravel(found)[np.argmax(wrong)]} in row {place}")
    kept = [number for number in values.tolist() if number] if name == "weights/kept" else []
    if min(kept, default=1) < 1 or len(set(kept)) < len(kept):
        raise ValueError(f"/{name} is not in order")
    if name == "state" and (len(values) != 1 or values[0]["status"].decode("utf-8", "replace") not in _STATUS):
        raise ValueError("/state has no status")
    return values


def plan(found: Plan, learners: int) -> Plan:
    """Returns a plan read from a file, if it is valid.

    Raises:
        ValueError: The plan is not valid.
    """
    kinds = [role.kind for role in found.roles]
    trains = sum(KINDS[kind].trains for kind in kinds if kind in KINDS)
    counts = [kinds.count(PARAMETER_SERVER), kinds.count(STATISTICS_SERVER), trains]
    if not set(kinds) <= KINDS.keys() or counts[0] > 1 or counts[1:] != [1, learners]:
        told = f"{counts[2]} of {learners} learners, {counts[0]} parameter and {counts[1]} statistics servers"
        raise ValueError(f"/roles has {told}")
    if found.sharing not in get_args(Sharing):
        raise ValueError(f"/roles has learners that share '{found.sharing}'")
    if [found.roles[id_].index for id_ in found.learners] != list(range(learners)):
        raise ValueError("/roles has its learners in no order")
    _exchange(found)
    for above in ([role.parent for role in found.roles], [found.weight_source(role) for role in found.roles]):
        _climb(above)
    return found


def _exchange(found: Plan) -> None:
    """Raises ValueError if a role has no partner to exchange gradients and weights with."""
    for id_, role in enumerate(found.roles):
        if not role.kind_traits.trains:
            continue
        if found.served and (role.parent is None or found.weight_source(role) is None):
            raise ValueError(f"/roles: {role.name} has no {'parent' if role.parent is None else 'source of weights'}")
        for other in (role.parent, found.weight_source(role)):
            if other == id_ or (other is not None and not 0 <= other < len(found.roles)):
                break  # `_climb` reports it
            if other is not None and found.roles[other].kind_traits.tests:
                raise ValueError(f"/roles: {role.name} exchanges with the statistics server")
    grouped = {role.group is not None for role in found.roles if role.kind_traits.trains}
    if len(grouped) > 1:
        raise ValueError("/roles: some learners are in a compute group, and others are not")


def _climb(above: Sequence[int | None]) -> None:
    """Raises ValueError if the path from a role to the root does not end."""
    depth: dict[int | None, int] = {None: 0}
    for start in range(len(above)):
        way: list[int] = []
        at: int | None = start
        while at not in depth:
            if at is None or not 0 <= at < len(above) or len(way) > _DEEPEST:
                raise ValueError(f"/roles: the way up from role {start} does not end")
            way.append(at)
            depth[at] = _DEEPEST + 1  # until its path is known: reaching it again means a cycle
            at = above[at]
        for id_ in reversed(way):
            depth[id_] = depth[at] + 1
            at = id_
            if depth[id_] > _DEEPEST:
                raise ValueError(f"/roles: the way up from role {start} does not end")
