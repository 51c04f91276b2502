"""What tables and keys of jobs were called before: files of runs have these names, and users' jobs may."""

from collections.abc import Mapping
from typing import Any

TABLES = {"faults": "fault_tolerance"}
KEYS = {
    "cluster": {"wire": "gradient_format"},
    "optimizer": {"factor": "decay_factor"},
    "fault_tolerance": {
        "stall_warning": "stall_warning_s",
        "stall_limit": "stall_limit_s",
        "straggler_timeout": "straggler_timeout_s",
    },
}

DATA = {"rudra.bench.prediction:noise": "rudra.data.noise:noise"}
HOOKS = {"rudra.hooks:csv": "csv", "rudra.hooks:tensorboard": "tensorboard"}


def now(tables: list[str], key: str) -> str | None:
    """The name that a table, or the key of a table, has now; None: it never had another."""
    if not tables:
        return TABLES.get(key)
    return KEYS.get(tables[0], {}).get(key) if len(tables) == 1 else None


def translated(job: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job that a file holds, under the names that they have now."""
    found = {TABLES.get(name, name): keys for name, keys in job.items()}
    for name, renamed in KEYS.items():
        if isinstance(keys := found.get(name), dict):
            found[name] = {renamed.get(key, key): value for key, value in keys.items()}
    if isinstance(data := found.get("data"), dict) and isinstance(source := data.get("name"), str):
        found["data"] = {**data, "name": DATA.get(source, source)}
    if isinstance(hooks := found.get("hooks"), list):
        found["hooks"] = [_renamed(hook) if isinstance(hook, dict) else hook for hook in hooks]
    return found


def _renamed(hook: dict[str, Any]) -> dict[str, Any]:
    call = hook.get("call")
    return {**hook, "call": HOOKS.get(call, call)} if isinstance(call, str) else hook
