"""What is kept of a run, and who looks on: tables results, hooks and study."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from rudra.errors import unknown
from rudra.job import renamed
from rudra.job.jobfiles import flattened
from rudra.job.table import Named, Table, short
from rudra.plugins import CALLABLE
from topologies import Plan

_INTERVAL = re.compile(r"0*([1-9][0-9]{0,9}) *(update|epoch|s)s?")


class ResultsTable(Table):
    """What the result file records, and how often a checkpoint is written."""

    minibatches: bool = Field(True, description="record loss, error and times of every mini-batch")
    flush_s: float = Field(1.0, gt=0, description="seconds between flushes of the result file during the run")
    swmr: Literal["auto", "on", "off"] = Field(
        "auto",
        description="let readers open the result file during the run (HDF5's single-writer mode); auto: unless the "
        "file is on NFS or the like",
    )
    report_s: float = Field(
        0.25,
        ge=0,
        description="seconds for which learners and servers gather rows before they send them to the statistics server",
    )
    checkpoint_every: str = Field(
        "600 s",
        description="how often to write a checkpoint: `N updates`, `N epochs` or `N s`, and once more at the end; "
        "`never`: only when the run is stopped",
    )

    keep_checkpoints: str = Field(
        "never",
        description="how often to keep a checkpoint beside the result file, with which other runs can begin: "
        "`N epochs` or `N updates`; training waits where one before it is still being written; default: never",
    )

    keep_every: int | None = Field(
        None,
        ge=1,
        description="keep the weights of every Nth epoch in the result file; default: only the final weights",
    )

    keep_best: bool = Field(False, description="keep the weights of the epoch with the best test in the result file")

    @field_validator("checkpoint_every")
    @classmethod
    def _interval(cls, value: str) -> str:
        if value != "never" and not _INTERVAL.fullmatch(value):
            raise ValueError(f"= '{value}' is not an interval; use `N updates`, `N epochs`, `N s` or `never`")
        return value

    @field_validator("keep_checkpoints")
    @classmethod
    def _kept(cls, value: str) -> str:
        found = _INTERVAL.fullmatch(value)
        if value != "never" and (found is None or found[2] == "s"):
            raise ValueError(f"= '{value}' is not such an interval; use `N epochs`, `N updates` or `never`")
        return value

    @property
    def kept_interval(self) -> tuple[int, str] | None:
        """How many updates or epochs from one checkpoint that is kept to the next; None: none is."""
        found = _INTERVAL.fullmatch(self.keep_checkpoints)
        return None if found is None else (int(found[1]), found[2])

    @property
    def checkpoint_interval(self) -> tuple[int, str] | None:
        """How many updates, epochs or seconds from one checkpoint to the next; None: there are none."""
        found = _INTERVAL.fullmatch(self.checkpoint_every)
        return None if found is None else (int(found[1]), found[2])


class Hook(Table):
    """Your own code, which a role calls at its updates, at epochs or at the end (`rudra.core.hooks`)."""

    SHIPPED: ClassVar[dict[str, str]] = {name: f"rudra.results.journals:{name}" for name in ("csv", "tensorboard")}

    at: Literal["update", "epoch", "end"] = Field(description="moment of the call: update, epoch or end")
    call: Named = Field(description="csv, tensorboard, or package.module:callable that takes a rudra.Moment")
    role: str | None = Field(
        None,
        description="role whose moments count, named as `rudra topology` prints it, or learners for all learners; "
        "default: the parameter server for update, else the statistics server",
    )
    every: int = Field(1, ge=1, description="call at every Nth update or epoch")
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
        """Ids of the roles that call it.

        Raises:
            ValueError: there are no such roles, or not with such moments.
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
    """The variants of the job that `rudra sweep` runs, and the figure that `rudra report` draws of them."""

    title: str = Field("", description="heading of the report")
    figure: Literal["staleness", "test-error", "target", "tradeoff", "speed-up", "penalties", "workers", "table"] = (
        Field("table", description="figure that the report shows first")
    )
    grid: dict[str, list[Any]] = Field({}, description="job key -> list of values; the study runs every combination")
    points: list[dict[str, Any]] = Field([], description="tables of job key = value; each is one more run")
    quick: dict[str, Any] = Field({}, description="job key = value: changes to every run under `--quick`")
    quick_grid: dict[str, list[Any]] = Field({}, description="grid that `--quick` uses in place of grid")
    quick_points: list[dict[str, Any]] = Field([], description="points that `--quick` uses in place of points")
    paper: list[str] = Field(
        [], description="names of tables in paper.toml, beside the job file, to print beside the results"
    )

    @field_validator("grid", "points", "quick", "quick_grid", "quick_points", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        """TOML reads `protocol.n = 4` as a table in a table."""
        return [flattened(entry) for entry in value] if isinstance(value, list) else flattened(value)

    @field_validator("grid", "quick_grid")
    @classmethod
    def _different(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in value.items():
            if not values or any(v in values[:i] for i, v in enumerate(values)):
                raise ValueError(f"{key} must have one or more values, each once, not {short(values)}")
        return value
