"""Tables hogbatch and hogbatch.workers: how a coordinator assigns samples to heterogeneous workers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocols.hogbatch import BatchBounds
from rudra.job.table import Table, short
from rudra.job.tables.protocol import ArgumentsTable
from topologies import Plan


class WorkersTable(Table):
    """Learners of one kind, to which protocol hogbatch assigns samples; there may be several such tables."""

    learners: tuple[int, ...] | None = Field(
        None, description="numbers of the learners, from 0; default: all that no other table names"
    )
    kind: Literal["small", "large"] = Field(
        description="small: a batch is computed in as many parts as there are threads, each of which is an update; "
        "large: a batch is one gradient"
    )
    threads: int = Field(
        1, ge=1, le=100_000, description="parts of a small worker's batch, computed one after another on real ranks"
    )
    device: Literal["cpu"] | None = Field(
        None, description="cpu: they compute there, where others have GPUs; default: cluster.device"
    )
    min: int | None = Field(
        None, ge=1, lt=2**31, description="smallest batch, in samples for each thread; default: small 1, large 128"
    )
    max: int | None = Field(
        None, ge=1, lt=2**31, description="largest batch, in samples for each thread; default: small 64, large 8192"
    )
    compute_s: float | dict[int, float] | None = Field(
        None,
        description="in virtual time, seconds in which one thread computes a part: a number, or sizes and seconds as "
        "in simulation.compute_s; default: simulation.compute_s",
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
        """The batches that each of them can take."""
        least, most = (1, 64) if self.kind == "small" else (128, 8192)
        own = (least if self.min is None else self.min, most if self.max is None else self.max)
        return BatchBounds(self.kind, self.threads, *own)


class HogbatchTable(ArgumentsTable):
    """How protocol hogbatch assigns samples, and where the weights are that workers update."""

    rule: Literal["fixed", "adaptive", "balanced"] = Field(
        "fixed",
        description="size of a worker's next batch: fixed, adaptive (Algorithm 2), or balanced, which changes the "
        "batches of large workers last",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear",
        description="linear: the learning rate is multiplied by samples of the gradient / "
        "protocol.reference_batch_size; sqrt: by the square root of that",
    )
    alpha: float = Field(2.0, gt=1, lt=2**31, description="α: factor by which rule adaptive changes a batch")
    beta: float = Field(
        1.0, ge=0, le=1, description="β: what each part of a small worker's batch counts, compared with an update"
    )
    shuffle: Literal["once", "epoch"] = Field(
        "once", description="once: each epoch has the samples in the same random order; epoch: in a new one"
    )
    counts: Literal["run", "epoch"] = Field("run", description="what updates are counted over: the run, or each epoch")
    weights: Literal["server", "shared"] = Field(
        "server",
        description="server: workers push gradients to the coordinator; shared: the ranks of one node share memory "
        "with the weights, and update them there themselves",
    )
    locking: bool = Field(
        False,
        description="how workers update shared weights: false: in place and without a lock, as in Hogwild; true: one "
        "after the other, each of which makes a new generation of the weights",
    )
    gpu_write: Literal["add", "overwrite"] = Field(
        "add",
        description="how large workers write to shared weights: add: they add their update to the weights of that "
        "moment; overwrite: the weights become their updated copy, and updates of others meanwhile are lost",
    )
    workers: tuple[WorkersTable, ...] = Field(
        (), description="list of tables: the learners of each kind; default: each learner is a small worker"
    )

    @property
    def shares_weights(self) -> bool:
        """Whether workers update weights in memory that they share."""
        return self.weights == "shared"

    def arguments(self, plan: Plan) -> dict[str, Any]:
        names = ("rule", "lr_scaling", "alpha", "beta", "shuffle", "counts")
        window = ("locked" if self.locking else "racing") if self.shares_weights else ""
        workers = [table.bounds for table in self.team(plan.learner_numbers)]
        return {name: getattr(self, name) for name in names} | {"workers": workers, "window": window}

    def team(self, learners: int) -> tuple[WorkersTable, ...]:
        """The table of each learner, by its number.

        Raises:
            ValueError: the tables do not name each learner once.
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

    def learners_on_cpu(self, plan: Plan) -> frozenset[int]:
        """Roles of the learners that compute on the CPU, where others may have GPUs."""
        team = self.team(plan.learner_numbers) if self.workers else ()
        return frozenset(role for role in plan.learners if team and team[plan.roles[role].index].device == "cpu")


def kinds_of(value: Any) -> str | None:
    """`small+large`, for people, of a list of tables `[[hogbatch.workers]]`; None: it is none."""
    if not (isinstance(value, list) and value and all(isinstance(table, dict) and "kind" in table for table in value)):
        return None
    return "+".join(str(table["kind"]) for table in value)
