"""Tables hogbatch and hogbatch.workers: assignment of samples to heterogeneous workers by a coordinator."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocols.hogbatch import BatchBounds
from rudra.job.table import Table, short
from rudra.job.tables.protocol import ArgumentsTable
from topologies import Plan


class WorkersTable(Table):
    """Learners of one kind under protocol hogbatch. A job can have several such tables."""

    learners: tuple[int, ...] | None = Field(
        None, description="numbers of the learners, from 0. Default: all learners that no other table names"
    )
    kind: Literal["small", "large"] = Field(
        description="small: a batch has one part for each thread, and each part is an update. large: a batch is one "
        "gradient"
    )
    threads: int = Field(
        1,
        ge=1,
        le=100_000,
        description="number of parts of a small worker's batch, which real ranks compute one after another",
    )
    device: Literal["cpu"] | None = Field(
        None, description="cpu: these learners compute on the CPU although others use GPUs. Default: cluster.device"
    )
    min: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="smallest batch, in samples for each thread. Default: 1 for small, 128 for large",
    )
    max: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="largest batch, in samples for each thread. Default: 64 for small, 8192 for large",
    )
    compute_s: float | dict[int, float] | None = Field(
        None,
        description="compute time of one thread for a part in virtual time, in seconds: a number, or a table as in "
        "simulation.compute_s. Default: simulation.compute_s",
    )

    @field_validator("compute_s")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        points = value if isinstance(value, dict) else {1: value}
        if value is not None and not (points and all(size >= 1 and s > 0 for size, s in points.items())):
            raise ValueError(f"must be seconds > 0, or a table of sizes >= 1 and seconds > 0, not {short(value)}")
        return value

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.kind == "large" and self.threads > 1:
            raise ValueError(f"threads = {self.threads} is not supported with kind = 'large'; use threads = 1")
        if self.bounds.least > self.bounds.most:
            raise ValueError(f"min = {self.bounds.least} is more than max = {self.bounds.most}; use min <= max")
        return self

    @property
    def bounds(self) -> BatchBounds:
        """Smallest and largest batch of each of these learners."""
        least, most = (1, 64) if self.kind == "small" else (128, 8192)
        own = (least if self.min is None else self.min, most if self.max is None else self.max)
        return BatchBounds(self.kind, self.threads, *own)


class HogbatchTable(ArgumentsTable):
    """Assignment of samples by protocol hogbatch, and place of the weights that workers update."""

    rule: Literal["fixed", "adaptive", "balanced"] = Field(
        "fixed",
        description="rule for the size of a worker's next batch: fixed, adaptive (Algorithm 2), or balanced, which "
        "changes the batches of large workers last",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear",
        description="linear: the learning rate is multiplied by samples of the gradient / "
        "protocol.reference_batch_size. sqrt: it is multiplied by the square root of this ratio",
    )
    alpha: float = Field(2.0, gt=1, lt=2**31, description="α: factor by which rule adaptive changes a batch")
    beta: float = Field(
        1.0, ge=0, le=1, description="β: weight of each part of a small worker's batch in the count of updates"
    )
    shuffle: Literal["once", "epoch"] = Field(
        "once", description="once: every epoch uses the same random order of samples. epoch: each epoch has a new order"
    )
    counts: Literal["run", "epoch"] = Field(
        "run", description="period over which updates are counted: the run, or each epoch"
    )
    weights: Literal["server", "shared"] = Field(
        "server",
        description="server: workers push gradients to the coordinator. shared: workers update the weights directly "
        "in memory that the ranks of a node share",
    )
    locking: bool = Field(
        False,
        description="false: workers update shared weights in place and without a lock, as in Hogwild. true: workers "
        "update them one after another, and each update makes a new generation of the weights",
    )
    gpu_write: Literal["add", "overwrite"] = Field(
        "add",
        description="write of large workers to shared weights. add: they add their update to the current weights. "
        "overwrite: they replace the weights by their updated copy, and concurrent updates of other workers are lost",
    )
    workers: tuple[WorkersTable, ...] = Field(
        (), description="list of tables: learners of each kind. Default: each learner is a small worker"
    )

    @property
    def shares_weights(self) -> bool:
        """Whether workers update weights in shared memory."""
        return self.weights == "shared"

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Returns the keyword arguments of the protocol's class, for the learners of a plan."""
        names = ("rule", "lr_scaling", "alpha", "beta", "shuffle", "counts")
        window = ("locked" if self.locking else "racing") if self.shares_weights else ""
        workers = [table.bounds for table in self.team(plan.learner_numbers)]
        return {name: getattr(self, name) for name in names} | {"workers": workers, "window": window}

    def team(self, learners: int) -> tuple[WorkersTable, ...]:
        """Returns the table of each learner, in the order of the learners' numbers.

        Raises:
            ValueError: the tables do not name each learner exactly once.
        """
        if not self.workers:
            return (WorkersTable(kind="small"),) * learners
        table_of: dict[int, int] = {}
        for place, table in enumerate(self.workers):
            where = f"[hogbatch] workers.{place}.learners"
            for learner in table.learners or ():
                if not 0 <= learner < learners:
                    raise ValueError(f"{where} names learner {learner}, which does not exist; use 0 to {learners - 1}")
                if learner in table_of:
                    raise ValueError(f"{where} names learner {learner} again; name each learner once")
                table_of[learner] = place
        rest = [place for place, table in enumerate(self.workers) if table.learners is None]
        if len(rest) > 1:
            raise ValueError(f"[hogbatch] workers.{rest[1]}.learners is missing; only one table may omit it")
        others = [learner for learner in range(learners) if learner not in table_of]
        if others and not rest:
            raise ValueError(f"[hogbatch] workers: no table names learner {others[0]}; name all {learners} learners")
        if rest and not others:
            raise ValueError(
                f"[hogbatch] workers.{rest[0]}: other tables name all {learners} learners; remove this table"
            )
        table_of |= dict.fromkeys(others, *rest)
        return tuple(self.workers[table_of[learner]] for learner in range(learners))

    def on_cpu(self, learners: int) -> list[int]:
        """Returns the numbers of the learners that compute on the CPU although others may use GPUs."""
        return [learner for learner, table in enumerate(self.team(learners)) if table.device == "cpu"]


def kinds_of(value: Any) -> str | None:
    """Returns the kinds in a list of tables `[[hogbatch.workers]]`, as `small+large`, or None for other values."""
    if not (isinstance(value, list) and value and all(isinstance(table, dict) and "kind" in table for table in value)):
        return None
    return "+".join(str(table["kind"]) for table in value)
