"""Checks that a checkpoint, a result file and a job belong together, and lists their differences.

Jobs are compared by their tables as plain values, which `Job.to_json` gives and every file holds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.core.digest import digest_of, sample
from rudra.errors import CheckpointError, ConfigError, ResultsError
from rudra.job.job import Job
from rudra.job.table import tables_in
from rudra.job.tables import PLACEMENT_RULES
from rudra.results import checkpoint
from rudra.results.checkpoint import SavedState
from rudra.results.reader import Results, open_results

Tables = Mapping[str, Any]
"""Job as plain values: table -> key -> value."""

DECISIVE_LISTS = tuple(name for name, kind, several in tables_in(Job) if kind.decides_weights and several)
"""Lists of tables that change the weights. Each list is compared as a whole."""

DECISIVE = tuple(name for name, kind, several in tables_in(Job) if kind.decides_weights and not several)
"""Tables that change the weights, except the keys of `RESUME_MAY_CHANGE`."""

RESUME_MAY_CHANGE = (
    "data.path",
    "training.warm_start",
    "training.evaluate",
    "training.evaluate_training_set",
    "training.evaluation_batch_size",
    "cluster.cpu_learners",
    "cluster.learners_per_rank",
    "cluster.learners_per_device",
    "cluster.streams",
    "cluster.one_rank",
    "cluster.node_memory",
    "cluster.buckets",
    "cluster.graphs",
)

LENGTH = tuple(f"training.{key}" for key in ("epochs", "target", "target_window", "stop_at_target", "patience"))
"""Keys that decide how long a run trains. They may also change."""


def tables_of(job: Job) -> dict[str, Any]:
    """Returns the tables of a job as plain values, as a file holds them."""
    found: dict[str, Any] = json.loads(job.to_json())
    return found


def decisive(job: Tables) -> dict[str, Any]:
    """Returns the `DECISIVE` tables of a job from a file. Keys that are newer than the file get their defaults."""
    whole = completed(job)
    return {table: whole[table] for table in DECISIVE}


def completed(job: Tables) -> dict[str, Any]:
    """Adds the defaults of keys that are newer than the file to the tables of its job."""
    return _with_defaults(job, tables_of(Job()))


def _with_defaults(keys: Tables, defaults: Tables) -> dict[str, Any]:
    inner = {
        key: _with_defaults(keys[key], default)
        for key, default in defaults.items()
        if isinstance(default, Mapping) and default and isinstance(keys.get(key), Mapping)
    }
    return {**defaults, **keys, **inner}


def differences(then: Tables, now: Tables) -> list[tuple[str, Any, Any]]:
    """Lists the decisive keys that differ between a run's job and the current one: key, value then, value now."""
    found, ran = [], decisive(then)
    by_rule = now["placement"]["cut"] in PLACEMENT_RULES
    for table in DECISIVE:
        for key, value in now[table].items():
            name, before = f"{table}.{key}", ran[table][key]
            measured = key == "shares" and value == "auto" and before  # the run stored its measured shares
            open_ = table == "cluster" and (value is None or key == "device" or measured)
            chosen = name == "placement.cut" and by_rule  # the run stored the chosen layer, or none
            chosen |= name in ("training.gradients", "cluster.bank") and value == "auto"
            free = name in {*RESUME_MAY_CHANGE, *LENGTH} and not grows(name, before, value)
            if value != before and not free and not open_ and not chosen:
                found.append((name, before, value))
    found += [(key, then.get(key, []), now[key]) for key in DECISIVE_LISTS if now[key] != then.get(key, [])]
    return found


def grows(name: str, *values: Any) -> bool:
    """Returns whether a key, with one of these values, lets banks grow: then the weights depend on it.

    Args:
        name: Name of the key, table.key.
        values: Values of the key.
    """
    return name == "cluster.learners_per_device" and "auto" in values


class JobComparison(NamedTuple):
    """Comparison of a job with a checkpoint's job.

    Attributes:
        differences: Decisive keys that differ: key, value then, value now.
        unfit: Key, value then and value now, if the job cannot use all of the checkpoint, or None if it can.
        decided: Keys that the checkpoint sets in the job, as results depend on them. Explicit devices and layers stay.
        still_different: Decisive keys that differ from the job with the keys of `decided`.
        as_long: Whether the keys that decide how long a run trains are equal.
        epochs: Number of epochs of the job.
    """

    differences: list[tuple[str, Any, Any]]
    unfit: tuple[str, Any, Any] | None
    decided: dict[str, Any]
    still_different: list[tuple[str, Any, Any]]
    as_long: bool
    epochs: int


def compare(then: Tables, now: Tables) -> JobComparison:
    """Compares the job of a checkpoint with the job to run.

    Args:
        then: Tables of the checkpoint's job.
        now: Tables of the job to run.
    """
    ran = decisive(then)
    decided = _decided(ran, now)
    fitting = {**now, **{table: {**now[table], **keys} for table, keys in decided.items()}}
    as_long = all(now[table][key] == ran[table][key] for table, key in (name.split(".") for name in LENGTH))
    different, still = differences(then, now), differences(then, fitting)
    return JobComparison(different, _unfit(ran, now), decided, still, as_long, now["training"]["epochs"])


def _decided(ran: Tables, now: Tables) -> dict[str, Any]:
    as_many = now["cluster"]["learners"] in (None, ran["cluster"]["learners"])
    keys = ["threads_per_rank", *(["learners"] if as_many else [])]
    keys += [key for key in ("device", "shares") if now["cluster"][key] == "auto" and (as_many or key == "device")]
    found = {"cluster": {key: ran["cluster"][key] for key in keys}}
    if now["cluster"]["bank"] == "auto" and now["cluster"]["learners_per_device"] is not None:
        found["cluster"]["bank"] = ran["cluster"]["bank"]
    if now["cluster"]["learners_per_device"] == "auto" == ran["cluster"]["learners_per_device"] and as_many:
        found["cluster"]["most_learners_per_device"] = ran["cluster"]["most_learners_per_device"]
    if now["placement"]["cut"] in PLACEMENT_RULES:
        found["placement"] = {"cut": ran["placement"]["cut"]}
    if now["training"]["gradients"] == "auto":
        found["training"] = {"gradients": ran["training"]["gradients"]}
    return found


def _unfit(ran: Tables, now: Tables) -> tuple[str, Any, Any] | None:
    """Returns a key that prevents full use of a checkpoint: its name, value then, value now. None: no key does."""
    places = [(table, key) for table in ("model", "data") for key in now[table] if key != "path"]
    places += [("optimizer", key) for key in ("name", "momentum_form", "options", "groups")]
    for table, key in places:
        if now[table][key] != ran[table][key]:
            return f"{table}.{key}", ran[table][key], now[table][key]
    return None


def source(given: Path) -> Path:
    """Returns the checkpoint for a path of a checkpoint or a result file."""
    return given if given.suffix == checkpoint.SUFFIX else checkpoint.path_of(given)


def finished(output: Path) -> bool:
    """Returns whether a result file holds a finished run. An empty file with a reserved name does not."""
    if not output.is_file() or not output.stat().st_size:
        return False
    with open_results(output) as results:
        return results.status == "finished"


def check_ranks_ran(path: Path) -> None:
    """Raises ConfigError if a checkpoint belongs to a simulation, whose result file ranks cannot continue."""
    beside = checkpoint.results_of(path)
    if not beside.is_file():
        return
    with open_results(beside) as results:
        simulated = results.attributes["driver"] == "simulation"
    if simulated:
        raise ConfigError(f"{path}: belongs to a simulation; use rudra simulate JOB --from {path} --carry all")


def replaceable(output: Path, job: Tables) -> bool:
    """Returns whether a result file is empty, or belongs to this job and ended before its first checkpoint."""
    try:
        if output.is_file() and not output.stat().st_size:
            return True
        with open_results(output) as results:
            return results.status != "finished" and not differences(results.job, job)
    except ResultsError:
        return False


def read_own(path: Path) -> SavedState:
    """Reads a checkpoint, if it belongs to the run of the result file next to it.

    Raises:
        CheckpointError: The file is missing, damaged, or belongs to another run.
    """
    state, tensors = checkpoint.read(path)
    beside = checkpoint.results_of(path)
    if beside.is_file():
        with open_results(beside) as results:
            if reason := _foreign(state, tensors.get("weights"), results):
                valid = "valid: the checkpoint that this run wrote"
                raise CheckpointError(f"{path}: belongs to another run than {beside}: {reason}; {valid}")
    return state


def _foreign(state: SavedState, weights: NDArray[np.float32] | None, results: Results) -> str:
    """Returns why a checkpoint does not belong to a result file's run, or an empty string if no difference is known."""
    runs = state.attributes.get("run"), results.attributes.get("run")
    if all(runs):
        return "" if runs[0] == runs[1] else f"their identities are {str(runs[0])[:8]}… and {str(runs[1])[:8]}…"
    then, now = decisive(state.job), decisive(results.job)
    for table, keys in then.items():
        for key, value in keys.items():
            name = f"{table}.{key}"
            if value != now[table].get(key) and name not in {*RESUME_MAY_CHANGE, *LENGTH}:
                return f"{name} is {value} in the checkpoint and {now[table].get(key)} in the result file"
    return _different_weights(state, weights, results)


def _different_weights(state: SavedState, weights: NDArray[np.float32] | None, results: Results) -> str:
    """Returns why a checkpoint's weights do not match a result file, or an empty string if they may match."""
    update, digest = state.position.timestamp, 0
    for piece in results.pieces("updates"):
        timestamps: NDArray[np.int64] = piece["timestamp"]
        digests: NDArray[np.uint64] = piece["digest"][timestamps == update]
        digest = int(next(iter(digests), digest))
    if weights is None or not digest or digest == digest_of(weights[sample(update, len(weights))].tobytes()):
        return ""
    plan = results.plan()
    if (
        state.job.get("changes") or state.position.decided or plan.parted or plan.window or plan.averaging
    ):  # such runs have other digests
        return ""
    return f"the weights of update {update} differ"
