"""Tables averaging and averaging.outer: averaging of the learners' replicas."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rudra.job.table import Table
from rudra.job.tables.optimizer import known_optimizer
from rudra.job.tables.protocol import ArgumentsTable
from topologies import Plan


class OuterTable(Table):
    """Outer optimiser, which updates the weights by the mean difference of all replicas.

    The keys have the meaning of the same keys in `[optimizer]`. The protocol sets omitted keys.
    """

    name: str | None = Field(
        None, description="sgd, adagrad, adam, adamw, rmsprop, or your own, package.module:class. Default: sgd"
    )
    learning_rate: float | None = Field(
        None,
        ge=0,
        description="learning rate. Default: 1 for average, 0.7 for diloco, "
        "averaging.elasticity times learners for easgd and sma",
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="momentum. Default: 0, or 0.9 for diloco and sma")
    options: dict[str, Any] = Field(
        {},
        description="further keyword arguments of the torch.optim class. Default: none, or nesterov = true for diloco",
    )

    _known = field_validator("name")(known_optimizer)


class AveragingTable(ArgumentsTable):
    """Averaging of the learners' replicas. The protocol sets omitted keys."""

    period: int | None = Field(
        None,
        ge=1,
        lt=2**20,
        description="τ: number of mini-batches of each learner between two averages. Default: 1, or 50 for diloco",
    )
    elasticity: float | None = Field(
        None,
        ge=0,
        description="α: fraction of the difference to the weights that each average moves a replica. Default: 1, "
        "or for easgd and sma 1 / learners with outer momentum, 1 / (learners + 1) without",
    )
    local_elasticity: float | None = Field(
        None,
        ge=0,
        description="with topology hierarchical: fraction of the difference to the block's reference that every "
        "mini-batch moves a replica. elasticity then moves references. Default: 1 / (learners of the block + 1)",
    )
    restart: bool | None = Field(
        None,
        description="true: each time the learning rate drops (schedules step and plateau), all replicas restart from "
        "the weights, without momentum. Default: false, or true for sma",
    )
    keep_momentum: bool | None = Field(
        None, description="true: replicas keep the momentum of their optimiser at a restart. Default: false"
    )
    outer: OuterTable = Field(OuterTable(), description="table: the outer optimiser, which updates the weights")

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Returns the keyword arguments of the protocol's class, for the learners of a plan."""
        found = {**self.non_defaults, "served": plan.averaging and plan.served}
        if "outer" in found:
            found["outer"] = self.outer.non_defaults
        return found | ({"blocks": [*map(len, plan.groups)]} if plan.sharing == "reference" else {})
