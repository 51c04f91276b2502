"""Old names of tables and keys of jobs, which older result files and jobs of users may contain."""

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """Table or key with a new name.

    Attributes:
        old: Old dotted name.
        new: New dotted name.
        values: Old value -> new value, for values that also have a new name.
        names: Names of the protocol or topology that had the key. Empty: the key did not depend on the name.
    """

    old: str
    new: str
    values: Mapping[Any, Any] = {}
    names: Collection[str] = ()


RENAMED = (
    Renamed("faults", "fault_tolerance"),
    Renamed("cluster.wire", "cluster.gradient_format"),
    Renamed("cluster.gpu_aware_mpi", "cluster.transport", {False: "auto", True: "mpi"}),
    Renamed("optimizer.factor", "optimizer.decay_factor"),
    Renamed("fault_tolerance.stall_warning", "fault_tolerance.stall_warning_s"),
    Renamed("fault_tolerance.stall_limit", "fault_tolerance.stall_limit_s"),
    Renamed("fault_tolerance.straggler_timeout", "fault_tolerance.straggler_timeout_s"),
    Renamed("protocol.rule", "hogbatch.rule", {None: "fixed"}),
    Renamed("protocol.lr_scaling", "hogbatch.lr_scaling", {None: "linear"}),
    *(
        Renamed(f"protocol.options.{key}", f"hogbatch.{key}", names=("hogbatch",))
        for key in ("alpha", "beta", "shuffle", "counts")
    ),
    Renamed("weights.at", "hogbatch.weights", {"window": "shared"}),
    Renamed("weights.update", "hogbatch.locking", {"racing": False, "locked": True}),
    Renamed("weights.push", "hogbatch.gpu_write", {"gradient": "add"}),
    Renamed("weights", "hogbatch"),
    Renamed("workers.ranks", "workers.learners"),
    Renamed("workers", "hogbatch.workers"),
    Renamed("hogbatch.workers.ranks", "hogbatch.workers.learners"),
    Renamed("averaging.optimizer", "averaging.outer.name"),
    Renamed("averaging.learning_rate", "averaging.outer.learning_rate"),
    Renamed("averaging.momentum", "averaging.outer.momentum"),
    Renamed("averaging.options", "averaging.outer.options"),
    Renamed("averaging.keeps_momentum", "averaging.keep_momentum"),
    Renamed("simulation.tear", "simulation.race_slices"),
    Renamed("simulation.beside", "simulation.background_jobs"),
    Renamed(
        "topology.options.server",
        "topology.options.parameter_server",
        names=("auto", "base", "groups", "replicas"),
    ),
    Renamed("topology.options.apart", "topology.options.servers_on_own_nodes", names=("sharded",)),
)

LISTS = ("hogbatch.workers", "workers")
"""Names in `RENAMED` whose values are lists of tables."""

DATA = {"rudra.bench.prediction:noise": "rudra.data.noise:noise"}
HOOKS = {"rudra.hooks:csv": "csv", "rudra.hooks:tensorboard": "tensorboard"}


def answers(job: Mapping[str, Any]) -> list[str]:
    """Returns a line with the new name for each table or key of a job that has an old name."""
    found: dict[str, str] = {}
    places: dict[Any, list[Any]] = {}
    for each in RENAMED:
        tables, key = _split(each.old)
        if (where := (tables, each.names)) not in places:
            places[where] = _places(job, tables, each)
        if any(key in place for place in places[where]):
            told = each.old not in LISTS and any(old.startswith(f"{each.old}.") for old in found)
            if not told:
                found[each.old] = _answer(each)
    return [*found.values()]


def translated(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a job from a file, with new names for tables and keys."""
    found: dict[str, Any] = copy.deepcopy(dict(job))
    for each in RENAMED:
        (tables, key), (others, new) = _split(each.old), _split(each.new)
        for place in _places(found, tables, each):
            if key not in place:
                continue
            value = place.pop(key)
            there = place if tables == others else _made(found, others)
            if isinstance(value, Mapping):
                there[new] = {**value, **_table_in(there, new)}
            else:
                there[new] = each.values.get(value, value) if value is None or isinstance(value, str | bool) else value
    if isinstance(data := found.get("data"), dict) and isinstance(source := data.get("name"), str):
        found["data"] = {**data, "name": DATA.get(source, source)}
    if isinstance(hooks := found.get("hooks"), list):
        found["hooks"] = [_hook(hook) if isinstance(hook, dict) else hook for hook in hooks]
    return found


@cache
def _split(name: str) -> tuple[tuple[str, ...], str]:
    """Splits a dotted name into its tables, outermost first, and its key."""
    *tables, key = name.split(".")
    return tuple(tables), key


def _places(job: Mapping[str, Any], tables: Sequence[str], each: Renamed) -> list[Any]:
    """Returns the tables that may have the old key: one, each of a list, or none if the name does not fit."""
    if tables and not isinstance(job.get(tables[0]), dict | list | tuple | Mapping):
        return []
    places: list[Any] = [job]
    for table in tables:
        inner = [place.get(table) for place in places if isinstance(place, Mapping)]
        places = [one for found in inner for one in (found if isinstance(found, list | tuple) else [found])]
    named = job.get(tables[0]) if tables else None
    fits = not each.names or (named.get("name", "auto") if isinstance(named, Mapping) else "auto") in each.names
    return [place for place in places if isinstance(place, Mapping) and fits]


def _made(job: dict[str, Any], tables: Sequence[str]) -> dict[str, Any]:
    """Returns a table of a job. Makes it if the job lacks it, or if a damaged file has another value there."""
    for table in tables:
        job[table] = _table_in(job, table)
        job = job[table]
    return job


def _table_in(tables: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = tables.get(key)
    return found if isinstance(found, dict) else {}


def _answer(each: Renamed) -> str:
    table, _, key = each.old.rpartition(".")
    other, _, new = each.new.rpartition(".")
    if not table or each.old in LISTS:
        return f"{_table(each.old)} is now {_table(each.new)}"
    first, _, inner = each.old.partition(".")
    before = f"{_table(table)} {key}" if table in LISTS else f"[{first}] {inner}"
    values = ", ".join(f"{_toml(old)} is {_toml(value)}" for old, value in each.values.items() if old)
    now = new if other == table else f"{_table(other)} {new}"
    return f"{before} is now {now}{f' ({values})' if values else ''}"


def _table(name: str) -> str:
    return f"[[{name}]]" if name in LISTS else f"[{name}]"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"


def _hook(hook: dict[str, Any]) -> dict[str, Any]:
    call = hook.get("call")
    return {**hook, "call": HOOKS.get(call, call)} if isinstance(call, str) else hook
