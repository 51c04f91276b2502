"""Tables `[[changes]]` of a job: keys that get another value after an epoch, or at an update."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from rudra.job.boundary import Boundary
from rudra.job.jobfiles import flattened
from rudra.job.table import Table, checked, short

MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "protocol": ("name", "n", "modulation", "reference_batch_size", "options"),
    "optimizer": ("learning_rate", "milestones", "decay_factor", "momentum", "options"),
    "training": ("minibatch_size",),
    "cluster": ("shares", "active_learners"),
    "averaging": ("period", "elasticity", "outer"),
    "topology": ("options",),
}
"""Table -> keys that may change. Neither the roles nor the kind of the optimisers' state depend on these keys."""

MOMENTS = ("betas", "alpha", "dampening", "nesterov")
"""Options of optimisers about momentum and moving means. They may change."""

WITHIN: dict[str, tuple[str, ...]] = {
    "optimizer.options": MOMENTS,
    "averaging.outer": ("learning_rate", "momentum", "options"),
    "averaging.outer.options": MOMENTS,
}
"""Key that is a table itself -> its keys that may change. Other tables may change as a whole."""

_NO_OTHER_PROTOCOLS: dict[str, Any] = {"n": None, "options": {}}
"""Keys of [protocol] that belong to one protocol, with the values that they get if the protocol changes."""

VALID = ", ".join(f"{table}.{key}" for table, keys in MAY_CHANGE.items() for key in keys)
"""Dotted names of all keys that may change, for errors."""


class JobChange(Table):
    """Keys of other tables, with the values that they get when an epoch is complete, or at an update."""

    at_epoch: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="number of completed epochs after which the keys below apply, less than training.epochs",
    )
    at_update: int | None = Field(
        None,
        ge=1,
        lt=2**53,
        description="number of updates after which the keys below apply. Give at_epoch or at_update",
    )
    protocol: dict[str, Any] = Field({}, description="keys of protocol. Another name resets n and options")
    optimizer: dict[str, Any] = Field(
        {},
        description="learning_rate, milestones, decay_factor, momentum; of options, betas, alpha, dampening and "
        "nesterov. Velocities and other state remain",
    )
    training: dict[str, Any] = Field({}, description="minibatch_size")
    cluster: dict[str, Any] = Field({}, description="shares, active_learners")
    averaging: dict[str, Any] = Field(
        {}, description="period, elasticity; of outer, learning_rate, momentum and the same options as of optimizer"
    )
    topology: dict[str, Any] = Field({}, description="options, such as options.groups, that keep roles and ranks")

    @model_validator(mode="before")
    @classmethod
    def _may_change(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        tables = {table: keys for table, keys in value.items() if table not in ("at_epoch", "at_update")}
        for table, keys in tables.items():
            for key in keys if isinstance(keys, Mapping) else [None]:
                if key not in MAY_CHANGE.get(table, ()):
                    name = table if key is None else f"{table}.{key}"
                    raise ValueError(f"{name} cannot change; use {VALID}")
        for name in flattened(tables):
            for table, may_change in WITHIN.items():
                if name.startswith(f"{table}.") and name.removeprefix(f"{table}.").partition(".")[0] not in may_change:
                    valid = ", ".join(f"{table}.{key}" for key in may_change)
                    raise ValueError(f"{name} cannot change; use {valid}")
        when = [key for key in ("at_epoch", "at_update") if value.get(key) is not None]
        if len(when) != 1:
            raise ValueError(f"has {' and '.join(when) or 'no at_epoch'}; use one of at_epoch and at_update")
        if not any(tables.values()):
            raise ValueError(f"changes no key; use {VALID}")
        return value

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Table -> key -> new value."""
        return {table: keys for table in MAY_CHANGE if (keys := getattr(self, table))}

    @property
    def where(self) -> str:
        """Name of the table, for errors."""
        return f"[[changes]] {self.boundary.key} = {self.boundary.number}"

    @property
    def boundary(self) -> Boundary:
        """The end of an epoch, or the update, after which the keys have the new values."""
        epochs, updates = (math.inf if number is None else number for number in (self.at_epoch, self.at_update))
        return Boundary(epochs, updates)

    @property
    def text(self) -> str:
        """The changed keys and their new values, as text."""
        return ", ".join(f"{key} = {short(value)}" for key, value in flattened(self.tables).items())

    def followed_by(self, later: JobChange) -> JobChange:
        """Returns the change that does the same as this one and a later one at the same place."""
        return JobChange.model_validate({self.boundary.key: self.boundary.number, **later.applied(self.tables)})

    def applied(self, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the tables of a job with the new values. Options that are not named keep their values.

        Args:
            tables: table -> key -> value, for every key that is set in the tables that may change.
        """
        found = {table: dict(keys) for table, keys in tables.items()}
        for table, keys in self.tables.items():
            before = found.setdefault(table, {})
            if "name" in keys and keys["name"] != before.get("name"):
                before |= _NO_OTHER_PROTOCOLS
            found[table] = _merged(before, keys)
        return found


def _merged(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of both tables, and the new value of each key that both have. At any depth."""
    found = dict(before)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both else value
    return found


def active_text(tables: Mapping[str, Any]) -> str:
    """Says how many learners take part, and from when on. Empty: all do.

    Args:
        tables: tables of a job as plain values: table -> key -> value.
    """
    cluster, changes = tables.get("cluster", {}), tables.get("changes", [])
    first, learners = cluster.get("active_learners"), cluster.get("learners")
    grows = cluster.get("learners_per_device") == "auto"
    texts = []
    for change in changes:
        if active := change.get("cluster", {}).get("active_learners"):
            key = "at_epoch" if change.get("at_epoch") is not None else "at_update"
            texts.append(f"{active} from {key.removeprefix('at_')} {change[key]} on")
    if first is None and not texts and not grows:
        return ""
    begin = first or ("1 on each device" if grows else learners)
    return ", ".join([f"{begin} of {learners} learners", *texts, *(["then banks grow"] if grows else [])])


def with_decided(
    changes: Sequence[JobChange], decided: Iterable[tuple[str, int] | tuple[str, int, bool]]
) -> tuple[JobChange, ...]:
    """Returns the changes of a job, with changes that were decided during the run in the places where they belong.

    Args:
        changes: Planned changes.
        decided: JSON of each decided change, the number of changes before it, and whether replicas restart.
    """
    found = list(changes)
    for text, place, *_ in decided:
        change = checked(JobChange, json.loads(text), "decided change")
        if place and place <= len(found) and found[place - 1].boundary == change.boundary:
            found[place - 1] = found[place - 1].followed_by(change)
        else:
            found.insert(place, change)
    return tuple(found)
