"""Tables results, hooks and study: records of a run, user code that roles call, and variants of a job."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from rudra.errors import unknown
from rudra.job import renamed
from rudra.job.jobfiles import flattened
from rudra.job.table import Named, Table, interval, short
from rudra.plugins import CALLABLE
from topologies import Plan


def every(text: str) -> int | None:
    """Returns the number N of a text `every N`. None: it is no such text, or N is 0."""
    found = re.fullmatch(r"every ([0-9]{1,9})", text)
    return int(found[1]) or None if found else None


class ResultsTable(Table):
    """Contents of the result file, and interval of checkpoints."""

    decides_weights = False

    minibatches: bool = Field(True, description="record the loss, error and times of every mini-batch")
    flush_s: float = Field(1.0, gt=0, description="seconds between flushes of the result file during the run")
    swmr: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: readers can open the result file during the run (HDF5's single-writer mode). auto: on, "
        "except on NFS and similar file systems",
    )
    report_s: float = Field(
        0.25,
        ge=0,
        description="seconds between messages with new rows from a learner or server to the statistics server",
    )
    checkpoint_every: str = Field(
        "auto",
        description="interval of checkpoints: `N updates`, `N epochs` or `N s` (virtual seconds in a simulation). The "
        "end of the run writes one more. `never`: only if the run is stopped. auto: `600 s`, in a simulation `never`",
    )

    keep_checkpoints: str = Field(
        "never",
        description="interval of checkpoints that are kept next to the result file, so that other runs can start from "
        "them: `N epochs` or `N updates`. Training waits while the previous one is being written. Default: never",
    )

    keep_every: int | None = Field(
        None,
        ge=1,
        description="keep the weights of every Nth epoch in the result file. Default: only the final weights",
    )

    keep_best: bool = Field(
        False, description="keep the weights of the epoch with the best evaluation in the result file"
    )

    gradient_norms: str = Field(
        "off",
        description="norms of gradients in the result file. `every N`: of each Nth update and its gradients. If "
        "gradients may be stale, the norms of all gradients are recorded. off: none",
    )

    @field_validator("gradient_norms")
    @classmethod
    def _every(cls, value: str) -> str:
        if value != "off" and every(value) is None:
            raise ValueError(f"= '{value}' is not such an interval; use `every N` with N of 1 or more, or `off`")
        return value

    @field_validator("checkpoint_every")
    @classmethod
    def _interval(cls, value: str) -> str:
        if value not in {"auto", "never"} and interval(value) is None:
            raise ValueError(f"= '{value}' is not an interval; use `N updates`, `N epochs`, `N s`, `never` or `auto`")
        return value

    @field_validator("keep_checkpoints")
    @classmethod
    def _kept(cls, value: str) -> str:
        found = interval(value)
        if value != "never" and (found is None or found[1] == "s"):
            raise ValueError(f"= '{value}' is not such an interval; use `N epochs`, `N updates` or `never`")
        return value

    @property
    def norms_every(self) -> int | None:
        """Number N: norms are recorded for each Nth update. None: for no update."""
        return every(self.gradient_norms)

    @property
    def kept_interval(self) -> tuple[int, str] | None:
        """Interval between kept checkpoints, as a number and a unit: updates or epochs. None: no checkpoint is kept."""
        return interval(self.keep_checkpoints)

    @property
    def checkpoint_interval(self) -> tuple[int, str] | None:
        """Interval between checkpoints, as a number and a unit: updates, epochs or seconds. None: no checkpoints."""
        return interval("600 s" if self.checkpoint_every == "auto" else self.checkpoint_every)


class Hook(Table):
    """Your own code, which a role calls at updates, at epochs or at the end (`rudra.core.hooks`)."""

    decides_weights = False
    SHIPPED: ClassVar[dict[str, str]] = {name: f"rudra.results.logging_hooks:{name}" for name in ("csv", "tensorboard")}

    at: Literal["update", "epoch", "end"] = Field(description="moment of the call: update, epoch or end")
    call: Named = Field(description="csv, tensorboard, or package.module:callable that takes a rudra.Moment")
    role: str | None = Field(
        None,
        description="role that calls it, named as in the output of `rudra topology`, or learners for all learners; "
        "default: the parameter server for update, else the statistics server",
    )
    every: int = Field(1, ge=1, description="number N: call at every Nth update or epoch")
    options: dict[str, Any] = Field({}, description="keyword arguments of the callable")

    @field_validator("call")
    @classmethod
    def _callable(cls, value: Named) -> Named:
        if isinstance(value, str) and value in renamed.HOOKS:
            raise ValueError(f"{value} is now {renamed.HOOKS[value]}")
        if isinstance(value, str) and ":" not in value and value not in cls.SHIPPED:
            raise ValueError(unknown(value, [*cls.SHIPPED, CALLABLE]))
        return value

    @field_validator("every")
    @classmethod
    def _counts(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("at") == "end":
            raise ValueError(f"= {value} is not supported with at = 'end'; use every = 1")
        return value

    def roles(self, plan: Plan) -> tuple[int, ...]:
        """Returns the ids of the roles that call the hook.

        Raises:
            ValueError: there are no such roles, or they have no such moments.
        """
        learners = (plan.server, *(i for i in plan.learners if i != plan.server))
        able = {"update": learners, "epoch": (plan.statistics,), "end": tuple(range(len(plan.roles)))}[self.at]
        if self.role is None:
            return (plan.server if self.at == "update" else plan.statistics,)
        if self.role == "learners" and self.at != "epoch":
            return plan.learners
        found = tuple(i for i in able if plan.roles[i].name == self.role)
        if not found:
            kinds: dict[str, list[str]] = {}
            for i in able:
                kinds.setdefault(plan.roles[i].kind, []).append(plan.roles[i].name)
            valid = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in kinds.values()]
            valid += ["learners"] if set(able) & set(plan.learners) else []
            raise ValueError(f"= '{self.role}' has no moment '{self.at}'; use {', '.join(valid)}")
        return found


class StudyTable(Table):
    """Variants of the job that `rudra sweep` runs, and figure that `rudra report` draws from them."""

    decides_weights = False

    title: str = Field("", description="heading of the report")
    figure: Literal["staleness", "test-error", "target", "tradeoff", "speed-up", "penalties", "workers", "table"] = (
        Field("table", description="first figure of the report")
    )
    grid: dict[str, list[Any]] = Field(
        {}, description="job key -> list of values. The study runs every combination of values"
    )
    points: list[dict[str, Any]] = Field(
        [], description="list of tables of job key = value, one for each additional run"
    )
    quick: dict[str, Any] = Field({}, description="job key = value: changes to every run with `--quick`")
    quick_grid: dict[str, list[Any]] = Field({}, description="grid that `--quick` uses instead of grid")
    quick_points: list[dict[str, Any]] = Field([], description="points that `--quick` uses instead of points")
    paper: list[str] = Field(
        [],
        description="names of tables in paper.toml, next to the job file, that the report prints next to the results",
    )

    @field_validator("grid", "points", "quick", "quick_grid", "quick_points", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        """Restores dotted keys, because TOML reads `protocol.n = 4` as a nested table."""
        return [flattened(entry) for entry in value] if isinstance(value, list) else flattened(value)

    @field_validator("grid", "quick_grid")
    @classmethod
    def _different(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in value.items():
            if not values or any(v in values[:i] for i, v in enumerate(values)):
                raise ValueError(f"{key} must have one or more values, each once, not {short(values)}")
        return value
